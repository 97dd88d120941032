"""Models that draw random numbers train in microbatches as a plain loop does that is seeded by `memfit.microbatch_streams`, bit for bit."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence import drawing_models
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier

FAST = {("patchtst", Order.LAYER_MAJOR), ("wav2vec2", Order.LAYER_MAJOR)}


def seed_all() -> None:
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=True)[1].tolist()  # type: ignore[index]


def assert_equal_to_a_seeded_loop(model: nn.Module, batch: Any, loss: Any, plan: Plan, **options: Any) -> None:
    """Two steps of two microbatches, gradients and generators compared."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    halves = [{name: value.tensor_split(2)[m] for name, value in batch.items()} for m in (0, 1)]
    with memfit.fit(model, optimizer, loss, batch, plan=plan, keep_gradients=True, **options) as job:
        seed_all()
        expected = []
        for _ in range(2):
            reference.zero_grad()
            stream = memfit.microbatch_streams(2)
            losses = []
            for m, part in enumerate(halves):
                with stream(m):
                    value = loss(reference, part)
                    (value / 2).backward()
                losses.append(float(value.detach()))
            gradients = {n: p.grad.clone() for n, p in reference.named_parameters() if p.grad is not None}
            expected.append((losses, gradients, states()))
        assert expected[0][0] != expected[1][0], "nothing was drawn"
        seed_all()
        for losses, gradients, after in expected:
            assert list(job.step(batch).losses) == losses
            assert states() == after
            for name, gradient in gradients.items():
                found = job.gradient(name)
                assert found is not None and torch.equal(found, gradient), name


@pytest.mark.parametrize(
    ("name", "order"),
    [
        pytest.param(name, order, marks=() if (name, order) in FAST else pytest.mark.slow)
        for name in drawing_models.ALL
        for order in Order
    ],
)
def test_a_model_that_draws_trains_as_a_seeded_loop(name: str, order: Order, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(3)
    model, batch, loss = drawing_models.ALL[name]()
    # The router's balance and losses over frames that are masked by chance do not add up over rows.
    allow = {"nonadditive-loss"} if name in ("switch_transformers", "wav2vec2") else set[str]()
    plan = Plan(microbatches=2, order=order)
    assert_equal_to_a_seeded_loop(model.train(), batch, loss, plan, allow=allow, directory=tmp_path)


class Noisy(nn.Module):
    """Draws from all three default generators in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * torch.rand(len(x), 1) * random.random() * np.random.rand()
        return x


@pytest.mark.parametrize("saved", [Saved.KEEP, Saved.RECOMPUTE])
def test_pythons_and_numpys_numbers_belong_to_a_microbatch_too(saved: Saved, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Noisy()
    batch = {"x": torch.randn(4, 6)}
    plan = Plan(
        microbatches=2,
        calls=(CallPlan(saved=saved),) * 4,
        blocks={f"layers.{index}": BlockPlan(weight_home=Tier.DISK) for index in range(4)},
    )
    loss = lambda m, b: m(b["x"]).square().mean()  # noqa: E731
    assert_equal_to_a_seeded_loop(model, batch, loss, plan, allow={"nonadditive-loss"}, directory=tmp_path)


def test_rows_that_draw_in_evaluation_mode_are_compared_with_equal_numbers(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(40, 40)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.rand(x.shape) < 0.5
            noise = torch.empty_like(x).normal_() + torch.randn_like(x) + torch.bernoulli(torch.full_like(x, 0.3))
            return self.inner(torch.where(mask, x, noise))

    torch.manual_seed(3)
    model = Masked()
    batch = {"x": torch.randn(6, 40)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = torch.get_rng_state()
    loss = lambda m, b: m(b["x"]).square().mean()  # noqa: E731
    with memfit.fit(model, optimizer, loss, batch, plan=Plan(microbatches=3), directory=tmp_path):
        assert torch.equal(torch.get_rng_state(), before)
    mixed = lambda m, b: m(b["x"] - b["x"].mean(0)).square().mean()  # noqa: E731
    with pytest.raises(memfit.UnsupportedError, match="does not add up"):
        memfit.fit(model, optimizer, mixed, batch, plan=Plan(microbatches=3), directory=tmp_path)
