"""The answer of the planner: a plan, its prediction, and the plans that stood beside it.

In: candidates that were built (`pricing`). Out: `PlanChoice`, its Pareto front and its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from memfit.core.errors import PlanError
from memfit.core.limits import Budget, format_bytes, format_seconds
from memfit.core.numerics import weighed_seconds
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.schedule import Schedule
from memfit.core.step import Timeline
from memfit.core.step_report import joined_names
from memfit.core.tiers import Tier
from memfit.planner.search.pricing import BuiltCandidate
from memfit.planner.search.slot_prices import describe_homes, describe_policy
from memfit.step.clock import Phase
from memfit.step.predict import Appraisal

_LEANER = 0.01


@dataclass(frozen=True, kw_only=True)
class ParetoPoint:
    """One step of a front: what a plan would take and give.

    Attributes:
        name: the decisions in words.
        peak_bytes: predicted device bytes of tensors.
        seconds: predicted for a step.
        fits: it is within every budget.
    """

    name: str
    peak_bytes: int
    seconds: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class ClassicPoint:
    """A technique of the field, as it is predicted on the same question.

    Attributes:
        name: by which `plan=` takes it.
        says: it in one line.
        source: where it comes from.
        microbatches: with which it fits and is fastest, or else is leanest.
        peak_bytes: predicted device bytes of tensors.
        seconds: predicted for a step.
        fits: it is within every budget.
    """

    name: str
    says: str
    source: str
    microbatches: int
    peak_bytes: int
    seconds: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """A plan, what it is predicted to cost, and what stood beside it.

    Attributes:
        name: the decisions in words.
        plan: them.
        schedule: the step built from it.
        timeline: its prediction.
        front: from the fastest to the leanest, plans that no other beats in both; the chosen one is
            among them.
        reason: why this one, in a sentence or two.
        built: number of candidates that were built and predicted.
        regroups: it regroups sums (`core.numerics`).
        unchanged_s: what a plan that regroups none, and may fit, takes at least; None: none is
            predicted to fit.
        least_s: what every uniform candidate takes at least, whatever it holds.
        bound_s: where mixed plans were looked for: seconds of the best mixture of shares of layers
            by the chain program (`planner.search.widening.MixedPlans`); None: they were not. No
            proof, but how much at most a better search of the same frames would gain.
        roomier_s: likewise of the mixture program with more bytes on the device; None: not asked.
        classics: techniques of the field on the same question, where they were asked for.
    """

    name: str
    plan: Plan
    schedule: Schedule
    timeline: Timeline
    front: tuple[ParetoPoint, ...]
    reason: str
    built: int
    regroups: bool
    unchanged_s: float | None
    least_s: float
    bound_s: float | None = None
    roomier_s: float | None = None
    classics: tuple[ClassicPoint, ...] = ()

    @property
    def weighed_s(self) -> float:
        """Its seconds as plans are compared by."""
        return weighed_seconds(self.timeline.seconds, regroups=self.regroups)


def pareto_front(built: list[BuiltCandidate], best: BuiltCandidate) -> tuple[ParetoPoint, ...]:
    """Returns the built candidates that no other beats in seconds and bytes, and the chosen one. Of
    those that are hardly leaner than the one before, none.
    """
    points: list[ParetoPoint] = []
    least = math.inf
    for b in sorted(built, key=lambda b: (b.cost.seconds, b.cost.peak_bytes, b.priced.index)):
        if b.cost.peak_bytes < least * (1 - _LEANER) or b is best:
            least = min(least, b.cost.peak_bytes)
            points.append(_point(b))
    return tuple(points)


def _point(built: BuiltCandidate) -> ParetoPoint:
    return ParetoPoint(
        name=built.priced.candidate.name,
        peak_bytes=built.cost.peak_bytes,
        seconds=built.cost.seconds,
        fits=built.fits,
    )


def give_reason(
    built: list[BuiltCandidate], best: BuiltCandidate, budget: Budget, bound_s: float | None = None, others: int = 0
) -> str:
    """Says why the chosen one was taken, and what more memory would give. `others` were built
    besides.
    """
    peak, seconds = best.cost.peak_bytes, best.cost.seconds
    room = "no limit" if budget.tensor_bytes is None else f"{format_bytes(budget.tensor_bytes)} for tensors"
    text = (
        f"{best.priced.candidate.name}: predicted {format_bytes(peak)} of {room}, {format_seconds(seconds)} a step; "
        f"the fastest of the plans that fit ({len(built) + others} built)."
    )
    if any(b.fits and b.cost.seconds < seconds for b in built):
        text = text.replace("the fastest of the plans that fit", "the fastest of the plans that fit and add up alike")
    if bound_s is not None and 0 < bound_s < seconds:
        text += f" No mixture of layers is expected to take less than {format_seconds(bound_s)}."
    faster = [b for b in built if not b.fits and b.cost.seconds < seconds]
    if faster:
        next_up = min(faster, key=lambda b: (b.cost.peak_bytes, b.priced.index))
        more = next_up.cost.peak_bytes - (budget.tensor_bytes or 0)
        if more > 0:
            text += (
                f" With {format_bytes(more)} more it would be {next_up.priced.candidate.name}, "
                f"{format_seconds(next_up.cost.seconds)}."
            )
    return text


# Notes on a plan's choices: what each saves and costs, by class of blocks.
#
# In: a plan, its profile, a judge. Out: `ChoiceNote`s, in words and as numbers.
#
# [Note: what a choice saves]
# A choice is taken back alone, all others stay: what the plan then takes more on the device, and
# how much sooner a step would be done, is what the choice saves and costs. So savings do not add
# up: two choices that both are needed at the same moment each save all that is missing there, and a
# choice whose bytes lie at another moment than the peak saves none of the peak.


@dataclass(frozen=True, kw_only=True)
class ChoiceNote:
    """One choice of a plan, for all blocks or calls of a class that share it.

    Attributes:
        members: names of blocks or calls, ranges where equal; "the step" for what is decided once.
        count: number of them.
        choice: what was chosen, in the plan's words.
        meaning: the same for somebody who does not know them.
        saves_bytes: device bytes that the plan's peak would be higher by without it; None: the plan
            is not legal without it.
        costs_s: seconds that a step would be shorter by without it, negative if longer; None
            likewise.
    """

    members: str
    count: int
    choice: str
    meaning: str
    saves_bytes: int | None
    costs_s: float | None


def note_choices(plan: Plan, profile: Profile, price: Callable[[Plan], Appraisal]) -> tuple[ChoiceNote, ...]:
    """Prices every choice of a plan that plain training does not make. See [Note: what a choice
    saves].

    Args:
        plan: the decisions.
        profile: of the model.
        price: predicts a plan; raises `PlanError` for one that is not legal.
    """
    own = price(plan)
    notes: list[ChoiceNote] = []
    for members, count, choice, meaning, without in _choices(plan, profile):
        try:
            other = price(without)
        except PlanError:
            other = None
        notes.append(
            ChoiceNote(
                members=members,
                count=count,
                choice=choice,
                meaning=meaning,
                saves_bytes=None if other is None else other.peak_bytes - own.peak_bytes,
                costs_s=None if other is None else own.seconds - other.seconds,
            )
        )
    return tuple(notes)


def _choices(plan: Plan, profile: Profile) -> Iterator[tuple[str, int, str, str, Plan]]:
    """Yields members, their number, the choice, its meaning, and the plan without it."""
    yield from _step_choices(plan)
    trace = next(iter(profile.traces.values()))
    by_policy: dict[tuple[str, CallPlan], list[int]] = {}
    for call in trace.calls:
        # What joins the call before it has the same policy.
        policy = replace(plan.call(call.index), joins_previous=False)
        if policy != CallPlan():
            by_policy.setdefault((call.kind, policy), []).append(call.index)
    for (_, policy), indices in by_policy.items():
        chosen = frozenset(indices)
        calls = [CallPlan() if index in chosen else plan.call(index) for index in range(len(plan.calls))]
        # A call cannot join one that is kept.
        calls = [
            replace(call, joins_previous=call.joins_previous and index - 1 not in chosen)
            for index, call in enumerate(calls)
        ]
        names = joined_names(trace.calls[index].site for index in indices)
        joined = sum(plan.call(index).joins_previous for index in indices)
        choice = describe_policy(policy) + (f", {len(indices) - joined} segments" if joined else "")
        yield names, len(indices), choice, _meaning_of_policy(policy), replace(plan, calls=tuple(calls))
    by_homes: dict[tuple[str, BlockPlan], list[str]] = {}
    for block in profile.blocks:
        homes = plan.block(block.name)
        if homes != BlockPlan():
            by_homes.setdefault((block.kind, homes), []).append(block.name)
    for (_, homes), found in by_homes.items():
        without = {name: homes for name, homes in plan.blocks.items() if name not in found}
        yield (
            joined_names(name or "(model)" for name in found),
            len(found),
            describe_homes(homes),
            _meaning_of_homes(homes),
            replace(plan, blocks=without),
        )


def _step_choices(plan: Plan) -> Iterator[tuple[str, int, str, str, Plan]]:
    if plan.microbatches > 1:
        turns = plan.order is Order.LAYER_MAJOR
        how = "layer by layer" if turns else "one after the other"
        meaning = "the batch is computed in parts, so that only a part's activations are there at once"
        if turns:
            meaning += "; each layer takes all parts before the next one, so that its weights come once"
        without = replace(plan, microbatches=1, order=Order.LAYER_MAJOR, tail=None)
        yield "the step", 1, f"{plan.microbatches} microbatches, {how}", meaning, without
    if plan.update is UpdateTime.IN_BACKWARD:
        meaning = "a block is updated as soon as its gradient is whole, which then goes"
        without = replace(plan, update=UpdateTime.AFTER_BACKWARD)
        yield "the step", 1, "updates in backward", meaning, without
    if any(block.weight_home is not Tier.DEVICE for block in plan.blocks.values()) and plan.prefetch > 0:
        meaning = f"up to {plan.prefetch} blocks' weights come while another one computes"
        yield "the step", 1, f"{plan.prefetch + 1} buffers for weights", meaning, replace(plan, prefetch=0)
    if plan.backlog > 1:
        meaning = f"an update's end is waited for {plan.backlog} compute actions later; until then its gradient stays"
        yield "the step", 1, f"updates {plan.backlog} actions behind", meaning, replace(plan, update_backlog=1)


def _meaning_of_policy(policy: CallPlan) -> str:
    if policy.saved.policy.offloads:
        return f"what backward needs goes to {policy.saved_home} after forward and comes back"
    again = "is computed again in backward"
    kept = "all but the dearest of what backward needs" if policy.saved.policy.kept_operators else "what backward needs"
    away = "" if policy.boundary_home is Tier.DEVICE else f", from inputs that wait on {policy.boundary_home}"
    return f"{kept} {again}{away}"


def _meaning_of_homes(homes: BlockPlan) -> str:
    told: list[str] = []
    if homes.weight_home is not Tier.DEVICE:
        told.append(f"weights come from {homes.weight_home} for each use")
    if homes.gradient_home is not Tier.DEVICE:
        told.append(f"gradients go to {homes.gradient_home}")
    if homes.state_home is not Tier.DEVICE:
        there = "are updated there, by the host's cores" if homes.update_on is Tier.HOST else "come for the update"
        told.append(f"optimizer states rest on {homes.state_home} and {there}")
    return "; ".join(told)


# The price of memory: seconds of a step by the limit, with its knees.
#
# In: answers of the planner for several limits. Out: `CurvePoint`s, smallest limit first.

_KNEE = 2.0
"""Times as dear below as above: from there on a point is a knee."""
_FLAT = 1e-3


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The chosen plan inside one limit.

    Attributes:
        limit_bytes: of the device.
        seconds: predicted for a step.
        peak_bytes: predicted device bytes of tensors.
        name: the plan in words.
        is_knee: with less memory seconds rise at least twice as steeply as they do above it.
        is_asked: it is the limit that was asked about.
    """

    limit_bytes: int
    seconds: float
    peak_bytes: int
    name: str
    is_knee: bool = False
    is_asked: bool = False


