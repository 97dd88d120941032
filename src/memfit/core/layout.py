"""Where the tensors of a block lie in its flat buffer: one rule for prediction and runtime.

In: byte sizes in order. Out: offsets and the buffer's size.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core.units import round_up

# A page: direct I/O moves whole pages, and a tensor that begins on one is read and written without its neighbours.
ALIGNMENT_BYTES = 4096


def flat_layout(sizes_bytes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Lays tensors out one after the other, each on a page of its own.

    Args:
        sizes_bytes: bytes of each tensor, in order.

    Returns:
        The offset of each in bytes, and the buffer's bytes (a multiple of `ALIGNMENT_BYTES`).
    """
    offsets: list[int] = []
    end = 0
    for size in sizes_bytes:
        offsets.append(end)
        end += round_up(size, ALIGNMENT_BYTES)
    return tuple(offsets), end
