"""Shares: which elements of each parameter a rank holds, where ranks cut a block between them.

In: sizes of parameters in order, the number of ranks. Out: ranges of elements, by rank and
parameter; one rule for prediction, homes and stores.

[Note: shares of elements]
A block's parameters are laid out one after the other, as often as there are kinds of bytes: the
weight, its master, the gradient, each state. All of them are cut at the same elements, so that an
update finds everything of its share beside it. Cuts lie on whole multiples of 4096 elements of a
parameter: there pages of direct I/O, records of low-bit states and the optimizer's vector units all
begin, so that a share gives the bits of the whole. A parameter whose optimizer needs all of it is
never cut. Shares may be uneven, or empty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from memfit.core.layout import ALIGNMENT_BYTES, flat_layout
from memfit.core.units import round_up

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
