"""What a plan's explanation says, against other predictions, by arithmetic, and against questions that are asked anew."""

from __future__ import annotations

import inspect
import json
import random
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.cli.plan_command import plan as plan_command
from memfit.core.errors import DoesNotFitError, UsageError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.numerics import weighed_seconds
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime, plan_differences
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.planner.advise import Advice, advise
from memfit.planner.search.plan_choice import CurvePoint, curve_limits, note_choices, with_knees
from memfit.step.build import build_step
from memfit.step.clock import find_phases
from memfit.step.lower import lower
from memfit.step.predict import Appraisal, appraise, predict
from unit.profiles import gpt_profile
from unit.test_cli import RECIPE, run
from unit.test_mixing import card

MIB = 1 << 20
RECOMPUTE = CallPlan(saved=Saved.RECOMPUTE)
AWAY = BlockPlan(weight_home=Tier.HOST, state_home=Tier.HOST)
PROFILE = gpt_profile(layers=4, width=128, tokens=128, batch_rows=4, rows=(4, 2))


def price(plan: Plan) -> Appraisal:
    step = lower(build_step(plan, PROFILE, clips_norm=False), plan, PROFILE, device="card")
    return appraise(step, card())


# ---- choices and phases ----


def test_a_choice_saves_and_costs_what_the_plan_without_it_differs_by() -> None:
    calls = (CallPlan(), RECOMPUTE, RECOMPUTE, replace(RECOMPUTE, joins_previous=True), CallPlan(), CallPlan())
    plan = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR, calls=calls, blocks={"h.1": AWAY, "h.2": AWAY})
    notes = note_choices(plan, PROFILE, price)
    told = {note.members: note for note in notes if note.members != "the step"}
    assert told.keys() == {"h.0-2", "h.1-2"}
    assert told["h.0-2"].choice == "recompute, 2 segments" and told["h.0-2"].count == 3
    without = {"h.0-2": replace(plan, calls=()), "h.1-2": replace(plan, blocks={})}
    steps = {
        "2 microbatches, one after the other": replace(plan, microbatches=1, order=Order.LAYER_MAJOR),
        "updates in backward": replace(plan, update=UpdateTime.AFTER_BACKWARD),
        "2 buffers for weights": replace(plan, prefetch=0),
    }
    assert {note.choice for note in notes if note.members == "the step"} == steps.keys()
    own = price(plan)
    for note in notes:
        other = price(steps[note.choice] if note.members == "the step" else without[note.members])
        assert note.saves_bytes == other.peak_bytes - own.peak_bytes
        assert note.costs_s == pytest.approx(own.seconds - other.seconds, abs=1e-15)
        assert note.meaning


def test_phases_are_the_whole_step_and_their_lanes_work_for_all_of_it() -> None:
    plan = Plan(blocks={"h.1": AWAY, "h.2": AWAY}, calls=(RECOMPUTE,) * 5)
    step = lower(build_step(plan, PROFILE, clips_norm=False), plan, PROFILE, device="card")
    timeline = predict(step, card())
    phases = find_phases(timeline)
    assert [phase.name for phase in phases][:2] == ["forward", "backward"]
    assert sum(phase.seconds for phase in phases) == pytest.approx(timeline.seconds)
    for lane, seconds in appraise(step, card()).busy_s.items():
        assert sum(phase.busy_s.get(lane, 0.0) for phase in phases) == pytest.approx(seconds)
    for cause, seconds in timeline.stalls_s.items():
        assert sum(phase.stalls_s.get(cause, 0.0) for phase in phases) == pytest.approx(seconds)
    assert all([*phase.busy_s.values()] == sorted(phase.busy_s.values(), reverse=True) for phase in phases)


# ---- the price of memory ----


def point(limit: int, seconds: float, *, is_asked: bool = False) -> CurvePoint:
    return CurvePoint(limit_bytes=limit, seconds=seconds, peak_bytes=limit, name="", is_asked=is_asked)


def test_knees_are_where_less_becomes_twice_as_dear() -> None:
    curve = with_knees(
        [point(4, 1.0), point(1, 4.0), point(2, 2.0), point(3, 1.5), point(5, 1.0), point(6, 1.0, is_asked=True)]
    )
    # 2 s, 0.5 s and 0.5 s for a byte, then nothing; 5 is as good as 4, and only what was asked stays.
    assert [(p.limit_bytes, p.is_knee) for p in curve] == [(1, False), (2, True), (3, False), (4, True), (6, False)]


