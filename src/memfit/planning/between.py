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
(`planning.widening`) are not looked for. A pair is looked at where the faster plan's bound is below
the seconds of the best plan known, and as long as that of all that is left between the two is:
what lies between them with a smaller limit lies there with a larger one too, unless something
faster is known, so that more room is never slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from memfit.core.plan import CallPlan, Plan
from memfit.planning.candidates import Candidate
from memfit.planning.mixed_units import joined_to
from memfit.planning.pricing import BuiltCandidate, PlanQuestion, PricedCandidate, price


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
        if fast.index not in known:
            known[fast.index] = question.build(fast)
        if lean.index not in known:
            known[lean.index] = question.build(lean)
        if known[fast.index].fits or not known[lean.index].fits:
            continue
        pair = _Pair(fast, lean, question)
        while pair.is_left and pair.bound_s < best_s:
            found.append(pair.build(next(indices)))
            if found[-1].fits:
                best_s = min(best_s, found[-1].weighed_s)
    return found


class _Pair:
    """Looks for the largest number of calls that have the faster policy and fit, by halves.

    Args:
        fast, lean: candidates that differ in policies of calls.
        question: that they answer.
    """

    def __init__(self, fast: PricedCandidate, lean: PricedCandidate, question: PlanQuestion) -> None:
        self._fast, self._lean, self._question = fast, lean, question
        self._calls = list(zip_longest(lean.candidate.plan.calls, fast.candidate.plan.calls, fillvalue=CallPlan()))
        self._apart = [index for index, (one, other) in enumerate(self._calls) if one != other]
        # The most that is known to fit, and the least that is known not to.
        self._most, self._too_many = 0, len(self._apart)
        self._bounds_s: dict[int, float] = {}

    @property
    def is_left(self) -> bool:
        """Tells whether a number is not known to fit or not to fit."""
        return self._most + 1 < self._too_many

    @property
    def bound_s(self) -> float:
        """Seconds that no plan that is left takes less than, as plans are compared by. Of all of
        them: what calls spare differs from kind to kind.
        """
        return min(map(self._bound_s, range(self._most + 1, self._too_many)))

    def build(self, index: int) -> BuiltCandidate:
        """Builds the plan in the middle of those that are left."""
        count = (self._most + self._too_many) // 2
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
