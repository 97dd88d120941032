"""Chooses a plan: of all candidates whose predicted peaks fit, the fastest.

In: `Profile`, `Budget`, `Hardware`. Out: `PlanChoice`, or `DoesNotFitError` with the smallest limit
that would do. Deterministic: the same inputs give the same plan, whatever the clock says.

[Note: which candidates are built] A schedule is built and predicted for each candidate that could
still win, in the order of a lower bound of its seconds (compute alone, or what must at least pass a
link). The search ends when the best that fits is no slower than the bound of the next. Weights,
states and gradients that never leave are a lower bound of a candidate's bytes: one that is over the
budget by those alone is not built. Seconds are compared as `core.numerics.weighed_seconds` weighs
them: a plan that regroups sums must be predicted to be a tenth faster than one that does not.
Unless nothing fits: then the smallest limit is looked for, in the order of a closer bound of the
peak (`planner.search.bounds`), until none that is left can be below the smallest found. Where no
mixtures are looked for, plans between two uniform ones are (`planner.search.uniform_search`).

[Note: a further permission is never slower] Which mixed plans are looked for follows from the
uniform ones that are known. Were those of a further permission among them, others would be looked
for, and what was found without it might be missed. So plans of each permission are looked for by
themselves, and the fastest of all is taken. Dtypes, chunks of the loss and formats are questions of
their own already (`planner.choosing`), and one is left out only where a bound says that it cannot
win.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count as counter
from types import MappingProxyType
from typing import Any

from memfit.core.errors import DoesNotFitError, UsageError
from memfit.core.hardware import Hardware
from memfit.core.layout import Scheme
from memfit.core.limits import Budget, format_bytes
from memfit.core.numerics import Wish
from memfit.core.plan import Plan
from memfit.core.process_state import without_collections
from memfit.core.profile import Profile
from memfit.core.storage_formats import WITHOUT_MASTERS, ComputeDtype
from memfit.core.tiers import Tier, is_processor
from memfit.planner.search.candidates import MasterForms
from memfit.planner.search.classics import CLASSICS, check_classic
from memfit.planner.search.plan_choice import ClassicPoint, PlanChoice, give_reason, pareto_front
from memfit.planner.search.pricing import (
    BASE_VARIATION_BYTES,
    BuiltCandidate,
    PlanCosts,
    PlanQuestion,
    PricedCandidate,
    Refusal,
    decisions_apart_from,
    price_all,
)
from memfit.planner.search.uniform_search import UNIFORM_PATIENCE, UniformSearch, may_be_between, search_between
from memfit.planner.search.widening import MixedPlans, mixes, search_mixed
from memfit.step.bytes import peak_report, peaks
from memfit.step.predict import predict
from memfit.step.segment_facts import KnownFacts
from memfit.step.sizes import disk_staging_bytes, home_bytes

# Mixed plans are looked for in a way to compute whose best uniform plan takes at most so many times
# what the best of other ways takes: they were at most twice as fast, and mostly a fifth.
_MAY_STILL_WIN = 1.3
# Where nothing fits, the smallest limit that would is looked for among mixed plans in steps of 3 %.
_BELOW = 0.97
# Where the processor is the device, the search is held to the job's limit: effects that it keeps of
# plans, some 10 MiB.
_MOST_EFFECTS = 16_384
# Where no uniform plan fits beside the device, from so many times what any takes of it at least.
_FROM_ABOVE = 4


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
    staging_bytes: int | None = None,
    checked_rows: int = 0,
    numerics: Wish = "auto",
    commits: float = 0.0,
    decided: Mapping[str, Any] = MappingProxyType({}),
    classic: str | None = None,
    others_s: float = math.inf,
    more_bytes: int | None = None,
    compares: bool = False,
    costs: PlanCosts | None = None,
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
            only plans that go with it, and with `like`, see `planner.search.candidates`.
        staging_bytes: as in `step.lower`.
        checked_rows: so many rows run forward whole before a batch is cut, to show that it may be;
            such a plan takes that too. 0: they do not.
        numerics: "exact": only plans that regroup no sums; "auto": others where they are the only
            ones that fit, or are a tenth faster.
        commits: to the store, a step: 1, or fewer where the durability is N steps.
        decided: fields of all plans, of which the profile was made: chunks of the loss, the format
            of states.
        classic: name of the only technique that is looked at (`planner.search.classics`).
        others_s: seconds, as plans are compared by, of the best plan of another way to compute:
            mixed plans are looked for (`planner.search.widening`) where they may still be faster;
            0: they are not.
        more_bytes: of the device, for `PlanChoice.roomier_s`.
        compares: every technique is predicted, for people (`PlanChoice.classics`).
        costs: of plans of this profile, from questions before; they are added to.

    Raises:
        DoesNotFitError: no candidate fits; `smallest_limit_bytes` is the smallest device limit that
            one would.
        UsageError: no microbatch size has a trace; a technique that needs what the machine does not
            have, or that goes with nothing else that is asked for.
    """
    question = PlanQuestion(
        profile=profile,
        budget=budget,
        hardware=hardware,
        clips_norm=clips_norm,
        tiers=tuple(tier for tier in tiers if tier in hardware.away),
        may_split=splits_allowed and profile.may_split,
        limits={tier: spec.nbytes for tier, spec in hardware.away.items()} | _away(limits),
        scheme=scheme,
        staging_bytes=disk_staging_bytes(hardware.device) if staging_bytes is None else staging_bytes,
        masters=MasterForms(kept="bf16" in allow or WITHOUT_MASTERS not in allow, dropped=WITHOUT_MASTERS in allow),
        compute=compute,
        like=like,
        checked_rows=checked_rows,
        numerics=numerics,
        commits=commits,
        decided=decided,
        classic=classic,
        known=KnownFacts(_MOST_EFFECTS if is_processor(hardware.device) else math.inf),
    )
    if classic is not None:
        if scheme == "journal":
            raise UsageError(
                f"plan={classic!r} says where everything rests, and so does a journal: leave scheme='journal' out, or the technique"
            )
        check_classic(classic, profile, hardware, question.tiers)
    if costs is not None and not mixes(question):
        conditions = hardware, clips_norm, question.staging_bytes, commits, checked_rows, scheme
        question = replace(question, costs=costs.under(conditions))
    others_s = 0.0 if classic is not None else others_s
    return _answer(question, others_s=others_s, more_bytes=more_bytes, compares=compares)


