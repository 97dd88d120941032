"""Preparing a batch: its schedules and their prediction, once for each shape.

In: a plan and a batch. Out: `Prepared`, or a refusal that says which limit the batch would pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.core.errors import AwayError, DoesNotFitError, MemfitError
from memfit.core.limits import format_bytes
from memfit.core.plan import CallPlan, Order, Plan
from memfit.core.profile import Profile, accumulated
from memfit.core.schedule import Schedule
from memfit.core.step import Step, Timeline
from memfit.core.tiers import Tier
from memfit.planner.plan_checks import check_meaning
from memfit.planner.setup import Planned, Prepared, Setup
from memfit.planner.user_hooks import hooks_of, tell_hooks
from memfit.step.build import build_forward, build_step
from memfit.step.check import check_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from memfit.step.sizes import disk_bytes_with_store, scaled, store_bytes
from memfit.trace.splitting import Signature, signature_of

# Batches of further lengths, run by what is prepared for longer ones.
#
# In: what is prepared for the shapes that came, and a new one. Out: the one that serves it, if
# there is one.
#
# [Note: buckets of lengths]
# A schedule names blocks, calls and microbatches, and no sizes; the engine moves what it finds. So
# a shorter batch runs by the schedule of a longer one, as it does in lines of the user's own, and
# takes no more than is predicted for the longer one. Nothing in a model says so beforehand: a
# program may do something else at another length. Ten shapes that were traced, with one schedule
# and peaks that do not exceed the longest one's, are taken as a sign that it does not. Where it
# does nevertheless, what the schedule does not foresee is served on demand, with equal bits, and
# told as a departure.

ENOUGH = 10
"""Shapes of a bucket that are traced; those behind them cost nothing."""


def serving(known: Mapping[Signature, Prepared], signature: Signature) -> Signature | None:
    """Returns the shapes whose preparation serves these too; None: they are to be traced.

    Args:
        known: all that is prepared.
        signature: of a batch whose shapes are not among them.
    """
    alike = {found: prepared for found, prepared in known.items() if _is_alike(found, signature)}
    if len(alike) < ENOUGH:
        return None
    covering = [found for found in alike if _is_within(signature, found)]
    for found in sorted(covering, key=lambda found: alike[found].peak_bytes):
        longest = alike[found]
        bucket = [prepared for other, prepared in alike.items() if _is_within(other, found)]
        if len(bucket) >= ENOUGH and all(_is_served(prepared, longest) for prepared in bucket):
            return found
    return None


def _is_alike(one: Signature, other: Signature) -> bool:
    return one.rows == other.rows and _ranks(one) == _ranks(other)


def _ranks(signature: Signature) -> list[tuple[int, str]]:
    return [(len(shape), dtype) for shape, dtype in signature.tensors]


def _is_within(one: Signature, other: Signature) -> bool:
    pairs = zip(one.tensors, other.tensors, strict=True)
    return all(size <= most for (sizes, _), (bounds, _) in pairs for size, most in zip(sizes, bounds, strict=True))


def _is_served(prepared: Prepared, longest: Prepared) -> bool:
    return (
        prepared.peak_bytes <= longest.peak_bytes
        and prepared.plan == longest.plan
        and prepared.step.schedule == longest.step.schedule
        and prepared.evaluation.schedule == longest.evaluation.schedule
    )


_SHAPES = 64
"""Shapes of batches that a job remembers its schedules for.

