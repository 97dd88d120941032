"""First steps beside later ones: optimizer states that are made, tensors that a forward leaves on its modules.

Independent roads as in `test_prediction_against_measurement`, which looks at a second step: here every step counts, from the first on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.plan import CallPlan, Order, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.devices.binding import install
from memfit.step.lower import lower
from memfit.step.predict import predict
from memory.measured_steps import Interval, measure_step

MIB = 1 << 20
SMALL_BYTES = MIB // 2
MOST_ABOVE_PREDICTION = 1.01
STEPS = 3


def _square(model: nn.Module, values: Tensor) -> Tensor:
    return model(values).square().mean()


def _measure(
    build: Callable[[], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    values: Tensor,
    plan: Plan,
    directory: Path,
) -> list[list[Interval]]:
    """The first steps, each operation beside its prediction."""
    allocator = install()
    gc.collect()
    before_bytes = allocator.stats().live_bytes
    model = build()
    with memfit.fit(model, optimizer(model.parameters()), _square, values, plan=plan, directory=directory) as job:
        timeline = predict(lower(job.schedule, job.plan, job.profile))
        return [measure_step(job, values, timeline, allocator, before_bytes) for _ in range(STEPS)]


def _check(steps: list[list[Interval]]) -> None:
    """Nothing is above its prediction, and the prediction is that of one of the steps."""
    for index, intervals in enumerate(steps):
        for i in intervals:
            assert i.peak_bytes <= i.predicted_peak_bytes * MOST_ABOVE_PREDICTION + SMALL_BYTES, (index, i)
    predicted = max(i.predicted_peak_bytes for i in steps[0])
    assert predicted <= 1.25 * max(i.peak_bytes for intervals in steps for i in intervals) + SMALL_BYTES


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "whole": lambda p: torch.optim.Muon(p, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_update_makes_its_states_inside_of_the_prediction(name: str, tmp_path: Path) -> None:
    """The optimizer's class makes states beside the memory that they will rest in. With few rows, updates are the step's highest."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2)))

    steps = _measure(build, OPTIMIZERS[name], torch.randn(4, 1024), Plan(), tmp_path / "homes")
    _check(steps)
    highest = max(steps[0], key=lambda i: i.peak_bytes)
    assert highest.action.startswith("update")


class _Table(nn.Module):
    """Keeps a table on itself that its first forward makes, as rotary embeddings do."""

    table: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 128)

    def forward(self, values: Tensor) -> Tensor:
        if self.table is None:
            places = torch.arange(4096.0)
            self.table = torch.cos(places[:, None] * torch.arange(128)[None] / 128)
        return values + self.inner(values) * self.table[: values.shape[1]]


class _Shown(nn.Module):
    """Keeps the attention of its last forward on itself, for whoever wants to see it."""

    attention: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 3 * 128)

    def forward(self, values: Tensor) -> Tensor:
        rows, tokens = values.shape[:2]
        query, key, value = (t.view(rows, tokens, 4, 32).transpose(1, 2) for t in self.inner(values).chunk(3, -1))
        attention = (query @ key.transpose(-1, -2) * 0.1).softmax(-1)
        self.attention = attention.detach()
        return values + (attention @ value).transpose(1, 2).reshape(values.shape)


@pytest.mark.parametrize("kind", [_Table, _Shown])
@pytest.mark.parametrize("saved", [Saved.RECOMPUTE, Saved.SELECT, Saved.OFFLOAD])
def test_a_tensor_left_on_its_module_is_held_whatever_becomes_of_saved_tensors(
    kind: type[nn.Module], saved: Saved, tmp_path: Path
) -> None:
    fate = CallPlan(saved=saved, saved_home=Tier.DISK) if saved is Saved.OFFLOAD else CallPlan(saved=saved)
    _check_left(kind, Plan(calls=(fate, fate, fate, CallPlan())), tmp_path / "homes")


@pytest.mark.parametrize("kind", [_Table, _Shown])
@pytest.mark.parametrize("order", Order)
def test_microbatches_in_turns_leave_tensors_beside_those_of_the_step_before(
    kind: type[nn.Module], order: Order, tmp_path: Path
) -> None:
    again = CallPlan(saved=Saved.RECOMPUTE)
    _check_left(kind, Plan(microbatches=2, order=order, calls=(again, again, again, CallPlan())), tmp_path / "homes")


def _check_left(kind: type[nn.Module], plan: Plan, directory: Path) -> None:
    """No operation of any step holds more than predicted, before the forward and after the backward too."""

    def build() -> nn.Module:
        return nn.Sequential(*(kind() for _ in range(3)), nn.Linear(128, 128))

    for index, intervals in enumerate(_measure(build, OPTIMIZERS["adamw"], torch.randn(8, 96, 128), plan, directory)):
        for i in intervals:
            assert i.peak_bytes <= i.predicted_peak_bytes * MOST_ABOVE_PREDICTION + SMALL_BYTES, (index, i)
            assert i.live_bytes <= i.predicted_bytes * MOST_ABOVE_PREDICTION + SMALL_BYTES, (index, i)
