"""Code between calls, of microbatches that take turns: predicted and counted by the allocator, action by action."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.plan import CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.devices.binding import install
from memfit.step.lower import lower
from memfit.step.predict import predict
from memory.measured_steps import Interval, measure_step

WIDTH, LAYERS = 768, 4
# Kinds that call each layer twice.
TWICE = ("twice", "beside")
# A recomputed call takes a state of the random generator as it begins, which is not counted.
STATE_BYTES = 5056
# Losses, and states of random generators that are counted where they lie for a moment.
SMALL_BYTES = 16
MOST_OVER_BYTES = 3 * 5056


class Chain(nn.Module):
    """Linear layers, and code of the model between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self._kind = kind

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self._kind == "twice":
                x = layer(x)
            elif self._kind == "beside":
                x = x + layer(x)
            if self._kind == "gelu":
                x = nn.functional.gelu(x)
            elif self._kind == "sines":
                x = x.sin().cos().sin() * x
            elif self._kind == "halves":
                left, right = x.tanh().chunk(2, dim=1)
                x = torch.cat([left * right, left + right], dim=1)
        return x


def second_step(kind: str, microbatches: int, rows: int, saved: Saved, directory: Path) -> list[Interval]:
    torch.manual_seed(0)
    allocator = install()
    gc.collect()
    before = allocator.stats().live_bytes
    model, batch = Chain(kind), torch.randn(rows, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    plan = Plan(microbatches=microbatches, calls=(CallPlan(saved=saved),) * LAYERS * (2 if kind in TWICE else 1))
    with memfit.fit(
        model,
        optimizer,
        lambda model, batch: model(batch).square().mean(),
        batch,
        plan=plan,
        directory=directory / "homes",
    ) as job:
        job.step(batch)
        timeline = predict(lower(job.schedule, job.plan, job.profile, staging_bytes=0))
        return measure_step(job, batch, timeline, allocator, before)


@pytest.mark.parametrize("kind", ["gelu", "sines", "halves", "twice", "beside"])
@pytest.mark.parametrize(
    ("microbatches", "rows", "saved"), [(1, 400, Saved.KEEP), (3, 801, Saved.KEEP), (4, 402, Saved.RECOMPUTE)]
)
def test_no_action_takes_more_than_is_predicted_where_the_model_computes_between_calls(
    kind: str, microbatches: int, rows: int, saved: Saved, tmp_path: Path
) -> None:
    """With several microbatches that code is differentiated behind the calls of all of them, and holds what it saved until then."""
    unseen = SMALL_BYTES + STATE_BYTES * (saved is Saved.RECOMPUTE)
    for interval in second_step(kind, microbatches, rows, saved, tmp_path):
        assert interval.peak_bytes <= interval.predicted_peak_bytes + unseen, interval
        assert interval.live_bytes <= interval.predicted_bytes + unseen, interval


@pytest.mark.parametrize("kind", ["gelu", "sines", "halves"])
def test_what_is_alive_after_each_backward_is_predicted_to_the_byte(kind: str, tmp_path: Path) -> None:
    for interval in second_step(kind, 3, 801, Saved.KEEP, tmp_path):
        if interval.action.startswith(("seed", "backward")):
            assert interval.predicted_bytes - interval.live_bytes <= MOST_OVER_BYTES, interval
