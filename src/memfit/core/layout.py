"""Layout of a block's tensors in its flat buffer: one rule for prediction and engine.

In: byte sizes in order. Out: offsets and the buffer's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from memfit.core.units import MIB, round_up

# A page: direct I/O moves whole pages, and a tensor that begins on one is read and written without
# its neighbours.
ALIGNMENT_BYTES = 4096
# Updates, conversions and sums work on pieces of so many elements: 2 MiB of fp32 fit a core's cache
# with gradient and moments, and are a whole number of pages.
PIECE_ELEMENTS = 1 << 19
# While a parameter has no states, the optimizer's class makes them beside the memory that they rest
# in: then pieces are smaller, so that both take no more than a later piece with its temporaries
# does.
FIRST_PIECE_ELEMENTS = PIECE_ELEMENTS >> 2

# Between an accelerator and a file, bytes pass through pinned host memory: as many pieces of this
# size each way. A piece is what the disk's threads move at once.
STAGING_PIECE_BYTES = 4 * MIB
STAGING_PIECES = 2
PINNED_STAGING_BYTES = 2 * STAGING_PIECES * STAGING_PIECE_BYTES
# Pieces of weights at home on the device that an update on the host has in pinned memory: one that
# leaves, one that is worked on, one that comes.
MOVED_PIECES = 3

Scheme = Literal["generations", "journal"]
"""Scheme by which a store has a complete step on disk at every instant: two versions of everything
(double-buffered), or one version and a journal of the gradients that lead to the next.
"""

_SPARE_SHARE = 16
_MOST_SPARE_BYTES = 512 * MIB


def spare_room_bytes(sizes_bytes: Sequence[int]) -> int:
    """Returns the spare room of a store with a journal, through which units are moved when they get
    a new version. Each time it is used up costs a commit, so it holds several small units.

    Args:
        sizes_bytes: bytes of each unit.

    Returns:
        The largest of them, or a sixteenth of all up to 512 MiB, in whole pages.
    """
    several_bytes = min(round_up(sum(sizes_bytes) // _SPARE_SHARE, ALIGNMENT_BYTES), _MOST_SPARE_BYTES)
    return max([several_bytes, *(round_up(size, ALIGNMENT_BYTES) for size in sizes_bytes)])


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


def split_layout(sizes_bytes: Sequence[tuple[int, int]]) -> tuple[tuple[tuple[int, int], ...], int]:
    """Lays out the low bits of split masters: for each, 16 bits an element (as many bytes as the
    weight) and one packed bit an element.

    Args:
        sizes_bytes: (bytes of the weight, bytes of the master) of each parameter; if they are
            equal, the master is stored whole.

    Returns:
        The two offsets in bytes of each parameter, and the total bytes.
    """
    parts: list[int] = []
    for weight, master in sizes_bytes:
        parts += [master, 0] if weight == master else [weight, -(-weight // 16)]
    offsets, end = flat_layout(parts)
    return tuple(zip(offsets[::2], offsets[1::2], strict=True)), end
