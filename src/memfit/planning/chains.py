"""Which outputs of a chain are kept when the rest is recomputed.

In: lengths. Out: segments, and the `CallPlan`s that carry them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from memfit.core.errors import UsageError
from memfit.core.plan import CallPlan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier


def every_kth(calls: int, spacing: int) -> tuple[tuple[int, int], ...]:
    """Segments of `spacing` calls: every `spacing`-th output is kept, the others are made again in
    backward.

    At worst calls / spacing kept outputs and one segment's `spacing` live together; at most `calls`
    extra forward calls.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 3.

    Returns:
        (first, last) call of each segment; the last one may be shorter.

    Raises:
        UsageError: either number below 1.
    """
    if calls < 1 or spacing < 1:
        raise UsageError(f"a chain has at least one call and a spacing of at least one, not {calls} and {spacing}")
    return tuple((first, min(first + spacing, calls) - 1) for first in range(0, calls, spacing))


def sqrt_segments(calls: int) -> tuple[tuple[int, int], ...]:
    """Segments of about sqrt(calls) calls, for which `every_kth`'s live outputs are fewest in a
    uniform chain.
    """
    spacings = {math.isqrt(calls), math.isqrt(calls) + 1} if calls > 0 else {0}
    return every_kth(calls, min(spacings, key=lambda k: (-(-calls // max(k, 1)) + k, k)))


def recompute_segments(segments: Sequence[tuple[int, int]], boundary_home: Tier = Tier.DEVICE) -> tuple[CallPlan, ...]:
    """Decisions of calls that are recomputed a segment at a time."""
    return tuple(
        CallPlan(saved=Saved.RECOMPUTE, boundary_home=boundary_home, joins_previous=call > first)
        for first, last in segments
        for call in range(first, last + 1)
    )
