"""How many units of a mixture have which option, and the counts next to them.

In: counts. Out: counts that differ in one move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OptionCounts:
    """How many units have each option, and which one each group of ends has."""

    policies: tuple[int, ...]
    homes: tuple[int, ...]
    ends: tuple[int, ...]


def other_ends(ends: tuple[int, ...], options: Sequence[int]) -> list[tuple[int, ...]]:
    """Lists ends of which one group has another option.

    Args:
        ends: option of each group.
        options: how many there are of each.
    """
    return [
        (*ends[:group], other, *ends[group + 1 :])
        for group, count in enumerate(options)
        for other in range(count)
        if other != ends[group]
    ]


def all_shifted(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Lists counts of which a half, a quarter, an eighth, or one of all, has gone from one option
    to another; the most first.
    """
    total = sum(counts)
    sizes = sorted({max(1, total // part) for part in (2, 4, 8, total)}, reverse=True)
    return list(dict.fromkeys(moved for size in sizes for moved in _shifted(counts, size)))


def _shifted(counts: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    for source, there in enumerate(counts):
        for target in range(len(counts)):
            if target != source and there:
                moved = min(size, there)
                yield tuple(c - moved if i == source else c + moved if i == target else c for i, c in enumerate(counts))
