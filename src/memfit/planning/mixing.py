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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

from memfit.core.tiers import Tier
from memfit.planning.slot_prices import OptionPrices, Row
from memfit.prediction.bytes import Slot

_GIB = float(1 << 30)
# Of lanes that are not the busiest: decides between equal optima for less work.
_TIE = 1e-3


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


def best_shares(
    prices: OptionPrices,
    room: ByteRoom,
    *,
    stall_weight: float,
    ends: Sequence[int] | None = None,
    is_bound: bool = False,
) -> Shares | None:
    """Solves the mixture program; None if no mixture is within the room.

    Args:
        prices: of the options.
        room: bytes.
        stall_weight: of the stalls of options, from 0 to 1.
        ends: index of the option of each group of ends, where they are decided.
        is_bound: its seconds are what is asked for, so that all that bounds them counts.

    See [Note: the mixture program].
    """
    import numpy as np

    # Not typed, and slow to import: only where mixed plans are looked for.
    optimize: Any = import_module("scipy.optimize")
    groups = (len(prices.policies), len(prices.homes), *map(len, prices.ends))
    options, count = prices.options, len(prices.options)
    # Rows of lanes are less than the seconds in the last column; all others are in GiB.
    matrix = np.zeros((len(prices.rows), count + 1))
    above = np.zeros(len(prices.rows))
    used: list[int] = []
    for i, (row, here) in enumerate(zip(prices.rows, prices.known, strict=True)):
        if row.kind == "lane" or (is_bound and row.kind == "bound"):
            matrix[i, :count], matrix[i, count], above[i] = prices.by_row[i], -1.0, -here
        elif (limit := limit_of(row, room)) is not None:
            matrix[i, :count], above[i] = prices.by_row[i] / _GIB, (limit - here) / _GIB
        else:
            continue
        used.append(i)
    sums: list[list[float]] = []
    for group in groups:
        begin = sum(groups[: len(sums)])
        sums.append([1.0 if begin <= i < begin + group else 0.0 for i in range(count + 1)])
    work = [sum(value for row, value in more.items() if row.kind == "lane") for more, _ in options]
    cost = [_TIE * w + stall_weight * max(0.0, stall_s) for w, (_, stall_s) in zip(work, options, strict=True)]
    begins = [sum(groups[:i]) for i in range(len(groups) + 1)]
    limits: list[tuple[float, float | None]] = [(0.0, 1.0)] * count
    for group, option in enumerate(ends or ()):
        first = begins[group + 2]
        for i in range(first, begins[group + 3]):
            limits[i] = (0.0, 1.0 if i - first == option else 0.0)
    found: Any = optimize.linprog(
        [*cost, 1.0],
        A_ub=matrix[used] if used else None,
        b_ub=above[used] if used else None,
        A_eq=sums,
        b_eq=[1.0] * len(sums),
        bounds=[*limits, (0.0, None)],
        method="highs",
    )
    if found.x is None or not found.success:
        return None
    shares = [float(value) for value in found.x[:count]]
    by_group = [tuple(shares[begin:end]) for begin, end in pairwise(begins)]
    return Shares(policies=by_group[0], homes=by_group[1], ends=tuple(by_group[2:]), seconds=float(found.x[count]))


def limit_of(row: Row, room: ByteRoom) -> float | None:
    """Returns how much of a row a mixture may take; None: any amount."""
    if row.kind == "slot":
        return None if room.device is None else room.device - room.slack.get(row.slot, 0.0)
    return room.tiers.get(row.tier) if row.kind == "tier" else None
