"""Batches that call other modules than the sample did, in another order: text without images, say."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import UnsupportedError
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.planner.preparing import for_other_calls


class Picking(nn.Module):
    """Calls the layers that its batch names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.last = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        hidden = batch["x"]
        for index in batch["layers"]:
            hidden = hidden + self.layers[index](hidden)
        return self.last(hidden)


def square(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return (model(batch) - batch["x"]).square().mean()


@pytest.mark.parametrize("seed", range(8))
def test_batches_call_other_layers_than_the_sample_in_another_order(seed: int) -> None:
    """Layers that the sample's trace did not meet, or met later, keep their places."""
    drawn = random.Random(seed)
    chosen = [drawn.sample(range(4), drawn.randint(0, 4)) for _ in range(5)]
    batches = [{"x": torch.randn(2 + index, 8), "layers": layers} for index, layers in enumerate(chosen)]
    plain = Picking()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        square(plain, batch).backward()
        optimizer.step()
    homes, policies = (Tier.DEVICE, Tier.DISK), (Saved.KEEP, Saved.RECOMPUTE, Saved.OFFLOAD)
    names = [*(f"layers.{index}" for index in range(4)), "last"]
    plan = Plan(
        blocks={n: BlockPlan(weight_home=drawn.choice(homes), state_home=drawn.choice(homes)) for n in names},
        calls=tuple(CallPlan(saved=drawn.choice(policies)) for _ in range(len(chosen[0]) + 1)),
        update=drawn.choice(list(UpdateTime)),
    )
    model = Picking()
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (
        tempfile.TemporaryDirectory() as directory,
        memfit.fit(model, ours, square, batches[0], plan=plan, directory=directory) as job,
    ):
        departures = [job.step(batch).departures for batch in batches]
    assert not any(departures)
    for (name, value), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


class HandsOn(nn.Module):
    """Computes, or hands its input on: as it is, as a view of it, or halved in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, way: str) -> Tensor:
        match way:
            case "computes":
                return x + torch.tanh(self.linear(x))
            case "view":
                return x.view_as(x)
            case "halves":
                return x.mul_(0.5)
            case _:
                return x


class Skipping(nn.Module):
    """Layers of which the batch says what each does: stochastic depth, by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([HandsOn() for _ in range(5)])

    def forward(self, batch: dict[str, Any]) -> Tensor:
        hidden = batch["x"] * 1.0
        for layer, way in zip(self.layers, batch["ways"], strict=True):
            hidden = layer(hidden, way)
        return hidden


@pytest.mark.parametrize("seed", range(12))
def test_layers_that_hand_on_their_input_leave_backward_to_the_layer_that_made_it(seed: int) -> None:
    """Autograd comes to one node for two calls there: the earlier one's backward must not be over when the later one's is told of."""
    drawn = random.Random(seed)
    ways = [drawn.choices(("computes", "as it is", "view", "halves"), (4, 3, 1, 1), k=5) for _ in range(5)]
    for each in ways:
        each[drawn.randrange(5)] = "computes"  # a loss that needs no gradient cannot be run back
    batches = [{"x": torch.randn(4, 8), "ways": each} for each in ways]
    count = drawn.choice((1, 2))
    plain = Skipping()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        for rows in batch["x"].chunk(count):
            (square(plain, {**batch, "x": rows}) / count).backward()
        optimizer.step()
    homes = (Tier.DEVICE, Tier.DISK)
    policies = (Saved.KEEP, Saved.RECOMPUTE, Saved.SELECT, Saved.OFFLOAD)
    plan = Plan(
        microbatches=count,
        order=drawn.choice(list(Order)),
        blocks={
            f"layers.{index}": BlockPlan(weight_home=drawn.choice(homes), state_home=drawn.choice(homes))
            for index in range(5)
        },
        calls=tuple(CallPlan(saved=drawn.choice(policies)) for _ in range(5)),
        update=drawn.choice(list(UpdateTime)),
    )
    model = Skipping()
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (
        tempfile.TemporaryDirectory() as directory,
        memfit.fit(model, ours, square, batches[0], plan=plan, directory=directory) as job,
    ):
        for batch in batches:
            job.step(batch)
    for (name, value), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_a_part_that_alone_uses_a_weight_again_is_refused_layer_by_layer() -> None:
    """Its uses would add up in another order than in a loop; nothing is updated, and the job goes on."""
    given, other = (
        [{"x": torch.randn(rows, 8), "layers": layers} for rows, layers in zip((4, 2), called, strict=True)]
        for called in (([0, 1], [0, 1]), ([0, 1], [1, 0, 1]))
    )
    plain, model = Picking(), Picking()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in given:
        square(plain, batch).backward()
    optimizer.step()
    ours, plan = torch.optim.AdamW(model.parameters(), lr=1e-2), Plan(microbatches=2)
    with memfit.fit(model, ours, square, memfit.Parts(given), plan=plan) as job:
        with pytest.raises(UnsupportedError, match=r"calls 'layers.1' again"):
            job.step(memfit.Parts(other))
        job.step(memfit.Parts(given))
    for (name, value), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


def test_policies_go_with_the_modules_of_calls() -> None:
    keep, again, joined = (
        CallPlan(),
        CallPlan(saved=Saved.RECOMPUTE),
        CallPlan(saved=Saved.RECOMPUTE, joins_previous=True),
    )
    plan = Plan(microbatches=2, calls=(keep, again, joined, keep), tail=3)
    told = for_other_calls(plan, ("image", "a", "b", "head"), ("b", "a", "new", "head"))
    assert told.calls == (again, again, keep, keep) and told.tail == 3
    assert for_other_calls(plan, ("image", "a", "b", "head"), ("a", "b", "head")).calls == (again, joined, keep)
    assert for_other_calls(plan, ("image", "a", "b", "head"), ("a", "head", "b")).tail is None
