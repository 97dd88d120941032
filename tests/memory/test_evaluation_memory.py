"""An evaluation takes no more than a step: what is fetched ahead does not lie beside the largest logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
import memfit.losses
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.step.build import build_forward, build_step
from memfit.step.lower import lower
from memfit.step.predict import predict

WORDS, WIDTH, ROWS, PLACES = 8000, 64, 4, 128


class Head(nn.Module):
    """The loss in chunks: its gradients are made in forward, so that a step's peak is there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) / 8)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return memfit.losses.chunked_cross_entropy(hidden, self.weight, tokens)


class Tiny(nn.Module):
    """Two large ends, and little between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = Head()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x, tokens)


def loss_of(model: Tiny, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_an_evaluation_of_microbatches_takes_no_more_than_a_step(prefetch: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tiny()
    tokens = torch.randint(WORDS, (ROWS, PLACES))
    with torch.no_grad():
        wanted = float(loss_of(model, tokens))
    homes = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    names = ("embed", *(f"layers.{index}" for index in range(3)), "head")
    plan = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR, prefetch=prefetch, blocks=dict.fromkeys(names, homes))
    with memfit.fit(
        model, torch.optim.AdamW(model.parameters()), loss_of, tokens, plan=plan, directory=tmp_path, enforce=False
    ) as job:
        found = job.evaluate(tokens).loss
        for _ in range(2):
            job.step(tokens)
        job.evaluate(tokens)
        phases = {phase.name: phase for phase in job.proof().phases}
        predicted = {one["name"]: one["predicted_tensor_bytes"] for one in job.proof().data()["phases"]}
    assert found == pytest.approx(wanted, rel=1e-6)
    assert predicted["evaluate"] <= predicted["steady"]
    assert phases["evaluate"].peak_bytes <= predicted["evaluate"]
    assert phases["evaluate"].peak_bytes <= phases["steady"].peak_bytes


def test_what_calls_save_in_a_step_changes_nothing_of_a_pass_without_gradients() -> None:
    """One that was predicted with what training keeps made plans look too large for the check of three rows."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Feed() for _ in range(3)))
    profile = memfit.profile(model, torch.optim.SGD(model.parameters()), squares, torch.randn(64, WIDTH))
    calls = next(iter(profile.traces.values())).calls
    peaks: dict[Saved, int] = {}
    for saved in (Saved.KEEP, Saved.RECOMPUTE, Saved.SELECT):
        plan = Plan(calls=tuple(CallPlan(saved=saved) if call.is_repeated else CallPlan() for call in calls))
        peaks[saved] = predict(lower(build_forward(plan, profile, 1), plan, profile)).peak_bytes
    assert len({*peaks.values()}) == 1, peaks
    plain = predict(lower(build_step(Plan(), profile, clips_norm=False), Plan(), profile)).peak_bytes
    assert plain > peaks[Saved.KEEP]


class Feed(nn.Module):
    """Most of what it makes is saved for backward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh().exp())


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()