def _answer(question: PlanQuestion, *, others_s: float, more_bytes: int | None, compares: bool) -> PlanChoice:
    priced = price_all(question)
    if question.like is not None:
        priced = [p for p in priced if _masters(p.candidate.plan) == _masters(question.like)]
    priced = [p for p in priced if question.allows(p)]
    if not priced:
        raise UsageError(_why_none(question))
    least_s = min(p.seconds_bound for p in priced)
    is_mixing = bool(others_s) and mixes(question)
    groups = _by_permission(priced) if is_mixing else [priced]
    searches = [UniformSearch(group, question) for group in groups]
    mixed: list[MixedPlans] = []
    indices = counter(len(priced))
    for search, group in zip(searches, groups, strict=True) if is_mixing else ():
        # Mixed plans are mostly faster: once they are known, most uniform ones need not be built.
        search.run(patience=UNIFORM_PATIENCE)
        fitting = [b.cost.seconds for b in search.built if b.fits]
        # Also where nothing fits: states, say, may be too many for each tier, and not for all.
        if min(p.seconds_bound for p in group) < min([_MAY_STILL_WIN * others_s, *fitting]):
            with without_collections():
                mixed.append(search_mixed(search, question, indices, others_s=others_s, more_bytes=more_bytes))
    built = [b for found in mixed for b in found.built]
    bound_s = min((found.bound_s for found in mixed if found.bound_s is not None), default=None)
    roomier = [found.roomier_s for found in mixed]
    roomier_s = min((s for s in roomier if s is not None), default=None) if None not in roomier else None
    count = sum(found.count for found in mixed) - len(built)
    for search in searches:
        found_s = min(
            (b.weighed_s for b in [*built, *(b for s in searches for b in s.built)] if b.fits), default=math.inf
        )
        search.run(best_s=found_s)
    uniform = [b for search in searches for b in search.built]
    if not mixes(question) and may_be_between(question):
        built += search_between(priced, uniform, question, indices)
    built = uniform + built
    waiting = [p for search in searches for p in search.waiting]
    crowded = [p for search in searches for p in search.crowded]
    fitting = [b for b in built if b.fits]
    if not fitting:
        built += _search_leanest(waiting, built, question)
        smallest = _smallest_of_mixed(searches, built, question, indices) if is_mixing else None
        if smallest is None and not any(b.fits_elsewhere for b in built):
            built += _search_leanest_beside(crowded, question)
        raise _does_not_fit(built, question, smallest, is_of_uniform=mixes(question) and not is_mixing)
    best = min(fitting, key=lambda b: (b.weighed_s, b.priced.index))
    step = question.lower(best.priced.candidate.plan)
    return PlanChoice(
        name=best.priced.candidate.name,
        plan=best.priced.candidate.plan,
        schedule=step.schedule,
        timeline=predict(step, question.hardware),
        front=pareto_front(built, best),
        reason=give_reason(built, best, question.budget, bound_s, count) + _order_told(best, question.profile),
        built=len(built) + count,
        regroups=best.priced.regroups,
        unchanged_s=_unchanged_seconds(priced, built, [*waiting, *crowded]),
        least_s=least_s,
        bound_s=bound_s,
        roomier_s=roomier_s,
        # Of a plan that another one beats, nobody reads.
        classics=_compared(priced, built, question) if compares and best.weighed_s < (others_s or math.inf) else (),
    )


