"""A machine as a file: what was written is read, and what is not a machine is refused by the name of the field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.core.errors import UsageError
from memfit.core.hardware import Hardware, Link, Rate, TierSpec, read_hardware
from memfit.core.limits import Limits
from memfit.core.tiers import Tier
from memfit.core.work_kinds import WorkKind
from memfit.homes.state_codecs import probe_codecs
from memfit.machine import probing
from memfit.machine.machine import open_machine
from memfit.store import DiskIO

LINK = Link(read_bytes_per_s=1.5e9, write_bytes_per_s=0.1)
MACHINE = Hardware(
    device="cpu",
    flops_per_s=1e11,
    tiers={Tier.DEVICE: TierSpec(nbytes=1 << 33), Tier.DISK: TierSpec(nbytes=1 << 40, link=LINK)},
)
WITH_HOST = Hardware(
    device="a GPU",
    flops_per_s=1.1e13,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 36),
        Tier.HOST: TierSpec(nbytes=1 << 37, link=LINK),
        Tier.DISK: TierSpec(nbytes=1 << 40, link=LINK),
    },
    bf16_flops_per_s=3e14,
    codec_elements_per_s=1.25e9,
    update_elements_per_s=7.0,
)
PROBED = replace(
    MACHINE,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 33),
        Tier.DISK: TierSpec(
            nbytes=1 << 40,
            link=replace(LINK, both_read_bytes_per_s=2.5, busy_write_bytes_per_s=3.5, compute_share=0.75, spread=0.125),
        ),
    },
    rates={WorkKind.STREAMED: Rate(4e10, 0.25), WorkKind.OPERATIONS: Rate(2e5)},
    network={"data": Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9, latency_s=1e-4)},
    origin={"processor": "some", "threads": "2"},
)


@pytest.mark.parametrize("machine", [MACHINE, WITH_HOST, PROBED])
def test_a_machine_comes_back_from_its_text_and_its_file(machine: Hardware, tmp_path: Path) -> None:
    text = machine.to_json()
    assert Hardware.from_json(text) == machine
    (tmp_path / "machine.json").write_text(text)
    assert read_hardware(tmp_path / "machine.json") == read_hardware(str(tmp_path / "machine.json")) == machine
    assert read_hardware(text) == read_hardware(machine) == machine
    # A person may write it by hand, without what has a default.
    short = {
        key: value
        for key, value in json.loads(MACHINE.to_json()).items()
        if key not in ("host", "host_bytes", "codec_elements_per_s")
    }
    assert Hardware.from_json(json.dumps(short)) == MACHINE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"flops_per_s": 0}, "'flops_per_s'"),
        ({"flops_per_s": "fast"}, "'flops_per_s'"),
        ({"flops_per_s": True}, "'flops_per_s'"),
        ({"flops_per_s": 10**400}, "'flops_per_s'"),
        ({"update_elements_per_s": None}, "'update_elements_per_s'"),
        ({"device_bytes": -1}, "'device_bytes'"),
        ({"device_bytes": 0}, "'device_bytes'"),
        ({"device_bytes": 1.5}, "'device_bytes'"),
        ({"device": 7}, "'device'"),
        ({"disk": None}, "no 'disk'"),
        ({"disk": [1, 2]}, "'disk' of the hardware file is no link"),
        ({"disk": {"read_bytes_per_s": 1}}, "no 'write_bytes_per_s'"),
        ({"disk": {"read_bytes_per_s": 1, "write_bytes_per_s": -1}}, "'write_bytes_per_s'"),
        ({"host_bytes": 5}, "no 'host', the link"),
        ({"speed": 5}, "unknown field 'speed'"),
        ({"network": [1]}, "'network' of the hardware file is an object of links"),
        ({"network": {"stage": {}}}, "unknown axis 'stage'"),
        ({"network": {"data": {"read_bytes_per_s": 1}}}, "'data' of 'network' of the hardware file has no 'write"),
        ({"format": 2}, '"format": 1'),
        ({"format": True}, '"format": 1'),
    ],
)
def test_what_is_no_machine_is_refused_by_the_field(change: dict[str, Any], said: str) -> None:
    raw = json.loads(MACHINE.to_json()) | change
    with pytest.raises(UsageError, match=said):
        Hardware.from_json(json.dumps(raw))


def test_a_field_that_is_missing_and_files_that_are_none_are_told(tmp_path: Path) -> None:
    raw = json.loads(MACHINE.to_json())
    del raw["flops_per_s"]
    with pytest.raises(UsageError, match="no 'flops_per_s'"):
        Hardware.from_json(json.dumps(raw))
    for given in (tmp_path, tmp_path / "nothing", "/dev/zero", "no\0name"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_hardware(given)
    with pytest.raises(UsageError, match="not int"):
        read_hardware(7)  # type: ignore[arg-type]


def test_codecs_are_probed_in_a_plausible_time() -> None:
    assert 1e6 < probe_codecs(torch.device("cpu"), elements=1 << 14, tries=2) < 1e12


def test_the_disk_is_probed_with_the_pieces_and_threads_that_homes_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []

    def make(*args: Any, **options: Any) -> DiskIO:
        made.append((args, options))
        return DiskIO(*args, **options)

    monkeypatch.setattr("memfit.store.probe.DiskIO", make)
    found = probing.probe(open_machine(torch.device("cpu"), Limits.read(None)), tmp_path / "homes")
    assert made == [((), {})]  # as homes make theirs
    link = found.tiers[Tier.DISK].link
    assert link is not None
    assert min(link.read_bytes_per_s, link.write_bytes_per_s) > 0
