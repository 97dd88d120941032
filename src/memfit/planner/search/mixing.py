"""Shares of a mixture: how many units get which option, from a linear program over prices.

In: `OptionPrices`, room by slot and tier. Out: `Shares`.

[Note: the mixture program]
Unknown are the share of units with each policy and each home, and the homes of the ends. A mixture
takes the sum of its shares of prices: at every slot that is within the room of the device, in every
tier within its limit. Each lane (the device, each direction of a link, the host's cores) works for
its sum, and the step takes at least as long as the busiest one. What a uniform plan stalls beyond
that is added by a weight: of the stalls of options, a mixture has some part, since one option waits
where another one works. The optimum has at most as many options as rows are tight, a few. It is a
point to begin from, not the answer: whole units and the order of events are the judge's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

from memfit.core.errors import UsageError
from memfit.core.plan import BlockPlan, CallPlan
from memfit.core.tiers import Tier
from memfit.planner.search.mixed_units import Mixture
from memfit.planner.search.slot_prices import Judge, Judged, OptionPrices, Row, uniform
from memfit.step.bytes import Slot

# Prices of an option for one unit, wherever it stands in the chain.
#
# In: a judge. Out: bytes by slot that one unit's option takes more than the reference's.
#
# [Note: a price is shifted]
# One unit in the middle is probed with each option. What it takes more is a constant while it rests
# (between its forward and its backward, or all the time) and a few numbers near its own forward and
# backward. A unit elsewhere takes the same around its own.

# Slots around a unit's own forward and backward at which its price differs from the constant.
_NEAR = 5


class PlacePrices:
    """Prices of all options of single units. See [Note: a price is shifted].

    Args:
        judge: of mixtures.
        policies, homes: options.

    Attributes:
        slots: in the order of the step.
        by_slot: bytes more than the reference.  # (units, options, slots)
    """

    def __init__(self, judge: Judge, policies: Sequence[CallPlan], homes: Sequence[BlockPlan]) -> None:
        import numpy as np

        none = uniform(judge.units, CallPlan(), BlockPlan())
        reference = judge(none)
        self.slots: tuple[Slot, ...] = tuple(reference.slots)
        calls = judge.units.calls
        middle = len(calls) // 2
        probes = [with_policy(none, middle, policy) for policy in policies]
        probes += [with_homes(none, middle, homes_) for homes_ in homes]
        found: list[list[list[float]]] = []
        for probe in probes:
            slots = judge(probe).slots
            more = [float(slots.get(slot, 0) - reference.slots[slot]) for slot in self.slots]
            found.append([self._shifted(more, calls[middle], call) for call in calls])
        # (options, units, slots) -> (units, options, slots)
        self.by_slot: Any = np.array(found).swapaxes(0, 1)

    def _span(self, call: int) -> tuple[int, int]:
        """Positions of a call's forward and backward."""
        forward = self.slots.index((False, call))
        backward = self.slots.index((True, call)) if (True, call) in self.slots else forward
        return forward, backward

    def _shifted(self, more: Sequence[float], probed: int, call: int) -> list[float]:
        """Returns a probed price at another call."""
        if call == probed:
            return list(more)
        forward, backward = self._span(probed)
        inside = median(more[forward + 2 : backward - 1]) if backward - forward > 3 else 0.0
        far = [*more[: max(0, forward - _NEAR)], *more[backward + _NEAR + 1 :]]
        outside = median(far) if far else 0.0
        own_forward, own_backward = self._span(call)
        found = [inside if own_forward <= t <= own_backward else outside for t in range(len(more))]
        for t, value in enumerate(more):
            rests = inside if forward <= t <= backward else outside
            is_first = abs(t - forward) <= abs(t - backward)
            offset = t - forward if is_first else t - backward
            place = (own_forward if is_first else own_backward) + offset
            if abs(offset) <= _NEAR and 0 <= place < len(found):
                found[place] += value - rests
        return found


def with_policy(mixture: Mixture, place: int, policy: CallPlan) -> Mixture:
    """Gives one unit another policy."""
    policies = list(mixture.policies)
    policies[place] = policy
    return Mixture(policies=tuple(policies), homes=mixture.homes, ends=mixture.ends)