Of more, those that were used longest ago are planned again.
"""


def prepared_for(
    profile: Profile,
    plan: Plan,
    *,
    clips_norm: bool,
    has_lines: bool = False,
    adds_apart: bool | None = None,
    device: str = "cpu",
) -> Prepared:
    """Builds and checks the schedules of a plan for the batch that the profile is of, and predicts
    the step.

    Args:
        profile: of the batch.
        plan: cut into no more microbatches than the batch has rows.
        clips_norm: updates wait for the norm of all gradients.
        has_lines: the user's own loop makes the steps, and may accumulate.
        adds_apart: `Plan.adds_apart` of the job's own plan; None: this is it.
        device: as in `step.lower`.
    """

    def lowered(chosen: Schedule) -> Step:
        step = lower(chosen, plan, profile, adds_apart=adds_apart, device=device)
        check_step(step, clips_norm=clips_norm)
        return step

    step = lowered(build_step(plan, profile, clips_norm=clips_norm))
    timeline = predict(step)
    further: Timeline | None = None
    if has_lines:
        twice = replace(plan, microbatches=2, order=Order.MICROBATCH_MAJOR)
        found = accumulated(profile)
        schedule = build_step(twice, found, clips_norm=clips_norm)
        further = predict(lower(schedule, twice, found, adds_apart=adds_apart, device=device))
    return Prepared(
        plan=plan,
        profile=profile,
        rows=-(-profile.batch_rows // plan.microbatches),
        step=step,
        evaluation=forward_pass(plan, profile, plan.microbatches, within_bytes=timeline.peak_bytes, device=device),
        timeline=timeline,
        further=further,
        lower=lowered,
    )


def forward_pass(plan: Plan, profile: Profile, microbatches: int, *, within_bytes: int, device: str) -> Step:
    """Builds a forward-only pass that takes no more than a step does, if there is one.

    In a step the last calls' backward comes before the next microbatch's first blocks; here these
    are fetched while the last calls compute, whose logits may be the largest tensors of all. So
    fewer blocks are fetched ahead where the plan's number takes too much.

    Args:
        plan: of the job.
        profile: of a batch.
        microbatches: that run one after the other.
        within_bytes: predicted peak of the step.
        device: as in `step.lower`.
    """
    found: list[tuple[int, Step]] = []
    for prefetch in range(plan.prefetch, -1, -1):
        ahead = replace(plan, prefetch=prefetch)
        step = lower(build_forward(ahead, profile, microbatches), ahead, profile, device=device)
        found.append((predict(step).peak_bytes, step))
        if found[-1][0] <= within_bytes:
            break
    return min(found, key=lambda one: one[0])[1]


def prepare(
    setup: Setup, plan: Plan, batch: Any, *, adds_apart: bool, like: Profile | None = None, growth: float = 1.0
) -> Prepared:
    """Traces a batch and prepares it.

    Args:
        setup: of the job.
        plan: the job's.
        batch: with any number of rows: the last one of an epoch may have fewer than the plan has
            microbatches.
        adds_apart: of the job's plan.
        like: profile of the batch that the plan was decided for; None: of this one.
        growth: bound of the memory of this batch, relative to that one: taken where the batch
            cannot be traced ([Note: untraceable batches]).

    Raises:
        UnsupportedError: the plan would train another model on this batch.
    """
    problem = setup.problem
    cut = replace(plan, microbatches=problem.cut.most(batch, plan.microbatches))
    try:
        traced = problem.profile_for(cut, batch, checks_repeat=False, like=like)
    except MemfitError as error:
        if like is None or like.source != "real" or not _needs_room(error):
            raise
        traced = scaled(like, problem.cut.rows(batch), cut.microbatches, growth)
    if like is not None:
        cut = for_other_calls(cut, _sites(like), _sites(traced))
        if traced.keeps_order and not like.keeps_order:
            # Parts that the sample's did not foretell: they draw numbers, or use a weight again.
            cut = replace(cut, order=Order.MICROBATCH_MAJOR)
    check_meaning(cut, traced, is_committed=setup.run is not None)
    return prepared_for(
        traced,
        cut,
        clips_norm=setup.clips_norm,
        has_lines=setup.has_lines,
        adds_apart=adds_apart,
        device=setup.device,
    )


def _needs_room(error: MemfitError) -> bool:
    """True if a real step that would show a batch has no weights or no memory.

    [Note: untraceable batches] A step that reads values cannot be traced without data, and in
    mid-training a real step with everything on the device may have neither the weights, which rest
    elsewhere, nor the memory. A schedule names no sizes ([Note: buckets of lengths]), so the batch
    runs by the sample's. Its memory is bounded by the sample's: in proportion to rows, and by the
    square of what a row holds, as attention grows. Not modelled: values that route rows otherwise
    than the sample's did.
    """
    return isinstance(error, AwayError) or isinstance(error.__cause__, torch.OutOfMemoryError)


def growth_of(signature: Signature, sample: Signature) -> float:
    """Bound of a batch's memory relative to the sample's, at least 1. See `_needs_room`."""
    rows = max(1.0, signature.rows / sample.rows)
    sizes, bounds = ([math.prod(shape) / one.rows for shape, _ in one.tensors] for one in (signature, sample))
    if len(sizes) != len(bounds):
        sizes, bounds = [sum(sizes)], [sum(bounds)]
    return rows * max((1.0, *(size / max(bound, 1.0) for size, bound in zip(sizes, bounds, strict=True)))) ** 2


def for_other_calls(plan: Plan, sites: Sequence[str], others: Sequence[str]) -> Plan:
    """Returns the plan for a batch whose calls are others than those it was decided for, which it
    counts: text without images, say.

    A call has the policy of the call of the same module there, the first of them the first's, and
    keeps what it saves where there was none.

    Args:
        plan: decided.
        sites: of the calls that it was decided for.
        others: of the calls of the batch.
    """
    if sites == others:
        return plan
    policies: dict[str, list[CallPlan]] = {}
    for index, site in enumerate(sites):
        policies.setdefault(site, []).append(plan.call(index))
    calls: list[CallPlan] = []
    for index, site in enumerate(others):
        left = policies.get(site, [CallPlan()])
        call = left.pop(0) if len(left) > 1 else left[0]
        goes_on = bool(index) and call.joins_previous and calls[-1].saved is call.saved
        calls.append(call if goes_on else replace(call, joins_previous=False))
    tail = plan.tail
    if tail is not None:
        end = len(others) - (len(sites) - tail)
        tail = end if end >= 0 and others[end:] == sites[tail:] else None
    return replace(plan, calls=tuple(calls), tail=tail)


def _sites(profile: Profile) -> tuple[str, ...]:
    return tuple(call.site for call in next(iter(profile.traces.values())).calls)


def with_smaller(setup: Setup, sample: Any, cut: Plan, found: Profile) -> Profile:
    """Returns the profile with a trace of the smaller microbatches of a plan that is decided, which
    the search took from the sizes around them.
    """
    rows, more = divmod(found.batch_rows, cut.microbatches)
    is_known = not more or rows in found.traces or not found.rows_are_alike
    if is_known or found.source != "fake" or found.source_reason:
        return found
    traced = setup.problem.profile_for(cut, sample).traces
    return replace(found, traces={**found.traces, rows: traced[rows]}) if rows in traced else found


def excess_beside_device(setup: Setup, ready: Prepared) -> str | None:
    """Says what a step takes above the limit of a tier beside the device; None if nothing.

    On disk the store's room counts, and homes and activations beside it.
    """
    plan, found = ready.plan, ready.profile
    for tier, limit in setup.machine.limits.by_tier.items():
        if tier.traits.is_device:
            continue
        taken, store, less = ready.timeline.peak_in(tier), "", ""
        if tier is Tier.DISK and setup.run is not None:
            taken = disk_bytes_with_store(plan, found, taken, setup.run.scheme)
            store = f", {format_bytes(store_bytes(plan, found, setup.run.scheme))} of it claimed by the store"
            less = "" if setup.has_journal else ' (a run that is begun with scheme="journal" claims less)'
        if taken > limit:
            word = "host memory" if tier is Tier.HOST else tier
            return f"takes {format_bytes(taken)} of {word}{store}, above {tier}_limit of {format_bytes(limit)}{less}"
    return None


class PreparedShapes:
    """Schedules of the shapes of batches that came, under one plan.

    Args:
        planned: its own sample is prepared already.
        looking_away: context in which the job's hooks let the model run as it is.
    """

    def __init__(self, planned: Planned, looking_away: Callable[[], AbstractContextManager[None]]) -> None:
        self._planned = planned
        self._looking_away = looking_away
        self._known = {planned.signature: planned.prepared}
        self._modes = _modes(planned.setup.problem.model)
        self._hooks = hooks_of(planned.setup.problem.model)
        self._marks: tuple[object, ...] = ()

    @property
    def known(self) -> tuple[Prepared, ...]:
        """All that is prepared; the sample, at least."""
        return tuple(self._known.values()) or (self._planned.prepared,)

    def forget(self) -> None:
        """Forgets all shapes: what fits is another matter now."""
        self._known.clear()

    def note_program(self, marks: tuple[object, ...], check_hooks: Callable[[], None]) -> None:
        """Forgets all where modules are in other modes (`model.train()` after a frozen start), or
        hooks came or went: that is another program.

        Args:
            marks: of the model now (`user_hooks.marks_of`).
            check_hooks: raises where the plan does not bear the hooks that are there now. Asked
                again until it does not raise.
        """
        if marks == self._marks:
            return
        model = self._planned.setup.problem.model
        modes, hooks = _modes(model), hooks_of(model)
        if hooks != self._hooks:
            check_hooks()
        if (modes, hooks) != (self._modes, self._hooks):
            self._known.clear()
            self._modes, before = modes, self._hooks
            self._hooks = hooks
            tell_hooks(model, before, "a step was planned anew, as they were registered after fit", stacklevel=5)
        # Last: where the check raises, it is asked again.
        self._marks = marks

    def prepare(self, batch: Any) -> Prepared:
        """Returns what depends on the batch's shapes, planned for when they come.

        Raises:
            DoesNotFitError: the plan passes a limit with this batch.
        """
        prepared, excess = self.try_batch(batch)
        if excess is not None:
            advice = "cut it, or close the job and fit again with this batch as the sample"
            if not self._planned.setup.replans:
                advice += (
                    '; fit(store=..., on_breach="replan") looks for another plan by itself when such a batch comes'
                )
            raise DoesNotFitError(f"{excess}: {advice}")
        return prepared

    def try_batch(self, batch: Any) -> tuple[Prepared, str | None]:
        """As `prepare`. Returns in words what passes a limit, too; None if nothing does."""
        planned = self._planned
        signature = signature_of(batch, planned.setup.problem.cut, planned.plan.microbatches)
        if signature not in self._known:
            # The one that serves it is used, and so not forgotten.
            signature = serving(self._known, signature) or signature
        if signature in self._known:
            # the one that was used last stands last
            known = self._known[signature] = self._known.pop(signature)
            return known, None
        with self._looking_away():
            like = planned.prepared.profile
            growth = growth_of(signature, planned.signature)
            prepared = prepare(
                planned.setup, planned.plan, batch, adds_apart=planned.adds_apart, like=like, growth=growth
            )
        excess = self._excess(prepared)
        if excess is None:
            self._known[signature] = prepared
            if len(self._known) > _SHAPES:
                del self._known[next(iter(self._known))]
            return prepared, None
        shapes = [list(shape) for shape, _ in signature.tensors]
        return prepared, f"a batch of {signature.rows} rows with tensors {shapes} {excess}"

    def _excess(self, prepared: Prepared) -> str | None:
        setup, peak = self._planned.setup, prepared.peak_bytes
        left = setup.machine.hard_limit.room_bytes
        if setup.enforces and left is not None and peak > left:
            return f"would take {format_bytes(peak)} of tensors under the job's plan, and {format_bytes(max(0, left))} are left"
        return excess_beside_device(setup, prepared)


def _modes(model: nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in model.modules())
