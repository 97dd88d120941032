"""Clean pages of libraries leave a process, come back with the same bytes, and limits and predictions count both."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import memfit
from memfit.devices import kernel, procfs
from memfit.devices.kernel import page_out_libraries
from memfit.machine.meters import ProcessMeter

MIB = 1 << 20
PAGES = 48 * MIB
# What the kernel may not have counted yet, and pages that it has just brought and does not take out again.
SLACK = 4 * MIB


@contextmanager
def mapped(path: Path, protection: int) -> Iterator[mmap.mmap]:
    """A file of this test's own, mapped private, with all of its pages in the process."""
    with path.open("wb") as file:
        for number in range(PAGES // MIB):
            file.write(bytes([number]) * MIB)
        file.flush()
        os.fsync(file.fileno())  # only clean pages leave
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, protection) as pages:
        assert read(pages) == sum(range(PAGES // MIB)) * (MIB // mmap.PAGESIZE)
        yield pages


def read(pages: mmap.mmap) -> int:
    return sum(pages[:: mmap.PAGESIZE])


def files() -> int:
    return procfs.read_status().file_bytes


def test_pages_of_a_library_leave_and_come_back_as_they_were(tmp_path: Path) -> None:
    before = files()
    with mapped(tmp_path / "library.so", mmap.PROT_READ | mmap.PROT_EXEC) as pages:
        assert files() > before + PAGES - SLACK
        page_out_libraries()
        assert files() < before + SLACK
        assert all(pages[number * MIB] == number for number in range(PAGES // MIB))


@pytest.mark.parametrize("protection", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE], ids=["data", "written"])
def test_pages_of_other_files_stay(tmp_path: Path, protection: int) -> None:
    with mapped(tmp_path / "data.bin", protection):
        page_out_libraries()
        # Of this mapping: the process's own libraries may have left.
        behind = Path("/proc/self/smaps").read_text(encoding="utf-8").partition(str(tmp_path / "data.bin"))[2]
        assert int(behind.partition("Rss:")[2].split()[0]) == PAGES >> 10


def test_a_kernel_without_this_advice_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_MADV_PAGEOUT", 9999)
    with mapped(tmp_path / "library.so", mmap.PROT_READ | mmap.PROT_EXEC) as pages:
        before = files()
        page_out_libraries()
        assert abs(files() - before) < SLACK
        assert read(pages)


def test_pages_that_a_step_uses_are_counted_while_they_are_away_and_others_are_not(tmp_path: Path) -> None:
    meter = ProcessMeter()
    with mapped(tmp_path / "used.so", mmap.PROT_READ | mmap.PROT_EXEC):
        meter.note_used_files()
        used = meter.counted_bytes()
        with mapped(tmp_path / "imported.so", mmap.PROT_READ | mmap.PROT_EXEC):
            assert meter.counted_bytes() > used + PAGES - SLACK
            meter.give_back_libraries()
            assert meter.resident_bytes().whole_bytes < used - PAGES + SLACK
            assert abs(meter.counted_bytes() - used) < SLACK


CHILD = """
import mmap, sys
import torch
from torch import nn
import memfit
from memfit.devices import procfs
MIB = 1 << 20
torch.set_num_threads(1)
kept = []
def resident():
    return procfs.read_status().resident_bytes
def load(name, most=1 << 60):  # an import that reads many pages of a large library
    file = open(sys.argv[1] + "/" + name, "rb")
    kept.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))
    for at in range(0, len(kept[-1]), MIB):
        if resident() < most:
            sum(kept[-1][at : at + MIB : mmap.PAGESIZE])
def build():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    return model, torch.optim.AdamW(model.parameters())
def loss(model, batch):
    return (model(batch) - batch).square().mean()
batches = [torch.randn(2048, 256) for _ in range(3)]
plain, optimizer = build()
for batch in batches:
    optimizer.zero_grad()
    loss(plain, batch).backward()
    optimizer.step()
model, optimizer = build()
load("first.so")
held = resident()
try:
    memfit.fit(model, optimizer, loss, batches[0][:1], limit=2 * MIB)
except memfit.DoesNotFitError as error:
    print("named", error.smallest_limit_bytes - held)
sum(kept[0][:: mmap.PAGESIZE])
limit = held - 48 * MIB
job = memfit.fit(model, optimizer, loss, batches[0], limit=limit, plan=memfit.Plan())
job.step(batches[0])
load("second.so", limit - 5 * MIB)
before = resident()
for batch in batches[1:]:
    job.step(batch)
print("left", limit - before < 8 * MIB, before - resident() > 16 * MIB)
proof = job.proof()
print("holds", proof.holds)
job.close()
print("same", all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True)))
"""


def test_limits_and_steps_follow_the_pages_that_left(tmp_path: Path) -> None:
    """Pages of a large library are no part of a limit, neither if it was imported before `fit` nor between two steps."""
    for name, size in (("first.so", 160 * MIB), ("second.so", 1024 * MIB)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(memfit.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    lines = dict(line.split(maxsplit=1) for line in child.stdout.splitlines())
    assert int(lines.pop("named")) < -48 * MIB
    assert lines == {"left": "True True", "holds": "True", "same": "True"}
