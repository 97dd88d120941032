"""Chooses a plan: of all candidates whose predicted peaks fit, the fastest.

In: `Profile`, `Budget`, `Hardware`. Out: `PlanChoice`, or `DoesNotFitError` with the smallest limit
that would do. Deterministic: the same inputs give the same plan, whatever the clock says.

[Note: which candidates are built]
A schedule is built and predicted for each candidate that could still win, in the order of a lower
bound of its seconds (compute alone, or what must at least pass a link). The search ends when the
best that fits is no slower than the bound of the next. Weights, states and gradients that never
leave are a lower bound of a candidate's bytes: one that is over the budget by those alone is not
built. Seconds are compared as `core.numerics.weighed_seconds` weighs them: a plan that regroups
sums must be predicted to be a tenth faster than one that does not. Unless nothing fits: then the
smallest limit is looked for, in the order of a closer bound of the peak (`planning.bounds`), until
none that is left can be below the smallest found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from memfit.core.errors import DoesNotFitError, UsageError
from memfit.core.hardware import Hardware
from memfit.core.layout import Scheme
from memfit.core.limits import Budget
from memfit.core.numerics import Wish, regroups_sums, weighed_seconds
from memfit.core.plan import Plan
from memfit.core.precision import WITHOUT_MASTERS, ComputeDtype
from memfit.core.profile import Profile
from memfit.core.schedule import Schedule
from memfit.core.shape import describe_step
from memfit.core.tiers import Tier, is_processor
from memfit.core.timeline import Timeline
from memfit.core.units import format_bytes
from memfit.planning.bounds import PeakBounds, commit_seconds, compute_seconds, update_seconds
from memfit.planning.candidates import Candidate, MasterForms, list_candidates
from memfit.planning.refusals import Refusal
from memfit.prediction.bytes import peaks
from memfit.prediction.predict import Appraisal, appraise, predict
from memfit.prediction.residents import peak_report
from memfit.scheduling.build import build_forward, build_step
from memfit.scheduling.lower import lower
from memfit.scheduling.sizes import (
    STAGING_BYTES,
    disk_bytes_with_store,
    flat_weight_bytes,
    master_home_bytes,
    trace_of,
    update_traffic,
)


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
        least_s: what every candidate takes at least, whatever it holds.
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

    @property
    def weighed_s(self) -> float:
        """Its seconds as plans are compared by."""
        return weighed_seconds(self.timeline.seconds, regroups=self.regroups)


@dataclass(frozen=True, kw_only=True)
class _Priced:
    index: int
    candidate: Candidate
    profile: Profile
    seconds_bound: float
    bytes_bound: int
    regroups: bool

    @property
    def weighed_bound(self) -> float:
        """Its bound as seconds are compared by."""
        return weighed_seconds(self.seconds_bound, regroups=self.regroups)


@dataclass(frozen=True, kw_only=True)
class _Built:
    priced: _Priced
    cost: Appraisal
    fits: bool
    fits_elsewhere: bool

    @property
    def weighed_s(self) -> float:
        """Its seconds as plans are compared by."""
        return weighed_seconds(self.cost.seconds, regroups=self.priced.regroups)


@dataclass(frozen=True, kw_only=True)
class _Question:
    """The question to the planner, resolved."""

    budget: Budget
    hardware: Hardware
    clips_norm: bool
    limits: Mapping[Tier, int]
    scheme: Scheme | None
    staging_bytes: int
    masters: MasterForms
    compute: ComputeDtype | None
    like: Plan | None
    checked_rows: int
    numerics: Wish
    commits: float
    checks: dict[Any, int] = field(default_factory=dict[Any, int])

    def build(self, priced: _Priced) -> _Built:
        plan = priced.candidate.plan
        schedule = build_step(plan, priced.profile, clips_norm=self.clips_norm)
        step = lower(
            schedule,
            plan,
            priced.profile,
            staging_bytes=self.staging_bytes,
            commits=self.commits,
            device=self.hardware.device,
        )
        found = appraise(step, self.hardware)
        if plan.microbatches > 1 and self.checked_rows:
            found = _with_peak(found, Tier.DEVICE, max(found.peak_bytes, self._check_bytes(plan, priced.profile)))
        if self.scheme is not None:
            beside = found.peaks.get(Tier.DISK, 0)
            in_all = disk_bytes_with_store(plan, priced.profile, beside, self.scheme)
            found = _with_peak(found, Tier.DISK, in_all)
        elsewhere = all(_within(found.peaks.get(tier, 0), limit) for tier, limit in self.limits.items())
        return _Built(
            priced=priced,
            cost=found,
            fits=elsewhere and _within(found.peak_bytes, self.budget.tensor_bytes),
            fits_elsewhere=elsewhere,
        )

    def _check_bytes(self, plan: Plan, profile: Profile) -> int:
        key = (tuple(plan.blocks.items()), plan.prefetch, plan.splits_masters, plan.drops_masters)
        if key not in self.checks:
            self.checks[key] = bytes_of_check(
                plan, profile, self.checked_rows, staging_bytes=self.staging_bytes, device=self.hardware.device
            )
        return self.checks[key]


def bytes_of_check(
    plan: Plan, profile: Profile, rows: int, *, staging_bytes: int = STAGING_BYTES, device: str = "cpu"
) -> int:
    """Predicted device peak of so many rows (all, if the batch has fewer) that run forward whole,
    to show that the batch may be cut.

    Args:
        plan: with more than one microbatch.
        profile: with a trace of that many rows or more; the smallest such is taken.
        rows: that are checked.
        staging_bytes: as in `scheduling.lower`.
        device: likewise.
    """
    needed = min(rows, profile.batch_rows)
    sizes = {count: -(-profile.batch_rows // count) for count in range(1, profile.batch_rows + 1)}
    count = max(count for count, size in sizes.items() if size >= needed and size in profile.traces)
    schedule = build_forward(plan, profile, 1)
    step = lower(schedule, plan, profile, microbatches=count, staging_bytes=staging_bytes, device=device)
    return peaks(step)[Tier.DEVICE]


def choose_plan(
    profile: Profile,
    budget: Budget,
    hardware: Hardware,
    *,
    allow: Collection[str] = frozenset(),
    clips_norm: bool = False,
    compute: ComputeDtype | None = None,
    tiers: Collection[Tier] = (Tier.DISK,),
    splits_allowed: bool = True,
    like: Plan | None = None,
    limits: Mapping[Tier, int] = MappingProxyType({}),
    scheme: Scheme | None = None,
    staging_bytes: int = STAGING_BYTES,
    checked_rows: int = 0,
    numerics: Wish = "auto",
    commits: float = 0.0,
    decided: Mapping[str, Any] = MappingProxyType({}),
) -> PlanChoice:
    """Takes the fastest candidate whose predicted peaks fit.

    Args:
        profile: with traces of the microbatch sizes to consider; sizes without a trace are not
            candidates.
        budget: of the device; without a limit everything fits.
        hardware: speeds and capacities.
        allow: names of changes that the user permits: "bf16" permits plans with masters,
            "bf16-weights-sr" plans that do without, where the profile is of weights in bf16. Other
            names change nothing here.
        clips_norm: gradients are clipped by their global norm.
        compute: the dtype that the profile was made for; None: bf16 where it has masters, else as
            given.
        tiers: where homes may be beside the device, as far as the hardware has a link to it.
        splits_allowed: the loss adds up over microbatches.
        like: only plans whose masters rest as this one's do.
        limits: of tiers beside the device; one that is not named is limited by the hardware's
            capacity.
        scheme: of the store that the run is committed to, whose room counts as disk; with a journal
            only plans that go with it, and with `like`, see `planning.journaling`.
        staging_bytes: as in `scheduling.lower`.
        checked_rows: so many rows run forward whole before a batch is cut, to show that it may be;
            such a plan takes that too. 0: they do not.
        numerics: "exact": only plans that regroup no sums; "auto": others where they are the only
            ones that fit, or are a tenth faster.
        commits: to the store, a step: 1, or fewer where the durability is N steps.
        decided: fields of all plans, of which the profile was made: chunks of the loss, the format
            of states.

    Raises:
        DoesNotFitError: no candidate fits; `smallest_limit_bytes` is the smallest device limit that
            one would.
        UsageError: no microbatch size has a trace.
    """
    question = _Question(
        budget=budget,
        hardware=hardware,
        clips_norm=clips_norm,
        limits={tier: spec.nbytes for tier, spec in hardware.away.items()} | _away(limits),
        scheme=scheme,
        staging_bytes=staging_bytes,
        masters=MasterForms(kept="bf16" in allow or WITHOUT_MASTERS not in allow, dropped=WITHOUT_MASTERS in allow),
        compute=compute,
        like=like,
        checked_rows=checked_rows,
        numerics=numerics,
        commits=commits,
    )
    tiers = tuple(tier for tier in tiers if tier in hardware.away)
    may_split = splits_allowed and profile.may_split
    priced = _price_all(profile, question, tiers, may_split=may_split and numerics != "exact", decided=decided)
    if like is not None:
        priced = [p for p in priced if _masters(p.candidate.plan) == _masters(like)]
    if numerics == "exact":
        priced = [p for p in priced if not p.regroups]
    built, waiting = _search(priced, question)
    fitting = [b for b in built if b.fits]
    if not fitting:
        built += _search_leanest(waiting, built, question)
        raise _does_not_fit(built, question, tiers, may_split=may_split)
    best = min(fitting, key=lambda b: (b.weighed_s, b.priced.index))
    plan = best.priced.candidate.plan
    schedule = build_step(plan, profile, clips_norm=clips_norm)
    return PlanChoice(
        name=best.priced.candidate.name,
        plan=plan,
        schedule=schedule,
        timeline=predict(
            lower(schedule, plan, profile, staging_bytes=staging_bytes, commits=commits, device=hardware.device),
            hardware,
        ),
        front=_front(built, best),
        reason=_reason(built, best, budget),
        built=len(built),
        regroups=best.priced.regroups,
        unchanged_s=_unchanged_seconds(priced, built, waiting),
        least_s=min(p.seconds_bound for p in priced),
    )


def _unchanged_seconds(priced: list[_Priced], built: list[_Built], waiting: list[_Priced]) -> float | None:
    """Least seconds of a plan that regroups no sums: predicted of those that were built and fit,
    bounded of those that were too slow to be built.
    """
    out = {p.index for p in waiting} | {b.priced.index for b in built}
    seconds = [b.cost.seconds for b in built if b.fits and not b.priced.regroups]
    seconds += [p.seconds_bound for p in priced if p.index not in out and not p.regroups]
    return min(seconds, default=None)


def _masters(plan: Plan) -> tuple[bool, bool]:
    """How masters rest."""
    return plan.splits_masters, plan.drops_masters


def _price_all(
    profile: Profile, question: _Question, tiers: tuple[Tier, ...], *, may_split: bool, decided: Mapping[str, Any]
) -> list[_Priced]:
    priced: list[_Priced] = []
    may_update_on_host = not is_processor(question.hardware.device) and not profile.host_update_obstacle
    count = 1
    while count <= (max(1, profile.batch_rows) if may_split else 1):
        if -(-profile.batch_rows // count) in profile.traces:
            for candidate in list_candidates(
                profile,
                microbatches=count,
                tiers=tiers,
                clips_norm=question.clips_norm,
                masters=question.masters,
                compute=question.compute,
                has_journal=question.scheme == "journal",
                like=question.like,
                may_update_on_host=may_update_on_host,
            ):
                whole = replace(candidate, plan=replace(candidate.plan, **decided))
                priced.append(_price(len(priced), whole, profile, question))
        count *= 2
    if not priced:
        raise UsageError(f"none of the microbatch sizes has a trace; traced rows are {sorted(profile.traces)}")
    return priced


def _price(index: int, candidate: Candidate, profile: Profile, question: _Question) -> _Priced:
    """Lower bounds of seconds and device bytes. See [Note: which candidates are built]."""
    plan, hardware = candidate.plan, question.hardware
    shape = describe_step(plan, profile)
    trace = trace_of(profile, plan.microbatches)
    work_s = compute_seconds(trace, plan, shape, hardware)
    moved_s: dict[tuple[Tier, str], float] = {}
    resident, host_s = 0, 0.0
    for block, profiled in enumerate(profile.blocks):
        homes = plan.block(profiled.name)
        weight = flat_weight_bytes(profiled)
        resident += 0 if block in shape.visiting else weight
        if homes.state_home is Tier.DEVICE:
            resident += profile.resting_state_bytes(profiled.name) + master_home_bytes(plan, profiled)
        if homes.gradient_home is Tier.DEVICE and (question.clips_norm or block in shape.loose):
            resident += profiled.gradient_bytes
        if block in shape.visiting:
            _add(moved_s, hardware, homes.weight_home, "read", weight)
        if block in shape.trainable:
            on_device_s, on_host_s = update_seconds(plan, profile, block, hardware)
            work_s, host_s = work_s + on_device_s, host_s + on_host_s
            traffic = update_traffic(plan, profile, block, is_visiting=True, device=hardware.device)
            for (tier, _), nbytes in traffic.read.items():
                _add(moved_s, hardware, tier, "read", nbytes)
            for (tier, _), nbytes in traffic.written.items():
                _add(moved_s, hardware, tier, "write", nbytes)
    return _Priced(
        index=index,
        candidate=candidate,
        profile=profile,
        seconds_bound=max([work_s, host_s, *moved_s.values()])
        + commit_seconds(plan, profile, hardware, question.commits),
        bytes_bound=resident,
        regroups=regroups_sums(plan, profile),
    )


def _add(moved_s: dict[tuple[Tier, str], float], hardware: Hardware, tier: Tier, direction: str, nbytes: int) -> None:
    link = hardware.link(tier)
    speed = link.read_bytes_per_s if direction == "read" else link.write_bytes_per_s
    moved_s[tier, direction] = moved_s.get((tier, direction), 0.0) + nbytes / speed


def _search(priced: list[_Priced], question: _Question) -> tuple[list[_Built], list[_Priced]]:
    """Builds what could win; returns that, and what was not built because its residents alone are
    too much.
    """
    built: list[_Built] = []
    waiting: list[_Priced] = []
    best_s = math.inf
    for candidate in sorted(priced, key=lambda p: (p.weighed_bound, p.index)):
        # A bound may be a rounding above what it bounds.
        if best_s <= candidate.weighed_bound * (1 + 1e-9):
            break
        # The fastest of all is built in any case: what it would need is what a person asks first.
        if built and not _within(candidate.bytes_bound, question.budget.tensor_bytes):
            waiting.append(candidate)
            continue
        built.append(question.build(candidate))
        if built[-1].fits:
            best_s = min(best_s, built[-1].weighed_s)
    return built, waiting


def _search_leanest(waiting: list[_Priced], built: list[_Built], question: _Question) -> list[_Built]:
    """Nothing fits: builds what may have the smallest peak of all, in the order of a lower bound of
    it.
    """
    if not waiting:
        return []
    found: list[_Built] = []
    least = min((b.cost.peak_bytes for b in built if b.fits_elsewhere), default=math.inf)
    bounds = PeakBounds(waiting[0].profile, staging_bytes=question.staging_bytes, device=question.hardware.device)
    bounded = [(bounds.of(candidate.candidate.plan), candidate) for candidate in waiting]
    for bound, candidate in sorted(bounded, key=lambda one: (one[0], one[1].index)):
        if bound > least:
            break
        found.append(question.build(candidate))
        if found[-1].fits_elsewhere:
            least = min(least, found[-1].cost.peak_bytes)
    return found


def _front(built: list[_Built], best: _Built) -> tuple[ParetoPoint, ...]:
    points: list[ParetoPoint] = []
    least = math.inf
    for b in sorted(built, key=lambda b: (b.cost.seconds, b.cost.peak_bytes, b.priced.index)):
        if b.cost.peak_bytes < least or b is best:
            least = min(least, b.cost.peak_bytes)
            points.append(_point(b))
    return tuple(points)


def _point(built: _Built) -> ParetoPoint:
    return ParetoPoint(
        name=built.priced.candidate.name,
        peak_bytes=built.cost.peak_bytes,
        seconds=built.cost.seconds,
        fits=built.fits,
    )


def _reason(built: list[_Built], best: _Built, budget: Budget) -> str:
    peak, seconds = best.cost.peak_bytes, best.cost.seconds
    room = "no limit" if budget.tensor_bytes is None else f"{format_bytes(budget.tensor_bytes)} for tensors"
    text = (
        f"{best.priced.candidate.name}: predicted {format_bytes(peak)} of {room}, {seconds:.3g} s a step; "
        f"the fastest of the plans that fit ({len(built)} built)."
    )
    if any(b.fits and b.cost.seconds < seconds for b in built):
        text = text.replace("the fastest of the plans that fit", "the fastest of the plans that fit and add up alike")
    faster = [b for b in built if not b.fits and b.cost.seconds < seconds]
    if faster:
        next_up = min(faster, key=lambda b: (b.cost.peak_bytes, b.priced.index))
        more = next_up.cost.peak_bytes - (budget.tensor_bytes or 0)
        if more > 0:
            text += (
                f" With {format_bytes(more)} more it would be {next_up.priced.candidate.name}, "
                f"{next_up.cost.seconds:.3g} s."
            )
    return text


def _does_not_fit(
    built: list[_Built], question: _Question, tiers: tuple[Tier, ...], *, may_split: bool
) -> DoesNotFitError:
    possible = [b for b in built if b.fits_elsewhere]
    if not possible:
        away = tuple(question.limits)
        leanest = min(built, key=lambda b: (sum(b.cost.peaks.get(tier, 0) for tier in away), b.priced.index))
        taken = [f"{format_bytes(leanest.cost.peaks.get(tier, 0))} of {_word(tier)}" for tier in away]
        return DoesNotFitError(
            f"no plan fits {' and '.join(map(_word, away))}: the leanest there would take {' and '.join(taken)}; raise those limits or free space"
        )
    leanest = min(possible, key=lambda b: (b.cost.peak_bytes, b.priced.index))
    advice = ["shorter sequences or smaller images"]
    kind = ""
    if question.numerics == "exact":
        kind = " that is bitwise plain PyTorch (numerics='exact')"
        advice.insert(0, "numerics='auto', which may regroup sums")
    elif not may_split:
        advice.insert(0, "a loss and a model that allow the batch to be split, or fewer rows")
    if len(possible) < len(built):
        advice.insert(0, "more host memory or disk")
    if Tier.DISK not in tiers:
        advice.insert(0, "the disk as a tier")
    plan, profile = leanest.priced.candidate.plan, leanest.priced.profile
    schedule = build_step(plan, profile, clips_norm=question.clips_norm)
    step = lower(
        schedule,
        plan,
        profile,
        staging_bytes=question.staging_bytes,
        device=question.hardware.device,
        is_itemized=True,
    )
    report = peak_report(step, rows=6)
    checked = leanest.cost.peak_bytes - peaks(step)[Tier.DEVICE]
    if checked > 0:
        report += f"\n{format_bytes(leanest.cost.peak_bytes)} where {question.checked_rows} rows run whole, to show that the batch may be cut"
    return Refusal(
        budget=question.budget,
        peak_bytes=leanest.cost.peak_bytes,
        plan=leanest.priced.candidate.name,
        report=report,
        advice=tuple(advice),
        kind=kind,
    ).error()


def _with_peak(cost: Appraisal, tier: Tier, nbytes: int) -> Appraisal:
    return replace(cost, peaks={**cost.peaks, tier: nbytes})


def _away(limits: Mapping[Tier, int]) -> dict[Tier, int]:
    return {tier: limit for tier, limit in limits.items() if not tier.traits.is_device}


def _word(tier: Tier) -> str:
    return "host memory" if tier is Tier.HOST else str(tier)


def _within(nbytes: int, limit: int | None) -> bool:
    return limit is None or nbytes <= limit
