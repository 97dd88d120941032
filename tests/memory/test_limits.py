"""A limit is hard: plain PyTorch dies at it, memfit trains below it, in every phase.

Small versions of `benchmarks/limits.py`: one on an emulated device, where only tensors count and the limits can be tight; one for this whole
process as the kernel sees it; and, slow, the benchmark itself on its smallest case.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence import plans
from faults import tower
from faults.tower import Batch, Tower
from memfit.core.errors import DoesNotFitError, LimitBreachError
from memfit.core.limits import Budget
from memfit.core.plan import CallPlan, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.devices.binding import Allocator, install
from memfit.job import deciding
from memfit.machine.meters import ProcessMeter

MIB = 1 << 20
STEPS = 3


def _train_plainly(model: nn.Module, width: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for step in range(STEPS):
        loss = tower.loss(model, Tower(width).batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _lean(profile: Profile) -> Plan:
    """Everything on disk, a quarter of the rows at a time, arguments of recomputed calls away as well."""
    fate = CallPlan(saved=Saved.RECOMPUTE, boundary_home=Tier.DISK)
    return Plan(microbatches=4, blocks=plans.on_disk(profile), calls=plans.fates(profile, fate))


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    gc.collect()
    found = install()
    found.trim()
    yield found
    found.set_limit(None)


@pytest.mark.parametrize("share", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_tensors_stay_below_a_limit_at_which_plain_training_dies(
    share: int, allocator: Allocator, tmp_path: Path
) -> None:
    layers, width = 12, 256
    before = allocator.stats().mapped_bytes
    allocator.reset_peak()
    wanted = _train_plainly(Tower(width, layers).build(), width)
    plain_bytes = allocator.stats().mapped_peak_bytes - before
    gc.collect()
    allocator.trim()
    base = allocator.stats().mapped_bytes
    limit = base + plain_bytes // share

    allocator.set_limit(limit)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="limit"):
            _train_plainly(Tower(width, layers).build(), width)
    finally:
        allocator.set_limit(None)
    gc.collect()

    # Built whole, the weights are a quarter of plain training's bytes by themselves.
    model = memfit.empty(Tower(width, layers).build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = _lean(memfit.profile(model, optimizer, tower.loss, Tower(width).batch(0)))
    job = memfit.fit(
        model,
        optimizer,
        tower.loss,
        Tower(width).batch(0),
        plan=plan,
        limit=limit,
        directory=tmp_path / "homes",
        emulate_device=True,
    )
    losses = [job.step(Tower(width).batch(step)).loss for step in range(STEPS)]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=0.0)
    held = {phase.name: phase.held_peak_bytes for phase in job.proof().phases}
    assert held.keys() == {"load", "first step", "steady"}
    assert max(held.values()) <= limit
    job.close(restore=False)


@pytest.mark.parametrize("lines", [False, True])
def test_a_plan_fits_beside_what_is_held_when_it_has_been_chosen(
    lines: bool, allocator: Allocator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look for a plan takes of the process, too: here a tensor that is too large for the plan."""
    model = Tower(128, 8).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = Tower(128).batch(0)
    limit = allocator.stats().live_bytes + 6 * sum(p.nbytes for p in model.parameters())
    grown: list[Tensor] = []
    peaks: list[int] = []
    choose = deciding._choose

    def choose_and_grow(setup: Any, sample: Any, found: Profile, budget: Budget, *kept: Any, **options: Any) -> Any:
        chosen = choose(setup, sample, found, budget, *kept, **options)
        peaks.append(chosen.found.timeline.peak_bytes)
        if not grown:
            assert budget.tensor_bytes is not None
            grown.append(torch.empty(budget.tensor_bytes - peaks[0] + 65536, dtype=torch.uint8))
        return chosen

    monkeypatch.setattr(deciding, "_choose", choose_and_grow)
    with memfit.fit(
        model, optimizer, tower.loss, batch, limit=limit, lines=lines, directory=tmp_path / "homes", emulate_device=True
    ) as job:
        if not lines:
            job.step(batch)
            assert max(phase.held_peak_bytes for phase in job.proof().phases) <= limit
        assert len(peaks) == 2
        assert peaks[1] < peaks[0]


