"""Memory outside of tensors that grows after `fit`: steps fit beside it or are refused whole, and the process stays below its limit, as another one sees it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import memfit
from memory.outside import peak_bytes

MIB = 1 << 20

CHILD = """
import gc, resource, sys
import numpy as np
import torch
from torch import nn
import memfit
import memfit.api
from memfit.devices.kernel import page_out_libraries
from memfit.machine.machine import prepare_process

mode, directory = sys.argv[1], sys.argv[2]
MIB = 1 << 20
rows, width = 49152, 64  # 12 MiB an output, for few operations
torch.manual_seed(0)
def build():
    torch.manual_seed(1)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(width, width), nn.Tanh())))
batches = [torch.randn(rows, width) for _ in range(6)]
extra = []
def loss(model, batch):
    held = [np.ones(nbytes, dtype=np.uint8) for nbytes in extra]
    found = model(batch).square().mean()
    del held
    return found
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
meter = prepare_process()
page_out_libraries()  # some 60 MiB with torch's build for the CPU, 300 and more with that for CUDA
limit = meter.resident_bytes().whole_bytes + 460 * MIB
print("limit", limit, flush=True)
before = resource.getrlimit(resource.RLIMIT_DATA)
options = {"limit": limit, "plan": memfit.Plan(), "directory": directory + "/homes"}
if mode == "kernel":
    options["enforce"] = "kernel"
if mode == "replan":
    options = {"limit": limit, "store": directory + "/run", "on_breach": "replan"}
job = memfit.fit(model, optimizer, loss, batches[0], **options)
if mode == "growth":
    # Too many: a step takes more than 40 MiB and those of libraries' pages that leave.
    taken = np.ones(limit - meter.resident_bytes().whole_bytes - 40 * MIB, dtype=np.uint8)
    try:
        job.step(batches[0])
    except memfit.LimitBreachError as error:
        print("refused", error.torn, error.where)
    del taken
for batch in batches[:2]:
    peak = job.step(batch).peak_bytes
spare = limit - peak
if mode == "growth":
    taken = np.ones(spare - 20 * MIB, dtype=np.uint8)
    job.step(batches[2])
    more = np.ones(44 * MIB, dtype=np.uint8)  # 24 too many
    try:
        job.step(batches[3])
    except memfit.LimitBreachError as error:
        print("refused", error.torn, error.where)
    del more
    job.step(batches[3])
    del taken
    with open(directory + "/rows.bin", "wb") as file:
        for _ in range((spare >> 20) + 80):
            file.write(bytes(MIB))
    mapped = np.memmap(directory + "/rows.bin", dtype=np.uint8, mode="r")
    for at in range(0, len(mapped), MIB):
        assert mapped[at : at + MIB].sum() == 0
        if meter.resident_bytes().whole_bytes > limit - 8 * MIB:
            break
    for batch in batches[4:]:
        job.step(batch)
elif mode == "replan":
    taken = np.ones(spare + 24 * MIB, dtype=np.uint8)
    import warnings
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in batches[2:]:
            job.step(batch)
    print("replanned", len(job.breaches), job.breaches[0].is_predicted, "outside of tensors" in job.breaches[0].cause)
elif mode == "kernel":
    extra += [limit - meter.resident_bytes().whole_bytes - 60 * MIB, 100 * MIB]
    try:
        job.step(batches[2])
    except memfit.LimitBreachError as error:
        print("refused", error.torn, isinstance(error.__cause__, MemoryError), "RLIMIT_DATA" in str(error))
    extra.clear()
    try:
        held = np.ones(limit - meter.resident_bytes().whole_bytes - 40 * MIB, dtype=np.uint8)
        np.ones(80 * MIB, dtype=np.uint8)
    except MemoryError:
        print("between")
    del held
    for batch in batches[2:]:
        job.step(batch)
print("steps", job.steps, flush=True)
sys.stdin.readline()
job.close()
assert resource.getrlimit(resource.RLIMIT_DATA) == before
torch.save([p.detach() for p in model.parameters()], directory + "/found.pt")
"""


def _wanted() -> list[torch.Tensor]:
    torch.manual_seed(0)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())))
    torch.manual_seed(0)
    batches = [torch.randn(49152, 64) for _ in range(6)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _run(mode: str, tmp_path: Path) -> list[str]:
    """What the child printed; it stayed below its limit, by the largest resident size that the kernel saw between two looks of a millisecond."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, mode, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        assert first.startswith("limit"), child.communicate()[1][-3000:]
        ended, peaks = threading.Event(), [0]

        def look() -> None:
            while not ended.wait(0.001):
                with contextlib.suppress(FileNotFoundError, StopIteration):  # it has ended
                    peaks[0] = max(peaks[0], peak_bytes(child.pid))

        looker = threading.Thread(target=look)
        looker.start()
        lines: list[str] = []
        while line := child.stdout.readline():
            lines.append(line.strip())
            if line.startswith("steps"):
                break
        ended.set()
        looker.join()
        _, complaints = child.communicate("\n")
    assert child.returncode == 0, complaints[-3000:]
    limit = int(first.split()[1])
    assert peaks[0] <= limit, f"{(peaks[0] - limit) / MIB:.1f} MiB above the limit"
    assert peaks[0] > limit - 120 * MIB, "nothing came near the limit"
    return lines


@pytest.mark.usefixtures("exact_counts")
def test_steps_beside_numpy_that_came_after_fit_are_made_where_they_fit_and_refused_whole_where_they_do_not(
    tmp_path: Path,
) -> None:
    """Before the first step, after it, and where the pages of a mapped file can make room."""
    lines = _run("growth", tmp_path)
    assert lines == ["refused False before the step"] * 2 + ["steps 6"]
    assert all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / "found.pt"), _wanted(), strict=True))


@pytest.mark.slow
def test_the_kernel_refuses_numpy_inside_of_a_step_and_between_two_and_the_job_goes_on(tmp_path: Path) -> None:
    lines = _run("kernel", tmp_path)
    assert lines == ["refused False True True", "between", "steps 6"]
    assert all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / "found.pt"), _wanted(), strict=True))


@pytest.mark.slow
def test_a_run_that_may_replan_goes_on_beside_numpy_that_came_after_fit(tmp_path: Path) -> None:
    lines = _run("replan", tmp_path)
    assert lines == ["replanned 1 True True", "steps 6"]
    for found, wanted in zip(torch.load(tmp_path / "found.pt"), _wanted(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_kernel_s_limit_is_refused_where_it_cannot_take_effect() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).sum()

    rows = torch.ones(2, 2)
    with pytest.raises(memfit.UsageError, match="without a limit"):
        memfit.fit(model, optimizer, loss, rows, enforce="kernel")
    with pytest.raises(memfit.UsageError, match="memory of a process"):
        memfit.fit(model, optimizer, loss, rows, enforce="kernel", limit="1GiB", emulate_device=True)
    with pytest.raises(memfit.UsageError, match='True, False or "kernel"'):
        memfit.fit(model, optimizer, loss, rows, enforce="kernels")  # type: ignore[arg-type]
