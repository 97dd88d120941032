"""Meters against memory of known size, and the proof against arithmetic."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memfit.core.errors import LimitBreachError, TierUnavailableError, UsageError
from memfit.devices import procfs
from memfit.devices.binding import Allocator, install
from memfit.machine.meters import AcceleratorMeter, CpuMeter, PhaseRecord, Phases, ProcessMeter
from memfit.machine.proof import Proof

MIB = 1 << 20
# The kernel adds up its page counts of a thread in batches; other threads of this process may allocate a little too.
SLACK_BYTES = 2 * MIB


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    found = install()
    found.trim()
    yield found
    found.set_limit(None)
    found.trim()


def test_the_process_meter_sees_memory_come_peak_and_go(allocator: Allocator) -> None:
    meter = ProcessMeter()
    meter.reset_peak()
    before = meter.resident_bytes()
    held = torch.ones(80 * MIB, dtype=torch.uint8)
    assert abs(meter.resident_bytes().private_bytes - before.private_bytes - 80 * MIB) < SLACK_BYTES
    del held
    allocator.trim()
    assert abs(meter.resident_bytes().private_bytes - before.private_bytes) < SLACK_BYTES
    assert abs(meter.peak_bytes().private_bytes - before.private_bytes - 80 * MIB) < SLACK_BYTES
    assert abs(meter.peak_bytes().whole_bytes - before.whole_bytes - 80 * MIB) < SLACK_BYTES
    meter.reset_peak()
    assert abs(meter.peak_bytes().private_bytes - before.private_bytes) < SLACK_BYTES
    assert meter.swap_bytes() >= 0
    assert before.whole_bytes > before.private_bytes


CHILD = """
import sys
held = bytearray(b"x") * (40 << 20)
print("ready", flush=True)
sys.stdin.readline()
del held
print("freed", flush=True)
sys.stdin.readline()
"""


def test_children_count_when_asked_for_and_are_gone_when_they_end() -> None:
    alone, family = ProcessMeter(), ProcessMeter(with_children=True)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert child.pid in procfs.descendants(os.getpid())
        extra = family.resident_bytes().private_bytes - alone.resident_bytes().private_bytes
        assert 40 * MIB <= extra < 70 * MIB
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "freed\n"
        assert family.peak_bytes().private_bytes - alone.peak_bytes().private_bytes >= 40 * MIB
        family.reset_peak()
        assert family.peak_bytes().private_bytes - alone.peak_bytes().private_bytes < 30 * MIB
        child.stdin.write("\n")
        child.stdin.flush()
        child.wait()
        with pytest.raises(ProcessLookupError):
            procfs.reset_peak(child.pid)
        with pytest.raises(ProcessLookupError):
            procfs.read_status(child.pid)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_process_knows_whether_it_has_children_without_looking_at_all_others() -> None:
    child = os.fork()
    if child == 0:
        os._exit(1 if procfs.has_children() else 0)
    assert procfs.has_children()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_system_without_proc_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *arguments: object, **options: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(TierUnavailableError, match="/proc"):
        ProcessMeter().resident_bytes()
    with pytest.raises(TierUnavailableError, match="clear_refs"):
        ProcessMeter().reset_peak()


def test_the_cpu_meter_reads_and_limits_its_ledger(allocator: Allocator) -> None:
    meter, host = CpuMeter(allocator), CpuMeter(allocator, "host")
    live, blocks = meter.live_bytes(), meter.live_blocks()
    meter.reset_peak()
    host.reset_peak()
    tensors = [torch.empty(3 * MIB, dtype=torch.uint8), torch.empty(5 * MIB, dtype=torch.uint8)]
    assert (meter.live_bytes() - live, meter.live_blocks() - blocks) == (8 * MIB, 2)
    del tensors
    assert meter.live_bytes() == live
    assert meter.peak_bytes() == live + 8 * MIB
    assert meter.held_peak_bytes() >= meter.peak_bytes()
    assert host.peak_bytes() == host.live_bytes()
    allocator.trim()
    meter.set_limit(allocator.stats().mapped_bytes + MIB)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * MIB, dtype=torch.uint8)
    meter.set_limit(None)
    assert torch.empty(2 * MIB, dtype=torch.uint8).numel() == 2 * MIB


def test_phases_hold_the_peak_of_each_and_nested_ones_count_for_the_outer(allocator: Allocator) -> None:
    phases = Phases(CpuMeter(allocator), ProcessMeter())
    live = allocator.stats().live_bytes
    with phases("load"):
        kept = torch.ones(4 * MIB, dtype=torch.uint8)
    with phases("steady"):
        torch.ones(2 * MIB, dtype=torch.uint8)
        with phases("evaluate"):
            torch.ones(20 * MIB, dtype=torch.uint8)
        torch.ones(3 * MIB, dtype=torch.uint8)
    with phases("steady"):
        torch.ones(1 * MIB, dtype=torch.uint8)
    with contextlib.suppress(KeyError), phases("save"):
        torch.ones(7 * MIB, dtype=torch.uint8)
        raise KeyError
    records = {record.name: record for record in phases.records}
    assert list(records) == ["load", "evaluate", "steady", "save"]
    assert {name: record.peak_bytes - live for name, record in records.items()} == {
        "load": 4 * MIB,
        "evaluate": 24 * MIB,
        "steady": 24 * MIB,
        "save": 11 * MIB,
    }
    assert records["steady"].times == 2
    assert records["load"].live_at_end_bytes - live == kept.numel()
    for record in records.values():
        assert record.held_peak_bytes >= record.peak_bytes
        assert record.process_peak_bytes is not None
        assert record.process_peak_bytes > record.peak_bytes
    unwatched = Phases(CpuMeter(allocator))
    with unwatched("load"):
        pass
    assert unwatched.records[0].process_peak_bytes is None


def record(name: str, peak_bytes: int) -> PhaseRecord:
    return PhaseRecord(
        name=name,
        times=1,
        peak_bytes=peak_bytes,
        held_peak_bytes=peak_bytes,
        process_peak_bytes=None,
        live_at_end_bytes=0,
    )


def test_the_proof_says_predicted_measured_and_limit_in_one_line() -> None:
    gib = 1 << 30
    proof = Proof(limit_bytes=gib * 5 // 4, predicted_peak_bytes=gib * 110 // 100, measured_peak_bytes=gib * 108 // 100)
    assert proof.line() == "proof: predicted peak 1.10 GiB, measured peak 1.08 GiB, limit 1.25 GiB"
    assert proof.holds
    assert proof.error == pytest.approx(108 / 110 - 1)
    proof.check()


def test_a_breach_is_an_error_that_names_the_phase() -> None:
    proof = Proof(
        limit_bytes=100,
        predicted_peak_bytes=90,
        measured_peak_bytes=101,
        phases=(record("load", 40), record("first step", 101), record("steady", 80)),
    )
    assert not proof.holds
    assert proof.line().endswith("limit 100 B: BREACHED")
    with pytest.raises(LimitBreachError, match="first step") as breach:
        proof.check(is_torn=True)
    assert (breach.value.phase, breach.value.torn) == ("first step", True)
    with pytest.raises(UsageError):
        _ = Proof(limit_bytes=1, predicted_peak_bytes=0, measured_peak_bytes=0).error


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_cuda_meter_without_cuda_is_a_clear_error() -> None:
    with pytest.raises(TierUnavailableError, match="no cuda device"):
        AcceleratorMeter()


@pytest.mark.gpu
def test_the_cuda_meter_reads_and_limits_the_caching_allocator() -> None:
    meter = AcceleratorMeter()
    live, blocks = meter.live_bytes(), meter.live_blocks()
    meter.reset_peak()
    tensors = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    assert (meter.live_bytes() - live, meter.live_blocks() - blocks) == (6 * MIB, 2)
    del tensors
    assert meter.live_bytes() == live
    assert meter.peak_bytes() == live + 6 * MIB
    assert meter.held_bytes() <= meter.held_peak_bytes()
    torch.cuda.empty_cache()
    meter.set_limit(meter.held_bytes() + 64 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    meter.set_limit(None)
    assert torch.empty(100 * MIB, dtype=torch.uint8, device="cuda").numel() == 100 * MIB