def _why_none(question: PlanQuestion) -> str:
    """Says why none of the plans that are listed may be taken."""
    asked = f"plan={question.classic!r}" if question.classic is not None else "what is asked for"
    if question.numerics == "exact":
        return (
            f"{asked} regroups sums, or updates on the host otherwise than on the device, and numerics='exact' permits bitwise plain PyTorch only: "
            "leave one of the two out"
        )
    return f"{asked} keeps masters otherwise than the run that goes on: leave it out"


def _by_permission(priced: list[PricedCandidate]) -> list[list[PricedCandidate]]:
    """Groups candidates by what a user must have allowed for them inside of one question.

    See [Note: a further permission is never slower].
    """
    groups = [[p for p in priced if p.candidate.plan.drops_masters is dropped] for dropped in (False, True)]
    return [group for group in groups if group]


def _compared(
    priced: list[PricedCandidate], built: list[BuiltCandidate], question: PlanQuestion
) -> tuple[ClassicPoint, ...]:
    """Predicts every technique: with the number of microbatches with which it is fastest and fits,
    or else leanest.
    """
    known = {b.priced.index: b for b in built}
    points: list[ClassicPoint] = []
    for name, classic in CLASSICS.items():
        mine = [p for p in priced if p.candidate.classic == name]
        found = [known.get(p.index) or question.build(p) for p in mine]
        if not found:
            continue
        taken = min(found, key=lambda b: (not b.fits, b.weighed_s if b.fits else b.cost.peak_bytes, b.priced.index))
        points.append(
            ClassicPoint(
                name=name,
                says=classic.says,
                source=classic.source,
                microbatches=taken.priced.candidate.plan.microbatches,
                peak_bytes=taken.cost.peak_bytes,
                seconds=taken.cost.seconds,
                fits=taken.fits,
            )
        )
    return tuple(points)


def _order_told(best: BuiltCandidate, profile: Profile) -> str:
    """Says why microbatches run one after the other, where what a forward keeps forbids turns."""
    if best.priced.candidate.plan.microbatches == 1 or not profile.carried:
        return ""
    return f" Microbatches run one after the other: a forward changes {profile.carried[0]!r}, which the next one meets."


