"""A recompute policy inside a block is an entry of a table: traced, planned, priced and carried out, without a line of `src`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import memfit
from equivalence import plans, zoo
from equivalence.compare import assert_equal_training
from equivalence.plain import adamw
from equivalence.with_memfit import fit_with, profile_of
from memfit.core.errors import PlanError
from memfit.core.hardware import Hardware, Link, Rate, TierSpec
from memfit.core.plan import CallPlan, Plan
from memfit.core.profile import Profile
from memfit.core.saved_policies import MATRIX_PRODUCTS_AND_ATTENTION, POLICIES, Policy, Saved
from memfit.core.step import Timeline
from memfit.core.tiers import Tier
from memfit.core.work_kinds import PRODUCT_KINDS, WorkKind
from memfit.planner.search.candidates import list_candidates
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict

WORD, SHARE = "select-linear", 0.7
MACHINE = Hardware(
    device="cpu",
    flops_per_s=1e9,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 40),
        Tier.DISK: TierSpec(nbytes=1 << 40, link=Link(read_bytes_per_s=1e12, write_bytes_per_s=1e12)),
    },
    # Products of every class take the same, all else nothing.
    rates={kind: Rate(1e9 if kind in PRODUCT_KINDS else 1e24) for kind in WorkKind},
)


@pytest.fixture(autouse=True)
def linear_layers_alone_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry: results of linear layers are held, attention is made again."""
    names = frozenset({"aten::addmm", "aten::mm", "aten::linear"})
    assert names < MATRIX_PRODUCTS_AND_ATTENTION
    monkeypatch.setitem(POLICIES, WORD, Policy(recomputes=True, kept_operators=names, replay_share=SHARE))


def plan_of(profile: Profile, word: str) -> Plan:
    return Plan(calls=plans.fates(profile, CallPlan(saved=Saved(word))))


def priced(profile: Profile, word: str) -> Timeline:
    plan = plan_of(profile, word)
    return predict(lower(build_step(plan, profile, clips_norm=False), plan, profile), MACHINE)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_policy_of_ones_own_gives_the_bits_of_plain_pytorch(name: str, tmp_path: Path) -> None:
    profile = profile_of(zoo.ZOO[name]())
    plan = plan_of(profile, WORD)
    assert Plan.from_json(plan.to_json()) == plan and f'"{WORD}"' in plan.to_json()
    assert_equal_training(zoo.ZOO[name], adamw(), fit_with(plan, tmp_path, keep_gradients=True), may_reorder=False)


def test_it_is_traced_and_priced_between_its_neighbours() -> None:
    case = zoo.ZOO["gpt2"]()
    profile = profile_of(case)
    trace = next(iter(profile.traces.values()))
    layers = [call for call in trace.calls if call.is_repeated]
    assert layers
    for call in layers:
        held, selected = call.held(Saved(WORD)), call.held(Saved.SELECT)
        assert held is not None and selected is not None
        # By hand: queries, keys and values, the projection, and the two layers of the perceptron, the first of four widths.
        assert held.nbytes == (3 + 1 + 4 + 1) * call.output_bytes < selected.nbytes
    peaks = {word: priced(profile, word).peak_bytes for word in ("recompute", WORD, "select", "keep")}
    assert peaks["recompute"] <= peaks[WORD] < peaks["select"] < peaks["keep"]
    most = sum(held.nbytes for call in layers for held in call.held_results if held.saved == WORD)
    assert peaks[WORD] - peaks["recompute"] <= most
    seconds = {word: priced(profile, word).seconds for word in ("keep", WORD, "recompute")}
    forward = sum(call.forward_flops for call in layers)
    assert seconds["recompute"] - seconds["keep"] == pytest.approx(forward / MACHINE.flops_per_s)
    # What is held is not repeated, whatever the policy's own estimate: it was traced.
    places = layers[0].output_bytes // (4 * zoo.WIDTH)
    held = {block for call in layers for block in call.blocks}
    linear = sum(
        2 * places * math.prod(p.shape)
        for b in profile.blocks
        if b.name in held
        for p in b.parameters
        if len(p.shape) == 2
    )
    assert 0 < linear < forward
    assert seconds[WORD] - seconds["keep"] == pytest.approx((forward - linear) / MACHINE.flops_per_s)


def test_the_planner_looks_at_it() -> None:
    profile = profile_of(zoo.ZOO["gpt2"]())
    names = [c.name for c in list_candidates(profile, microbatches=1, tiers=(), clips_norm=False)]
    assert any(WORD in name for name in names)
    assert [name.split(";")[1].strip() for name in names] == ["keep", "select", WORD, "recompute"]


def test_a_word_that_is_no_entry_is_refused_with_those_that_are() -> None:
    with pytest.raises(PlanError, match=rf"saved of CallPlan is one of .*'offload', '{WORD}'\], not 'select-all'"):
        CallPlan(saved="select-all")  # type: ignore[arg-type]
    with pytest.raises(memfit.MemfitError, match="select-all"):
        Plan.from_json('{"format": 1, "calls": [{"saved": "select-all"}]}')
