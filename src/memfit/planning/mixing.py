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
from itertools import accumulate, pairwise

from memfit.core.tiers import Tier
from memfit.planning.linear_programs import LinearProgram
from memfit.planning.slot_prices import OptionPrices, Row
from memfit.prediction.bytes import Slot

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
