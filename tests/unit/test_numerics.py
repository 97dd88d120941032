"""Sums are regrouped where that pays, and only where it may be: the planner's rule, the refusal, and the names that `allow` takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.core.errors import DoesNotFitError, UnsupportedError, UsageError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.limits import Budget, Limits
from memfit.core.numerics import ALLOWANCES, GAIN, TECHNIQUES, Exactness, Wish, declare, table, weighed_seconds
from memfit.core.plan import Plan
from memfit.core.tiers import Tier
from memfit.devices.compiled_kernels import compute_once
from memfit.engine.causal_loss import LossNotChunkedError
from memfit.machine.machine import open_machine
from memfit.planner.advise import advise
from memfit.planner.choosing import Choice, Wanted, choose
from memfit.planner.problem import Problem, driver_of
from memfit.planner.search.candidates import list_candidates
from memfit.planner.search.planner import choose_plan
from memfit.planner.search.pricing import Refusal
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import appraise
from memfit.trace.blocks import find_blocks
from unit.profiles import gpt_profile

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
MACHINE = Hardware(
    device="cpu",
    flops_per_s=2e9,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 36),
        Tier.DISK: TierSpec(nbytes=1 << 36, link=Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)),
    },
)
PROFILE = gpt_profile(layers=2, width=256, vocabulary=4096, tokens=64, rows=(8, 4, 2, 1))


def _budget(nbytes: int) -> Budget:
    return Budget(limit_bytes=nbytes, base_bytes=0, reserve_bytes=0)


def _all() -> list[tuple[Plan, int, float]]:
    """Every candidate with its predicted peak and seconds: the slow road."""
    found: list[tuple[Plan, int, float]] = []
    for count in (1, 2, 4, 8):
        for candidate in list_candidates(PROFILE, microbatches=count, tiers=(Tier.DISK,), clips_norm=False):
            schedule = build_step(candidate.plan, PROFILE, clips_norm=False)
            cost = appraise(lower(schedule, candidate.plan, PROFILE), MACHINE)
            found.append((candidate.plan, cost.peak_bytes, cost.seconds))
    return found


@pytest.mark.parametrize("read_bytes_per_s", [1e8, 1e11])
def test_a_plan_that_regroups_sums_is_taken_only_where_none_else_fits_or_where_it_gains_a_tenth(
    read_bytes_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(read_bytes_per_s=read_bytes_per_s, write_bytes_per_s=read_bytes_per_s)
    disk = replace(MACHINE.tiers[Tier.DISK], link=link)
    machine = replace(MACHINE, tiers={**MACHINE.tiers, Tier.DISK: disk})
    monkeypatch.setattr(f"{__name__}.MACHINE", machine)
    plans = _all()
    least = min(peak for _, peak, _ in plans)
    kinds: set[str] = set()
    for budget in (least, *(least + (i * 12 << 20) // 4 for i in range(1, 24, 2))):
        exact = min((s for plan, peak, s in plans if peak <= budget and plan.microbatches == 1), default=None)
        any_s = min(s for _, peak, s in plans if peak <= budget)
        chosen = choose_plan(PROFILE, _budget(budget), machine)
        is_exact = chosen.plan.microbatches == 1
        assert chosen.regroups == (not is_exact)
        # Beside uniform plans there are those between two of them: never slower.
        assert chosen.weighed_s <= weighed_seconds(any_s, regroups=True) * (1 + 1e-9)
        if exact is None:
            kinds.add("none else fits")
            assert not is_exact
            assert chosen.unchanged_s is None or chosen.unchanged_s > any_s
            continue
        assert chosen.weighed_s <= exact * (1 + 1e-9)
        if is_exact:
            kinds.add("exact")
        else:
            kinds.add("gains")
            assert chosen.timeline.seconds <= (1 - GAIN) * exact * (1 + 1e-9)
            assert chosen.unchanged_s is not None
            assert chosen.unchanged_s <= exact * (1 + 1e-9)
    assert {"none else fits", "exact"} <= kinds, kinds


def test_exact_plans_only_and_the_smallest_limit_for_one_is_the_smallest() -> None:
    plans = _all()
    least = min(peak for plan, peak, _ in plans if plan.microbatches == 1)
    below = min(peak for _, peak, _ in plans)
    assert below < least, "the case shows nothing"
    with pytest.raises(
        DoesNotFitError, match=r"no plan that is bitwise plain PyTorch \(numerics='exact'\) fits"
    ) as error:
        choose_plan(PROFILE, _budget(below), MACHINE, numerics="exact")
    assert error.value.smallest_limit_bytes == least
    at_it = choose_plan(PROFILE, _budget(least), MACHINE, numerics="exact")
    assert declare(at_it.plan, PROFILE).is_exact
    with pytest.raises(DoesNotFitError):
        choose_plan(PROFILE, _budget(least - 1), MACHINE, numerics="exact")


class _Language:
    """A small causal language model with a wide vocabulary: its logits are most of what a step holds."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=12000, n_positions=128, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config).train()
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.problem = Problem(
            model=model, loss=self.loss, driver=driver_of(self.optimizer, model), block_map=find_blocks(model, None)
        )
        self.tokens = torch.randint(12000, (1, 128))
        self.profile = self.problem.profile(self.tokens, (1,), chunk_tokens=None)
        compute_once(self.profile.libraries)  # as `fit` does: then nothing of theirs is to come
        self.machine = open_machine(torch.device("cpu"), Limits.read(None))

    @staticmethod
    def loss(model: nn.Module, tokens: Any) -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    def choose(self, nbytes: int, numerics: Wish = "auto") -> Choice:
        return choose(
            self.problem, self.tokens, self.profile, _budget(nbytes), MACHINE, self.machine,
            Wanted(allow=(), may_split=True, clips_norm=False, load_bytes=0, numerics=numerics),
        )  # fmt: skip


