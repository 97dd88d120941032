"""Offsets for buffers whose lifetimes are known beforehand.

In: lifetimes and sizes. Out: an offset for each, and the capacity that holds them all. Offline
dynamic storage allocation is NP-hard, so this is a heuristic. Its usual result is the sum of what
is live at the worst moment, or a few per cent more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.core.errors import UsageError
from memfit.core.units import round_up

Lifetime = tuple[int, int, int]


def plan_offsets(lifetimes: Sequence[Lifetime], alignment: int = 1) -> tuple[tuple[int, ...], int]:
    """Packs buffers so that no two that are live at the same time overlap.

    Three orders are tried (largest first, size times lifetime first, earliest first). Each buffer
    goes to the smallest gap that holds it between the buffers it meets in time, at the gap's low
    end. The order with the least capacity wins. Deterministic. Quadratic in the number of buffers:
    1,000 take about 0.3 s.

    Args:
        lifetimes: (start, end, size) of each: live from `start` on and before `end`, in any integer
            clock. Sizes are in any unit, such as the elements of an `Arena`'s buffer; offsets and
            capacity are in the same unit.
        alignment: offsets are multiples of it.

    Returns:
        The offsets in the order of `lifetimes`, and the capacity: the largest offset + size. Empty
            buffers get offset 0.

    Raises:
        UsageError: a lifetime that ends before it begins, a negative size, or an alignment below 1.

    Source: Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference",
    section 5 (greedy by size).
    """
    if alignment < 1:
        raise UsageError(f"an alignment is at least 1, not {alignment}")
    for index, (start, end, size) in enumerate(lifetimes):
        if size < 0 or end < start or (end == start and size > 0):
            raise UsageError(f"buffer {index} has start {start}, end {end} and size {size}: it needs end > start")
    orders: tuple[Callable[[Lifetime], tuple[int, ...]], ...] = (
        lambda buffer: (-buffer[2], buffer[0]),
        lambda buffer: (-buffer[2] * (buffer[1] - buffer[0]), buffer[0]),
        lambda buffer: (buffer[0], -buffer[2]),
    )
    return min((_pack(lifetimes, alignment, order) for order in orders), key=lambda packed: packed[1])


def _pack(
    lifetimes: Sequence[Lifetime], alignment: int, order: Callable[[Lifetime], tuple[int, ...]]
) -> tuple[tuple[int, ...], int]:
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, int, int]] = []  # offset, end of its bytes rounded up, start, end
    capacity = 0
    for index in sorted(range(len(lifetimes)), key=lambda each: (*order(lifetimes[each]), each)):
        start, end, wanted = lifetimes[index]
        if wanted == 0:
            continue
        size = round_up(wanted, alignment)
        meets = sorted(
            (low, high) for low, high, other_start, other_end in placed if other_start < end and start < other_end
        )
        offset = _best_gap(meets, size)
        offsets[index] = offset
        placed.append((offset, offset + size, start, end))
        capacity = max(capacity, offset + wanted)
    return tuple(offsets), capacity


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Returns the low end of the smallest gap of `size` in `taken` (sorted, may overlap), else the
    end of them all.
    """
    low = 0
    best: tuple[int, int] | None = None
    for start, end in taken:
        gap = start - low
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, low)
        low = max(low, end)
    return low if best is None else best[1]