def test_the_whole_process_stays_below_a_limit_at_which_plain_training_dies(
    allocator: Allocator, tmp_path: Path
) -> None:
    layers, width = 16, 640
    meter = ProcessMeter()
    _train_plainly(Tower(64, 1).build(), 64)  # brings up threads and libraries, which belong to what is resident
    gc.collect()
    allocator.trim()
    resident = meter.resident_bytes().whole_bytes
    meter.reset_peak()
    wanted = _train_plainly(Tower(width, layers).build(), width)
    peak = meter.peak_bytes().whole_bytes
    gc.collect()
    allocator.trim()
    limit = resident + (peak - resident) // 2

    allocator.set_limit(limit - resident)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            _train_plainly(Tower(width, layers).build(), width)
    finally:
        allocator.set_limit(None)
    gc.collect()
    allocator.trim()

    meter.reset_peak()
    model = Tower(width, layers).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    built = meter.peak_bytes().whole_bytes
    plan = _lean(memfit.profile(model, optimizer, tower.loss, Tower(width).batch(0)))
    job = memfit.fit(
        model, optimizer, tower.loss, Tower(width).batch(0), plan=plan, limit=limit, directory=tmp_path / "homes"
    )
    losses = [job.step(Tower(width).batch(step)).loss for step in range(STEPS)]
    job.evaluate(Tower(width).batch(0))
    job.save(tmp_path / "saved")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=0.0)
    proof = job.proof(before_bytes=built)
    assert proof.holds, proof.line()
    peaks = {phase.name: phase.process_peak_bytes or 0 for phase in proof.phases}
    assert peaks.keys() >= {"load", "first step", "steady", "evaluate", "save"}
    assert not {name: nbytes for name, nbytes in peaks.items() if nbytes > limit}
    job.close(restore=False)


def test_a_breach_names_the_action_and_the_job_goes_on_with_smaller_work(allocator: Allocator, tmp_path: Path) -> None:
    width = 256
    model = Tower(width, 4).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    extra: list[int] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        # An allocation that no trace saw, in the middle of a step.
        held = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in extra]
        value = tower.loss(model, batch)
        del held
        return value

    plan = Plan(update=UpdateTime.AFTER_BACKWARD)
    job = memfit.fit(
        model,
        optimizer,
        loss,
        Tower(width).batch(0),
        plan=plan,
        limit=allocator.stats().mapped_bytes + 256 * MIB,
        emulate_device=True,
    )
    weights = [p.detach().clone() for p in model.parameters()]
    extra.append(1024 * MIB)
    with pytest.raises(LimitBreachError, match="was hit at 'start m0'") as caught:
        job.step(Tower(width).batch(0))
    assert not caught.value.torn
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    extra.clear()
    assert job.step(Tower(width).batch(0)).is_finite
    job.close()


def test_a_limit_below_what_is_possible_is_refused_with_the_smallest_that_works(tmp_path: Path) -> None:
    model = Tower(256, 2).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    resident = ProcessMeter().resident_bytes().whole_bytes
    with pytest.raises(DoesNotFitError, match="smallest limit") as caught:
        memfit.fit(
            model, optimizer, tower.loss, Tower(256).batch(0), limit=resident + MIB, directory=tmp_path / "homes"
        )
    assert caught.value.smallest_limit_bytes is not None
    assert caught.value.smallest_limit_bytes > resident + MIB


