"""`job.step(memfit.Parts([...]))` beside plain accumulation: unequal parts with shares, in both orders, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import PlanError, UnsupportedError, UsageError
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.planner.advise import advise

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
        told = [job.step(memfit.Parts(window, None if shares is None else shares[: len(window)])) for window in windows]
        assert [result.rows for result in told] == [10, 10, 9]
        return model, [result.loss for result in told], job.reason


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


def summed(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return (model(batch["values"]) - batch["target"]).square().sum(), torch.tensor(float(batch["values"].numel()))


def test_parts_of_a_loss_that_counts_of_bf16_and_with_hooks_behind_fit() -> None:
    """Checks of a first batch look at one part, which is cut between its rows: parts are not one batch."""
    windows = steps_of()
    expected = plain(Tower(), None, None)
    model = Tower()
    with memfit.fit(model, optimizer_of(model), summed, memfit.Parts(windows[0]), limit="4GiB") as job:
        count = sum(part["values"].numel() for part in windows[0])
        whole = sum(float(summed(Tower(), part)[0].detach()) for part in windows[0]) / count
        assert job.step(memfit.Parts(windows[0])).loss == pytest.approx(whole, rel=1e-5)
    with pytest.raises(UsageError, match="its first is no sum"):
        memfit.fit(
            model,
            optimizer_of(model),
            lambda model, batch: (mean_square(model, batch), torch.tensor(float(len(batch["values"])))),
            memfit.Parts(windows[0]),
        )
    plan = Plan(microbatches=3, order=Order.MICROBATCH_MAJOR, compute_dtype=ComputeDtype.BFLOAT16)
    with memfit.fit(
        model, optimizer_of(model), mean_square, memfit.Parts(windows[0]), plan=plan, allow={"bf16"}
    ) as job:
        assert job.step(memfit.Parts(windows[0])).is_finite
    model = Tower()
    with memfit.fit(model, optimizer_of(model), mean_square, memfit.Parts(windows[0]), limit="4GiB") as job:
        seen: list[Any] = []
        model.last.register_forward_hook(lambda *_: None if memfit.is_tracing() else seen.append(1))
        for window in windows:
            job.step(memfit.Parts(window))
    check_equal((model, expected[1], ""), expected)
    assert len(seen) == sum(map(len, windows))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_gradient_meets_what_it_meets_in_a_loop(kind: str) -> None:
    def hook(gradient: Any) -> Any:
        held = gradient.grad if kind == "register_post_accumulate_grad_hook" else gradient
        if held is gradient:
            return held.clamp(-1e-3, 1e-3)
        held.clamp_(-1e-3, 1e-3)
        return None

    def hooked() -> Tower:
        tower = Tower()
        getattr(tower.layers[1].get_submodule("0").weight, kind)(hook)
        return tower

    found = ours(hooked(), None, limit="4GiB")
    check_equal(found, plain(hooked(), None, None))
    assert "a hook is on a gradient" in found[2]
    with pytest.raises(PlanError, match="a hook reads the gradient of 'layers.1.0.weight'"):
        ours(hooked(), None, plan=plan_of(Order.LAYER_MAJOR))


def test_parts_that_draw_numbers_after_a_sample_that_did_not_go_one_after_the_other() -> None:
    """A step layer by layer takes no numbers from the loop's generator, and one whose parts draw runs in their order."""

    def noisy(model: Any, batch: Any) -> Tensor:
        values = model(batch["values"])
        return torch.nn.functional.dropout(values, 0.5 if len(values) == 4 else 0.0).square().mean()

    windows = steps_of()
    plain_model, model = Tower(), Tower()
    optimizer = optimizer_of(plain_model)
    torch.manual_seed(7)
    for window in windows:
        optimizer.zero_grad()
        for part in window:
            noisy(plain_model, part).backward()
        optimizer.step()
    plan = plan_of(Order.LAYER_MAJOR)
    with memfit.fit(model, optimizer_of(model), noisy, memfit.Parts(windows[0]), plan=plan) as job:
        torch.manual_seed(7)
        for window in windows:
            job.step(memfit.Parts(window))
    check_equal((model, [], ""), (plain_model, []))


def test_verify_advise_and_profile_take_parts() -> None:
    model, sample = Tower(), memfit.Parts(steps_of()[0], (0.5, 0.3, 1 / 7))
    asked: tuple[Any, ...] = (model, optimizer_of(model), mean_square, sample)
    assert memfit.verify(*asked, limit="4GiB", steps=2).kind == "bitwise"
    found = advise(*asked, limit="4GiB")
    assert found.plan.microbatches == 3 and "The 3 parts" in found.reason
    assert memfit.profile(*asked).own_parts == 3


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
    wrong: list[Any] = [torch.zeros(2), {"values": 1}, iter(window), [memfit.Parts(window)]]
    for batches in wrong:
        with pytest.raises(UsageError, match="takes a list of batches"):
            memfit.Parts(batches)
    with pytest.raises(UsageError, match="fails on the largest of the parts: 'target'"):
        memfit.fit(
            model, optimizer_of(model), mean_square, memfit.Parts([{"values": part["values"]} for part in window])
        )
    for shares in ("abc", 0.5):
        with pytest.raises(UsageError, match="takes a number for each batch"):
            memfit.Parts(window, shares)  # type: ignore[arg-type]
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
