"""Lines that end without an update, and copies of the model that they make."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import memfit
from memfit.core.errors import AwayError, MemfitWarning
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier

ON_DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
PLANS = {"on the device": Plan(), "on disk": Plan(blocks={"0": ON_DISK, "2": ON_DISK})}
BATCH = torch.linspace(-1, 1, 128).view(16, 8)

Lines = Callable[[nn.Module, torch.optim.Optimizer], object]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _job(plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer, memfit.Job]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, memfit.fit(model, optimizer, loss_of, BATCH, plan=plan, lines=True)


def zeroed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model, BATCH).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, BATCH).backward()
    optimizer.zero_grad()


def zeroed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model, BATCH).backward()
    optimizer.zero_grad(set_to_none=False)


def forgotten_one_by_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model, BATCH).backward()
    for parameter in model.parameters():
        parameter.grad = None


def scaled_to_infinity(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """`zero_grad` at the top, as most loops have it: what the scaler has skipped is left at the end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, BATCH) * 1e10).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("lines", [zeroed, zeroed_in_place, forgotten_one_by_one, scaled_to_infinity])
def test_lines_whose_last_step_was_skipped_end_in_silence(lines: Lines, plan: Plan) -> None:
    model, optimizer, job = _job(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with job.lines():
            lines(model, optimizer)
    job.close()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("is_in_part", [False, True])
def test_gradients_that_an_update_would_use_are_told_of(plan: Plan, *, is_in_part: bool) -> None:
    model, _, job = _job(plan)

    def leave_gradients() -> None:
        with job.lines():
            loss_of(model, BATCH).backward()
            if is_in_part:
                model.get_parameter("0.weight").grad = None

    with pytest.warns(MemfitWarning, match="gradients of 1 backward that"):
        leave_gradients()
    job.close()


@pytest.mark.parametrize("make", [copy.deepcopy, AveragedModel])
def test_a_copy_inside_of_lines_is_an_ordinary_model(make: Callable[[nn.Module], nn.Module]) -> None:
    model, optimizer, job = _job(Plan())
    with job.lines() as lines:
        loss_of(model, BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        made = make(model)
        loss_of(made, BATCH).backward()
        assert lines.backwards == 0 and all(p.grad is None for p in model.parameters())
        assert all(torch.equal(p, q) for p, q in zip(made.parameters(), model.parameters(), strict=True))
    torch.save(made, io.BytesIO())
    job.close()


@pytest.mark.parametrize("make", [copy.deepcopy, AveragedModel])
def test_a_copy_of_weights_that_are_away_is_refused_by_the_way_to_it_which_works(
    make: Callable[[nn.Module], nn.Module],
) -> None:
    model, _, job = _job(PLANS["on disk"])
    with job.lines():
        with pytest.raises(AwayError, match=r"memfit\.MemfitEma\(job\)"):
            make(model)
        with job.weights():
            made = make(model)
    job.close()
    assert all(torch.equal(p, q) for p, q in zip(made.parameters(), model.parameters(), strict=True))