def test_the_loss_runs_in_chunks_only_where_it_does_not_fit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    language = _Language()
    traced: list[int | None] = []
    plain = Problem.profile

    def profile(problem: Problem, sample: Any, counts: Any, **ways: Any) -> Any:
        traced.append(ways["chunk_tokens"])
        return plain(problem, sample, counts, **ways)

    monkeypatch.setattr(Problem, "profile", profile)
    monkeypatch.setattr("memfit.planner.choosing.chunk_tokens", lambda _: 32)
    with_room = language.choose(1 << 34)
    assert with_room.plan.loss_chunk_tokens is None
    assert with_room.why == ""
    assert traced == [], "with room to spare nobody asks what chunks would take"
    with pytest.raises(DoesNotFitError) as error:
        language.choose(1 << 20, "exact")
    assert isinstance(error.value.refusal, Refusal)
    exact_bytes = error.value.refusal.peak_bytes  # the limit that is named is above it, since processes vary
    assert language.choose(exact_bytes, "exact").plan.loss_chunk_tokens is None
    tight = language.choose(exact_bytes - (1 << 20))
    assert tight.plan.loss_chunk_tokens == 32
    assert tight.why == "no plan that adds up as plain PyTorch does is predicted to fit"
    declared = declare(tight.plan, tight.profile, why=tight.why)
    assert [c.technique for c in declared.changes] == ["loss in chunks"]
    assert "chunks of 32 tokens" in declared.sentence()


def test_why_a_loss_was_not_tried_in_chunks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    language = _Language()
    plain, refusals = Problem.profile, [UnsupportedError("a refusal of another kind"), LossNotChunkedError("its own")]

    def profile(problem: Problem, sample: Any, counts: Any, **ways: Any) -> Any:
        if ways["chunk_tokens"] is not None:
            raise refusals.pop(0)
        return plain(problem, sample, counts, **ways)

    monkeypatch.setattr(Problem, "profile", profile)
    # Chunks are asked for although there is room.
    monkeypatch.setattr("memfit.planner.choosing._Search._chunked_s", lambda *_: 0.0)
    monkeypatch.setattr("memfit.planner.choosing._SURELY_LESS", 0.0)
    assert language.choose(1 << 34).reason.endswith("The loss was not tried in chunks: a refusal of another kind.")
    assert "in chunks" not in language.choose(1 << 34).reason


def test_the_table_of_the_docs_is_the_one_in_the_code() -> None:
    assert table() in ARCHITECTURE.read_text(encoding="utf-8")


def test_every_allowance_is_a_technique_that_is_approximate_and_every_such_technique_has_one() -> None:
    assert {t.allowance for t in TECHNIQUES if t.exactness is Exactness.APPROXIMATE} == ALLOWANCES
    assert not any(t.allowance for t in TECHNIQUES if t.exactness is not Exactness.APPROXIMATE)


def _small() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8)


def _square(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


@pytest.mark.parametrize("call", [memfit.fit, advise])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow": {"exact"}}, r"allow='exact' is not .*\(numerics='exact' .* choose from bf16, "),
        ({"allow": {"bf15"}}, r"allow='bf15' is not .* choose from bf16, .*nonadditive-loss"),
        ({"allow": {"int8-state"}}, r'allow=\{"int8-state"\} has no effect: .* keeps no running means'),
        ({"allow": {"fp16"}}, r'allow=\{"fp16"\} has no effect: on a CPU .* plan='),
        ({"allow": {"bf16"}, "numerics": "exact"}, r"allow=\['bf16'\] has no effect with numerics='exact'"),
        ({"numerics": "bitwise"}, r"numerics is one of \['auto', 'exact'\], not 'bitwise'"),
        ({"numerics": "exact", "plan": Plan(microbatches=2)}, r"the given plan is reordered \(several microbatches\)"),
    ],
)
def test_what_cannot_take_effect_is_refused_with_what_can(call: Any, options: dict[str, Any], message: str) -> None:
    model, optimizer, rows = _small()
    with pytest.raises(UsageError, match=message):
        call(model, optimizer, _square, rows, **options)


def test_bf16_that_the_model_cannot_have_is_refused_with_the_reason() -> None:
    model, optimizer, rows = _small()
    with pytest.raises(UsageError, match=r'allow=\{"bf16"\} has no effect: the parameter .* is torch.float64'):
        advise(model.double(), optimizer, _square, rows.double(), allow={"bf16"}, limit="64GiB")


def test_exact_asks_for_no_more_than_the_one_batch() -> None:
    language = _Language()
    assert replace(language.problem, numerics="exact").counts(torch.zeros(8, 2)) == (1,)
    assert language.problem.counts(torch.zeros(8, 2)) == (1, 2, 4, 8)
