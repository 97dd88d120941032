"""Forwards that change what the next one computes with: microbatches keep the order of a plain loop, or are refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.core.errors import UnsupportedError
from memfit.core.plan import BlockPlan, Order, Plan
from memfit.core.tiers import Tier
from memfit.planner.search.candidates import list_candidates

WIDTH = 8


class Layer(nn.Module):
    """A residual layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.mix: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.mix(self.inner(x)), 0.25, self.training)


class Counting(Layer):
    """Counts its forwards, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * (1 + self.count / 8)


class Exchanging(Layer):
    """Exchanges a module in its first forward, for one made with random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.mix, nn.Identity):
            nn.Linear(WIDTH, WIDTH)  # its weights are thrown away, its random numbers are gone
            self.mix = nn.Tanh()
        return super().forward(x)


class Clamping(Layer):
    """Holds its weights in a range, as Gemma 3n does."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.inner.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Replacing(Layer):
    """Puts a tensor in the place of the one that its last forward left, which it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) * (1 + self.last)
        self.last = out.detach().mean()
        return out


class Remembering(Layer):
    """Keeps what its last forwards gave in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.past: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out = out + self.past[-1] if self.past else out
        self.past[:] = [*self.past[-1:], out.detach().mean(0)]
        return out


class Holder:
    """An object of the program's own."""

    mean: Tensor = torch.zeros(WIDTH)


class Holding(Layer):
    """Keeps a mean in an object that lies on it."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Holder()
        self.held.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) + self.held.mean
        self.held.mean = out.detach().mean(0)
        return out


class Stashing(Layer):
    """Leaves a tensor for the loss, as mixtures of experts do, and keeps a constant."""

    aux: Tensor | None = None
    steps: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.steps is None:
            self.steps = torch.arange(WIDTH) / 8
        out = super().forward(x) + self.steps
        self.aux = out.square().mean()
        return out + self.aux


class Noting(Layer):
    """Notes on itself how large its input is: the same in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.rows, self.width = "some", x.shape[1]
        return super().forward(x)


class Shifting(Layer):
    """Draws from NumPy's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(np.random.random())


class Picking(Layer):
    """Draws from Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


def build(kind: type[Layer]) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Sequential(kind(), kind()), nn.Linear(WIDTH, 2))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(1))}


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def plain(kind: type[Layer], steps: int, each: Callable[[int], None]) -> nn.Module:
    """Accumulation over two halves, as a user writes it."""
    model = build(kind)
    updates = optimizer(model)
    for step in range(steps):
        each(step)
        updates.zero_grad()
        stream = memfit.microbatch_streams(2)
        for m, part in enumerate(batch()["x"].chunk(2)):
            with stream(m):
                (loss_of(model, {"x": part}) * 0.5).backward()
        updates.step()
    return model


def fitted(model: nn.Module, order: Order, **settings: Any) -> memfit.Job:
    plan = Plan(microbatches=2, order=order, blocks={"2": BlockPlan(weight_home=Tier.DISK)})
    return memfit.fit(model, optimizer(model), loss_of, batch(), plan=plan, **settings)


@pytest.mark.parametrize("kind", [Counting, Exchanging, Clamping, Replacing, Remembering, Holding])
def test_what_a_forward_leaves_to_the_next_trains_as_in_a_plain_loop(kind: type[Layer]) -> None:
    model = build(kind)
    # That these change the numbers is no question of rows: the contract is plain accumulation.
    allow = () if kind in (Exchanging, Clamping) else {"nonadditive-loss"}
    with fitted(model, Order.MICROBATCH_MAJOR, allow=allow) as job:
        for step in range(2):
            seed(step)
            job.step(batch())
    expected = plain(kind, 2, seed)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (Counting, "1.0.count"),
        (Exchanging, "1.0.mix"),
        (Clamping, "1.0.inner.weight"),
        (Replacing, "1.0.last"),
        (Remembering, "1.0.past"),
        (Holding, "1.0.held.mean"),
    ],
)
def test_such_a_model_is_refused_layer_by_layer(kind: type[Layer], word: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{word}.*microbatch-major"):
        fitted(build(kind), Order.LAYER_MAJOR, allow={"nonadditive-loss"})


@pytest.mark.parametrize("kind", [Counting, Exchanging, Clamping, Replacing])
def test_the_planner_looks_at_no_plan_that_would_be_refused(kind: type[Layer]) -> None:
    model = build(kind)
    profile = memfit.profile(model, optimizer(model), loss_of, batch(), microbatches=[1, 2])
    assert profile.may_split
    for count in (1, 2):
        found = [c.plan for c in list_candidates(profile, microbatches=count, tiers=(Tier.DISK,), clips_norm=False)]
        assert found
        assert count == 1 or all(plan.order is Order.MICROBATCH_MAJOR for plan in found)
        if kind is Clamping:
            again = [
                plan.call(c.index).saved
                for plan in found
                for c in profile.traces[4].calls
                if profile.written_blocks & {*c.blocks}
            ]
            assert {str(saved) for saved in again} <= {"keep", "offload"}


@pytest.mark.parametrize("kind", [Noting, Stashing])
def test_what_no_later_forward_reads_forbids_nothing(kind: type[Layer]) -> None:
    model = build(kind)
    assert memfit.profile(model, optimizer(model), loss_of, batch()).carried == ()
    with fitted(model, Order.LAYER_MAJOR, allow={"nonadditive-loss"}) as job:
        seed(0)
        job.step(batch())


@pytest.mark.parametrize("kind", [Exchanging, Clamping])
def test_showing_that_a_batch_may_be_cut_leaves_the_model_as_it_was(kind: type[Layer]) -> None:
    model = build(kind)
    states, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    with fitted(model, Order.MICROBATCH_MAJOR) as job, job.weights():
        assert dict(model.named_modules()) == modules
        assert all(torch.equal(tensor, states[name]) for name, tensor in model.state_dict().items())


def test_a_refused_cut_leaves_counts_as_they_were() -> None:
    model = build(Counting)
    with pytest.raises(UnsupportedError, match="does not add up"):
        fitted(model, Order.MICROBATCH_MAJOR)
    assert [module.count for module in model.modules() if isinstance(module, Counting)] == [0, 0]


@pytest.mark.parametrize(("kind", "is_told"), [(Shifting, True), (Picking, True), (Layer, True), (nn.Identity, False)])
def test_draws_of_every_generator_are_declared(kind: type[Layer], is_told: bool) -> None:
    model = build(kind)
    model.eval()  # no dropout
    plan = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR)
    model.train(kind is Layer)
    with memfit.fit(model, optimizer(model), loss_of, batch(), plan=plan, allow={"nonadditive-loss"}) as job:
        assert ("random numbers of microbatches" in str(job.numerics)) is is_told
