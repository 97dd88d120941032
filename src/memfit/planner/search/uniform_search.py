"""Builds uniform plans that could win, in the order of a lower bound of their seconds.

In: priced candidates, a question. Out: those that were built. See [Note: which candidates are
built] in `planner.search.planner`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from memfit.core.plan import CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.planner.search.candidates import Candidate
from memfit.planner.search.mixed_units import joined_to
from memfit.planner.search.pricing import (
    BuiltCandidate,
    PlanQuestion,
    PricedCandidate,
    decisions_apart_from,
    is_within,
    price,
)
from memfit.step.predict import Appraisal
from memfit.step.sizes import home_bytes

UNIFORM_PATIENCE = 15
"""Uniform plans that are built in vain before mixed ones are looked for."""


class UniformSearch:
    """Builds what could win, in the order of its bound; can stop and go on.

    Args:
        priced: candidates.
        question: that they answer.

    Attributes:
        built: candidates that were built.
        waiting: candidates that were not, because their residents alone are too much.
        crowded: candidates that were not, because what rests beside the device alone is too much
            there.
    """

    def __init__(self, priced: Sequence[PricedCandidate], question: PlanQuestion) -> None:
        self._left = sorted(priced, key=lambda p: (p.weighed_bound, p.index), reverse=True)
        self._question = question
        self._best_s = math.inf
        self.built: list[BuiltCandidate] = []
        self.waiting: list[PricedCandidate] = []
        self.crowded: list[PricedCandidate] = []
        # Of all limits that are asked about: predictions, and lower bounds of peaks.
        self._costs: dict[int, Appraisal] = {}
        self._peaks: dict[int, int] = {}
        self._has_room: dict[int, bool] = {}
        self._all = tuple(reversed(self._left))

    @property
    def candidates(self) -> Sequence[PricedCandidate]:
        """All of them, in the order of their bounds."""
        return self._all

    def run(self, *, patience: float = math.inf, best_s: float = math.inf) -> None:
        """Goes on until nothing that is left can win.

        Args:
            patience: it stops when so many in turn, after the first that fits, were not the best.
            best_s: of a plan that was found elsewhere.
        """
        self._best_s = min(self._best_s, best_s)
        in_vain = 0
        while self._left and in_vain < patience:
            # A bound may be a rounding above what it bounds.
            if self._best_s <= self._left[-1].weighed_bound * (1 + 1e-9):
                return
            candidate = self._left.pop()
            # The fastest of all is built in any case: what it would need is asked first.
            if self.built and not is_within(candidate.bytes_bound, self._question.budget.tensor_bytes):
                self.waiting.append(candidate)
                continue
            if self.built and not self._has_room_beside(candidate):
                self.crowded.append(candidate)
                continue
            built = self._build(candidate, self._question)
            self.built.append(built)
            in_vain += math.isfinite(self._best_s)
            if built.fits and built.weighed_s < self._best_s:
                self._best_s, in_vain = built.weighed_s, 0

    def within(self, question: PlanQuestion, *, most: int, patience: int) -> list[BuiltCandidate]:
        """Returns plans that fit another limit, some of the fastest; nothing of it depends on what
        was asked before.

        Args:
            question: with that limit.
            most: so many are looked at that fit beside the device.
            patience: as for `run`.
        """
        found: list[BuiltCandidate] = []
        best_s, in_vain, looked_at = math.inf, 0, 0
        for candidate in self._all:
            if looked_at >= most or in_vain >= patience or best_s <= candidate.weighed_bound * (1 + 1e-9):
                break
            if not is_within(self._least_peak(candidate), question.budget.tensor_bytes):
                continue
            if not self._has_room_beside(candidate):
                continue
            built = self._build(candidate, question)
            if not built.fits_elsewhere:
                continue  # at no limit of the device
            looked_at += 1
            in_vain += bool(found)
            if built.fits:
                found.append(built)
                if built.weighed_s < best_s:
                    best_s, in_vain = built.weighed_s, 0
        return found

    @property
    def least_peak_bytes(self) -> int:
        """Bytes that no candidate's peak is below."""
        return min(map(self._least_peak, self._all))

    def _least_peak(self, candidate: PricedCandidate) -> int:
        if candidate.index not in self._peaks:
            self._peaks[candidate.index] = self._question.peak_bounds.of(candidate.candidate.plan)
        return self._peaks[candidate.index]

    def _has_room_beside(self, candidate: PricedCandidate) -> bool:
        """Tells whether what rests beside the device is within the limits there."""
        question, plan = self._question, candidate.candidate.plan
        known = self._has_room.get(candidate.index)
        if known is None:
            # A store's room counts otherwise than what rests there.
            limits = {t: limit for t, limit in question.limits.items() if not (question.scheme and t is Tier.DISK)}
            homes = question.known.homes_of(plan)
            known = all(
                question.known.found(("home", homes, tier), lambda: home_bytes(plan, question.profile, tier)) <= limit  # noqa: B023, asked at once
                for tier, limit in limits.items()
            )
            self._has_room[candidate.index] = known
        return known

    def _build(self, candidate: PricedCandidate, question: PlanQuestion) -> BuiltCandidate:
        cost = self._costs.get(candidate.index)
        if cost is None:
            built = question.build(candidate)
            self._costs[candidate.index] = built.cost
            return built
        return question.fitted(candidate, cost)


# Plans between two uniform ones: some calls keep what the faster one keeps, the others do what the
# leaner one does.
#
# In: uniform candidates, those that were built. Out: plans that were built between them.
#
# [Note: between uniform plans] Uniform plans are far apart: on a processor, say, a model of equal
# layers keeps all that they save, keeps results of products, or recomputes, and a limit between two
# of these peaks leaves the difference unused. So for each pair of candidates that differ in the
# policies of calls only, of which the leaner one fits, the number of calls that have the faster
# one's policy is halved down to the largest that fits: the last calls of the forward, whose saved
# tensors backward gives up first, before it makes those of the others again. That takes the
# logarithm of the number of calls in built plans, and no solver, so that it is done where mixed
# plans (`planner.search.widening`) are not looked for. Of few calls smaller numbers follow, where
# they may be faster: what is offloaded to a slow disk, say, is waited for from some number on. What
# cannot be faster than the best plan known, by a bound of seconds, or cannot fit, by one of bytes,
# is not built: what lies between two plans with a smaller limit lies there with a larger one too,
# unless something faster is known, so that more room is not slower. (Of many calls it may be, where
# fewer of the faster policy would be faster: seconds that are waited for are in no bound, and of
# hundreds of numbers some are asked for theirs.)

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