@given(least=st.integers(1 * MIB, 1 << 36), more=st.integers(0, 1 << 37), count=st.integers(1, 12))
def test_limits_of_a_curve_rise_by_one_factor(least: int, more: int, count: int) -> None:
    limits = curve_limits(least, least + more, count)
    assert limits[0] == least and list(limits) == sorted(set(limits)) and len(limits) <= max(2, count)
    if more > 100 * MIB and count > 1:
        assert limits[-1] == least + more
        factor = ((least + more) / least) ** (1 / (count - 1))
        assert all(b / a < factor * (1 + 2 * MIB / a) for a, b in pairwise(limits))


# ---- differences ----


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_differences_are_all_that_differs(seed: int) -> None:
    drawn = random.Random(seed)

    def draw() -> Plan:
        homes = [BlockPlan(), AWAY, replace(AWAY, weight_home=Tier.DISK)]
        policies = [CallPlan(), RECOMPUTE, replace(RECOMPUTE, boundary_home=Tier.HOST)]
        return Plan(
            microbatches=drawn.choice((1, 2)),
            prefetch=drawn.choice((0, 1)),
            update_backlog=drawn.choice((1, 2)),
            blocks={f"h.{i}": drawn.choice(homes) for i in range(3)},
            calls=tuple(drawn.choice(policies) for _ in range(3)),
        )

    before, after = draw(), draw()
    assert plan_differences(before, before) == ()
    found = plan_differences(before, after)
    assert (found == ()) == (before == after)
    told = " ".join(one.where for one in found)
    for name in ("microbatches", "prefetch", "update_backlog"):
        assert (name in told) == (getattr(before, name) != getattr(after, name))
    # Every field of every block and call that differs is named once for its group.
    wanted = {
        f"{each.name}={getattr(made(after), each.name)}"
        for kind, make in ((BlockPlan, lambda p, i: p.block(f"h.{i}")), (CallPlan, lambda p, i: p.call(i)))
        for i in range(3)
        for each in fields(kind)
        for made in (lambda p, make=make, i=i: make(p, i),)
        if getattr(made(before), each.name) != getattr(made(after), each.name)
    }
    assert {part for one in found for part in one.after.split(", ") if "=" in part} == wanted


def test_plans_of_files_are_compared_with_and_without_a_model(tmp_path: Path) -> None:
    first, second, data = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "d.json"
    first.write_text(Plan().to_json())
    second.write_text(Plan(microbatches=2, calls=(CallPlan(), RECOMPUTE, RECOMPUTE)).to_json())
    text = run("plan", "--diff", str(first), str(second))
    assert "microbatches" in text and "2 calls: 1-2" in text and "saved=recompute" in text
    assert "decide the same" in run("plan", "--diff", str(first), str(first))
    text = run("plan", *RECIPE, "--diff", str(first), str(second), "--data", str(data), "--hardware", "laptop-cpu")
    told = json.loads(data.read_text())
    assert "What they take" in text
    assert told["predicted"][0]["peaks"]["device"] > told["predicted"][1]["peaks"]["device"]
    assert {one["where"] for one in told["differences"]} == {"microbatches", "2 calls: 1-2"}
    assert "cannot be read" in run("plan", "--diff", str(first), str(tmp_path / "none.json"), code=2)


# ---- one road ----

# Keywords of `fit` that change how it runs, and not which plan it takes; `compile` measures what runs here.
_OF_THE_RUN = {
    "adapt",
    "compile",
    "enforce",
    "tiers",
    "keep_gradients",
    "weight",
    "weights",
    "store",
    "resume",
    "on_breach",
}
_OPTIONS = {"blocks": "block", "max_grad_norm": "clip"}


def test_every_keyword_of_fit_that_changes_the_plan_is_one_of_advise_and_an_option() -> None:
    wanted = {
        name for name, each in inspect.signature(memfit.fit).parameters.items() if each.kind is each.KEYWORD_ONLY
    } - _OF_THE_RUN
    assert wanted <= inspect.signature(advise).parameters.keys()
    # A function cannot be typed.
    assert {_OPTIONS.get(name, name) for name in wanted - {"split"}} <= inspect.signature(
        plan_command
    ).parameters.keys()


# ---- questions that are asked anew ----


