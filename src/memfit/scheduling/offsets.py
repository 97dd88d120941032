"""Positions for buffers whose lifetimes are known: who lies where in one piece of memory.

In: lifetimes and sizes. Out: an offset for each, and the capacity that holds them all. Offline dynamic storage
allocation is NP-hard, so this is a heuristic, with the usual result: the sum of what is live at the worst moment, or a
few per cent more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.core.errors import UsageError
from memfit.core.units import round_up

Lifetime = tuple[int, int, int]


def plan_offsets(lifetimes: Sequence[Lifetime], alignment: int = 4096) -> tuple[tuple[int, ...], int]:
    """Packs buffers so that no two that live at the same time overlap.

    Three orders are tried (largest first, longest-lived times size first, earliest first); each buffer goes to the
    smallest gap between those it meets in time that holds it, at the gap's low end; the order with the least capacity
    wins, the first of equals. Deterministic. Quadratic in the number of buffers: 1,000 take about 0.3 s.

    Args:
        lifetimes: (start, end, nbytes) of each: live from `start` on and before `end`, in any integer clock, such as
            action indices.
        alignment: offsets are multiples of it, in bytes.

    Returns:
        The offsets in the order of `lifetimes`, and the capacity in bytes: the largest offset + nbytes. Empty buffers
        get offset 0.

    Raises:
        UsageError: a lifetime that ends before it begins, a negative size, or an alignment below 1.

    Source: Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference", section 5 (greedy by
    size).
    """
    if alignment < 1:
        raise UsageError(f"an alignment is at least 1 byte, not {alignment}")
    for index, (start, end, nbytes) in enumerate(lifetimes):
        if nbytes < 0 or end < start or (end == start and nbytes > 0):
            raise UsageError(
                f"buffer {index} with start {start}, end {end} and {nbytes} bytes is none: it needs end > start"
            )
    orders: tuple[Callable[[Lifetime], tuple[int, ...]], ...] = (
        lambda buffer: (-buffer[2], buffer[0]),
        lambda buffer: (-buffer[2] * (buffer[1] - buffer[0]), buffer[0]),
        lambda buffer: (buffer[0], -buffer[2]),
    )
    # The worst moment's live bytes: no packing can be smaller, so an order that reaches it ends the search.
    floor = most_live_bytes(lifetimes)
    best: tuple[tuple[int, ...], int] | None = None
    for order in orders:
        packed = _pack(lifetimes, alignment, order)
        if best is None or packed[1] < best[1]:
            best = packed
        if best[1] <= floor:
            break
    assert best is not None
    return best


def most_live_bytes(lifetimes: Sequence[Lifetime]) -> int:
    """The largest sum of bytes that live at one moment: the least capacity that any packing can have."""
    changes = sorted(
        [(start, nbytes) for start, _, nbytes in lifetimes] + [(end, -nbytes) for _, end, nbytes in lifetimes]
    )
    live = most = 0
    for _, change in changes:  # at one moment the endings come first: they sort as negative
        live += change
        most = max(most, live)
    return most


def _pack(
    lifetimes: Sequence[Lifetime], alignment: int, order: Callable[[Lifetime], tuple[int, ...]]
) -> tuple[tuple[int, ...], int]:
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, int, int]] = []  # offset, end of its bytes rounded up, start, end
    capacity = 0
    for index in sorted(range(len(lifetimes)), key=lambda each: (*order(lifetimes[each]), each)):
        start, end, nbytes = lifetimes[index]
        if nbytes == 0:
            continue
        size = round_up(nbytes, alignment)
        meets = sorted(
            (low, high) for low, high, other_start, other_end in placed if other_start < end and start < other_end
        )
        offset = _best_gap(meets, size)
        offsets[index] = offset
        placed.append((offset, offset + size, start, end))
        capacity = max(capacity, offset + nbytes)
    return tuple(offsets), capacity


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The low end of the smallest gap of at least `size` in `taken` (sorted, may overlap), else the end of them all."""
    low = 0
    best: tuple[int, int] | None = None
    for start, end in taken:
        gap = start - low
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, low)
        low = max(low, end)
    return low if best is None else best[1]
