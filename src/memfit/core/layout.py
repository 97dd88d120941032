"""Layout of a block's tensors in its flat buffer: one rule for prediction and engine.

In: byte sizes in order. Out: offsets and the buffer's size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Literal

from memfit.core.limits import MIB, round_up

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


# Shares: which elements of each parameter a rank holds, where ranks cut a block between them.
#
# In: sizes of parameters in order, the number of ranks. Out: ranges of elements, by rank and
# parameter; one rule for prediction, homes and stores.
#
# [Note: shares of elements]
# A block's parameters are laid out one after the other, as often as there are kinds of bytes: the
# weight, its master, the gradient, each state. All of them are cut at the same elements, so that an
# update finds everything of its share beside it. Cuts lie on whole multiples of 4096 elements of a
# parameter: there pages of direct I/O, records of low-bit states and the optimizer's vector units
# all begin, so that a share gives the bits of the whole. A parameter whose optimizer needs all of
# it is never cut. Shares may be uneven, or empty.

UNIT_ELEMENTS = 4096
# Gradients are exchanged in pieces of so many elements for each rank, so that what is staged is
# bounded.
EXCHANGED_ELEMENTS = 1 << 18
# New weights that rest in no processor's memory go to the other ranks in pieces of so many bytes of
# each rank.
SPREAD_BYTES = 1 << 20


class Share(StrEnum):
    """Part of a block's weights, gradients or states that each rank has at home.

    WHOLE: all of it. DATA: its share over the ranks of the data axis.
    """

    WHOLE = "whole"
    DATA = "data"


@dataclass(frozen=True)
class BlockCut:
    """Places at which the parameters of a block are cut between ranks.

    Attributes:
        numels: elements of each parameter, in the block's order.
        points: where the share of each rank begins, and the end: (parameter, element of it).
    """

    numels: tuple[int, ...]
    points: tuple[tuple[int, int], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.points) - 1

    def held(self, rank: int) -> tuple[range, ...]:
        """Returns, by parameter, the elements that a rank holds."""
        first, last = self.points[rank : rank + 2]
        return tuple(
            range(
                0 if index > first[0] else numel if index < first[0] else first[1],
                numel if index < last[0] else 0 if index > last[0] else last[1],
            )
            if first[0] <= index <= last[0]
            else range(0)
            for index, numel in enumerate(self.numels)
        )

    def borders(self, sizes_bytes: Sequence[int]) -> tuple[int, ...]:
        """Returns where the share of each rank begins in a flat buffer (`core.layout`), and the
        end: whole pages.

        Args:
            sizes_bytes: of each parameter in that buffer.
        """
        offsets, end = flat_layout(sizes_bytes)
        found: list[int] = []
        for index, element in self.points:
            if index == len(self.numels):
                found.append(end)
                continue
            numel = self.numels[index]
            inside = sizes_bytes[index] * element // numel if numel else 0
            found.append(offsets[index] + round_up(inside, ALIGNMENT_BYTES))
        return tuple(found)

    def largest(self, sizes_bytes: Sequence[int]) -> int:
        """Returns the bytes of the largest share of a flat buffer."""
        borders = self.borders(sizes_bytes)
        return max(last - first for first, last in pairwise(borders))


def cut_block(numels: Sequence[int], ranks: int, uncut: Collection[int] = ()) -> BlockCut:
    """Cuts the parameters of a block between ranks into nearly equal runs of elements.

    Args:
        numels: elements of each parameter, in the block's order.
        ranks: their number.
        uncut: indices of parameters that one rank must hold whole.
    """
    total = sum(numels)
    points = [_place(numels, total * rank // ranks, uncut) for rank in range(1, ranks)]
    return BlockCut(numels=tuple(numels), points=((0, 0), *points, (len(numels), 0)))


def _place(numels: Sequence[int], wanted: int, uncut: Collection[int]) -> tuple[int, int]:
    """Returns the place nearest to a wanted one where a block may be cut."""
    for index, numel in enumerate(numels):
        if wanted < numel:
            unit = max(numel, 1) if index in uncut else UNIT_ELEMENTS
            inside = (wanted + unit // 2) // unit * unit
            return (index + 1, 0) if inside >= numel else (index, inside)
        wanted -= numel
    return (len(numels), 0)