def curve_limits(least: int, most: int, count: int) -> tuple[int, ...]:
    """Returns limits from the least to the most, each larger than the one before by the same
    factor, and whole MiB (but for the ends).
    """
    if most <= least or count < 2:
        return (least,)
    ratio = (most / least) ** (1 / (count - 1))
    inner = [round(least * ratio**i) >> 20 << 20 for i in range(1, count - 1)]
    return tuple(sorted({least, most, *(limit for limit in inner if least < limit < most)}))


def with_knees(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Returns the points by limit, knees marked, without those that a smaller limit equals.

    A point is a knee if a byte less costs at least twice the seconds that a byte more saves, both
    towards the next points that differ.
    """
    ordered = sorted(points, key=lambda p: p.limit_bytes)
    kept: list[CurvePoint] = []
    for point in ordered:
        if not kept or point.is_asked or point.seconds < kept[-1].seconds * (1 - _FLAT):
            kept.append(point)
    steepness = [
        (before.seconds - after.seconds) / max(1, after.limit_bytes - before.limit_bytes)
        for before, after in pairwise(kept)
    ]
    marked: list[CurvePoint] = []
    for i, point in enumerate(kept):
        below = steepness[i - 1] if i else 0.0
        above = steepness[i] if i < len(steepness) else 0.0
        marked.append(replace(point, is_knee=below > 0 and below >= _KNEE * above))
    return tuple(marked)


# Answers to "what if": the chosen plan with another limit, another tier's limit, or something more
# that is allowed; and all that explains a plan together.
#
# In: made by `planner.explaining`. Out: data for people.


@dataclass(frozen=True, kw_only=True)
class IncrementNote:
    """A decision on the way from plain training to the plan.

    Attributes:
        adds: the decision that is added.
        peak_bytes: predicted device bytes of tensors with it and all before it.
        seconds: of a step, likewise.
        saves_bytes: less than without it.
        costs_s: more than without it.
        why: it helps (which bytes), and stands before the next.
    """

    adds: str
    peak_bytes: int
    seconds: float
    saves_bytes: int
    costs_s: float
    why: str


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Answer to one question.

    Attributes:
        question: in words, such as "1 GiB more of the device".
        seconds: of the plan that would be chosen; None: none fits, or it has no effect.
        peak_bytes: its device bytes of tensors; None likewise.
        faster_s: seconds that it takes less than the plan that is explained; negative: more; None
            likewise.
        plan: it in words; or why there is none.
    """

    question: str
    seconds: float | None
    peak_bytes: int | None
    faster_s: float | None
    plan: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan is what it is.

    Attributes:
        choices: what each choice saves and costs, alone.
        increments: from plain training to the plan, one kind of decision more each.
        phases: who works, and who waits, in each part of the step.
        curve: seconds by the limit, from the smallest that works to where more does not help;
            empty: not asked for.
        tiers: one more and one less of each tier's memory; empty likewise.
        allowances: what each `allow=` would bring; empty likewise.
    """

    choices: tuple[ChoiceNote, ...] = ()
    increments: tuple[IncrementNote, ...] = ()
    phases: tuple[Phase, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    tiers: tuple[WhatIf, ...] = ()
    allowances: tuple[WhatIf, ...] = ()

    def data(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return asdict(self)
