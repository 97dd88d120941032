"""Attention that bypasses tiled kernels.

In: nothing (the `profiling` package fills it). Out: a frozen dataclass, a part of
`core.profile.TraceProfile`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UntiledAttention:
    """Attention that saves its probabilities for backward, instead of making them again in tiles.

    Attributes:
        call: index of the call in whose segment it ran.
        module: dotted name of the module.
        saved_bytes: the probabilities, and dropout's mask and result where there are any.
        tiled_bytes: what a tiled kernel saves in their place, a number in fp32 for each row. Q, K
            and V are saved either way.
    """

    call: int
    module: str
    saved_bytes: int
    tiled_bytes: int
