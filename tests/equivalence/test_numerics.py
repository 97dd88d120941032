"""What a plan declares of its numbers is what it does: plans of the planner over small models, beside plain PyTorch and a plain accumulation loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from equivalence import plans
from equivalence.with_memfit import traced_once
from memfit.core.numerics import Exactness, declare
from memfit.core.plan import Order, Plan
from memfit.core.profile import Profile
from memfit.core.tiers import Tier
from memfit.planner.problem import Problem, driver_of
from memfit.planner.search.candidates import find_tail, list_candidates
from memfit.trace.blocks import find_blocks

ROWS, WIDTH = 6, 16
COUNTS = (1, 2, 3)
# Sums of some hundred terms in fp32, in another order; relative to the largest entry of a tensor.
ROUNDINGS = 2e-5


@dataclass(frozen=True)
class Subject:
    """A model that draws no random numbers, its loss, and its batch."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    batch: Callable[[], dict[str, Tensor]]


def _chain() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(3)]
    return nn.Sequential(*layers, nn.LayerNorm(WIDTH))


class _Twice(nn.Module):
    """One layer is called twice, and one weight is used twice in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = x + torch.tanh(layer(x))
        return x


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=96, n_positions=12, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _pairs() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)}


def _tokens() -> dict[str, Tensor]:
    tokens = torch.randint(96, (ROWS, 12))
    return {"input_ids": tokens, "labels": tokens}


def _mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(model(batch["x"]), batch["y"])


def _counted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return functional.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), 7 * len(batch["x"])


SUBJECTS = {
    "chain": Subject(_chain, _mean, _pairs),
    "twice": Subject(_Twice, _mean, _pairs),
    "counted": Subject(_chain, _counted, _pairs),
    "gpt2": Subject(_gpt2, lambda model, batch: model(**batch).loss, _tokens),
}


def _plain(subject: Subject, microbatches: int, max_grad_norm: float | None) -> tuple[float, dict[str, Tensor]]:
    """The loss, and weights after one step of SGD with a rate of 1, whole or by an accumulation loop."""
    torch.manual_seed(0)
    model, batch = subject.build().train(), subject.batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    total = 0.0
    for parts in zip(*(value.tensor_split(microbatches) for value in batch.values()), strict=True):
        part = dict(zip(batch, parts, strict=True))
        result = subject.loss(model, part)
        share = len(parts[0]) / ROWS
        is_counted = isinstance(result, tuple)
        loss = result[0] / result[1] if is_counted else result
        (loss if microbatches == 1 else loss * share).backward()
        total += float(result[0].detach()) / result[1] * share if is_counted else float(loss.detach()) * share
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return total, {name: p.detach().clone() for name, p in model.named_parameters()}


def _ours(
    subject: Subject, plan: Plan, max_grad_norm: float | None, directory: Path, **options: Any
) -> tuple[memfit.Job, float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = subject.build().train(), subject.batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    job = memfit.fit(
        model, optimizer, subject.loss, batch, plan=plan, max_grad_norm=max_grad_norm, directory=directory, **options
    )
    loss = job.step(batch).loss
    job.close()
    return job, loss, {name: p.detach().clone() for name, p in model.named_parameters()}


def _profile(subject: Subject) -> Profile:
    model = subject.build().train()
    driver = driver_of(torch.optim.SGD(model.parameters(), lr=1.0), model)
    problem = Problem(model=model, loss=subject.loss, driver=driver, block_map=find_blocks(model, None))
    return problem.profile(subject.batch(), COUNTS, chunk_tokens=None)


def _plans(profile: Profile, name: str, wanted: int) -> list[tuple[Plan, float | None]]:
    """Some of the planner's candidates for each number of microbatches, and where the loss is known some of these in chunks."""
    rng = random.Random(name)
    chosen: list[tuple[Plan, float | None]] = []
    for count in COUNTS:
        for clip in (None, 0.1):
            found = list_candidates(profile, microbatches=count, tiers=(Tier.DISK,), clips_norm=clip is not None)
            # Blocks as small as these rest on the device in all of them.
            drawn = rng.sample([candidate.plan for candidate in found], wanted)
            homes = rng.choice([{}, plans.on_disk(profile)])
            chosen += [(replace(plan, blocks=homes), clip) for plan in drawn]
    if name == "gpt2":
        chosen += [(replace(plan, loss_chunk_tokens=16), clip) for plan, clip in rng.sample(chosen, 3)]
    return chosen


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def _near(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all((left[n] - right[n]).abs().max() <= ROUNDINGS * max(1.0, float(right[n].abs().max())) for n in left)


@pytest.mark.parametrize("wanted", [1, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_numbers_are_as_near_to_plain_pytorch_as_the_plan_declares(name: str, wanted: int, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    profile = _profile(subject)
    whole: dict[float | None, tuple[float, dict[str, Tensor]]] = {}
    seen: list[tuple[Exactness, bool]] = []
    for index, (plan, clip) in enumerate(_plans(profile, name, wanted)):
        with traced_once(("numerics", name)):
            job, loss, weights = _ours(subject, plan, clip, tmp_path / str(index))
        declared = job.numerics
        expected_loss, expected = whole.setdefault(clip, _plain(subject, 1, clip))
        # A sum and its count are divided in double precision, not by torch: the last of its digits is nobody's.
        is_same = loss == pytest.approx(expected_loss, rel=1e-15, abs=0.0) and _same(weights, expected)
        seen.append((declared.exactness, is_same))
        if declared.is_exact:
            assert is_same, plan
        assert declared.exactness is not Exactness.APPROXIMATE
        assert loss == pytest.approx(expected_loss, rel=1e-6), plan
        assert _near(weights, expected), plan
        if [change.technique for change in declared.changes] == ["several microbatches"]:
            _, accumulated = _plain(subject, plan.microbatches, clip)
            assert _same(weights, accumulated), plan
        assert declared.is_exact or declared.why == "the plan was given"
    assert (Exactness.EXACT, True) in seen
    assert (Exactness.REORDERED, False) in seen, "nothing that is called reordered differs: the word says nothing"


@pytest.mark.parametrize(("name", "shared"), [("chain", ()), ("twice", ("layers.0.weight", "layers.0.bias"))])
def test_weights_with_several_uses_are_named_and_are_what_differs_from_accumulation(
    name: str, shared: tuple[str, ...], tmp_path: Path
) -> None:
    subject = SUBJECTS[name]
    profile = _profile(subject)
    assert profile.shared_weights == shared
    plan = Plan(microbatches=3, order=Order.LAYER_MAJOR, tail=find_tail(next(iter(profile.traces.values()))))
    job, _, weights = _ours(subject, plan, None, tmp_path)
    _, accumulated = _plain(subject, 3, None)
    different = {n for n in weights if not torch.equal(weights[n], accumulated[n])}
    assert different <= {*shared}
    assert bool(different) == bool(shared)
    named = [c for c in job.numerics.changes if c.technique == "weights used several times, layer by layer"]
    assert len(named) == bool(shared)
    assert all(weight in named[0].says for weight in shared)


def test_a_tied_head_is_a_weight_with_several_uses() -> None:
    assert _profile(SUBJECTS["gpt2"]).shared_weights == ("transformer.wte.weight",)
    assert _profile(SUBJECTS["counted"]).counts_losses
    assert not _profile(SUBJECTS["chain"]).counts_losses


def test_reason_proof_and_numerics_say_the_same(tmp_path: Path) -> None:
    plan = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR)
    job, _, _ = _ours(SUBJECTS["chain"], plan, None, tmp_path / "cut")
    assert job.numerics.short() == "reordered (several microbatches)"
    assert "numerics reordered (several microbatches)" in job.proof().line()
    assert "Numerics: reordered. Several microbatches: the loss and every gradient are sums over 2" in job.reason
    assert "why: the plan was given" in str(job.numerics)
    exact, _, _ = _ours(SUBJECTS["chain"], Plan(), None, tmp_path / "whole", numerics="exact")
    assert exact.numerics.is_exact
    assert exact.proof().line().endswith("numerics exact")
    assert exact.reason.endswith("Numerics: exact, the bits of plain PyTorch.")


def test_a_plan_that_is_cut_is_approximate_where_the_loss_need_not_add_up() -> None:
    profile = _profile(SUBJECTS["chain"])
    plan = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR)
    assert declare(plan, profile).exactness is Exactness.REORDERED
    assert declare(plan, profile, allow={"nonadditive-loss"}).exactness is Exactness.APPROXIMATE