def with_homes(mixture: Mixture, place: int, homes: BlockPlan) -> Mixture:
    """Gives one unit other homes."""
    found = list(mixture.homes)
    found[place] = homes
    return Mixture(policies=mixture.policies, homes=tuple(found), ends=mixture.ends)


# Linear programs, some of whose columns may be whole, solved by HiGHS.
#
# In: costs, rows and bounds. Out: columns at the optimum, or a bound of it.
#
# HiGHS's own binding: it is there in a fiftieth of the time that `scipy.optimize` takes to import,
# and a program that differs from the one before in its bounds alone is not built again. Each
# solution begins anew: what was solved before does not decide between equal optima.

# Nothing depends on the clock or on how many cores there are. The number of threads is not said:
# HiGHS has one scheduler a thread, and refuses whoever asks for another number than the first.
_OPTIONS: Mapping[str, object] = {"output_flag": False, "parallel": "off"}


class LinearProgram:
    """Minimizes the cost of columns within their bounds and those of rows.

    Args:
        least, most: bounds of columns.
        rows: terms of each row, (column, factor); of each pair of row and column one at most.
        row_least, row_most: bounds of rows.
        whole: columns that are whole numbers.
        options: of HiGHS, by its names.
    """

    def __init__(
        self,
        least: Sequence[float],
        most: Sequence[float],
        rows: Sequence[Sequence[tuple[int, float]]],
        row_least: Sequence[float],
        row_most: Sequence[float],
        *,
        whole: Sequence[int] = (),
        options: Mapping[str, object] | None = None,
    ) -> None:
        import numpy as np

        # Not typed, and only where mixed plans are looked for.
        self._core: Any = import_module("highspy")
        self._highs: Any = self._core.Highs()
        for name, value in {**_OPTIONS, **(options or {})}.items():
            assert self._highs.setOptionValue(name, value) != self._core.HighsStatus.kError, (
                f"HiGHS has no option {name}"
            )
        self._is_whole = bool(whole)
        model: Any = self._core.HighsLp()
        model.num_col_, model.num_row_ = len(least), len(rows)
        model.col_cost_ = np.zeros(len(least))
        model.col_lower_, model.col_upper_ = np.array(least, float), np.array(most, float)
        model.row_lower_, model.row_upper_ = np.array(row_least, float), np.array(row_most, float)
        model.a_matrix_.format_ = self._core.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        model.a_matrix_.index_ = np.array([column for row in rows for column, _ in row], np.int32)
        model.a_matrix_.value_ = np.array([factor for row in rows for _, factor in row], float)
        if whole:
            kinds = [self._core.HighsVarType.kContinuous] * len(least)
            for column in whole:
                kinds[column] = self._core.HighsVarType.kInteger
            model.integrality_ = kinds
        self._checked(self._highs.passModel(model))

    def bound_columns(self, least: Sequence[float], most: Sequence[float]) -> None:
        """Takes other bounds of all columns from now on."""
        import numpy as np

        columns = np.arange(len(least), dtype=np.int32)
        self._checked(
            self._highs.changeColsBounds(len(columns), columns, np.array(least, float), np.array(most, float))
        )

    def bound_rows(self, least: Sequence[float], most: Sequence[float]) -> None:
        """Takes other bounds of all rows from now on."""
        import numpy as np

        rows = np.arange(len(least), dtype=np.int32)
        self._checked(self._highs.changeRowsBounds(len(rows), rows, np.array(least, float), np.array(most, float)))

    def minimize(self, cost: Sequence[float]) -> list[float] | None:
        """Returns the columns at the optimum; None if nothing is within the bounds.

        Args:
            cost: of each column.
        """
        return list(self._highs.getSolution().col_value) if self._run(cost) == "kOptimal" else None

    def bound_of_minimum(self, cost: Sequence[float]) -> float:
        """Returns what no columns within the bounds cost less than; infinite: nothing is within.

        Args:
            cost: of each column; columns that cost something are not negative, nor are their costs.
        """
        status = self._run(cost)
        if status == "kInfeasible":
            return math.inf
        info = self._highs.getInfo()
        if self._is_whole:
            return max(0.0, float(info.mip_dual_bound))
        return float(info.objective_function_value) if status == "kOptimal" else 0.0

    def _run(self, cost: Sequence[float]) -> str:
        import numpy as np

        columns = np.arange(len(cost), dtype=np.int32)
        self._checked(self._highs.changeColsCost(len(columns), columns, np.array(cost, float)))
        self._highs.clearSolver()
        self._checked(self._highs.run())
        # A program of the caller's own may ask for any number of threads.
        self._core.Highs.resetGlobalScheduler(True)  # noqa: FBT003, the only way to say it
        return self._highs.getModelStatus().name

    def _checked(self, status: Any) -> None:
        if status == self._core.HighsStatus.kError:
            raise UsageError(
                "the solver of mixed plans refuses a program: the machine's rates are too many orders apart for it. Correct the rates of the hardware file"
            )


