"""`job.step(memfit.Parts([...]))` beside plain accumulation: unequal parts with shares, in both orders, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import UnsupportedError, UsageError
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier

WIDTH, LAYERS = 16, 3
DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
NAMES = [f"layers.{index}" for index in range(LAYERS)]


class Tower(nn.Module):
    def __init__(self, *, dropout: float = 0.0, is_tied: bool = False, normed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if normed else nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH)
            )
            for _ in range(LAYERS)
        )  # fmt: skip
        self.last = nn.Linear(WIDTH, WIDTH)
        if is_tied:
            self.last.weight = self.first.weight

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        for layer in self.layers:
            values = values + layer(values)
        return self.last(values)


def mean_square(model: Any, batch: Any) -> Tensor:
    return (model(batch["values"]) - batch["target"]).square().mean()


def steps_of(count: int = 3) -> list[list[Any]]:
    """Windows of unequal parts; the last one is shorter."""
    drawn = torch.Generator().manual_seed(1)
    windows: list[list[Any]] = []
    for step in range(count):
        sizes = (5, 2, 3) if step < count - 1 else (4, 5)
        parts = [torch.randn(2, rows, WIDTH, generator=drawn) for rows in sizes]
        windows.append([{"values": values, "target": target} for values, target in parts])
    return windows


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(model: nn.Module, shares: Sequence[float] | None, max_norm: float | None) -> tuple[nn.Module, list[float]]:
    optimizer, told = optimizer_of(model), []
    torch.manual_seed(7)
    for window in steps_of():
        factors = [1.0] * len(window) if shares is None else shares[: len(window)]
        total = 0.0
        for part, factor in zip(window, factors, strict=True):
            loss = mean_square(model, part) * factor
            loss.backward()
            total += float(loss.detach())
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        told.append(total)
    return model, told


def ours(model: nn.Module, shares: Sequence[float] | None, **given: Any) -> tuple[Any, list[float], str]:
    windows = steps_of()
    sample = memfit.Parts(windows[0], shares)
    with memfit.fit(model, optimizer_of(model), mean_square, sample, **given) as job:
        torch.manual_seed(7)
        told = [
            job.step(memfit.Parts(window, None if shares is None else shares[: len(window)])).loss for window in windows
        ]
        return model, told, job.reason


def check_equal(found: tuple[Any, list[float], str], expected: tuple[nn.Module, list[float]]) -> None:
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    for (name, value), other in zip(found[0].state_dict().items(), expected[0].state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def plan_of(order: Order, update: UpdateTime = UpdateTime.IN_BACKWARD, **call: Any) -> Plan:
    calls = (CallPlan(),) + (CallPlan(**call),) * LAYERS + (CallPlan(),)
    return Plan(microbatches=3, order=order, blocks=dict.fromkeys(NAMES, DISK), calls=calls, update=update)


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize(
    ("shares", "max_norm", "saved"),
    [(None, None, Saved.KEEP), ((0.5, 0.3, 1 / 7), 0.05, Saved.RECOMPUTE)],
    ids=["as they are", "with shares, clipped, recomputed"],
)
def test_unequal_parts_are_plain_accumulation(
    order: Order, shares: Sequence[float] | None, max_norm: float | None, saved: Saved
) -> None:
    update = UpdateTime.IN_BACKWARD if max_norm is None else UpdateTime.AFTER_BACKWARD
    given = {"plan": plan_of(order, update, saved=saved), "max_grad_norm": max_norm, "numerics": "exact"}
    check_equal(ours(Tower(), shares, **given), plain(Tower(), shares, max_norm))


@pytest.mark.parametrize("kind", ["dropout", "normed"])
def test_parts_one_after_the_other_draw_and_count_as_a_loop(kind: str) -> None:
    """Dropout draws the loop's numbers, also where calls run again; running statistics are the loop's."""
    options: dict[str, Any] = {"dropout": {"dropout": 0.3}, "normed": {"normed": True}}[kind]
    plan = plan_of(Order.MICROBATCH_MAJOR, saved=Saved.RECOMPUTE)
    check_equal(ours(Tower(**options), None, plan=plan, numerics="exact"), plain(Tower(**options), None, None))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "layer by layer: what travels comes once|not predicted to be faster"),
        ({"dropout": 0.1}, "would draw other random numbers"),
        ({"is_tied": True}, "would add up in another order"),
        ({"normed": True}, "changes buffers"),
    ],
    ids=["plain", "dropout", "tied", "batch norm"],
)
def test_a_chosen_plan_is_exact_and_says_which_way_the_parts_go(options: dict[str, Any], words: str) -> None:
    found = ours(Tower(**options), None, limit="4GiB")
    check_equal(found, plain(Tower(**options), None, None))
    assert any(word in found[2] for word in words.split("|")), found[2]
    assert "Numerics: exact" in found[2]


def test_what_parts_do_not_go_with_is_named() -> None:
    window = steps_of()[0]
    model = Tower()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"lines": True}, "lines=True"),
        ({"weight": len}, "leave weight= out"),
        ({"plan": Plan(microbatches=2, order=Order.MICROBATCH_MAJOR)}, "comes in 3 parts"),
    ]
    for given, words in refused:
        with pytest.raises(UsageError, match=words):
            memfit.fit(model, optimizer_of(model), mean_square, memfit.Parts(window), **given)
    with pytest.raises(UsageError, match="2 numbers for 3 batches"):
        memfit.Parts(window, (0.5, 0.5))
    with (
        memfit.fit(model, optimizer_of(model), mean_square, window[0]) as job,
        pytest.raises(UsageError, match="give memfit.fit such a sample"),
    ):
        job.step(memfit.Parts(window))
    with memfit.fit(model, optimizer_of(model), mean_square, memfit.Parts(window[:2])) as job:
        with pytest.raises(UsageError, match="2 at most"):
            job.step(memfit.Parts(window))
        job.step(window[0])
    normed = Tower(normed=True)
    with pytest.raises(UnsupportedError, match="statistics over the batch"):
        memfit.fit(normed, optimizer_of(normed), mean_square, memfit.Parts(window), plan=plan_of(Order.LAYER_MAJOR))
