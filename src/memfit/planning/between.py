"""Plans between two uniform ones: some calls keep what the faster one keeps, the others do what the
leaner one does.

In: uniform candidates, those that were built. Out: plans that were built between them.

[Note: between uniform plans]
Uniform plans are far apart: on a processor, say, a model of equal layers keeps all that they save,
keeps results of products, or recomputes, and a limit between two of these peaks leaves the
difference unused. So for each pair of candidates that differ in the policies of calls only, of
which the leaner one fits, the number of calls that have the faster one's policy is halved down to
the largest that fits: the last calls of the forward, whose saved tensors backward gives up first,
before it makes those of the others again. That takes the logarithm of the number of calls in built
plans, and no solver, so that it is done where mixed plans (`planning.widening`) are not looked for.
Of few calls smaller numbers follow, where they may be faster: what is offloaded to a slow disk,
say, is waited for from some number on. What cannot be faster than the best plan known, by a bound
of seconds, or cannot fit, by one of bytes, is not built: what lies between two plans with a smaller
limit lies there with a larger one too, unless something faster is known, so that more room is not
slower. (Of many calls it may be, where fewer of the faster policy would be faster: seconds that are
waited for are in no bound, and of hundreds of numbers some are asked for theirs.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from memfit.core.plan import CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.planning.candidates import Candidate
from memfit.planning.mixed_units import joined_to
from memfit.planning.plan_costs import decisions_apart_from
from memfit.planning.pricing import BuiltCandidate, PlanQuestion, PricedCandidate, is_within, price

# Of so few calls in which a pair differs, smaller numbers are tried as well.
_FEW_CALLS = 8
# So many numbers, evenly spread, and the largest are asked for a bound of seconds before one is
# built.
_MOST_BOUNDS = 16


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
    found: list[BuiltCandidate] = []

    def fits(one: PricedCandidate) -> bool:
        if one.index not in known:
            if not _may_fit(one.candidate.plan, question):
                return False
            known[one.index] = question.build(one)
            found.append(known[one.index])
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
    policies: dict[Any, _Policies] = {}
    for fast, lean in sorted(pairs, key=lambda pair: (pair[0].weighed_bound, pair[1].weighed_bound, pair[1].index)):
        if fast.weighed_bound >= best_s:
            break
        calls = fast.candidate.plan.calls, lean.candidate.plan.calls
        if calls not in policies:
            policies[calls] = _Policies(*calls)
        pair = _Pair(fast, lean, policies[calls], question)
        # Of a leaner plan a bound of bytes is mostly known already, of those between it is not.
        if not _may_fit(lean.candidate.plan, question) or pair.next(best_s) is None or not fits(lean):
            continue
        if fits(fast):
            pair.take_all()
        while (count := pair.next(best_s)) is not None:
            found.append(pair.build(count, next(indices)))
            best_s = min([best_s, *(one.weighed_s for one in found[-1:] if one.fits)])
    return found


def _may_fit(plan: Plan, question: PlanQuestion) -> bool:
    return is_within(question.peak_bounds.of(plan), question.budget.tensor_bytes)


class _Policies:
    """Calls' policies between those of two plans: of the faster one in the last calls of those in
    which they differ. Pairs of plans that differ in homes alone share them.

    Args:
        fast, lean: policies of calls.
    """

    def __init__(self, fast: Sequence[CallPlan], lean: Sequence[CallPlan]) -> None:
        self._calls = list(zip_longest(lean, fast, fillvalue=CallPlan()))
        self._apart = [index for index, (one, other) in enumerate(self._calls) if one != other]
        self._between: dict[int, tuple[CallPlan, ...]] = {}

    @property
    def count(self) -> int:
        """Calls in which the two differ."""
        return len(self._apart)

    @property
    def saved(self) -> Saved:
        """Policy of the faster one's last call."""
        return self._calls[self._apart[-1]][1].saved

    def of(self, count: int) -> tuple[CallPlan, ...]:
        """Returns the policies with so many of the faster one."""
        if count not in self._between:
            last = set(self._apart[-count:])
            taken: list[CallPlan] = []
            for index, (one, other) in enumerate(self._calls):
                call = other if index in last else one
                taken.append(joined_to(taken[-1] if taken else CallPlan(), call))
            self._between[count] = tuple(taken)
        return self._between[count]


class _Pair:
    """Looks for the numbers of calls that have the faster policy, fit and may be faster than the
    best plan: the largest by halves, then smaller ones.

    Args:
        fast, lean: candidates that differ in policies of calls.
        policies: of calls between theirs.
        question: that they answer.
    """

    def __init__(
        self, fast: PricedCandidate, lean: PricedCandidate, policies: _Policies, question: PlanQuestion
    ) -> None:
        self._fast, self._lean, self._policies, self._question = fast, lean, policies, question
        # The most that is known to fit, and the least that is known not to.
        self._most: int = 0
        self._too_many: int = policies.count
        self._built: set[int] = set()
        self._bounds_s: dict[int, float] = {}

    def take_all(self) -> None:
        """Says that all calls may have the faster policy."""
        self._most = self._too_many = self._policies.count

    def next(self, best_s: float) -> int | None:
        """Returns a number that is to be built; None: none may be faster than the best plan and
        fit.
        """
        while self._most + 1 < self._too_many:
            between = range(self._most + 1, self._too_many)
            asked = sorted({*between[:: -(-len(between) // _MOST_BOUNDS)], between[-1]})
            least = next((count for count in asked if self._may_win(count, best_s)), None)
            if least is None:
                break
            middle = (least - 1 + self._too_many) // 2
            if _may_fit(self._plan(middle), self._question):
                return middle
            self._too_many = middle
        return self._next_smaller(best_s)

    def _next_smaller(self, best_s: float) -> int | None:
        if self._policies.count > _FEW_CALLS:
            return None
        smaller = (count for count in reversed(range(1, self._most)) if count not in self._built)
        return next((count for count in smaller if self._may_win(count, best_s)), None)

    def _may_win(self, count: int, best_s: float) -> bool:
        """Tells whether a number may be faster than the best plan.

        One whose bound is below the faster plan's is left out, with any limit: with another, pairs
        behind this plan's bound are not looked at.
        """
        return self._fast.weighed_bound <= self._bound_s(count) < best_s

    def build(self, count: int, index: int) -> BuiltCandidate:
        """Builds the plan with so many calls of the faster policy."""
        policies = self._policies
        name = f"{self._lean.candidate.name}; {policies.saved} in the last {count} of {policies.count} calls"
        found = self._question.build(price(index, Candidate(name=name, plan=self._plan(count)), self._question))
        self._built.add(count)
        if found.fits:
            self._most = max(self._most, count)
        else:
            self._too_many = min(self._too_many, count)
        return found

    def _bound_s(self, count: int) -> float:
        if count not in self._bounds_s:
            candidate = Candidate(name="", plan=self._plan(count))
            self._bounds_s[count] = price(0, candidate, self._question).weighed_bound
        return self._bounds_s[count]

    def _plan(self, count: int) -> Plan:
        return replace(self._lean.candidate.plan, calls=self._policies.of(count))


def _apart_from_policies(plan: Plan) -> tuple[Any, ...]:
    """Returns all decisions of a plan but the policies of its calls."""
    return (*decisions_apart_from(plan, "calls", "blocks"), *plan.blocks.items())
