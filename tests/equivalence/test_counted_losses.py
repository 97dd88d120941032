"""A loss that returns (sum, count), under every order of microbatches: the mean over all counts, as plain PyTorch divides it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence import plans
from memfit.core.errors import UsageError
from memfit.core.plan import Order, Plan, UpdateTime
from memfit.core.storage_formats import ComputeDtype

ROWS, WIDTH, CLASSES, STEPS = 6, 8, 4, 3
Loss = Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> dict[str, Tensor]:
    """Of the first microbatch nothing counts in step 1."""
    generator = torch.Generator().manual_seed(step)
    counts = torch.tensor([[1.0, 0, 3, 1, 0, 5], [0, 0, 0, 7, 1, 1], [2, 2, 2, 2, 2, 2]])[step]
    x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator)
    return {"x": x, "y": y, "counts": counts}


def nothing() -> dict[str, Tensor]:
    return {**batch(0), "counts": torch.zeros(ROWS)}


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["counts"]).sum(), batch["counts"].sum()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


PLANS: dict[str, tuple[Plan, bool]] = {
    "whole": (Plan(), False),
    "interleaved": (Plan(microbatches=3), False),
    "tail at once": (Plan(microbatches=3), True),
    "one after the other": (Plan(microbatches=3, order=Order.MICROBATCH_MAJOR), False),
    "one after the other, updated late": (
        Plan(microbatches=2, order=Order.MICROBATCH_MAJOR, update=UpdateTime.AFTER_BACKWARD),
        False,
    ),
}


def plan_of(name: str, *, on_disk: bool, dtype: ComputeDtype = ComputeDtype.GIVEN) -> Plan:
    made, has_tail = PLANS[name]
    found = memfit.profile(model := build(), sgd(model), loss_of, batch(0))
    blocks = plans.on_disk(found) if on_disk else {}
    tail = plans.tail(found) if has_tail else None
    return Plan(**{**vars(made), "blocks": blocks, "tail": tail, "compute_dtype": dtype})


def train_plainly(max_norm: float | None) -> tuple[Net, list[float]]:
    model = build()
    optimizer, losses = sgd(model), list[float]()
    for step in range(STEPS):
        optimizer.zero_grad()
        total, count = loss_of(model, batch(step))
        (total / count).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append((total / count).item())
    return model, losses


_QUICK = [("tail at once", True, None), ("one after the other", True, 0.3), ("whole", False, None)]


@pytest.mark.parametrize(
    ("name", "on_disk", "max_norm"),
    [
        pytest.param(*case, marks=[] if case in _QUICK else [pytest.mark.slow])
        for case in itertools.product(PLANS, (False, True), (None, 0.3))
    ],
)
def test_the_mean_is_over_all_counts(name: str, on_disk: bool, max_norm: float | None, tmp_path: Path) -> None:
    model = build()
    plan = plan_of(name, on_disk=on_disk)
    with memfit.fit(
        model, sgd(model), loss_of, nothing(), plan=plan, max_grad_norm=max_norm, directory=tmp_path / "homes"
    ) as job:
        results = [job.step(batch(step)) for step in range(STEPS)]
        evaluated = job.evaluate(batch(0)).loss
        assert math.isnan(job.evaluate(nothing()).loss)
    plain, losses = train_plainly(max_norm)
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-6)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    total, count = loss_of(plain, batch(0))
    assert evaluated == pytest.approx((total / count).item(), rel=1e-5)


def test_a_batch_that_counts_for_nothing_is_refused_and_changes_nothing() -> None:
    for name in ("interleaved", "one after the other"):
        model = build()
        with memfit.fit(model, sgd(model), loss_of, batch(0), plan=plan_of(name, on_disk=False)) as job:
            with pytest.raises(UsageError, match="add up to 0"):
                job.step(nothing())
            job.step(batch(0))
        first = build()
        optimizer = sgd(first)
        total, count = loss_of(first, batch(0))
        (total / count).backward()
        optimizer.step()
        for ours, theirs in zip(model.parameters(), first.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [pytest.param("tail at once", marks=pytest.mark.slow), "one after the other"])
def test_gradients_in_fp16_begin_at_their_usual_size(name: str, tmp_path: Path) -> None:
    model = build()
    plan = plan_of(name, on_disk=True, dtype=ComputeDtype.FLOAT16)
    with memfit.fit(model, sgd(model), loss_of, batch(0), plan=plan, allow={"fp16"}, directory=tmp_path / "h") as job:
        assert job.loss_scaler is not None
        job.loss_scaler.load_state_dict({**job.loss_scaler.state_dict(), "scale": 2.0**13})
        results = [job.step(batch(step)) for step in range(STEPS)]
    assert not any(r.is_skipped for r in results)
    plain, losses = train_plainly(None)
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-2)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


@pytest.mark.slow
def test_a_journal_goes_on_with_the_same_mean(tmp_path: Path) -> None:
    model = build()
    plan = plan_of("one after the other, updated late", on_disk=True)
    for step in range(STEPS):
        model = build()
        with memfit.fit(
            model, sgd(model), loss_of, batch(0), plan=plan, store=tmp_path / "run", scheme="journal"
        ) as job:
            assert job.steps == step
            job.step(batch(step))
    plain, _ = train_plainly(None)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def mean_and_right_answers(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits, batch["y"]), int((logits.argmax(-1) == batch["y"]).sum()) + 2


def mean_and_rows(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return -nn.functional.cross_entropy(model(batch["x"]), batch["y"]), len(batch["x"])


@pytest.mark.parametrize("loss", [mean_and_right_answers, mean_and_rows])
@pytest.mark.parametrize("plan", [None, Plan(), Plan(microbatches=2)])
def test_a_mean_with_something_beside_it_is_no_sum_and_count(loss: Loss, plan: Plan | None) -> None:
    model = build()
    with pytest.raises(UsageError, match=r"means \(sum, count\), but its first is no sum: .*return the loss alone"):
        memfit.fit(model, sgd(model), loss, batch(0), plan=plan)
    assert all(parameter.untyped_storage().nbytes() > 0 for parameter in model.parameters())


class Normed(Net):
    """Its loss is no sum over rows: batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.BatchNorm1d(WIDTH))


@pytest.mark.thinned
@pytest.mark.parametrize("kind", [Net, Normed])
@pytest.mark.parametrize("rows", [1, 2, 3, ROWS])
def test_sums_are_taken_for_sums(kind: type[Net], rows: int) -> None:
    torch.manual_seed(0)
    model = kind()
    given = {name: tensor[:rows] for name, tensor in batch(2).items()}
    if kind is Normed and rows == 1:
        return  # one row has no statistics
    memfit.fit(model, sgd(model), loss_of, given).close()