def _unchanged_seconds(
    priced: list[PricedCandidate], built: list[BuiltCandidate], waiting: list[PricedCandidate]
) -> float | None:
    """Least seconds of a plan that regroups no sums: predicted of those that were built and fit,
    bounded of those that were too slow to be built.
    """
    out = {p.index for p in waiting} | {b.priced.index for b in built}
    seconds = [b.cost.seconds for b in built if b.fits and not b.priced.regroups]
    seconds += [p.seconds_bound for p in priced if p.index not in out and not p.regroups]
    return min(seconds, default=None)


def _masters(plan: Plan) -> tuple[bool, bool]:
    """Returns how masters rest: (split, dropped)."""
    return plan.splits_masters, plan.drops_masters


def _search_leanest(
    waiting: list[PricedCandidate], built: list[BuiltCandidate], question: PlanQuestion
) -> list[BuiltCandidate]:
    """Builds, where nothing fits, what may have the smallest peak of all, in the order of a lower
    bound of it. Where the limit is of a process, what may save less than equal processes differ by
    is not: a plan of few MiB less in many microbatches takes more than that to be built.
    """
    if not waiting:
        return []
    found: list[BuiltCandidate] = []
    least = min((b.cost.peak_bytes for b in built if b.fits_elsewhere), default=math.inf)
    # Of plans that differ in buffers alone, the one with the fewest holds least.
    fewest: dict[Any, PricedCandidate] = {}
    for candidate in sorted(waiting, key=lambda one: (one.candidate.plan.prefetch, one.index)):
        plan = candidate.candidate.plan
        others = decisions_apart_from(plan, "prefetch", "blocks")
        fewest.setdefault((question.known.homes_of(plan), others), candidate)
    bounded = [(question.peak_bounds.of(candidate.candidate.plan), candidate) for candidate in fewest.values()]
    # On a device beside the process nothing but others' tensors is in the base.
    is_process = question.budget.base_bytes > question.budget.others_bytes
    little = BASE_VARIATION_BYTES if is_process else 0

    def order(one: tuple[int, PricedCandidate]) -> tuple[int, int, int]:
        microbatches = one[1].candidate.plan.microbatches if is_process else 0
        return one[0] // max(1, little), microbatches, one[1].index

    for bound, candidate in sorted(bounded, key=order):
        if bound + little > least:
            continue
        found.append(question.build(candidate))
        if found[-1].fits_elsewhere:
            least = min(least, found[-1].cost.peak_bytes)
    return found


