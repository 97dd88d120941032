"""Machines by name, and plans for a machine that is not here: equal to those for its numbers, made elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import memfit
from memfit.cli import app
from memfit.core.errors import DoesNotFitError, UsageError
from memfit.core.hardware import Hardware, machine_names, read_hardware, read_tiers
from memfit.core.limits import DEVICE_RESERVE_BYTES, GIB, MIB, Budget
from memfit.core.plan import Plan
from memfit.core.tiers import Tier, is_processor
from memfit.planner.advise import Advice, advise
from memfit.planner.search.planner import choose_plan
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict

FILES = Path(memfit.core.__file__).parent / "machine_files"
# Of a Hopper: cuBLAS keeps two workspaces of 32 MiB, half of which the usual reserve is for.
RESERVE_BYTES = DEVICE_RESERVE_BYTES + 32 * MIB
# As their data sheets say: GB, GB/s, dense TFLOPS in fp32 and bf16, generation of PCIe.
SHEETS = {
    "a100-40gb": (40, 1555, 19.5, 312, 4),
    "a100-80gb": (80, 2039, 19.5, 312, 4),
    "h100-sxm": (80, 3350, 67, 989.5, 5),
    "h200": (141, 4800, 67, 989.5, 5),
    "b200": (180, 8000, 80, 2250, 5),
    "rtx-3090": (24, 936, 35.6, 71.2, 4),
    "rtx-4090": (24, 1008, 82.6, 165.2, 4),
    "rtx-5090": (32, 1792, 104.8, 209.5, 5),
    "mi300x": (192, 5300, 163.4, 1307.4, 5),
}


def described(name: str, **sizes: int) -> Hardware:
    found = read_hardware(name)
    assert found is not None
    return found.with_capacities({Tier(tier): nbytes for tier, nbytes in sizes.items()})


def raw(name: str) -> dict[str, Any]:
    return json.loads((FILES / f"{name}.json").read_text())


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_a_described_device_is_its_data_sheet_times_one_factor(name: str) -> None:
    gb, gb_per_s, fp32, bf16, pcie = SHEETS[name]
    found = described(name)
    assert not is_processor(found.device)
    assert found.device_bytes == gb * 10**9
    assert found.flops_per_s == pytest.approx(fp32 * 1e12 / 2)
    assert found.bf16_flops_per_s == pytest.approx(bf16 * 1e12 / 2)
    # AdamW reads and writes 80 bytes a parameter, a codec 160 a state.
    assert found.update_elements_per_s == pytest.approx(gb_per_s * 1e9 / 2 / 80)
    assert found.codec_elements_per_s == pytest.approx(gb_per_s * 1e9 / 2 / 160)
    sheet = found.datasheet
    assert sheet is not None
    assert (sheet.utilisation, sheet.pcie_generation) == (0.5, pcie)
    # A lane of PCIe 4.0 carries 16e9 bits a second with 128 of 130 of them data; a later generation twice that.
    carried = 16 * (16e9 * 128 / 130 / 8) * 2 ** (pcie - 4)
    assert 0.75 < found.link(Tier.HOST).read_bytes_per_s / carried < 0.85


@pytest.mark.parametrize("name", machine_names())
def test_every_figure_of_a_description_says_where_it_comes_from_and_that_it_was_not_measured(name: str) -> None:
    text = raw(name)
    assert set(text["sources"]) == set(text) - {"format", "datasheet", "sources"}
    sheet = text["datasheet"]
    assert set(sheet["sources"]) == set(sheet) - {"note", "utilisation", "sources"}
    assert sheet["note"].startswith("Not measured by us")
    found = described(name)
    assert Hardware.from_json(found.to_json()) == found
    for tier in ("host", "disk"):
        assert all("assumption" in text["sources"][key] for key in (tier, f"{tier}_bytes") if key in text)


def test_all_common_devices_are_described_and_reading_one_loads_no_torch() -> None:
    assert machine_names() == sorted([*SHEETS, "laptop-cpu"])
    program = (
        "import sys\nfrom memfit.core.hardware import read_hardware\n"
        "assert read_hardware('h200').device == 'NVIDIA H200'\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_name_is_read_as_people_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_hardware("H200") == read_hardware("h200")
    assert read_hardware("RTX 4090") == read_hardware("rtx4090") == read_hardware("rtx_4090") == described("rtx-4090")
    # A file of that name is meant by a path.
    monkeypatch.chdir(tmp_path)
    Path("h200").write_text(described("b200").to_json())
    assert read_hardware("h200") == described("h200")
    assert read_hardware("./h200") == read_hardware(Path("h200")) == described("b200")


def test_an_unknown_name_is_told_with_the_nearest_and_all() -> None:
    with pytest.raises(UsageError, match=r"no machine is called 'h100': did you mean 'h100-sxm'") as caught:
        read_hardware("h100")
    assert all(name in str(caught.value) for name in machine_names())
    with pytest.raises(UsageError, match=r"did you mean 'a100-40gb' or 'a100-80gb'\?"):
        read_hardware("A100")
    with pytest.raises(UsageError, match=r"did you mean 'rtx-3090'"):
        read_hardware("rtx 3080")
    with pytest.raises(UsageError, match=r"no machine is called 'zzz'\. memfit has descriptions of"):
        read_hardware("zzz")
    with pytest.raises(UsageError, match=r"^the hardware file 'h201.json' cannot be read"):
        read_hardware("h201.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device_bytes": 0}, "'device_bytes' of the hardware file is a whole number of bytes from 1"),
        ({"host_bytes": 0}, "'host_bytes'"),
        ({"host_bytes": -1}, "'host_bytes'"),
        ({"host_bytes": None}, "'host_bytes'"),
        ({"host": None}, "no 'host', the link"),
        ({"disk": {"read_bytes_per_s": 1, "write_bytes_per_s": 0}}, "'write_bytes_per_s'"),
        ({"update_elements_per_s": -1}, "'update_elements_per_s'"),
        ({"datasheet": 5}, "'datasheet' of the hardware file is an object"),
        ({"datasheet": {"note": "n"}}, "'datasheet' of the hardware file has no 'utilisation'"),
        ({"sources": {"device": 5}}, "'device' in 'sources' of the hardware file is a line of text"),
        ({"sources": []}, "'sources' of the hardware file is an object"),
    ],
)
def test_an_inconsistent_description_is_refused_by_the_field(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Hardware.from_json(json.dumps(raw("h200") | change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"utilisation": 1.5}, "'utilisation' of 'datasheet'"),
        ({"utilisation": 0}, "'utilisation'"),
        ({"memory_bytes": 0}, "'memory_bytes'"),
        ({"fp32_flops_per_s": None}, "'fp32_flops_per_s'"),
        ({"pcie_generation": 0}, "'pcie_generation' of 'datasheet'"),
        ({"note": 7}, "'note' of 'datasheet'"),
        ({"sources": {"note": "two\nlines"}}, "'note' in 'sources' of 'datasheet'"),
        ({"teraflops": 1}, "unknown field 'teraflops'"),
    ],
)
def test_an_inconsistent_data_sheet_is_refused_by_the_field(change: dict[str, Any], said: str) -> None:
    text = raw("h200")
    with pytest.raises(UsageError, match=said):
        Hardware.from_json(json.dumps(text | {"datasheet": text["datasheet"] | change}))


def test_a_full_disk_and_a_device_without_a_host_are_machines() -> None:
    assert described("h200", disk=0).tiers[Tier.DISK].nbytes == 0
    text = {key: value for key, value in raw("h200").items() if key not in ("host", "host_bytes")}
    assert set(Hardware.from_json(json.dumps(text)).away) == {Tier.DISK}


def test_sizes_take_the_place_of_capacities_and_are_refused_by_the_tier() -> None:
    sizes = read_tiers("device=141GiB, host=128GiB,disk=64 GiB")
    assert sizes == {Tier.DEVICE: 141 * GIB, Tier.HOST: 128 * GIB, Tier.DISK: 64 * GIB}
    found = described("h200").with_capacities(sizes)
    assert {tier: spec.nbytes for tier, spec in found.tiers.items()} == sizes
    assert found.link(Tier.HOST) == described("h200").link(Tier.HOST)
    assert found.sources["host_bytes"] == "stated in place of the description's"
    for text, said in (
        ("device", "'device' of the tiers is not TIER=SIZE"),
        ("device=1GiB,device=2GiB", "'device' has two sizes"),
        ("device=1q", "cannot read the size '1q'"),
        ("device=-1", "cannot read the size '-1'"),
        ("Device=1", "no name of a tier"),
    ):
        with pytest.raises(UsageError, match=said):
            read_tiers(text)
    with pytest.raises(UsageError, match=r"cpu has no tier 'host': there is no link"):
        described("laptop-cpu", host=GIB)
    with pytest.raises(UsageError, match="'device_bytes'"):
        described("h200", device=0)


def build(blocks: int = 6) -> tuple[nn.Module, torch.optim.Optimizer, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(blocks)))
    return model, torch.optim.AdamW(model.parameters()), loss_of, torch.randn(8, 512)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def direct(advice: Advice, hardware: Hardware, limit_bytes: int, **wanted: Any) -> Any:
    """The planner, asked about the numbers themselves."""
    return choose_plan(
        advice.profile,
        Budget(limit_bytes=limit_bytes, base_bytes=0, reserve_bytes=RESERVE_BYTES),
        hardware,
        tiers=tuple(hardware.tiers),
        limits={tier: spec.nbytes for tier, spec in hardware.tiers.items()},
        decided={"loss_chunk_tokens": None},
        **wanted,
    )


# 6 blocks of 1 MiB of weights, as much gradients and twice the states: all of it, some of it and little of it on the device.
@pytest.mark.parametrize("device_bytes", [141 * GIB, RESERVE_BYTES + 20 * MIB, RESERVE_BYTES + 12 * MIB])
def test_a_plan_for_an_accelerator_that_is_not_here_is_the_planners_for_its_numbers(device_bytes: int) -> None:
    hardware = described("h200", device=device_bytes, host=64 * MIB, disk=64 * MIB)
    advice = advise(*build(), hardware=hardware)
    found = direct(advice, hardware, device_bytes)
    assert advice.plan == found.plan
    assert advice.timeline == found.timeline
    assert advice.front == found.front
    assert advice.hardware == hardware
    # Nothing of this process is on that device.
    assert advice.budget == Budget(limit_bytes=device_bytes, base_bytes=0, reserve_bytes=RESERVE_BYTES)
    assert advice.predicted_peak_bytes <= device_bytes
    # Priced once more as an accelerator's step: updates of weights at home on the host are no updates in place.
    schedule = build_step(advice.plan, advice.profile, clips_norm=False)
    step = lower(schedule, advice.plan, advice.profile, device="an accelerator")
    assert predict(step, hardware) == advice.timeline
    assert not advice.profile.agrees_on_host, "bits of a processor that is not here are not known"
    assert (Tier.HOST in advice.plan.tiers) == (device_bytes < GIB)
    if device_bytes < GIB:
        # The host has room for less than everything: 24 MiB of weights, gradients and states, and staging.
        assert 0 < advice.timeline.peak_in(Tier.HOST) <= 64 * MIB


def test_capacities_beside_the_device_bound_the_plan() -> None:
    model, optimizer, loss, rows = build(12)
    full = described("h200", device=RESERVE_BYTES + 10 * MIB, host=24 * MIB, disk=0)
    with pytest.raises(DoesNotFitError):
        advise(model, optimizer, loss, rows[:1], hardware=full)
    roomy = full.with_capacities({Tier.DISK: GIB})
    assert Tier.DISK in advise(model, optimizer, loss, rows[:1], hardware=roomy).plan.tiers
    with pytest.raises(UsageError, match=r"more than NVIDIA H200 has \(122.0 MiB\)"):
        advise(model, optimizer, loss, rows, hardware=full, limit="1GiB")


def test_a_described_processor_holds_this_process_and_has_no_host() -> None:
    hardware = described("laptop-cpu")
    advice = advise(*build(), hardware="laptop-cpu")
    assert advice.budget.limit_bytes == 16 * GIB
    assert advice.budget.base_bytes > 100 * MIB  # interpreter and torch
    assert advice.profile.agrees_on_host
    assert advice.hardware == hardware
    assert advise(*build(), hardware=hardware, limit="2GiB").budget.limit_bytes == 2 * GIB


def test_fit_runs_by_a_description_of_its_own_kind_only(tmp_path: Path) -> None:
    model, optimizer, loss, rows = build()
    with pytest.raises(UsageError, match=r"describes 'NVIDIA H200', and the model lies on 'cpu'.*--hardware"):
        memfit.fit(model, optimizer, loss, rows, hardware="h200")
    with memfit.fit(model, optimizer, loss, rows, hardware="laptop-cpu", directory=tmp_path / "homes") as job:
        job.step(rows)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output + str(result.exception)
    return result.output


def test_the_command_plans_for_the_machine_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "the_parts", sys.modules[build.__module__])
    device_bytes = RESERVE_BYTES + 20 * MIB
    tiers = f"device={device_bytes},host=64MiB,disk=64MiB"
    advice = advise(*build(), hardware=described("h200", device=device_bytes, host=64 * MIB, disk=64 * MIB))
    file = tmp_path / "mine.json"
    file.write_text(replace(described("h200"), device="my GPU").to_json())
    text = run(
        "plan", "the_parts:build", "--hardware", str(file), "--tiers", tiers, "--json", str(tmp_path / "plan.json")
    )
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == advice.plan
    assert "my GPU" in text
    assert re.search(r"host, predicted peak +[\d.]+ MiB of 64.0 MiB", text)
    assert f"{advice.timeline.seconds:.3g} s" in text
    report = run("report", "the_parts:build", "--hardware", "h200", "--tiers", tiers)
    assert "Moved in a step" in report
    assert "name the machine with --hardware" in " ".join(
        run("plan", "the_parts:build", "--tiers", tiers, code=2).split()
    )


def test_the_profile_says_whether_a_plain_step_fits_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "the_parts", sys.modules[build.__module__])
    plain = advise(*build(), plan=Plan(), hardware="h200")
    # At least weights and states, and the reserve.
    numbers = sum(p.numel() for p in build()[0].parameters())
    assert plain.predicted_peak_bytes > 3 * 4 * numbers + RESERVE_BYTES
    text = run("profile", "the_parts:build", "--hardware", "h200", "--largest", "0")
    assert "A plain step on NVIDIA H200" in text and "131.32 GiB" in text and "yes" in text
    assert f"{plain.timeline.seconds:.3g} s" in text
    text = run("profile", "the_parts:build", "--hardware", "h200", "--tiers", "device=70MiB", "--largest", "0")
    missing = (plain.predicted_peak_bytes - 70 * MIB) / MIB
    assert f"no, {missing:.1f} MiB more than there is" in text


def test_memories_on_the_chip_are_those_of_the_white_papers_and_read_back() -> None:
    """Per multiprocessor: 64 Ki registers of 4 bytes in each; L1 with shared memory by generation."""
    for name, (count, shared_kib) in {
        "a100-40gb": (108, 192), "a100-80gb": (108, 192), "h100-sxm": (132, 256),
        "rtx-3090": (82, 128), "rtx-4090": (128, 128), "rtx-5090": (170, 128),
    }.items():  # fmt: skip
        chip = described(name).on_chip
        assert chip["registers"] == count * (64 << 10) * 4
        assert chip["L1 caches and shared memory"] == count * shared_kib << 10
        assert Hardware.from_json(described(name).to_json()).on_chip == chip
    assert described("laptop-cpu").on_chip == {} and not described("h200").is_unified


@pytest.mark.parametrize(
    ("given", "said"),
    [({"on_chip": [1]}, "object of bytes by name"), ({"on_chip": {"L2": -1}}, "whole number of bytes"),
     ({"on_chip": {"L2\n": 1}}, "on_chip"), ({"is_unified": 1}, "true or false")],
)  # fmt: skip
def test_wrong_memories_of_the_chip_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Hardware.from_json(json.dumps({**raw("h200"), **given}))


def test_a_tiers_field_that_is_written_wrongly_gets_the_right_name() -> None:
    with pytest.raises(UsageError, match="unknown field 'disk_byts': did you mean 'disk_bytes'"):
        Hardware.from_json(json.dumps({**raw("h200"), "disk_byts": 5}))
