"""Bound of all mixtures of one frame, from a program over the chain of units.

In: `ChainPrices`, bytes. Out: seconds that no mixture is expected to take less than.

[Note: the chain program]
Unknown are, of each unit, the share of each policy and of each homes; of each group of ends which
homes it has, whole; and the instants of the clock. Of each place of the step (`Flows`) M is
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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from memfit.core.plan import BlockPlan, CallPlan
from memfit.core.schedule import Backward, Forward
from memfit.core.step import COMPUTE_LANE, HOST_LANE, UPDATE_LANE, Operation, Step, Token, Transfer, for_updates
from memfit.core.tiers import Tier
from memfit.planner.search.mixed_units import Mixture
from memfit.planner.search.mixing import LinearProgram, PlacePrices, with_homes, with_policy
from memfit.planner.search.polish import Ahead
from memfit.planner.search.slot_prices import Judge, Judged, uniform
from memfit.step.bytes import Slot
from memfit.step.clock import Pace

# Flows of a lowered step: what each lane is given to do at which place of the step, and by when it
# must be through with it.
#
# In: `Step`, the machine's speeds. Out: `Flows`.
#
# [Note: places of a step]
# Whatever a plan moves, its main thread computes the same forwards and backwards in the same order;
# those of one call one right after the other (microbatches that go layer by layer) are one *place*.
# All that is issued between two places belongs to the later one. It does not begin before the
# earlier one has been computed; and where something waits for it, it is through by then. Counted
# are places: how many lie between, at most, is the *window* of a queue. A queue is what one lane
# does of one category, or all of it: what is behind others in a lane's order cannot be there before
# it could be there without them.


class PlaceInStep(NamedTuple):
    """A run of forwards or backwards of one call; which of its runs, from 0."""

    is_backward: bool
    call: int
    turn: int


class Queue(NamedTuple):
    """Work of one category that one lane does, in order."""

    lane: str
    category: str


COMPUTE = Queue(COMPUTE_LANE, "")
BEFORE = Queue(COMPUTE_LANE, "before")
UPDATES = Queue(UPDATE_LANE, "")
HOST = Queue(HOST_LANE, "")


@dataclass(frozen=True, kw_only=True)
class Flows:
    """Work of a step by place.

    Attributes:
        places: in order; what is issued behind the last one has the number behind it.
        work_s: seconds that a queue is given to do at places, by their number.
        windows: places, at most, from where something is given to a queue to where something waits
            for it, in halves: even to where a place's computing begins, odd to where it ends;
            infinite where nothing ever waits.
        chains_s: seconds that an operation takes at least when it moves one thing after the other,
            by its place and by the halves of places where something waits for it.
    """

    places: tuple[PlaceInStep, ...]
    work_s: Mapping[Queue, Mapping[int, float]]
    windows: Mapping[Queue, float]
    chains_s: Mapping[tuple[int, float], float]


def flows_of(step: Step, pace: Pace) -> Flows:
    """Returns the flows of a step. See [Note: places of a step]."""
    places, at = _places(step)
    ends = _waits(step, at)
    work: dict[Queue, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    windows: dict[Queue, float] = {}
    chains: dict[tuple[int, float], float] = {}

    def give(queue: Queue, place: int, seconds: float, end: float) -> None:
        work[queue][place] += seconds
        windows[queue] = max(windows.get(queue, 0.0), end - 2 * place)

    for index, operation in enumerate(step.operations):
        place, is_first = at[index]
        for transfer in operation.awaited:
            for queue, seconds in _queues(transfer, operation, pace):
                give(queue, place, seconds, 2 * place + (0 if is_first else 1))
        for transfer in operation.transfers:
            for queue, seconds in _queues(transfer, operation, pace):
                give(queue, place, seconds, ends[index])
        if operation.work and operation.update_place and operation.update_place.is_beside:
            give(UPDATES, place, pace.work_s(operation.work), ends[index])
        elif operation.work:
            # What stands in front of the place's own computing may be through before its waits.
            give(BEFORE if is_first else COMPUTE, place, pace.work_s(operation.work), 2 * place + 1)
        if operation.host_work:
            give(HOST, place, pace.host_work_s(operation.host_work), ends[index])
        if operation.gives is not None and operation.is_chain and len(operation.transfers) > 1:
            key = place, ends[index]
            chains[key] = max(chains.get(key, 0.0), sum(_alone_s(t, pace) for t in operation.transfers))
    return Flows(
        places=places,
        work_s={queue: dict(values) for queue, values in work.items()},
        windows=windows,
        chains_s=chains,
    )


def _alone_s(transfer: Transfer, pace: Pace) -> float:
    return transfer.nbytes / pace.lane(transfer.tier, transfer.direction).alone


def _places(step: Step) -> tuple[tuple[PlaceInStep, ...], list[tuple[int, bool]]]:
    """Returns the places, and of each operation the number of its place and whether it stands
    before the place's first computing.
    """
    places: list[PlaceInStep] = []
    turns: dict[tuple[bool, int], int] = {}
    at: list[tuple[int, bool]] = []
    for operation in step.operations:
        action = operation.action
        if isinstance(action, Forward | Backward):
            here = isinstance(action, Backward), action.first
            if not places or places[-1][:2] != here:
                turns[here] = turns.get(here, -1) + 1
                places.append(PlaceInStep(*here, turns[here]))
            at.append((len(places) - 1, False))
        else:
            at.append((len(places), True))
    # What stands inside of a run begins no sooner than the run.
    behind: PlaceInStep | None = None
    following = len(places)
    for index in range(len(at) - 1, -1, -1):
        place, is_gap = at[index]
        if not is_gap:
            behind, following = places[place], place
        elif behind is not None:
            at[index] = (following, place == following)
    return tuple(places), at


def _waits(step: Step, at: list[tuple[int, bool]]) -> list[float]:
    """Returns, of each operation, in halves of places where the main thread first waits for it."""
    ends: list[float] = [math.inf] * len(step.operations)
    given: dict[Token, int] = {}
    for index, operation in enumerate(step.operations):
        place, is_gap = at[index]
        is_inside = is_gap and index > 0 and at[index - 1] == (place, False)
        for token in operation.waits:
            if token in given:
                here = 2 * place + (1 if is_inside or _is_again(step, index, at) else 0)
                ends[given[token]] = min(ends[given[token]], here)
        for token in operation.waits_after:
            if token in given:
                ends[given[token]] = min(ends[given[token]], 2 * place + (0 if is_gap else 1))
        if operation.gives is not None:
            given[operation.gives] = index
    return ends


def _is_again(step: Step, index: int, at: list[tuple[int, bool]]) -> bool:
    """Tells whether the place was computed in before."""
    place, _ = at[index]
    return any(at[other] == (place, False) for other in range(max(0, index - 64), index))


def _queues(transfer: Transfer, operation: Operation, pace: Pace) -> list[tuple[Queue, float]]:
    found: list[tuple[Queue, float]] = []
    for tier in (transfer.tier, transfer.crosses):
        if tier is None or tier not in pace.hardware.tiers:
            continue
        lane = pace.lane(tier, transfer.direction)
        name = for_updates(lane.name) if operation.update_place is not None else lane.name
        found.append((Queue(name, transfer.category), lane.latency_s + transfer.nbytes / lane.alone))
    return found


# Prices of options by place of the step: what each unit's option adds to what lanes have to do, and
# where.
#
# In: a judge, options. Out: `ChainPrices`.
#
# As in [Note: a price is shifted], one unit in the middle is probed with each option, and what its
# schedule gives to lanes around its own forward and backward is taken to be given around another
# unit's. The last unit is probed by itself, and so is each group of ends: between them and the turn
# there is no room to shift.

# Differences of seconds that rounding makes.
_LEAST_S = 1e-12


@dataclass(frozen=True, kw_only=True)
class PlacePrice:
    """Amounts that one option takes more than the reference.

    Attributes:
        work_s: by queue and place.
        chains_s: of `Flows`, where the reference has none such.
        slots: bytes by slot, in the order of the prices' slots.
        tiers: bytes by tier beside the device.
    """

    work_s: Mapping[tuple[Queue, int], float]
    chains_s: Mapping[tuple[int, float], float]
    slots: Any
    tiers: Mapping[Tier, float]


class ChainPrices:
    """Prices of all options of one frame.

    Args:
        judge: of its mixtures.
        policies, homes: options of units; homes are those of ends too.

    Attributes:
        flows: of the reference: everything kept on the device.
        reference: judged.
        windows: the longest of each queue in any probe.
        agrees: all probes compute in the same order; if not, there is no program.
        slots: of the byte prices, in order.
        of_units: by unit and option, policies first.
        of_ends: by group of ends and option.
    """

    def __init__(self, judge: Judge, policies: Sequence[CallPlan], homes: Sequence[BlockPlan]) -> None:
        self.policies, self.homes = tuple(policies), tuple(homes)
        self.units = judge.units
        self.agrees = True
        self._judge = judge
        self.windows: dict[Queue, float] = {}
        none = uniform(judge.units, CallPlan(), BlockPlan())
        self.reference: Judged
        self.flows: Flows
        self.reference, self.flows = self._lowered(none)
        self.slots: tuple[Slot, ...] = tuple(self.reference.slots)
        calls = judge.units.calls
        middle, last = len(calls) // 2, len(calls) - 1
        self.of_units: list[list[PlacePrice]] = [[] for _ in calls]
        probes = [[with_policy(none, place, p) for place in (middle, last)] for p in policies]
        probes += [[with_homes(none, place, h) for place in (middle, last)] for h in homes]
        priced = [(self._price(in_middle), self._price(at_last)) for in_middle, at_last in probes]
        # Asks for the same probes, which are judged by now.
        bytes_ = PlacePrices(judge, policies, homes)
        for option, (middle_price, last_price) in enumerate(priced):
            for unit, call in enumerate(calls):
                price = last_price if unit == last else self._shifted(middle_price, calls[middle], call)
                self.of_units[unit].append(replace(price, slots=bytes_.by_slot[unit, option]))
        self.of_ends: list[list[PlacePrice]] = [
            [self._price(replace(none, ends=(*none.ends[:g], h, *none.ends[g + 1 :]))) for h in homes]
            for g in range(len(none.ends))
        ]
        # A crowd of moves may be waited for later than one alone.
        crowds = [uniform(judge.units, p, BlockPlan()) for p in policies]
        crowds += [uniform(judge.units, CallPlan(), h) for h in homes]
        for mixture in crowds:
            self._probe(mixture)

    def _lowered(self, mixture: Mixture) -> tuple[Judged, Flows]:
        judged, step = self._judge.with_step(mixture)
        found = flows_of(step, self._judge.question.pace)
        for queue, window in found.windows.items():
            self.windows[queue] = max(self.windows.get(queue, 0.0), window)
        return judged, found

    def _probe(self, mixture: Mixture) -> tuple[Judged, Flows]:
        judged, found = self._lowered(mixture)
        self.agrees = self.agrees and found.places == self.flows.places
        return judged, found

    def _price(self, mixture: Mixture) -> PlacePrice:
        import numpy as np

        (judged, flows), reference = self._probe(mixture), self.reference
        work: dict[tuple[Queue, int], float] = defaultdict(float)
        for source, sign in ((flows, 1.0), (self.flows, -1.0)):
            for queue, values in source.work_s.items():
                for place, seconds in values.items():
                    work[queue, place] += sign * seconds
        peaks, before = judged.built.cost.peaks, reference.built.cost.peaks
        return PlacePrice(
            work_s={key: seconds for key, seconds in work.items() if abs(seconds) > _LEAST_S},
            chains_s={key: s for key, s in flows.chains_s.items() if self.flows.chains_s.get(key) != s},
            slots=np.array([judged.slots.get(s, 0) - reference.slots[s] for s in self.slots], dtype=float),
            tiers={t: peaks[t] - before.get(t, 0) for t in peaks if not t.traits.is_device},
        )

    def _own(self, call: int) -> dict[tuple[bool, int], int]:
        """Numbers of a call's own places."""
        return {(place.is_backward, place.turn): i for i, place in enumerate(self.flows.places) if place.call == call}

    def _shifted(self, price: PlacePrice, probed: int, call: int) -> PlacePrice:
        """Returns a probed price at another call."""
        there, own = self._own(probed), self._own(call)
        count = len(self.flows.places)

        def moved_by(place: int) -> int | None:
            nearest = min(there, key=lambda key: (abs(place - there[key]), there[key]))
            return own[nearest] - there[nearest] if nearest in own else None

        work: dict[tuple[Queue, int], float] = defaultdict(float)
        for (queue, place), seconds in price.work_s.items():
            if (by := moved_by(place)) is not None:
                work[queue, min(count, max(0, place + by))] += seconds
        chains: dict[tuple[int, float], float] = {}
        for (place, end), seconds in price.chains_s.items():
            by = moved_by(place)
            if by is not None and 0 <= place + by <= count:
                chains[place + by, end + 2 * by] = seconds
        return replace(price, work_s=dict(work), chains_s=chains)

    def options_of(self, mixture: Mixture) -> tuple[list[tuple[int, int]], list[int]]:
        """Returns a mixture's options as numbers: of policies and homes by unit, of homes by group
        of ends.
        """
        first = len(self.policies)
        units = zip(mixture.policies, mixture.homes, strict=True)
        of_units = [(self.policies.index(policy), first + self.homes.index(homes)) for policy, homes in units]
        return of_units, [self.homes.index(homes) for homes in mixture.ends]


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