def _model() -> tuple[nn.Module, torch.optim.Optimizer, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))
    return model, torch.optim.AdamW(model.parameters()), lambda m, x: (m(x) - x).square().mean(), torch.randn(8, 256)


SIDES = {
    "recompute": "Activations:", "select": "Activations:", "offload": "Activations:", "microbatches": "Activations:",
    "updates in backward": "Gradients:", "optimizer states of": "Weights' side:", "weights of": "Weights' side:",
    "gradients of": "Weights' side:",
}  # fmt: skip


def small_card(host: int = 8 * MIB) -> Hardware:
    return Hardware(
        device="card",
        architecture="sm_80",
        flops_per_s=1e10,
        bf16_flops_per_s=4e10,
        tiers={
            Tier.DEVICE: TierSpec(nbytes=1 << 32),
            Tier.HOST: TierSpec(nbytes=host, link=Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)),
        },
    )


@pytest.fixture(scope="module")
def asked() -> tuple[tuple[Any, ...], Advice]:
    parts = _model()
    return parts, advise(*parts, limit="88MiB", hardware=small_card(), explains=True)


def test_what_else_is_told_is_what_the_question_would_be_answered(asked: tuple[tuple[Any, ...], Advice]) -> None:
    parts, advice = asked
    explained = advice.explanation
    assert explained is not None
    assert explained.increments[0].adds == "plain training"
    assert explained.increments[-1].peak_bytes == advice.timeline.peak_bytes
    assert explained.increments[-1].seconds == pytest.approx(advice.timeline.seconds)
    saved = sum(increment.saves_bytes for increment in explained.increments)
    assert explained.increments[0].peak_bytes - saved == explained.increments[-1].peak_bytes
    # Which bytes a decision helps follows from its kind, told from its name alone.
    for increment in explained.increments[1:]:
        for word, bytes_of in SIDES.items():
            assert word not in increment.adds or bytes_of in increment.why, increment
    assert len({increment.why for increment in explained.increments}) == len(explained.increments)
    step = 88 * MIB // 8 >> 20 << 20
    variants = {
        "11.0 MiB more of the device": {"limit": 88 * MIB + step},
        "11.0 MiB less of the device": {"limit": 88 * MIB - step},
        "1.0 MiB more of the host": {"hardware": small_card(9 * MIB)},
        "1.0 MiB less of the host": {"hardware": small_card(7 * MIB)},
    }
    answers = {answer.question: answer for answer in explained.tiers}
    assert answers.keys() == variants.keys()
    answers |= {answer.question.split(" (")[0]: answer for answer in explained.allowances}
    variants |= {f"allow={name}": {"allow": {name}} for name in ("bf16", "fp16", "int8-state")}
    for question, changed in variants.items():
        answer = answers[question]
        keywords: dict[str, Any] = {"limit": "88MiB", "hardware": small_card(), **changed}
        if answer.seconds is None:
            with pytest.raises((DoesNotFitError, UsageError)) as refused:
                advise(*parts, **keywords)
            assert answer.plan == str(refused.value).splitlines()[0]
            continue
        other = advise(*parts, **keywords)
        assert answer.seconds == pytest.approx(other.timeline.seconds)
        assert answer.peak_bytes == other.timeline.peak_bytes
        assert (answer.plan == "the same plan") == (other.plan == advice.plan)


def test_the_curve_begins_at_the_smallest_limit_and_falls(asked: tuple[tuple[Any, ...], Advice]) -> None:
    parts, advice = asked
    assert advice.explanation is not None
    curve = advice.explanation.curve
    assert [p.limit_bytes for p in curve if p.is_asked] == [88 * MIB]
    # one that updates on the host rounds otherwise: it is taken where it is a tenth faster, or alone
    for smaller, larger in pairwise(curve):
        regroups = "updated there" in smaller.name and "updated there" not in larger.name
        assert larger.seconds <= weighed_seconds(smaller.seconds, regroups=regroups)
    with pytest.raises(DoesNotFitError) as refused:
        advise(*parts, limit=curve[0].limit_bytes - 1, hardware=small_card())
    assert refused.value.smallest_limit_bytes == curve[0].limit_bytes
    unlimited = advise(*parts, hardware=small_card())
    assert curve[-1].seconds == pytest.approx(unlimited.timeline.seconds)
    json.dumps(advice.explanation.data(), allow_nan=False)
