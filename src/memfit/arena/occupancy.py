"""Which parts of a buffer are taken: positions only, no memory.

In: a capacity, and blocks that are taken and freed. Out: where the next one fits, and how
fragmented the rest is.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Literal

import torch

from memfit.core.errors import UsageError

Fit = Literal["best", "first"]


@dataclass(frozen=True, kw_only=True)
class ArenaStatistics:
    """An arena at one moment.

    Attributes:
        capacity_bytes: size of the buffer.
        live_bytes: bytes allocated and not released.
        live_blocks: number of blocks that `live_bytes` is made of.
        free_bytes: capacity minus live bytes.
        largest_free_bytes: the largest single hole.
        fragmentation: 1 - largest_free / free; 0.0 where nothing is free.
    """

    capacity_bytes: int
    live_bytes: int
    live_blocks: int
    free_bytes: int
    largest_free_bytes: int
    fragmentation: float


class Occupancy:
    """The live blocks of [0, capacity), by their offset in bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.sizes: dict[int, int] = {}  # offset -> bytes
        self._offsets: list[int] = []  # sorted

    def offsets(self) -> list[int]:
        """Returns where the live blocks begin, in ascending order."""
        return list(self._offsets)

    def holes(self) -> list[tuple[int, int]]:
        """Returns the free parts as (begin, end), in ascending order."""
        ends = [0, *(offset + self.sizes[offset] for offset in self._offsets)]
        starts = [*self._offsets, self.capacity_bytes]
        return [(low, high) for low, high in zip(ends, starts, strict=True) if low < high]

    def find(self, nbytes: int, fit: Fit) -> int:
        """Returns the offset of the smallest (best) or lowest (first) hole that holds `nbytes`.

        Raises:
            torch.OutOfMemoryError: there is none; the message says whether closing the holes would
                help.
        """
        holes = [(low, high) for low, high in self.holes() if high - low >= nbytes]
        if holes:
            low, _ = holes[0] if fit == "first" else min(holes, key=lambda hole: (hole[1] - hole[0], hole[0]))
            return low
        now = self.statistics()
        remedy = (
            "defragment() would make room" if now.free_bytes >= nbytes else "release tensors or make a larger arena"
        )
        raise torch.OutOfMemoryError(
            f"the arena has no hole of {nbytes} bytes: capacity {now.capacity_bytes} bytes, live {now.live_bytes} "
            f"bytes, free {now.free_bytes} bytes, largest hole {now.largest_free_bytes} bytes, fragmentation "
            f"{now.fragmentation:.2f}; {remedy}"
        )

    def take(self, offset: int, nbytes: int) -> None:
        """Marks a place as taken.

        Raises:
            UsageError: the place is outside, or overlaps a live block, which the message names.
        """
        if offset < 0 or offset + nbytes > self.capacity_bytes:
            raise UsageError(
                f"{nbytes} bytes at offset {offset} do not lie inside the arena of {self.capacity_bytes} bytes"
            )
        index = bisect.bisect_left(self._offsets, offset)
        for neighbour in self._offsets[max(0, index - 1) : index + 1]:
            if neighbour < offset + nbytes and offset < neighbour + self.sizes[neighbour]:
                raise UsageError(
                    f"{nbytes} bytes at offset {offset} would overlap the live block of {self.sizes[neighbour]} bytes "
                    f"at offset {neighbour}"
                )
        self._offsets.insert(index, offset)
        self.sizes[offset] = nbytes

    def free(self, offset: int) -> None:
        """Frees the block at `offset`."""
        del self.sizes[offset]
        del self._offsets[bisect.bisect_left(self._offsets, offset)]

    def statistics(self) -> ArenaStatistics:
        """Returns how full and how fragmented the buffer is."""
        holes = [high - low for low, high in self.holes()]
        free, largest = sum(holes), max(holes, default=0)
        return ArenaStatistics(
            capacity_bytes=self.capacity_bytes,
            live_bytes=sum(self.sizes.values()),
            live_blocks=len(self.sizes),
            free_bytes=free,
            largest_free_bytes=largest,
            fragmentation=1 - largest / free if free else 0.0,
        )