def test_after_a_refusal_the_program_goes_on_without_the_limit(allocator: Allocator, tmp_path: Path) -> None:
    """While the error is held, too, whose frames hold what was begun."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    how: dict[str, Any] = {"directory": tmp_path / "homes", "emulate_device": True, "limit": 48 * MIB}
    with pytest.raises(DoesNotFitError) as held:
        memfit.fit(
            model, optimizer, lambda m, b: m(b).square().mean(), torch.randn(32768, 256), numerics="exact", **how
        )
    assert torch.ones(64 * MIB, dtype=torch.uint8).sum() == 64 * MIB
    assert held.value.smallest_limit_bytes is not None


def test_what_is_there_beside_the_job_is_counted_before_it_begins(allocator: Allocator, tmp_path: Path) -> None:
    """A teacher, another job, data: their bytes are taken from the limit when a plan is made, not met in the middle of a step."""

    def fit(limit: int) -> memfit.Job:
        model = Tower(256, 2).build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return memfit.fit(
            model,
            optimizer,
            tower.loss,
            Tower(256).batch(0),
            limit=limit,
            directory=tmp_path / "homes",
            emulate_device=True,
        )

    def smallest() -> int:
        try:
            fit(MIB)
        except DoesNotFitError as error:
            found = error.smallest_limit_bytes
        else:
            pytest.fail("it does not fit")
        gc.collect()
        assert found is not None
        return found

    alone = smallest()
    teacher = torch.ones(64 * MIB, dtype=torch.uint8)
    beside = smallest()
    assert abs(beside - alone - teacher.nbytes) < 8 * MIB  # which plan is the leanest may differ
    with fit(beside) as job:
        for step in range(STEPS):
            job.step(Tower(256).batch(step))
        held = [phase.held_peak_bytes for phase in job.proof().phases if phase.name != "load"]
    assert teacher.nbytes < max(held) <= beside


@pytest.mark.slow
def test_the_benchmark_holds_on_its_smallest_case(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks/limits.py"), "--only", "gpt-quick", "--out", str(tmp_path / "found.json"),
         "--directory", str(tmp_path)],
        check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root / "src")},
    )  # fmt: skip
    assert (tmp_path / "found.json").exists(), done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads((tmp_path / "found.json").read_text())["results"]
    half = next(r for r in found if r["share"] == 2)
    assert half["plain_died"]
    assert half["holds"], half


@pytest.mark.parametrize("fate", [Saved.OFFLOAD, pytest.param(Saved.RECOMPUTE, marks=pytest.mark.slow)], ids=str)
def test_the_allocator_sees_all_memory_that_a_step_takes(fate: Saved, allocator: Allocator, tmp_path: Path) -> None:
    """What the process held at its peak is what was there before and what the allocator gave: nothing goes past it."""
    rows, width, layers = 2048, 512, 8
    model = Tower(width, layers).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = [{name: torch.randn(rows, width) for name in ("x", "y")} for _ in range(3)]
    profile = memfit.profile(model, optimizer, tower.loss, batches[0])
    call = CallPlan(saved=fate, saved_home=Tier.DISK, boundary_home=Tier.DISK)
    plan = Plan(blocks=plans.on_disk(profile), calls=plans.fates(profile, call))
    with memfit.fit(model, optimizer, tower.loss, batches[0], plan=plan, directory=tmp_path / "homes") as job:
        job.step(batches[0])
        allocator.trim()
        process = ProcessMeter()
        before = process.resident_bytes().whole_bytes - allocator.stats().mapped_bytes
        job.step(batches[1])
        steady = job.proof().phases[-1]
        moved = job.bytes_moved[0].get("activation", 0)
        job.close(restore=False)
    assert moved > 30 * MIB, "or nothing could have gone past the allocator"
    assert (steady.process_peak_bytes or 0) - steady.held_peak_bytes - before < 8 * MIB


CHILD_WITHOUT_ROOM = """
import sys
import torch
from torch import nn
import memfit
import memfit.api
from memfit.machine.machine import prepare_process
from memfit.machine.meters import ProcessMeter
prepare_process()
def build(width):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(24)))
def loss(model, batch):
    return model(batch).square().mean()
batch = torch.randn(8, 1536)
warm = build(64)
torch.optim.SGD(warm.parameters(), lr=0.1)  # brings up torch._dynamo
meter = ProcessMeter()
base = meter.resident_bytes().whole_bytes
model = build(1536)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weights = sum(p.nbytes for p in model.parameters())
# Less than planning takes beside the model.
limit = base + weights + (14 << 20)
meter.reset_peak()
with memfit.fit(model, optimizer, loss, batch, limit=limit, directory=sys.argv[1]) as job:
    found = job.step(batch).loss
    peaks = {record.name: record.process_peak_bytes for record in job.proof().phases}
    print(found, limit, job.predicted_peak_bytes, *peaks.values())
"""


def test_planning_takes_no_room_beside_a_model_that_nearly_fills_the_limit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD_WITHOUT_ROOM, str(tmp_path / "homes")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loss, limit, predicted, *peaks = map(float, done.stdout.split())
    assert loss > 0
    assert len(peaks) >= 2
    assert max(peaks) <= limit
    assert predicted <= limit
