"""What `memfit probe` measures, keeps and says; what a later run takes of it."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from memfit.cli import app
from memfit.core.errors import MemfitWarning, UsageError
from memfit.core.hardware import ROUNDED_BYTES, SPLIT_BYTES, Hardware, rates_of, read_hardware
from memfit.core.layout import PIECE_ELEMENTS
from memfit.core.limits import Limits
from memfit.core.tiers import Tier
from memfit.core.work_kinds import WorkKind
from memfit.devices import clocks
from memfit.homes import masters as master_probes
from memfit.homes.masters import probe_rounding, probe_splitting
from memfit.job import probe_machine
from memfit.machine import described, measuring_rates, probing
from memfit.machine import probing as pieces_probe
from memfit.machine import probing as probing_whole
from memfit.machine.host.measure import OthersMeter
from memfit.machine.machine import Machine, open_machine
from memfit.planner.problem import computes_in_bf16
from memfit.step.work_amounts import _ROUNDED_PIECES, _SPLIT_PIECES
from memfit.store import probe_disk_beside

CPU = torch.device("cpu")
# What no probe measures: classes that are there for profiles made by hand.
NOT_MEASURED = {WorkKind.FLOPS}


@pytest.fixture(autouse=True)
def a_quick_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As much as a figure of each needs, and files of its own."""
    monkeypatch.setenv("MEMFIT_HARDWARE_CACHE", str(tmp_path / "cache"))
    for name, elements in (("_SMALL", 1 << 14), ("_LARGE", 1 << 15)):
        monkeypatch.setattr(measuring_rates, name, elements)
    repeated, pieces = probing_whole._repeated, pieces_probe.probe_piece_updates
    monkeypatch.setattr(probing_whole, "_repeated", lambda measure, **_: repeated(measure, rounds=1))
    monkeypatch.setattr(probing_whole, "probe_piece_updates", lambda device: pieces(device, pieces=1, tries=1))
    every = measuring_rates._operations
    monkeypatch.setattr(measuring_rates, "_operations", lambda device: {o.kind: o for o in every(device)}.values())
    monkeypatch.setattr(probe_machine, "_STEPS", 7)
    plain = measuring_rates.measure_rates
    monkeypatch.setattr(probing_whole, "measure_rates", lambda device: plain(device, rounds=1, seconds=0.0))
    for name, value in (("_DISK_ROUNDS", 1), ("_DISK_S", 0.02), ("_BESIDE_S", 0.05), ("_FILE_BYTES", 8 << 20)):
        monkeypatch.setattr(probing_whole, name, value)


def here() -> Machine:
    return open_machine(CPU, Limits.read(None))


def test_the_command_measures_every_class_keeps_the_file_and_fit_takes_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["probe", "--directory", str(tmp_path / "homes"), "--json"])
    assert result.exit_code == 0, result.output
    written = Hardware.from_json(result.stdout)
    assert {*written.rates} == {*WorkKind} - NOT_MEASURED
    path = described.saved_path(described.identity_of(CPU))
    assert Hardware.from_json(path.read_text()) == written
    found = probing.probe(here(), tmp_path / "homes")
    assert found.rates == written.rates and found.origin == written.origin
    assert found.link(Tier.DISK) == written.link(Tier.DISK)
    assert read_hardware(path) == written
    # What each policy adds is told apart: watched operations take longer than plain ones, entries of calls too.
    seconds = {kind: 1 / rate.per_s for kind, rate in written.rates.items()}
    assert 5e-7 < seconds[WorkKind.OPERATIONS] < seconds[WorkKind.WATCHED] < 1e-3
    assert seconds[WorkKind.OPERATIONS] < seconds[WorkKind.CALLS] < 1e-2
    assert seconds[WorkKind.PIECES] > 1e-5
    assert 1e-6 < seconds[WorkKind.PIECE_TRANSFERS] < 1e-3


def test_its_tables_say_rates_links_and_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = saved(tmp_path)
    monkeypatch.setattr("memfit.job.probe_machine.probe_whole", lambda _device, _directory: made)
    monkeypatch.setattr("memfit.job.probe_machine.measure_engine", lambda _hardware, _directory: {})
    result = CliRunner().invoke(app, ["probe", "--out", str(tmp_path / "x.json")])
    assert result.exit_code == 0, result.output
    for said in ("streamed", "disk, read", "while computing", "Capacities", str(tmp_path / "x.json")):
        assert said in result.output


