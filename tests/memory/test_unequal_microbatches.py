"""Microbatches of unequal rows, and sums of gradients that come one by one: predicted and measured, action by action."""

from __future__ import annotations

import gc
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn

import memfit
from memfit.core.plan import Order, Plan, UpdateTime
from memfit.core.storage_formats import ComputeDtype
from memfit.devices.binding import install
from memfit.step.lower import lower
from memfit.step.predict import predict
from memory.measured_steps import Interval, measure_step

MIB = 1 << 20
# Losses, 0-d counters, alignment.
SMALL_BYTES = MIB // 4


def measured(
    model: nn.Module, batch: Tensor, plan: Plan, directory: Path, *, allow: Collection[str], clip: float | None = None
) -> dict[str, Interval]:
    """The second step of a job, by action."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    allocator = install()
    gc.collect()
    before = allocator.stats().live_bytes - sum(t.nbytes for t in (*model.parameters(), batch))
    with memfit.fit(
        model, optimizer, loss, batch, plan=plan, allow=allow, max_grad_norm=clip, directory=directory / "homes"
    ) as job:
        timeline = predict(lower(job.schedule, job.plan, job.profile, staging_bytes=0))
        job.step(batch)
        return {i.action: i for i in measure_step(job, batch, timeline, allocator, before)}


def test_a_microbatch_of_a_row_less_is_predicted_with_a_row_less(tmp_path: Path) -> None:
    """Of 3 rows in two, the second has one: with the first one's rows, 4 MiB more would be predicted of each of its tensors."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 1024))
    plan = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR)
    found = measured(model, torch.randn(3, 1024, 256), plan, tmp_path, allow={"nonadditive-loss"})
    for action in ("seed m0", "seed m1"):
        assert abs(found[action].peak_bytes - found[action].predicted_peak_bytes) <= SMALL_BYTES, found[action]
    assert found["seed m0"].peak_bytes - found["seed m1"].peak_bytes >= 8 * MIB


class Wide(nn.Module):
    """A block of four weights, of which backward comes to the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))

    def forward(self, values: Tensor) -> Tensor:
        return self.parts(values)


def test_sums_of_low_precision_gradients_are_counted_as_they_come(tmp_path: Path) -> None:
    """While activations are highest, of four sums of 4 MiB one is there: before, all of them and 2 MiB were counted."""
    model = nn.Sequential(Wide(), Wide())
    plan = Plan(update=UpdateTime.AFTER_BACKWARD, compute_dtype=ComputeDtype.BFLOAT16)
    found = measured(model, torch.randn(2048, 1024), plan, tmp_path, allow={"bf16"}, clip=1e9)
    backwards = [interval for action, interval in found.items() if action.startswith("backward")]
    assert len(backwards) >= 2
    for interval in backwards:
        assert interval.peak_bytes <= interval.predicted_peak_bytes + SMALL_BYTES, interval
        assert interval.predicted_peak_bytes <= interval.peak_bytes + 4 * MIB, interval


def test_a_chosen_plan_traces_its_smaller_microbatch(tmp_path: Path) -> None:
    """The search takes it from the sizes around it; what is said of the plan is said of its own rows."""
    model, batch = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 64)), torch.randn(7, 512, 64)
    with memfit.fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch).square().sum(),
        batch,
        limit="50MiB",
        emulate_device=True,
        plan="accumulate",
        allow={"nonadditive-loss"},
        directory=tmp_path / "homes",
    ) as job:
        rows, more = divmod(7, job.plan.microbatches)
        assert job.plan.microbatches > 1
        assert more
        assert {rows, rows + 1} <= {*job.profile.traces}
