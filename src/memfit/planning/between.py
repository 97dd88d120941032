"""Plans between two uniform ones: some calls keep what the faster one keeps, the others do what the
leaner one does.

In: uniform candidates, those that were built. Out: plans that were built between them.

[Note: between uniform plans]
Uniform plans are far apart: on a processor, say, a model of equal layers keeps all that they save,
keeps results of products, or recomputes, and a limit between two of these peaks leaves the
difference unused. So for each pair of candidates that differ in the policies of calls only, of
which the leaner one fits and the faster one does not, the number of calls that have the faster
one's policy is halved down to the largest that fits: the last calls of the forward, whose saved
tensors backward gives up first, before it makes those of the others again. That takes the logarithm
of the number of calls in built plans, and no solver, so that it is done where mixed plans
(`planning.widening`) are not looked for. What cannot be faster than the best plan known, by a bound
of seconds, or cannot fit, by one of bytes, is not built, and of a pair of which nothing else is
left nothing is: what lies between them with a smaller limit lies there with a larger one too,
unless something faster is known, so that more room is never slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from memfit.core.plan import CallPlan, Plan
from memfit.planning.bounds import PeakBounds
from memfit.planning.candidates import Candidate
from memfit.planning.mixed_units import joined_to
from memfit.planning.pricing import BuiltCandidate, PlanQuestion, PricedCandidate, is_within, price


def may_be_between(question: PlanQuestion) -> bool:
    """Tells whether plans between uniform ones are among the answers to a question."""
    is_free = question.classic is None and question.scheme != "journal"
    return is_free and question.budget.tensor_bytes is not None


def search_between(
    priced: Sequence[PricedCandidate], built: Sequence[BuiltCandidate], question: PlanQuestion, indices: Iterator[int]
) -> list[BuiltCandidate]:
    """Builds plans between two uniform ones. See [Note: between uniform plans].

    Args:
        priced: uniform candidates.
        built: those of them that were built.
        question: that they answer.
        indices: numbers plans behind the listed ones.
    """
    known = {one.priced.index: one for one in built}
    bounds = PeakBounds(
        question.profile,
        staging_bytes=question.staging_bytes,
        device=question.hardware.device,
        known=question.known,
    )

    def fits(one: PricedCandidate) -> bool:
        if one.index not in known:
            if not _may_fit(one.candidate.plan, question, bounds):
                return False
            known[one.index] = question.build(one)
        return known[one.index].fits

    best_s = min((one.weighed_s for one in built if one.fits), default=math.inf)
    groups: dict[Any, list[PricedCandidate]] = {}
    for one in priced:
        groups.setdefault(_apart_from_policies(one.candidate.plan), []).append(one)
    pairs = [
        (fast, lean)
        for group in groups.values()
        for fast in group
        for lean in group
        if fast.weighed_bound < lean.weighed_bound
    ]
    found: list[BuiltCandidate] = []
    for fast, lean in sorted(pairs, key=lambda pair: (pair[0].weighed_bound, pair[1].weighed_bound, pair[1].index)):
        if fast.weighed_bound >= best_s:
            break
        pair = _Pair(fast, lean, question, bounds)
        if not pair.narrow(best_s) or fits(fast) or not fits(lean):
            continue
        while pair.narrow(best_s):
            found.append(pair.build(next(indices)))
            if found[-1].fits:
                best_s = min(best_s, found[-1].weighed_s)
    return found


def _may_fit(plan: Plan, question: PlanQuestion, bounds: PeakBounds) -> bool:
    return is_within(bounds.of(plan), question.budget.tensor_bytes)


class _Pair:
    """Looks for the largest number of calls that have the faster policy and fit, by halves.

    Args:
        fast, lean: candidates that differ in policies of calls.
        question: that they answer.
        bounds: of peaks.
    """

    def __init__(
        self, fast: PricedCandidate, lean: PricedCandidate, question: PlanQuestion, bounds: PeakBounds
    ) -> None:
        self._fast, self._lean, self._question, self._bounds = fast, lean, question, bounds
        self._calls = list(zip_longest(lean.candidate.plan.calls, fast.candidate.plan.calls, fillvalue=CallPlan()))
        self._apart = [index for index, (one, other) in enumerate(self._calls) if one != other]
        # The most that fits or is too slow, and the least that is known not to fit.
        self._most: int = 0
        self._too_many: int = len(self._apart)
        self._bounds_s: dict[int, float] = {}

    def narrow(self, best_s: float) -> bool:
        """Leaves out numbers that cannot be faster than the best plan, or whose middle cannot fit;
        tells whether any is left.
        """
        while self._most + 1 < self._too_many:
            left = range(self._most + 1, self._too_many)
            least = next((count for count in left if self._bound_s(count) < best_s), None)
            if least is None:
                return False
            self._most = least - 1
            if _may_fit(self._plan(self._middle), self._question, self._bounds):
                return True
            self._too_many = self._middle
        return False

    @property
    def _middle(self) -> int:
        return (self._most + self._too_many) // 2

    def build(self, index: int) -> BuiltCandidate:
        """Builds the plan in the middle of those that are left."""
        count = self._middle
        saved = self._calls[self._apart[-1]][1].saved
        name = f"{self._lean.candidate.name}; {saved} in the last {count} of {len(self._apart)} calls"
        found = self._question.build(price(index, Candidate(name=name, plan=self._plan(count)), self._question))
        self._most, self._too_many = (count, self._too_many) if found.fits else (self._most, count)
        return found

    def _bound_s(self, count: int) -> float:
        if count not in self._bounds_s:
            candidate = Candidate(name="", plan=self._plan(count))
            self._bounds_s[count] = price(0, candidate, self._question).weighed_bound
        return self._bounds_s[count]

    def _plan(self, count: int) -> Plan:
        last = set(self._apart[-count:])
        taken: list[CallPlan] = []
        for index, (one, other) in enumerate(self._calls):
            call = other if index in last else one
            taken.append(joined_to(taken[-1] if taken else CallPlan(), call))
        return replace(self._lean.candidate.plan, calls=tuple(taken))


def _apart_from_policies(plan: Plan) -> tuple[Any, ...]:
    """Returns all decisions of a plan but the policies of its calls."""
    others = (getattr(plan, field.name) for field in fields(plan) if field.name not in ("calls", "blocks"))
    return (*others, *plan.blocks.items())