def saved(tmp_path: Path, **changed: str) -> Hardware:
    """A file of this machine, with an origin of another one where that is asked for."""
    raw = json.loads(probing.probe(here(), tmp_path / "homes").to_json())
    raw["rates"] = {"streamed": {"per_s": 12345.0, "spread": 0.5}}
    raw["origin"] = {**described.identity_of(CPU), "disk": described.disk_name(tmp_path), **changed}
    raw["disk"] |= {"read_bytes_per_s": 77.0}
    made = Hardware.from_json(json.dumps(raw))
    described.save(made, described.saved_path(described.identity_of(CPU)))
    return made


def test_a_saved_link_counts_on_the_disk_that_was_measured_alone(tmp_path: Path) -> None:
    saved(tmp_path)
    assert probing.probe(here(), tmp_path / "homes").link(Tier.DISK).read_bytes_per_s == 77.0
    saved(tmp_path, disk="another")
    found = probing.probe(here(), tmp_path / "homes")
    assert found.link(Tier.DISK).read_bytes_per_s > 77.0
    assert rates_of(found)[WorkKind.STREAMED].per_s == 12345.0


@pytest.mark.parametrize("key", ["processor", "threads", "torch"])
def test_a_file_of_another_machine_is_not_taken(tmp_path: Path, key: str) -> None:
    saved(tmp_path, **{key: "another"})
    assert not probing.probe(here(), tmp_path / "homes").rates


def test_other_threads_have_another_file() -> None:
    one = described.identity_of(CPU)
    assert described.saved_path(one) != described.saved_path({**one, "threads": "99"})


def test_a_damaged_file_is_told_and_not_taken(tmp_path: Path) -> None:
    path = described.saved_path(described.identity_of(CPU))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.warns(MemfitWarning, match="run memfit probe again"):
        assert not probing.probe(here(), tmp_path / "homes").rates


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    machine = probing.probe(here(), tmp_path / "homes")
    with pytest.raises(UsageError, match="cannot be written"):
        described.save(machine, tmp_path / "file" / "machine.json")


def test_shares_of_others_are_told_by_the_kernels_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    stat = tmp_path / "proc/stat"
    ticks = os.sysconf("SC_CLK_TCK")
    times = iter([10.0, 12.0])
    monkeypatch.setattr("memfit.machine.host.measure.time.monotonic", lambda: next(times))
    monkeypatch.setattr("memfit.machine.host.measure.os.cpu_count", lambda: 4)
    monkeypatch.setattr("memfit.machine.host.measure.os.times", lambda: os.times_result((1, 1, 0, 0, 0)))
    stat.write_text("cpu  100 0 100 900 0 0 0 50 0 0\n")
    meter = OthersMeter(tmp_path)
    # 4 processors for 2 s: one second of others' and two stolen.
    stat.write_text(f"cpu  {100 + ticks} 0 100 900 0 0 0 {50 + 2 * ticks} 0 0\n")
    found = meter.read()
    assert found is not None
    assert (found.used, found.stolen) == (pytest.approx(1 / 8), pytest.approx(2 / 8))
    assert "12%" in found.sentence() and "25%" in found.sentence()


def test_directions_and_compute_run_at_once(tmp_path: Path) -> None:
    found = probe_disk_beside(
        tmp_path, directions=("read", "write"), seconds=0.05, file_bytes=8 << 20, meanwhile=lambda: torch.ones(10).sum()
    )
    assert {*found.bytes_per_s} == {"read", "write"}
    assert min(found.bytes_per_s.values()) > 0 and found.calls_per_s > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rates": {"quick": {"per_s": 1}}}, "unknown class 'quick'"),
        ({"rates": {"streamed": 5}}, "per_s and spread"),
        ({"rates": {"streamed": {"per_s": -1}}}, "'streamed'"),
        ({"rates": {"streamed": {"per_s": 1, "spread": 2}}}, "share from 0 to 1"),
        ({"rates": []}, "rates by class"),
        ({"origin": {"a": 1}}, "line of text"),
        ({"disk": {"read_bytes_per_s": 1, "write_bytes_per_s": 1, "compute_share": 7}}, "share from 0 to 1"),
    ],
)
def test_rates_that_are_none_are_refused_by_name(tmp_path: Path, change: dict[str, object], said: str) -> None:
    raw = json.loads(probing.probe(here(), tmp_path / "homes").to_json()) | change
    with pytest.raises(UsageError, match=said):
        Hardware.from_json(json.dumps(raw))


