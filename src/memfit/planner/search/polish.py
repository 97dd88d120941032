"""Polishing: a mixed plan is changed unit by unit, as long as the judge says that it gains.

In: a judge and a mixture that fits. Out: one that is as fast or faster. Every change is judged by
the timeline of the lowered schedule; the number of judged plans is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.planner.search.mixed_units import Mixture
from memfit.planner.search.mixing import PlacePrices, PriceTable
from memfit.planner.search.pricing import BuiltCandidate, PlanQuestion
from memfit.planner.search.slot_prices import Judge, Judged, OptionPrices

# How far ahead of the main thread a mixture's transfers and updates go, and judges for each way.
#
# In: the judge of a frame's mixtures. Out: judges of the same frame that goes further ahead, or
# less far, and the best mixture of all.


@dataclass(frozen=True, kw_only=True, order=True)
class Ahead:
    """How far transfers and updates of a frame go ahead of the main thread.

    Attributes:
        prefetch: blocks that are fetched ahead.
        backlog: compute actions beside which an update runs (`Plan.update_backlog`).
    """

    prefetch: int
    backlog: int

    @classmethod
    def said_by(cls, frame: Plan) -> Ahead:
        """Returns what a frame says."""
        return cls(prefetch=frame.prefetch, backlog=frame.update_backlog)

    def of(self, frame: Plan) -> Plan:
        """Returns a frame that goes so far ahead, and else is the given one."""
        return replace(frame, prefetch=self.prefetch, update_backlog=self.backlog)


AHEAD = Ahead(prefetch=2, backlog=1)
"""How far the frames of mixtures go ahead."""
BUFFERS_AHEAD = (2, 1, 3, 4)
"""Blocks fetched ahead as polishing tries them."""
BACKLOGS = (0, 1, 2, 3, 4)
"""The same of compute actions beside which updates run."""


GAIN = 1e-4
"""Share of its seconds by which a mixture must be faster than another: with less it is as fast."""


class JudgesAhead:
    """Judges of one frame's mixtures, one for each way to go ahead.

    Args:
        first: the judge to begin with.

    Attributes:
        by_ahead: all judges that were asked for.
    """

    def __init__(self, first: Judge) -> None:
        self._first = first
        self._question = first.question
        self.by_ahead = {Ahead.said_by(first.frame): first}
        # The least seconds of so many plans, under the question of now.
        self._known: tuple[int, float] = 0, math.inf

    def within(self, question: PlanQuestion) -> None:
        """Asks with another limit from now on."""
        self._question = question
        self._known = 0, math.inf
        for judge in self.by_ahead.values():
            judge.within(question)

    def of(self, ahead: Ahead) -> Judge:
        """Returns the judge of mixtures that go so far ahead."""
        first = self._first
        if ahead not in self.by_ahead:
            self.by_ahead[ahead] = Judge(self._question, ahead.of(first.frame), first.units, indices=first.indices)
        return self.by_ahead[ahead]

    @property
    def judged(self) -> list[Judged]:
        """All plans that were judged."""
        return [judged for judge in self.by_ahead.values() for judged in judge.judged.values()]

    @property
    def best_s(self) -> float:
        """Seconds of the best mixture that fits, as they are compared by; infinite: none does."""
        count = sum(len(judge.judged) for judge in self.by_ahead.values())
        if count != self._known[0]:
            taken = (judged.built.weighed_s for judged in self.judged if self._is_taken(judged))
            self._known = count, min(taken, default=math.inf)
        return self._known[1]

    @property
    def best(self) -> tuple[Ahead, Judged]:
        """The best mixture that fits, if any does, and how far it goes ahead; of those that are as
        fast (`GAIN`) the one with the fewest bytes.
        """
        taken = [
            (ahead, judged)
            for ahead, judge in self.by_ahead.items()
            for judged in judge.judged.values()
            if self._is_taken(judged)
        ]
        most_s = self.best_s * (1 + GAIN)
        as_fast = [one for one in taken if one[1].built.weighed_s <= most_s]
        return min(as_fast, key=lambda one: (one[1].built.cost.peak_bytes, one[1].built.weighed_s, one[0]))

    def _is_taken(self, judged: Judged) -> bool:
        return judged.built.fits and self._question.allows(judged.built.priced)


_ValueT = TypeVar("_ValueT")
# Judging costs time in proportion to units: in all about as many units as this are judged.
_UNITS_JUDGED = 400
_MOST, _LEAST = 60, 4
# Pairs of changes are estimated all at once, for so many changes at most.
_CHANGES_IN_PAIRS = 360


@dataclass(frozen=True)
class _Change:
    """A unit, or a group of ends, gets another option.

    Attributes:
        place: of the unit; of a group of ends its number, counted from the number of units on.
        row: of the price table.
        gives_up: row of the option that it had.
    """

    place: int
    row: int
    gives_up: int


def polish(judge: Judge, start: Judged, prices: OptionPrices, table: PriceTable, places: PlacePrices) -> Judged:
    """Changes single units, swaps pairs, and changes two units at once as prices promise, until
    nothing gains or the budget is used.

    Args:
        judge: of the plans.
        start: fits.
        prices: of the options.
        table: of these prices.
        places: prices of single units.

    Returns:
        The fastest that was found, but for what is as fast and has fewer bytes.
    """
    units = len(judge.units.calls)
    left = max(_LEAST, min(_MOST, _UNITS_JUDGED // max(1, units)))
    best = start
    is_done = False
    while not is_done:
        is_done = True
        for mixture in _around(best, prices, table, places):
            if mixture in judge.judged:
                continue
            if not left:
                return best
            left -= 1
            found = judge(mixture)
            is_taken = found.built.fits and judge.question.allows(found.built.priced)
            if is_taken and _is_better(found.built, best.built):
                best, is_done = found, False
                break
    return best


def _is_better(found: BuiltCandidate, known: BuiltCandidate) -> bool:
    """Faster, or as fast with fewer bytes: room in which something else may become faster."""
    if known.weighed_s * (1 - GAIN) <= found.weighed_s <= known.weighed_s:
        return found.cost.peak_bytes < known.cost.peak_bytes
    return found.weighed_s < known.weighed_s


def _around(known: Judged, prices: OptionPrices, table: PriceTable, places: PlacePrices) -> Iterator[Mixture]:
    """Yields mixtures that differ in two units that change places, or in options of one unit or of
    two.
    """
    mixture = known.mixture
    for policies in _swapped(mixture.policies):
        yield replace(mixture, policies=policies)
    for homes in _swapped(mixture.homes):
        yield replace(mixture, homes=homes)
    changes = _changes(mixture, prices)
    for change in _promising(changes, known, table, places):
        yield _changed(mixture, change, prices)
    if len(changes) <= _CHANGES_IN_PAIRS:
        for first, second in _promising_pairs(changes, known, table, places):
            yield _changed(_changed(mixture, first, prices), second, prices)


def _changes(mixture: Mixture, prices: OptionPrices) -> list[_Change]:
    """Lists all changes of one unit's policy or homes."""
    policies = [option.value for option in prices.policies]
    homes = [option.value for option in prices.homes]
    found: list[_Change] = []
    for place, (policy, home) in enumerate(zip(mixture.policies, mixture.homes, strict=True)):
        there = policies.index(policy)
        found += [_Change(place, row, there) for row in range(len(policies)) if row != there]
        there = len(policies) + homes.index(home)
        rows = range(len(policies), len(policies) + len(homes))
        found += [_Change(place, row, there) for row in rows if row != there]
    begin = len(policies) + len(homes)
    for group, (options, home) in enumerate(zip(prices.ends, mixture.ends, strict=True)):
        there = begin + [option.value for option in options].index(home)
        rows = range(begin, begin + len(options))
        found += [_Change(len(mixture.policies) + group, row, there) for row in rows if row != there]
        begin += len(options)
    return found


