"""An epoch's last batch has fewer rows than the others, maybe fewer than the plan has microbatches: it is cut into as many as it has rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from equivalence import plans
from equivalence.plain import PlainTrainer, RandomState, adamw
from equivalence.with_memfit import fit_with, profile_of
from equivalence.zoo import Batch, Case
from memfit.core.plan import Order, Plan

WIDTH, MICROBATCHES = 12, 4


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch["x"]), batch["y"])


def batch_of(step: int, rows: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(300 + step)
    return {name: torch.randn(rows, WIDTH, generator=generator) for name in ("x", "y")}


def case_of() -> Case:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.2), nn.GELU()) for _ in range(3)]
    return Case(model=nn.Sequential(*layers), loss=loss_of, batch=batch_of)


@pytest.mark.parametrize("order", Order)
def test_a_batch_with_few_rows_is_cut_into_fewer_microbatches(order: Order, tmp_path: Path) -> None:
    ours, reference = case_of(), case_of()
    profile = profile_of(ours)
    tail = plans.tail(profile) if order is Order.LAYER_MAJOR else None
    plan = Plan(order=order, microbatches=MICROBATCHES, blocks=plans.on_disk(profile), tail=tail)
    make = adamw()
    plain = PlainTrainer(reference, make(reference.model), max_grad_norm=1.0)
    random = RandomState(state=plain.random.state.clone())
    optimizer = make(ours.model)
    with random.in_use():
        job = fit_with(plan, tmp_path, max_grad_norm=1.0)(ours, optimizer)
    assert isinstance(job, memfit.Job)
    with job:
        for step, rows in enumerate((6, 3, 1, 6, 2)):
            batch = batch_of(step, rows)
            plain.microbatches = min(rows, MICROBATCHES)
            plain.accumulate(batch)
            norm = plain.clip()
            plain.update()
            with random.in_use():
                result = job.step(batch)
            assert len(result.losses) == plain.microbatches
            assert list(result.losses) == [float(loss) for loss in plain.losses]
            assert norm is not None and result.norm == pytest.approx(float(norm), rel=1e-6)
            assert torch.equal(random.state, plain.random.state)
            assert job.evaluate(batch_of(step, 1)).losses
    for (name, weight), other in zip(ours.model.named_parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(weight, other), name
