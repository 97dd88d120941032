"""Bound of all mixtures of one frame, from a program over the chain of units.

In: `ChainPrices`, bytes. Out: seconds that no mixture is expected to take less than.

[Note: the chain program]
Unknown are, of each unit, the share of each policy and of each homes; of each group of ends which
homes it has, whole; and the instants of the clock. Of each place of the step (`chain_flows`) M is
when the main thread comes to it and S when its computing begins. Of each queue and place, Q is when
the queue is through with all that it was given up to there. Then

    S[t] >= M[t] + what is computed in front      M[t+1] >= S[t] + what is computed
    Q[t] >= M[t] + work[t]                        Q[t] >= Q[t-1] + work[t]
    S or M at t + window >= Q[t]                  end >= M and all Q

and the end is made as early as can be. Work is linear in the shares, so all rows are; of whole
shares each row says something that the clock cannot undercut. Queues of one lane also stand
together, and the device's own work together with the updates beside it. Bytes at each slot and in
each tier are rows too.

So the optimum is below what any mixture of the frame takes, as far as prices add up. Where they do
not (the highest of several transients; a wait later than in any probe) it may be above: it is told
as a bound of the program, not as a proof. Shares of units stay shares: a part of a unit hides in
windows in which a whole one does not, and that is what is left between this bound and whole plans.
Ends are whole where the program is small, which makes the bound 0 to 3 % higher; in one of 6,900
rows it made it 0.3 % higher and took 20 s instead of 1. The number of nodes is bounded, and what is
told is the solver's bound, which holds at any node.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memfit.core.plan import BlockPlan, CallPlan
from memfit.core.tiers import Tier
from memfit.core.timeline import for_updates
from memfit.planning.ahead import Ahead
from memfit.planning.chain_flows import BEFORE, COMPUTE, UPDATES, Queue
from memfit.planning.chain_prices import ChainPrices, PlacePrice
from memfit.planning.linear_programs import LinearProgram
from memfit.planning.mixed_units import Mixture
from memfit.planning.slot_prices import Judge

_GIB = float(1 << 30)
# Of a program of at most so many rows the ends are whole; that takes a few nodes.
_FEW_ROWS = 4000
# Where ends are whole, simplifying takes longer than it saves (measured: 0.44 s instead of 0.77).
# Of shares only the optimum is asked for, not the columns: 126 layers take 5 s, by simplex 64.
_OF_WHOLE: Mapping[str, object] = {
    "mip_max_nodes": 20,
    "mip_rel_gap": 1e-2,
    "presolve": "off",
    "mip_detect_symmetry": False,
}
_OF_SHARES: Mapping[str, object] = {"solver": "ipm", "run_crossover": "off"}

# What the solver's optimum may be off by.
_ROUNDING = 1e-6

_Terms = list[tuple[int, float]]


def frame_bound_s(
    judges: Mapping[Ahead, Judge], ahead: Ahead, policies: Sequence[CallPlan], homes: Sequence[BlockPlan]
) -> float:
    """Returns the program's seconds for one frame, going as far ahead as the best mixture that is
    known. Where a mixture is known that takes less, byte prices did not add up: then it is 0, no
    bound.

    Args:
        judges: of the frame's mixtures, by how far these go ahead.
        ahead: of the frame, for where no mixture fits.
        policies: options of calls.
        homes: options of blocks.
    """
    fitting = [
        (judged.built.cost.seconds, known)
        for known, judge in judges.items()
        for judged in judge.judged.values()
        if judged.built.fits
    ]
    best_s, best_ahead = min(fitting, default=(math.inf, ahead))
    question = judges[best_ahead].question
    prices = ChainPrices(judges[best_ahead], policies, homes)
    found_s = chain_bound_s(prices, question.budget.tensor_bytes, question.limits)
    return 0.0 if found_s > best_s * (1 + _ROUNDING) else min(found_s, best_s)


def chain_bound_s(prices: ChainPrices, device: int | None, tiers: Mapping[Tier, float]) -> float:
    """Solves the chain program: seconds that no mixture takes less than; infinite: none is within
    the bytes. See [Note: the chain program].

    Args:
        prices: of the frame.
        device: bytes at every slot; None: no limit.
        tiers: limits beside the device.
    """
    if not prices.agrees:
        return 0.0
    program = _Program(prices)
    program.limit_bytes(device, tiers)
    return program.solved()


def clock_bound_s(prices: ChainPrices, mixture: Mixture) -> float:
    """Returns what the program says of one mixture, its bytes aside: at most what it takes, by
    which tests show that the program is a bound.

    Args:
        prices: of the frame.
        mixture: of these options.
    """
    program = _Program(prices)
    program.take(mixture)
    return program.solved()


class _Program:
    """Rows and columns of the program; a column is told by its number."""

    def __init__(self, prices: ChainPrices) -> None:
        self._prices = prices
        self._columns = 0
        self._rows: list[_Terms] = []
        self._least: list[float] = []
        self._most: list[float] = []
        self._taken: dict[int, float] = {}
        self._free: list[int] = []
        first = len(prices.policies)
        self._units = [self._new(len(options)) for options in prices.of_units]
        self._ends = [self._new(len(options)) for options in prices.of_ends]
        self._shares = self._columns
        parts = [part for group in self._units for part in (group[:first], group[first:])]
        for part in (*parts, *self._ends):
            self._row([(column, 1.0) for column in part], 1.0, 1.0)
        self._work: dict[Queue, dict[int, _Terms]] = {q: defaultdict(list) for q in prices.flows.work_s}
        for column, price in self._priced():
            for (queue, place), seconds in price.work_s.items():
                self._work.setdefault(queue, defaultdict(list))[place].append((column, seconds))
        count = len(prices.flows.places)
        self._begins, self._comes = self._new(count), self._new(count + 1)
        self._end = self._new(1)[0]
        self._set_main_thread()
        for queues, window in self._groups().items():
            self._set_queue(queues, window)
        for group, of_group in zip(self._units, prices.of_units, strict=True):
            self._set_chains(group[first:], of_group[first:])
        for group, of_group in zip(self._ends, prices.of_ends, strict=True):
            self._set_chains(group, of_group)

    def limit_bytes(self, device: int | None, tiers: Mapping[Tier, float]) -> None:
        """Adds rows of bytes."""
        known = self._prices.reference
        if device is not None:
            self._limit_slots(device)
        for tier, limit in tiers.items():
            terms = [(c, p.tiers[tier] / _GIB) for c, p in self._priced() if p.tiers.get(tier)]
            self._row(terms, -math.inf, (limit - known.built.cost.peaks.get(tier, 0)) / _GIB)

    def _limit_slots(self, device: int) -> None:
        """Adds the device's rows. Far from a unit's own place its bytes are the same from slot to
        slot: what changes is said, so that a large program has few terms.
        """
        import numpy as np

        priced = self._priced()
        # (columns, slots): what each takes more at a slot than at the one before.
        bytes_: Any = np.array([price.slots for _, price in priced])
        steps: list[list[float]] = (np.diff(bytes_, axis=1, prepend=0.0) / _GIB).T.tolist()
        held = self._new(len(self._prices.slots))
        self._free += held
        for position, (slot, changes) in enumerate(zip(self._prices.slots, steps, strict=True)):
            terms = [(column, -change) for (column, _), change in zip(priced, changes, strict=True) if change]
            before = [(held[position - 1], -1.0)] if position else []
            self._row([(held[position], 1.0), *before, *terms], 0.0, 0.0)
            self._row([(held[position], 1.0)], -math.inf, (device - self._prices.reference.slots[slot]) / _GIB)

    def take(self, mixture: Mixture) -> None:
        """Makes the shares those of a mixture."""
        of_units, of_ends = self._prices.options_of(mixture)
        chosen = {group[i] for group, pair in zip(self._units, of_units, strict=True) for i in pair}
        chosen |= {group[i] for group, i in zip(self._ends, of_ends, strict=True)}
        self._taken = {column: float(column in chosen) for column in range(self._shares)}

    def solved(self) -> float:
        """Makes the end as early as can be; returns the solver's bound, infinite if nothing is
        within the rows.
        """
        least, most = [0.0] * self._columns, [math.inf] * self._columns
        most[: self._shares] = [1.0] * self._shares
        for column in self._free:
            least[column] = -math.inf
        for column, value in self._taken.items():
            least[column] = most[column] = value
        has_whole = not self._taken and len(self._rows) <= _FEW_ROWS
        program = LinearProgram(
            least,
            most,
            self._rows,
            self._least,
            self._most,
            whole=[column for group in self._ends for column in group] if has_whole else (),
            options=_OF_WHOLE if has_whole else _OF_SHARES,
        )
        return program.bound_of_minimum([float(column == self._end) for column in range(self._columns)])

    # --- rows ---

    def _set_main_thread(self) -> None:
        begins, comes = self._begins, self._comes
        for t, begin in enumerate(begins):
            terms, work_s = self._given([BEFORE], t)
            self._row([(begin, 1.0), (comes[t], -1.0), *terms], work_s)
            terms, work_s = self._given([COMPUTE], t)
            self._row([(comes[t + 1], 1.0), (begin, -1.0), *terms], work_s)
        terms, work_s = self._given([COMPUTE, BEFORE], len(begins))
        self._row([(self._end, 1.0), (comes[-1], -1.0), *terms], work_s)

    def _groups(self) -> dict[tuple[Queue, ...], float]:
        """Returns queues that are served in turn, with the longest window of them."""
        windows = self._prices.windows
        groups: dict[tuple[Queue, ...], float] = {}
        queues = sorted(self._work)
        for lane in dict.fromkeys(queue.lane for queue in queues if queue.lane != COMPUTE.lane):
            mine = sorted((queue for queue in queues if queue.lane == lane), key=lambda queue: (windows[queue], queue))
            # Each by itself, and all that are waited for as soon: what takes longer is let out.
            groups |= {(queue,): windows[queue] for queue in mine}
            groups |= {tuple(mine[: i + 1]): windows[queue] for i, queue in enumerate(mine)}
            # Pieces of updates let others go first: both are through in the end.
            if pieces := [queue for queue in queues if queue.lane == for_updates(lane)]:
                groups[(*mine, *pieces)] = math.inf
        # An update beside goes first, and what is computed meanwhile comes later by as much.
        beside = [queue for queue in queues if queue == UPDATES]
        groups[(COMPUTE, BEFORE, *beside)] = max(1.0, *(windows[queue] for queue in beside), 1.0)
        return groups

    def _set_queue(self, queues: Sequence[Queue], window: float) -> None:
        through: int | None = None
        for t, comes in enumerate(self._comes):
            terms, work_s = self._given(queues, t)
            if not terms and not work_s:
                continue  # through with nothing new
            before, through = through, self._new(1)[0]
            self._row([(through, 1.0), (comes, -1.0), *terms], work_s)
            if before is not None:
                self._row([(through, 1.0), (before, -1.0), *terms], work_s)
            self._row([(self._instant(2 * t + window), 1.0), (through, -1.0)], 0.0)
        if through is not None:
            self._row([(self._end, 1.0), (through, -1.0)], 0.0)

    def _set_chains(self, group: Sequence[int], prices: Sequence[PlacePrice]) -> None:
        """Says of homes that what an operation moves one after the other takes the sum."""
        homes = list(zip(group, prices, strict=True))
        for key in dict.fromkeys(key for _, price in homes for key in price.chains_s):
            place, end = key
            terms = [(column, -price.chains_s[key]) for column, price in homes if key in price.chains_s]
            self._row([(self._instant(end), 1.0), (self._comes[place], -1.0), *terms], 0.0)

    def _instant(self, halves: float) -> int:
        """Column of an instant that is told in halves of places."""
        if halves >= 2 * len(self._begins):
            return self._end
        return self._comes[(int(halves) + 1) // 2] if int(halves) % 2 else self._begins[int(halves) // 2]

    # --- parts ---

    def _new(self, count: int) -> list[int]:
        self._columns += count
        return list(range(self._columns - count, self._columns))

    def _row(self, terms: Iterable[tuple[int, float]], least: float, most: float = math.inf) -> None:
        # Several queues may be given something by one column.
        together: dict[int, float] = {}
        for column, value in terms:
            together[column] = together.get(column, 0.0) + value
        self._rows.append(list(together.items()))
        self._least.append(least)
        self._most.append(most)

    def _priced(self) -> list[tuple[int, PlacePrice]]:
        groups = zip((*self._units, *self._ends), (*self._prices.of_units, *self._prices.of_ends), strict=True)
        return [pair for group, prices in groups for pair in zip(group, prices, strict=True)]

    def _given(self, queues: Iterable[Queue], place: int) -> tuple[_Terms, float]:
        """Returns what queues are given at a place: terms of a row's left side, and seconds of its
        right side.
        """
        terms: _Terms = []
        seconds = 0.0
        for queue in queues:
            seconds += self._prices.flows.work_s.get(queue, {}).get(place, 0.0)
            terms += [(column, -value) for column, value in self._work.get(queue, {}).get(place, ())]
        return terms, seconds