def _changed(mixture: Mixture, change: _Change, prices: OptionPrices) -> Mixture:
    group = change.place - len(mixture.policies)
    if group >= 0:
        begin = len(prices.policies) + len(prices.homes) + sum(map(len, prices.ends[:group]))
        return replace(mixture, ends=_with(mixture.ends, group, prices.ends[group][change.row - begin].value))
    if change.row < len(prices.policies):
        policy: CallPlan = prices.policies[change.row].value
        return replace(mixture, policies=_with(mixture.policies, change.place, policy))
    homes: BlockPlan = prices.homes[change.row - len(prices.policies)].value
    return replace(mixture, homes=_with(mixture.homes, change.place, homes))


def _differences(changes: list[_Change], known: Judged, table: PriceTable, places: PlacePrices) -> Any:
    """Estimates what each change takes more: bytes where the unit stands, of all else its part of
    the option's price. Of ends: all of the price.
    """
    import numpy as np

    units = len(known.mixture.policies)
    rows, gives_up = [c.row for c in changes], [c.gives_up for c in changes]
    found = table.more[rows] - table.more[gives_up]
    own = [i for i, c in enumerate(changes) if c.place < units]
    found[own] /= units
    at, rows, gives_up = ([values[i] for i in own] for values in ([c.place for c in changes], rows, gives_up))
    by_slot = places.by_slot[at, rows] - places.by_slot[at, gives_up]
    found[np.ix_(own, table.slot_columns)] = by_slot[:, table.slot_order(places)]
    return found


def _promising(changes: list[_Change], known: Judged, table: PriceTable, places: PlacePrices) -> Iterator[_Change]:
    """Yields changes that may fit and gain by their prices, the fastest first."""
    import numpy as np

    if not changes:
        return
    changed = table.amounts_of(known) + _differences(changes, known, table, places)
    seconds = table.worth(changed, known)
    for index in np.argsort(seconds, kind="stable"):
        if not math.isfinite(seconds[index]):
            return
        yield changes[int(index)]


def _promising_pairs(
    changes: list[_Change], known: Judged, table: PriceTable, places: PlacePrices
) -> Iterator[tuple[_Change, _Change]]:
    """Yields pairs of changes that fit as estimated, the fastest first."""
    import numpy as np

    if not changes:
        return
    differences = _differences(changes, known, table, places)
    here = table.amounts_of(known)
    seconds = np.full((len(changes), len(changes)), math.inf)
    for i, first in enumerate(changes):
        changed = here + differences[i] + differences[i + 1 :]
        # Two changes of one thing of one unit are one change.
        same = np.array([c.place == first.place and c.gives_up == first.gives_up for c in changes[i + 1 :]], dtype=bool)
        seconds[i, i + 1 :] = np.where(same, math.inf, table.worth(changed, known))
    for index in np.argsort(seconds, axis=None, kind="stable"):
        i, j = divmod(int(index), len(changes))
        if not math.isfinite(seconds[i, j]):
            return
        yield changes[i], changes[j]


def _swapped(values: tuple[_ValueT, ...]) -> Iterator[tuple[_ValueT, ...]]:
    """Yields tuples in which two unequal values have changed places: neighbours first."""
    count = len(values)
    for distance in range(1, count):
        for first in range(count - distance):
            second = first + distance
            if values[first] != values[second]:
                swapped = list(values)
                swapped[first], swapped[second] = values[second], values[first]
                yield tuple(swapped)


def _with(values: tuple[_ValueT, ...], place: int, value: _ValueT) -> tuple[_ValueT, ...]:
    return (*values[:place], value, *values[place + 1 :])