def test_rates_of_the_engine_explain_all_that_was_measured() -> None:
    taken = {kind: 1e-6 * (index + 2) ** 2 for index, kind in enumerate(probe_machine.EXPLAINED)}
    draw = random.Random(3)
    actions: list[tuple[dict[str, float], float]] = []
    for _ in range(24):
        amounts = {str(kind): float(draw.randrange(0, 60)) for kind in taken} | {"parts": float(draw.randrange(1, 4))}
        seconds = sum(amounts[str(kind)] * s for kind, s in taken.items()) + amounts["parts"] * 3e-5
        actions.append((amounts, seconds))
    found, spread = probe_machine.explained(actions)
    assert found == pytest.approx(taken, rel=1e-6)
    assert spread == 0.1  # the least that is told
    # Actions that other work disturbed move no rate.
    disturbed = [(amounts, seconds * (1.8 if i % 8 == 0 else 1.0)) for i, (amounts, seconds) in enumerate(actions)]
    found, spread = probe_machine.explained(disturbed)
    assert found == pytest.approx(taken, rel=0.2)
    assert spread == 0.1
    # Where all are, the spread says so.
    noisy = [(amounts, seconds * draw.uniform(0.5, 1.5)) for amounts, seconds in actions]
    assert probe_machine.explained(noisy)[1] > 0.1


class Moved(TorchDispatchMode):
    """Counts operations, and the bytes that those read and write that make no view."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.operations += 1
        if not func.is_view and func not in ALLOCATES | INDEXES:
            read = args[1:] if func is torch.ops.aten.copy_.default else args
            given = tree_leaves((read, kwargs, made))
            self.nbytes += sum(one.numel() * one.element_size() for one in given if isinstance(one, torch.Tensor))
        return made


def here_described() -> Hardware:
    found = read_hardware("h200")
    assert found is not None
    return found


# They move nothing, or no more than the few elements that are indexed.
ALLOCATES = {torch.ops.aten.empty_like.default, torch.ops.aten.empty.memory_format}
INDEXES = {torch.ops.aten.index.Tensor, torch.ops.aten.index_add_.default}


@pytest.mark.parametrize(
    ("probe", "nbytes", "pieces"),
    [(probe_splitting, SPLIT_BYTES, _SPLIT_PIECES), (probe_rounding, ROUNDED_BYTES, _ROUNDED_PIECES)],
)
def test_what_updates_of_bf16_weights_move_and_launch_is_what_their_operations_do(
    probe: Any, nbytes: float, pieces: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The constants that accelerators are priced with, beside a count of the operations that the probe runs."""
    runs: list[Any] = []
    monkeypatch.setattr(master_probes, "_elements_per_s", lambda _device, run: runs.append(run) or 1.0)
    probe(CPU)
    masters = torch.linspace(-1.0, 1.0, PIECE_ELEMENTS)
    with Moved() as moved:
        runs[0](masters)
    assert moved.nbytes / PIECE_ELEMENTS == pytest.approx(nbytes, rel=0.1)
    rates = rates_of(here_described())
    of_a_piece = rates[WorkKind.OPERATIONS].per_s / rates[WorkKind.PIECES].per_s
    assert moved.operations == pytest.approx(pieces * of_a_piece, rel=0.15)


def test_rates_of_masters_are_those_of_what_is_measured_and_leave_launching_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that each element takes a nanosecond of, and each run a second."""
    now = 0.0

    def run(masters: torch.Tensor) -> None:
        nonlocal now
        now += 1.0 + 1e-9 * masters.numel()

    monkeypatch.setattr(clocks, "clock_of", lambda _device: lambda: now)
    monkeypatch.setattr(master_probes, "_LEAST_SHARE", 1e-6)
    assert master_probes._elements_per_s(CPU, run) == pytest.approx(1e9, rel=1e-3)


def test_bf16_is_probed_with_its_masters_where_it_is_allowed(tmp_path: Path) -> None:
    kinds = {WorkKind.SPLIT, WorkKind.ROUNDED}
    assert not kinds & {*probing.probe(here(), tmp_path).rates}
    found = probing.probe(here(), tmp_path, probes_bf16=True)
    assert kinds <= {*found.rates}
    assert all(1e6 < found.rates[kind].per_s < 1e12 for kind in kinds)
    assert [computes_in_bf16({name}) for name in ("bf16", "bf16-weights-sr", "int8-state")] == [True, True, False]
