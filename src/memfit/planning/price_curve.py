"""The price of memory: seconds of a step by the limit, with its knees.

In: answers of the planner for several limits. Out: `CurvePoint`s, smallest limit first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

_KNEE = 2.0
"""Times as dear below as above: from there on a point is a knee."""
_FLAT = 1e-3


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The chosen plan inside one limit.

    Attributes:
        limit_bytes: of the device.
        seconds: predicted for a step.
        peak_bytes: predicted device bytes of tensors.
        name: the plan in words.
        is_knee: with less memory seconds rise at least twice as steeply as they do above it.
        is_asked: it is the limit that was asked about.
    """

    limit_bytes: int
    seconds: float
    peak_bytes: int
    name: str
    is_knee: bool = False
    is_asked: bool = False


def curve_limits(least: int, most: int, count: int) -> tuple[int, ...]:
    """Returns limits from the least to the most, each larger than the one before by the same
    factor, and whole MiB (but for the ends).
    """
    if most <= least or count < 2:
        return (least,)
    ratio = (most / least) ** (1 / (count - 1))
    inner = [round(least * ratio**i) >> 20 << 20 for i in range(1, count - 1)]
    return tuple(sorted({least, most, *(limit for limit in inner if least < limit < most)}))


def with_knees(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Returns the points by limit, knees marked, without those that a smaller limit equals.

    A point is a knee if a byte less costs at least twice the seconds that a byte more saves, both
    towards the next points that differ.
    """
    ordered = sorted(points, key=lambda p: p.limit_bytes)
    kept: list[CurvePoint] = []
    for point in ordered:
        if not kept or point.is_asked or point.seconds < kept[-1].seconds * (1 - _FLAT):
            kept.append(point)
    steepness = [
        (before.seconds - after.seconds) / max(1, after.limit_bytes - before.limit_bytes)
        for before, after in pairwise(kept)
    ]
    marked: list[CurvePoint] = []
    for i, point in enumerate(kept):
        below = steepness[i - 1] if i else 0.0
        above = steepness[i] if i < len(steepness) else 0.0
        marked.append(replace(point, is_knee=below > 0 and below >= _KNEE * above))
    return tuple(marked)