_GIB = float(1 << 30)
# Of lanes that are not the busiest: decides between equal optima for less work.
_TIE = 1e-3
_OF_LANES = ("lane", "bound")


@dataclass(frozen=True, kw_only=True)
class ByteRoom:
    """Bytes that a mixture may take.

    Attributes:
        device: at every slot; None: no limit.
        slack: bytes by which a slot's room is smaller, because mixtures were found to take more
            there than their prices say.
        tiers: limits beside the device.
    """

    device: int | None
    slack: Mapping[Slot, float]
    tiers: Mapping[Tier, float]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Solution of the mixture program.

    Attributes:
        policies, homes: shares of options; each group's sum to 1.
        ends: the same for each group of ends.
        seconds: its optimum.
    """

    policies: tuple[float, ...]
    homes: tuple[float, ...]
    ends: tuple[tuple[float, ...], ...]
    seconds: float


class MixtureProgram:
    """The mixture program of some options, solved with one room after the other.

    Args:
        prices: of the options.

    See [Note: the mixture program].
    """

    def __init__(self, prices: OptionPrices) -> None:
        self._prices = prices
        count, rows = len(prices.options), prices.rows
        groups = (len(prices.policies), len(prices.homes), *map(len, prices.ends))
        self._begins = [*accumulate(groups, initial=0)]
        # Rows of lanes are less than the seconds in the last column; all others are in GiB.
        self._scales = [1.0 if row.kind in _OF_LANES else _GIB for row in rows]
        terms = [
            [(column, float(more) / scale) for column, more in enumerate(of_row) if more]
            + ([(count, -1.0)] if row.kind in _OF_LANES else [])
            for row, of_row, scale in zip(rows, prices.by_row, self._scales, strict=True)
        ]
        sums = [[(column, 1.0) for column in range(begin, end)] for begin, end in pairwise(self._begins)]
        self._sums = [1.0] * len(sums)
        self._least = [*([-math.inf] * len(rows)), *self._sums]
        self._program = LinearProgram(
            [0.0] * (count + 1),
            [*([1.0] * count), math.inf],
            [*terms, *sums],
            self._least,
            [*([math.inf] * len(rows)), *self._sums],
            options={"presolve": "off", "solver": "simplex"},
        )
        work = [sum(value for row, value in more.items() if row.kind == "lane") for more, _ in prices.options]
        self._ties = [_TIE * seconds for seconds in work]
        self._stalls = [max(0.0, stall_s) for _, stall_s in prices.options]

    def best_shares(
        self,
        room: ByteRoom,
        *,
        stall_weight: float,
        ends: Sequence[int] | None = None,
        is_bound: bool = False,
    ) -> Shares | None:
        """Solves the program; None if no mixture is within the room.

        Args:
            room: bytes.
            stall_weight: of the stalls of options, from 0 to 1.
            ends: index of the option of each group of ends, where they are decided.
            is_bound: its seconds are what is asked for, so that all that bounds them counts.
        """
        count = self._begins[-1]
        above = [
            self._most(row, known, room, is_bound=is_bound) / scale
            for row, known, scale in zip(self._prices.rows, self._prices.known, self._scales, strict=True)
        ]
        most = [1.0] * count
        for group, option in enumerate(ends or ()):
            begin, end = self._begins[group + 2 : group + 4]
            most[begin:end] = [1.0 if i == option else 0.0 for i in range(end - begin)]
        self._program.bound_rows(self._least, [*above, *self._sums])
        self._program.bound_columns([0.0] * (count + 1), [*most, math.inf])
        cost = [tie + stall_weight * stall_s for tie, stall_s in zip(self._ties, self._stalls, strict=True)]
        found = self._program.minimize([*cost, 1.0])
        if found is None:
            return None
        by_group = [tuple(found[begin:end]) for begin, end in pairwise(self._begins)]
        return Shares(policies=by_group[0], homes=by_group[1], ends=tuple(by_group[2:]), seconds=found[count])

    @staticmethod
    def _most(row: Row, known: float, room: ByteRoom, *, is_bound: bool) -> float:
        """Returns what options may take of a row more than the reference; infinite: any amount."""
        if row.kind in _OF_LANES:
            return -known if is_bound or row.kind == "lane" else math.inf
        limit = limit_of(row, room)
        return math.inf if limit is None else limit - known


def limit_of(row: Row, room: ByteRoom) -> float | None:
    """Returns how much of a row a mixture may take; None: any amount."""
    if row.kind == "slot":
        return None if room.device is None else room.device - room.slack.get(row.slot, 0.0)
    return room.tiers.get(row.tier) if row.kind == "tier" else None


# Prices as arrays, to estimate many mixtures at once.
#
# In: `OptionPrices`, room. Out: amounts by row of prices, and seconds, of mixtures that differ a
# little from a judged one.

# Prices of neighbours are trusted to so much of the room; the part of stalls that they say.
_ROUNDING = 0.005
_STALLED = 0.5


class PriceTable:
    """Prices of options: a row an option, a column a row of prices, the last one stalls.

    Args:
        prices: of the options.
        room: bytes that a mixture may take.

    Attributes:
        more: what options take more than the reference.  # (options, columns)
        most: what a mixture may take; infinite for lanes and stalls.  # (columns,)
        lanes, slot_columns: columns of lanes and of slots.
        first_home: row at which the options of homes begin.
        first_ends: the same for each group of ends, and the number of rows.
    """

    def __init__(self, prices: OptionPrices, room: ByteRoom) -> None:
        import numpy as np

        self._rows = prices.rows
        stalls = np.array([stall for _, stall in prices.options])
        self.more: Any = np.column_stack([prices.by_row.T, stalls])
        limits = [limit_of(row, room) for row in self._rows]
        most = [math.inf if limit is None else limit * (1 + _ROUNDING) for limit in limits]
        self.most: Any = np.array([*most, math.inf])
        self.lanes = [i for i, row in enumerate(self._rows) if row.kind == "lane"]
        self.slot_columns = [i for i, row in enumerate(self._rows) if row.kind == "slot"]
        self.first_home = len(prices.policies)
        self.first_ends = [self.first_home + len(prices.homes)]
        for group in prices.ends:
            self.first_ends.append(self.first_ends[-1] + len(group))

    def slot_order(self, places: PlacePrices) -> list[int]:
        """Returns the positions of the columns' slots in prices by place."""
        return [places.slots.index(self._rows[column].slot) for column in self.slot_columns]

    def amounts_of(self, judged: Judged) -> Any:
        """Returns what a judged mixture takes of each column; of the last one nothing: stalls are
        told by their changes.
        """
        import numpy as np

        return np.array([*(judged.amount(row) for row in self._rows), 0.0])

    def worth(self, changed: Any, known: Judged) -> Any:
        """Estimates seconds of mixtures; infinite where they do not fit, or one of their lanes
        alone works as long as the known mixture takes.

        Args:
            changed: their amounts, as of the known one plus changes.  # (..., columns)
            known: that they differ from.
        """
        import numpy as np

        stalls = np.maximum(0.0, known.stall_s + _STALLED * changed[..., -1])
        busiest = changed[..., self.lanes].max(-1)
        may_win = (changed <= self.most).all(-1) & (busiest < known.built.cost.seconds)
        return np.where(may_win, busiest + stalls, math.inf)
