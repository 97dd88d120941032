"""Losses that begin their backward together: predicted and counted by the allocator, action by action."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.plan import Plan
from memfit.devices.binding import install
from memfit.step.lower import lower
from memfit.step.predict import predict
from memory.measured_steps import Interval, measure_step

WIDTH, ROWS = 768, 801
# A microbatch's rows, which is what a saved tensor of these takes.
TENSOR_BYTES = ROWS // 3 * WIDTH * 4
# With one microbatch: the loss itself, a divisor, its first gradient and a copy of its number, which no trace has.
SCALAR_BYTES = 16
# States of random generators that are counted where they lie for a moment, and losses.
SMALL_BYTES = 3 * 5056
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda out: (out**2).mean(),
    "error": lambda out: (out - 0.3).square().mean(),
    "scaled error": lambda out: ((out - 0.3) * 2).square().mean(),
    "sum": lambda out: out.sum() / out.numel(),
    "mean": lambda out: out.mean(),
}


def second_step(loss: Callable[[Tensor], Tensor], microbatches: int, directory: Path) -> list[Interval]:
    """The second step of a tower of linear layers without a tail."""
    torch.manual_seed(0)
    allocator = install()
    gc.collect()
    before = allocator.stats().live_bytes
    model, rows = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    plan = Plan(microbatches=microbatches)
    with memfit.fit(
        model, optimizer, lambda model, batch: loss(model(batch)), rows, plan=plan, directory=directory / "homes"
    ) as job:
        job.step(rows)
        timeline = predict(lower(job.schedule, job.plan, job.profile, staging_bytes=0))
        return measure_step(job, rows, timeline, allocator, before)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_no_action_takes_more_than_is_predicted_whatever_the_loss_saves(
    name: str, microbatches: int, tmp_path: Path
) -> None:
    """Each loss's backward runs behind the earlier microbatch's last call, whose own backward would else seem to take more."""
    found, unseen = second_step(LOSSES[name], microbatches, tmp_path), SCALAR_BYTES * (microbatches == 1)
    for interval in found:
        assert interval.peak_bytes <= interval.predicted_peak_bytes + unseen, interval
        assert interval.live_bytes <= interval.predicted_bytes + unseen, interval


@pytest.mark.parametrize("name", LOSSES)
def test_the_seed_and_the_first_backwards_are_predicted_to_the_byte(name: str, tmp_path: Path) -> None:
    """But for what a middle microbatch's sums hold, which is bounded: the largest gradient beside the highest activations."""
    found = {interval.action: interval for interval in second_step(LOSSES[name], 3, tmp_path)}
    for action in ("seed m0-2", "backward C3 m0", "backward C3 m2", "backward C2 m0", "commit"):
        interval = found[action]
        assert interval.predicted_peak_bytes - interval.peak_bytes <= SMALL_BYTES, interval


def test_the_loss_of_the_second_microbatch_rises_in_the_backward_of_the_first(tmp_path: Path) -> None:
    """As counted by hand: four tensors of a microbatch's rows for each of three, one less behind the first call's
    backward, and four above that while the second loss is differentiated; weights, one gradient, and three tensors of rows of the batch.
    """
    found = {interval.action: interval for interval in second_step(LOSSES["square"], 3, tmp_path)}
    weight_bytes = WIDTH * WIDTH * 4
    # Each microbatch holds the inputs of layers 1 to 3 and what the loss saved, the batch is there once.
    by_hand = 5 * weight_bytes + (3 + 3 * 4 - 1 + 4) * TENSOR_BYTES
    assert 0 <= found["backward C3 m0"].peak_bytes - by_hand <= 2 * SMALL_BYTES, found["backward C3 m0"]
