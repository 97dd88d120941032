"""Batches of other shapes than the sample's: planned for when they come, beside weights that are away, and measured each for itself."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from equivalence.line_loops import BLOCKS, WIDTH, WORDS, Run, Words, batch, check_equal, loss_of
from faults.tower import Tower, adamw, loss
from memfit.core.errors import DoesNotFitError
from memfit.core.limits import MIB
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.devices.binding import install
from memfit.planner.preparing import prepare

TOWER = Tower(width=64)


def plan(home: Tier) -> Plan:
    return Plan(blocks={str(i): BlockPlan(weight_home=home, state_home=home) for i in range(TOWER.layers)})


@pytest.mark.parametrize("home", [Tier.HOST, Tier.DISK])
def test_planning_for_another_shape_touches_no_weight_that_is_away(home: Tier, tmp_path: Path) -> None:
    model = TOWER.build()
    options = {"plan": plan(home), "emulate_device": True, "limit": 64 * MIB, "directory": tmp_path / "homes"}
    with memfit.fit(model, adamw(model), loss, TOWER.batch(0), **options) as job:
        job.step(TOWER.batch(0))
        before = job.bytes_moved
        with pytest.raises(DoesNotFitError, match="a batch of 65536 rows"):
            job.step({name: torch.zeros(1 << 16, 64) for name in ("x", "y")})
        assert job.bytes_moved == before
        halves = {name: tensor[:32] for name, tensor in TOWER.batch(1).items()}
        found = job.step(halves)
    assert not found.departures
    reference, optimizer = TOWER.after_plain_steps(1)
    optimizer.zero_grad()
    assert found.loss == float(loss(reference, halves).detach())


def test_a_step_tells_its_own_peak_whatever_came_before_it() -> None:
    model = TOWER.build()
    large = {name: torch.zeros(1 << 13, 64) for name in ("x", "y")}
    with memfit.fit(model, adamw(model), loss, large, plan=Plan(), emulate_device=True) as job:
        most = job.step(large).peak_bytes
        job.evaluate(TOWER.batch(0))
        assert job.step(large).peak_bytes == pytest.approx(most, rel=0.1)
        job.evaluate(large)
        del large
        assert job.step(TOWER.batch(1)).peak_bytes < most - MIB  # the pool of freed memory counts


def test_another_shape_leaves_the_reserve_of_a_process_free_as_the_sample_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TOWER.build()
    with memfit.fit(model, adamw(model), loss, TOWER.batch(0), plan=Plan()) as job:
        other = {name: torch.cat([tensor] * 2) for name, tensor in TOWER.batch(0).items()}
        machine, assembly = job._machine, job._assembly
        peak = prepare(assembly.setup, job.plan, other, adds_apart=False).timeline.peak_bytes
        monkeypatch.setattr(machine.hard_limit, "armed_bytes", peak + machine.reserve_bytes() - 1)
        with pytest.raises(DoesNotFitError, match="a batch of 128 rows"):
            job.step(other)
        monkeypatch.setattr(machine.hard_limit, "armed_bytes", peak + machine.reserve_bytes())
        assert job.step(other).rows == 128
        monkeypatch.undo()


def _untied() -> Words:
    """Without dropout, whose draws are each microbatch's own, and without a weight of two uses."""
    model = Words()
    model.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
    for layer in model.layers:
        layer.dropout = torch.nn.Identity()
    return model


def test_behind_some_lengths_of_a_bucket_no_other_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some: ten, here three, of which the sample's is one."""
    monkeypatch.setattr("memfit.planner.preparing.ENOUGH", 3)
    lengths = [16, 5, 9, 3, 12, 1, 17, 5]
    ours, theirs = Run.new(_untied), Run.new(_untied)
    for index, length in enumerate(lengths):
        for part in batch(index, length=length).split(1):
            share = loss_of(theirs.model, part) / 2
            share.backward()
        theirs.optimizer.step()
        theirs.optimizer.zero_grad()
    homes = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
    kinds = (Saved.KEEP, Saved.OFFLOAD, Saved.RECOMPUTE, Saved.SELECT, Saved.KEEP)
    given = Plan(
        blocks=dict.fromkeys(BLOCKS, homes), calls=tuple(CallPlan(saved=kind) for kind in kinds), microbatches=2
    )
    traced: list[int] = []

    def noted(setup: Any, plan: Plan, sample: Any, **options: Any) -> Any:
        traced.append(sample.shape[1])
        return prepare(setup, plan, sample, **options)

    monkeypatch.setattr("memfit.planner.preparing.prepare", noted)
    with memfit.fit(ours.model, ours.optimizer, loss_of, batch(0, length=16), plan=given) as job:
        found = [job.step(batch(index, length=length)) for index, length in enumerate(lengths)]
    assert traced == [5, 9, 17]  # the last is longer than all
    assert not any(result.departures for result in found)
    check_equal(ours, theirs)


class Routed(torch.nn.Module):
    """Rows go where their values say: no trace without data shows the step."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.gate = torch.nn.Linear(width, 2)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]).tanh())
        return x + out


def routed() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Routed() for _ in range(3)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def routed_loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def untraceable_plan(home: Tier, microbatches: int = 1) -> Plan:
    blocks = {str(i): BlockPlan(weight_home=home, state_home=home, gradient_home=home) for i in range(3)}
    return Plan(blocks=blocks, microbatches=microbatches)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_step_that_cannot_be_traced_trains_batches_of_other_shapes_with_weights_on_disk(microbatches: int) -> None:
    (plain, plain_optimizer), (model, optimizer) = routed(), routed()
    batches = [torch.randn(rows, 32) for rows in (18, 18, 12, 33, 2, 18)]
    with memfit.fit(model, optimizer, routed_loss, batches[0], plan=untraceable_plan(Tier.DISK, microbatches)) as job:
        for each in batches:
            plain_optimizer.zero_grad()
            k = min(microbatches, len(each))
            parts = each.tensor_split(k)
            for part in parts:
                (routed_loss(plain, part) * (len(part) / len(each))).backward()
            plain_optimizer.step()
            assert not job.step(each).departures
        job.evaluate(torch.randn(40, 32))
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_an_untraceable_batch_is_bounded_by_the_samples_memory_and_refused_where_the_bound_does_not_fit() -> None:
    gc.collect()
    others = install().stats().live_bytes  # of other tests
    model, optimizer = routed()
    torch.manual_seed(0)
    options = {"plan": untraceable_plan(Tier.DISK), "emulate_device": True, "limit": 8 * MIB}
    with memfit.fit(model, optimizer, routed_loss, torch.randn(512, 32), **options) as job:
        job.step(torch.randn(512, 32))
        for rows in (700, 1400, 100):
            result = job.step(torch.randn(rows, 32))
            prepared = job._runner.assembly.shapes.known[-1]
            assert prepared.profile.batch_rows == rows
            # Values that send more rows to one expert than the sample's did are in no prediction.
            assert result.peak_bytes - others <= prepared.peak_bytes * 1.1
        with pytest.raises(DoesNotFitError, match="a batch of 32768 rows"):
            job.step(torch.zeros(1 << 15, 32))
        job.step(torch.randn(512, 32))
