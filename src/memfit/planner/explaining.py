"""Explains a plan: what its choices save and cost, the way to it from plain training, and what
other limits and permissions would give.

In: the question that a plan answers, and the answer. Out: `Explanation`. Each "what if" is answered
by choosing again, as `fit` would; traces are shared, so that a question takes as long as a search.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from memfit.core.errors import DoesNotFitError, PlanError, UnsupportedError, UsageError
from memfit.core.hardware import Hardware
from memfit.core.limits import GIB, MIB, Budget, Limits, format_bytes
from memfit.core.numerics import TECHNIQUES
from memfit.core.plan import CallPlan, Plan, UpdateTime
from memfit.core.profile import Profile, accumulated
from memfit.core.step import Timeline
from memfit.core.tiers import Tier
from memfit.machine.described import PlannedMachine
from memfit.planner.choosing import Choice, Traces, Wanted, choose
from memfit.planner.plan_checks import check_effect
from memfit.planner.problem import Problem
from memfit.planner.search.plan_choice import (
    CurvePoint,
    Explanation,
    IncrementNote,
    WhatIf,
    curve_limits,
    note_choices,
    with_knees,
)
from memfit.report.subject import PlanPoint
from memfit.step.build import build_step
from memfit.step.clock import find_phases
from memfit.step.lower import lower
from memfit.step.predict import Appraisal, appraise

# The way from plain training to a plan, one kind of decision more at a time, each priced.
#
# In: `Plan`, `Profile`, `Hardware`. Out: `PlanPoint`s, from plain training to the plan.

# Why a decision helps, and why it stands before the next: dearer by the byte from line to line.
_PLAIN = "Weights, gradients, optimizer states and all that forward keeps are there together."
_FUSED = (
    "Gradients: each block's goes into its update as soon as it is whole. First, since nothing is computed or moved "
    "for it."
)
_PARTS = (
    "Activations: forward keeps those of one part of the batch at a time; weights and states are as large as before. "
    "Ahead of recompute, since nothing is computed twice."
)
_RECOMPUTED = (
    "Activations: calls keep what they were given, and compute the rest again in backward. Ahead of what moves bytes, "
    "since it takes arithmetic and no link."
)
_OFFLOADED = (
    "Activations: what calls save leaves after forward and comes back for backward. It takes a link, twice for each "
    "byte, and no arithmetic."
)
_ON_HOST = "Optimizer states: the host's cores update beside them, so that gradients travel and states do not."
_AHEAD = "Speed: what is fetched ahead takes memory, and is waited for less."
_HOMES = (
    (
        "optimizer states", "state_home",
        "Weights' side: states are used once a step, by the update alone; forward and backward wait for none of them.",
    ),
    (
        "gradients", "gradient_home",
        "Weights' side: written once in backward, read once by the update. Ahead of weights, which come twice.",
    ),
    (
        "weights", "weight_home",
        "Weights' side: only the blocks that compute are there. Last, since each comes for forward and for backward.",
    ),
)  # fmt: skip


def points_from_plain(plan: Plan, profile: Profile, hardware: Hardware, *, clips_norm: bool) -> tuple[PlanPoint, ...]:
    """Prices plain training, then the plan's decisions as they are added one kind after the other.

    Formats of numbers and the loss are the plan's from the beginning, since the profile was traced
    with them. A decision that is impossible without the next one (an atomic step whose states are
    not on disk, a size of microbatches that was not traced) is priced together with it.

    Args:
        plan: all decisions.
        profile: with a trace of the plan's microbatch; with one of the whole batch, plain training
            is priced too.
        hardware: that seconds are predicted for.
        clips_norm: gradients are clipped by their global norm.
    """
    return tuple(point for point, _ in points_and_reasons(plan, profile, hardware, clips_norm=clips_norm))


def points_and_reasons(
    plan: Plan, profile: Profile, hardware: Hardware, *, clips_norm: bool
) -> tuple[tuple[PlanPoint, str], ...]:
    """Prices as `points_from_plain` does, with why each decision helps and stands where it does.

    Args:
        plan: all decisions.
        profile: of its microbatch.
        hardware: that seconds are predicted for.
        clips_norm: gradients are clipped by their global norm.
    """
    points: list[tuple[PlanPoint, str]] = []
    names: list[str] = []
    reasons: list[str] = []
    for name, reason, part in increments(plan, profile):
        names.append(name)
        reasons.append(reason)
        try:
            step = lower(build_step(part, profile, clips_norm=clips_norm), part, profile, device=hardware.device)
        except PlanError:
            if part == plan:
                raise
            continue  # told with the next one, which makes it possible
        cost = appraise(step, hardware)
        point = PlanPoint(name=" + ".join(names), peak_bytes=cost.peak_bytes, seconds=cost.seconds)
        points.append((point, " ".join(reasons)))
        names, reasons = [], []
    return tuple(points)


def increments(plan: Plan, profile: Profile) -> Iterator[tuple[str, str, Plan]]:
    """Yields plans from plain training to `plan`, each with the name of what it adds and why that
    helps and stands there.
    """
    part = Plan(
        update=UpdateTime.AFTER_BACKWARD,
        compute_dtype=plan.compute_dtype,
        splits_masters=plan.splits_masters,
        drops_masters=plan.drops_masters,
        state_format=plan.state_format,
        loss_chunk_tokens=plan.loss_chunk_tokens,
    )
    yield "plain training", _PLAIN, part
    if plan.update is not part.update:
        part = replace(part, update=plan.update)
        yield "updates in backward", _FUSED, part
    if plan.microbatches > 1:
        part = replace(part, microbatches=plan.microbatches, order=plan.order, tail=plan.tail)
        yield f"{plan.microbatches} microbatches, {plan.order}", _PARTS, part
    policies = dict.fromkeys(call.saved for call in plan.calls if not call.saved.policy.keeps_all)
    for policy in sorted(policies, key=lambda one: one.policy.offloads):
        chosen = [call.saved is policy for call in plan.calls]
        earlier = {call.saved for call in part.calls}
        calls = tuple(each if each.saved is policy or each.saved in earlier else CallPlan() for each in plan.calls)
        part = replace(part, calls=calls)
        reason = _OFFLOADED if policy.policy.offloads else _RECOMPUTED
        yield f"{policy} {sum(chosen)} of {_calls(profile)} calls", reason, part
    for what, home_field, reason in _HOMES:
        homes: dict[str, Tier] = {name: getattr(block, home_field) for name, block in plan.blocks.items()}
        away = [home for home in homes.values() if home is not Tier.DEVICE]
        if away:
            blocks = {name: replace(part.block(name), **{home_field: home}) for name, home in homes.items()}
            part = replace(part, blocks=blocks)
            yield f"{what} of {len(away)} blocks on {', '.join(dict.fromkeys(away))}", reason, part
    if part != plan:
        on_host = sum(block.update_on is Tier.HOST for block in plan.blocks.values())
        if on_host:
            yield f"updates of {on_host} blocks on the host", _ON_HOST, plan
        else:
            yield "prefetch and other settings", _AHEAD, plan


def _calls(profile: Profile) -> int:
    return len(next(iter(profile.traces.values())).calls)


__all__ = ["AskedPlan", "Explanation", "explain_choice", "explain_plan"]

_POINTS = 8
# Of small limits a part is more, and less, instead of a GiB.
_LARGE_LIMIT = 4 * GIB
_PART = 8


@dataclass(frozen=True, kw_only=True)
class _VariedMachine:
    """A machine with other limits."""

    tiers: tuple[Tier, ...]
    limits: Limits
    counts_process: bool


@dataclass(frozen=True, kw_only=True)
class AskedPlan:
    """A question that a plan was chosen for, so that it can be asked in other ways.

    Attributes:
        problem: what is trained.
        sample: a batch.
        first: its profile in all sizes of microbatches.
        budget: measures what is left to tensors.
        hardware: that plans are priced on.
        machine: with its limits.
        wanted: what is allowed.
        traces: that earlier questions have made.
    """

    problem: Problem
    sample: Any
    first: Profile
    budget: Callable[[Profile], Budget]
    hardware: Hardware
    machine: PlannedMachine
    wanted: Wanted
    traces: Traces = field(default_factory=Traces)

    def answer(
        self,
        *,
        limit: int | None = None,
        of_tiers: Mapping[Tier, int] | None = None,
        allow: Collection[str] = (),
    ) -> Choice:
        """Chooses a plan.

        Args:
            limit: of the device, in place of the one that was asked about.
            of_tiers: the same for other tiers.
            allow: permitted besides.

        Raises:
            DoesNotFitError: none fits. UsageError: a permission has no effect.
        """
        budget, machine = self.budget(self.first), self.machine
        if limit is not None:
            budget = replace(budget, limit_bytes=limit)
        if of_tiers:
            limits = Limits(by_tier={**machine.limits.by_tier, **of_tiers})
            machine = _VariedMachine(tiers=machine.tiers, limits=limits, counts_process=machine.counts_process)
        wanted = replace(self.wanted, allow=frozenset({*self.wanted.allow, *allow}), compares=False)
        if allow:
            check_effect(self.problem, wanted.allow, self.hardware.device)
        return choose(self.problem, self.sample, self.first, budget, self.hardware, machine, wanted, self.traces)

    def smallest_limit(self, beside: int) -> int:
        """Returns the smallest limit of the device that has a plan.

        Args:
            beside: bytes that are there beside tensors.
        """
        try:
            return self.answer(limit=beside + 1).found.timeline.peak_bytes + beside
        except DoesNotFitError as error:
            smallest = error.smallest_limit_bytes
            if smallest is None:
                raise  # another tier's limit
        return smallest


def explain_plan(
    plan: Plan, profile: Profile, timeline: Timeline, hardware: Hardware, *, clips_norm: bool
) -> Explanation:
    """Explains a plan by itself: its choices, the way to it, its bottlenecks. Takes milliseconds.

    Args:
        plan: the decisions.
        profile: that it was made from.
        timeline: predicted for it.
        hardware: in its dtype.
        clips_norm: gradients are clipped by their global norm.
    """

    def price(other: Plan) -> Appraisal:
        schedule = build_step(other, profile, clips_norm=clips_norm)
        return appraise(lower(schedule, other, profile, device=hardware.device), hardware)

    points = points_and_reasons(plan, profile, hardware, clips_norm=clips_norm)
    increments = [
        IncrementNote(
            adds=point.name,
            peak_bytes=point.peak_bytes,
            seconds=point.seconds,
            saves_bytes=before.peak_bytes - point.peak_bytes,
            costs_s=point.seconds - before.seconds,
            why=why,
        )
        for (before, _), (point, why) in pairwise([*points[:1], *points])
    ]
    return Explanation(
        choices=note_choices(plan, profile, price), increments=tuple(increments), phases=find_phases(timeline)
    )


def explain_choice(asked: AskedPlan, chosen: Choice) -> Explanation:
    """Explains a plan that was chosen, with what other limits and permissions would give.

    Args:
        asked: the question.
        chosen: its answer.
    """
    profile = accumulated(chosen.profile) if asked.wanted.has_lines else chosen.profile
    found = explain_plan(
        chosen.found.plan, profile, chosen.found.timeline, chosen.hardware, clips_norm=asked.wanted.clips_norm
    )
    return replace(
        found,
        curve=_curve(asked, chosen),
        tiers=tuple(_other_tiers(asked, chosen)),
        allowances=tuple(_other_permissions(asked, chosen)),
    )


# --- the price of memory --------------------------------------------------------------------------


def _curve(asked: AskedPlan, chosen: Choice) -> tuple[CurvePoint, ...]:
    """Chooses for limits from the smallest that works to the one from which on none is missed."""
    budget = asked.budget(asked.first)
    beside = budget.base_bytes + budget.reserve_bytes
    # The largest first: it makes the traces, and what it takes is the most that helps.
    largest = 1 << 62
    found = [(largest, asked.answer(limit=largest))]
    most = found[0][1].found.timeline.peak_bytes + beside
    least = asked.smallest_limit(beside)
    if budget.limit_bytes is not None:
        found.append((budget.limit_bytes, chosen))
    for limit in curve_limits(min(least, most), most, _POINTS)[:-1]:
        try:
            found.append((limit, asked.answer(limit=limit)))
        except DoesNotFitError:
            continue  # the smallest limit is told with what a process varies by
    points = [
        CurvePoint(
            limit_bytes=most if limit == largest else limit,
            seconds=choice.found.timeline.seconds,
            peak_bytes=choice.found.timeline.peak_bytes,
            name=choice.found.name,
            is_asked=choice is chosen,
        )
        for limit, choice in found
    ]
    return with_knees(points)


# --- other tiers, other permissions ---------------------------------------------------------------


def _other_tiers(asked: AskedPlan, chosen: Choice) -> list[WhatIf]:
    """Asks about more and less of each tier."""
    found: list[WhatIf] = []
    limit = asked.budget(asked.first).limit_bytes
    if limit is not None:
        for sign, word in ((1, "more"), (-1, "less")):
            step = _step_of(limit)
            question = f"{format_bytes(step)} {word} of the device"
            found.append(_ask(question, chosen, lambda to=limit + sign * step: asked.answer(limit=to)))
    for tier in asked.machine.tiers:
        if tier is Tier.DEVICE or tier not in asked.hardware.away:
            continue
        has = asked.machine.limits.by_tier.get(tier, asked.hardware.away[tier].nbytes)
        for sign, word in ((1, "more"), (-1, "less")):
            step = _step_of(has)
            question = f"{format_bytes(step)} {word} of the {tier}"
            limits = {tier: max(0, has + sign * step)}
            found.append(_ask(question, chosen, lambda to=limits: asked.answer(of_tiers=to)))
    return found


def _step_of(limit: int) -> int:
    """Returns a GiB; of small limits an eighth, in whole MiB."""
    return GIB if limit >= _LARGE_LIMIT else max(MIB, limit // _PART >> 20 << 20)


def _other_permissions(asked: AskedPlan, chosen: Choice) -> list[WhatIf]:
    """Asks about every permission that is not given."""
    if asked.wanted.numerics == "exact":
        return []
    names = {t.allowance: t.says for t in TECHNIQUES if t.allowance and t.allowance not in asked.wanted.allow}
    return [
        _ask(f"allow={name} ({says.format('some tensors')})", chosen, lambda one=name: asked.answer(allow=(one,)))
        for name, says in names.items()
    ]


def _ask(question: str, chosen: Choice, answer: Callable[[], Choice]) -> WhatIf:
    try:
        other = answer()
    except (DoesNotFitError, UsageError, UnsupportedError) as error:
        why = str(error).splitlines()[0]
        return WhatIf(question=question, seconds=None, peak_bytes=None, faster_s=None, plan=why)
    timeline = other.found.timeline
    return WhatIf(
        question=question,
        seconds=timeline.seconds,
        peak_bytes=timeline.peak_bytes,
        faster_s=chosen.found.timeline.seconds - timeline.seconds,
        plan="the same plan" if other.plan == chosen.plan else other.found.name,
    )