def _smallest_of_mixed(
    searches: Sequence[UniformSearch], built: list[BuiltCandidate], question: PlanQuestion, indices: Iterator[int]
) -> tuple[int, BuiltCandidate] | None:
    """Looks for mixed plans, where nothing fits, at limits each 3 % below the one before, by
    halves.

    Returns:
        Bytes of tensors at which a search finds a plan, where it finds none at 3 % less of the
        whole limit, and the leanest plan that is found there; None where no mixed plan does with
        less than the leanest of those that were built.
    """
    asked, budget = question.budget.tensor_bytes, question.budget
    bound = min(search.least_peak_bytes for search in searches)
    assert asked is not None, "asked of a question with a limit"
    beside = budget.base_bytes + budget.reserve_bytes
    known = min((b.cost.peak_bytes for b in built if b.fits_elsewhere and question.allows(b.priced)), default=None)
    # What rests beside the device may be too much for all layers alike, and not for some.
    top = _FROM_ABOVE * bound if known is None else known
    found: dict[int, BuiltCandidate | None] = {}

    def limit(number: int) -> int:
        return int((top + beside) * _BELOW**number) - beside

    def works(number: int) -> bool:
        # A search goes as far as its limit, so that each limit has one of its own: what is named is
        # what a search of that very limit finds.
        if number not in found:
            leaner: list[BuiltCandidate] = []
            for search in searches if limit(number) > asked else ():
                leaner += search_mixed(search, question.within(limit(number)), indices).built
            fitting = [b for b in leaner if b.fits_elsewhere and b.cost.peak_bytes <= limit(number)]
            found[number] = min(fitting, key=lambda b: (b.cost.peak_bytes, b.priced.index), default=None)
        return found[number] is not None

    if known is None and not works(0):
        return None
    most = next(number for number in counter() if limit(number) <= max(asked, bound // 2))
    number = bisect.bisect_left(range(1, most + 1), 1, key=lambda n: int(not works(n)))
    leanest = found.get(number)
    return None if leanest is None else (limit(number), leanest)


def _search_leanest_beside(crowded: list[PricedCandidate], question: PlanQuestion) -> list[BuiltCandidate]:
    """Builds, where nothing fits beside the device, what rests there with the fewest bytes."""

    def beside(priced: PricedCandidate) -> tuple[int, int]:
        plan = priced.candidate.plan
        return sum(home_bytes(plan, question.profile, tier) for tier in question.limits), priced.index

    return [question.build(min(crowded, key=beside))] if crowded else []


def _does_not_fit(
    built: list[BuiltCandidate],
    question: PlanQuestion,
    smallest: tuple[int, BuiltCandidate] | None,
    *,
    is_of_uniform: bool,
) -> DoesNotFitError:
    """Makes the refusal.

    Args:
        built: that do not fit.
        question: that they do not answer.
        smallest: see `_smallest_of_mixed`.
        is_of_uniform: mixed plans were not looked for.
    """
    possible = [b for b in built if b.fits_elsewhere]
    if smallest is None and not possible:
        away = tuple(question.limits)
        leanest = min(built, key=lambda b: (sum(b.cost.peaks.get(tier, 0) for tier in away), b.priced.index))
        taken = [f"{format_bytes(leanest.cost.peaks.get(tier, 0))} of {_word(tier)}" for tier in away]
        return DoesNotFitError(
            f"no plan fits {' and '.join(map(_word, away))}: the leanest there would take {' and '.join(taken)}; raise those limits or free space"
        )
    if smallest is None:
        leanest = min(possible, key=lambda b: (b.cost.peak_bytes, b.priced.index))
        peak_bytes = leanest.cost.peak_bytes
    else:
        peak_bytes, leanest = smallest
    advice = ["shorter sequences or smaller images"]
    kind = ""
    if question.classic is not None:
        kind = f" of the technique {question.classic!r}"
        advice.insert(0, "no plan, so that the fastest that fits is chosen")
    if question.numerics == "exact":
        kind += " that is bitwise plain PyTorch (numerics='exact')"
        advice.insert(0, "numerics='auto', which may regroup sums")
    elif not question.may_split:
        advice.insert(0, "a loss and a model that allow the batch to be split, or fewer rows")
    if len(possible) < len(built):
        advice.insert(0, "more host memory or disk")
    if Tier.DISK not in question.tiers:
        advice.insert(0, "the disk as a tier")
    step = question.lower(leanest.priced.candidate.plan, is_itemized=True)
    report = peak_report(step, rows=6)
    checked = leanest.cost.peak_bytes - peaks(step)[Tier.DEVICE]
    if checked > 0:
        report += f"\n{format_bytes(leanest.cost.peak_bytes)} where {question.checked_rows} rows run whole, to show that the batch may be cut"
    return Refusal(
        budget=question.budget,
        peak_bytes=peak_bytes,
        plan=leanest.priced.candidate.name,
        report=report,
        advice=tuple(advice),
        kind=kind,
        is_of_uniform=is_of_uniform and question.classic is None,
    ).error()


def _away(limits: Mapping[Tier, int]) -> dict[Tier, int]:
    return {tier: limit for tier, limit in limits.items() if not tier.traits.is_device}


def _word(tier: Tier) -> str:
    return "host memory" if tier is Tier.HOST else str(tier)
