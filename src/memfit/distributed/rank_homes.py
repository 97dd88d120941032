"""Homes that ranks have in common: of which each holds a share, or which each has whole and updates
a share of.

In: local homes of any tier, the places where a block is cut. Out: `ByteHome`s whose visits gather.
Reads and writes are local; only visits, gathers and spreads are collective (`homes.home`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.core.shares import SPREAD_BYTES
from memfit.core.tiers import Tier
from memfit.distributed.rank_group import RankGroup
from memfit.distributed.transport import Group, free_exchanged, gather_in_place
from memfit.homes.home import DONE, ByteHome, TransferHandle
from memfit.tensors.trees import bytes_view, new_storage


class RankHome(ByteHome):
    """A home of a region that ranks cut between them; abstract.

    Args:
        name: of the region, in messages.
        nbytes: of the whole.
        local: this rank's own home.
        group: the ranks.
        borders: where the share of each rank begins, and the end.
    """

    def __init__(self, name: str, nbytes: int, local: ByteHome, group: RankGroup, borders: Sequence[int]) -> None:
        assert len(borders) == group.size + 1 and borders[-1] == nbytes
        self.tier: Tier = local.tier
        self.nbytes = nbytes
        self.local = local
        self._name = name
        self._group = group
        self._borders = tuple(borders)
        kind = name.rpartition("/")[2]
        self._purpose = kind if kind in ("weight", "master", "gradient") else "state"
        self._first, self._last = borders[group.rank : group.rank + 2]

    @property
    def own(self) -> ByteHome:
        """See `ByteHome.own`."""
        return self.local

    @property
    def has_spare_slot(self) -> bool:
        """See `ByteHome`."""
        return self.local.has_spare_slot

    @property
    def has_versions(self) -> bool:
        """See `ByteHome`."""
        return self.local.has_versions

    @property
    def is_dirty(self) -> bool:
        """See `ByteHome`."""
        return self.local.is_dirty

    @property
    def is_stored(self) -> bool:
        """See `ByteHome`."""
        return self.local.is_stored

    @property
    def bytes(self) -> torch.UntypedStorage | None:
        """See `ByteHome`."""
        return self.local.bytes

    def memory_at(self, device: torch.device) -> torch.UntypedStorage | None:
        """See `ByteHome.memory_at`."""
        return self.local.memory_at(device)

    def begin_version(self) -> None:
        """See `ByteHome`."""
        self.local.begin_version()

    def complete(self) -> None:
        """See `ByteHome`."""
        self.local.complete()

    def close(self) -> None:
        """See `ByteHome`."""
        self.local.close()


class SharedHome(RankHome):
    """A home of which each rank holds its share."""

    @property
    def is_shared(self) -> bool:
        """See `ByteHome`."""
        return True

    def place(self, offset: int) -> int:
        """See `ByteHome.place`."""
        return offset - self._first

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`: within this rank's share."""
        assert self._first <= offset and offset + nbytes <= self._last, f"{self._name}: not this rank's share"
        return self.local.read(offset - self._first, nbytes, into, into_offset)

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`: what lies in this rank's share."""
        first, last = self._own(offset, nbytes)
        if first >= last:
            return DONE
        return self.local.write(first - self._first, last - first, source, source_offset + first - offset)

    def gather(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.gather`."""
        first, last = self._own(offset, nbytes)
        came: TransferHandle = DONE
        if first < last:
            came = self.local.read(first - self._first, last - first, into, into_offset + first - offset)
        borders = [min(max(border - offset, 0), nbytes) for border in self._borders]

        def act(group: Group) -> None:
            # Here, not by whoever submits: a disk's read goes on beside what is computed.
            came.wait()
            gather_in_place(group, bytes_view(into, into_offset, nbytes), borders)
            self._group.received[self._purpose] += nbytes - max(last - first, 0)

        return self._group.submit(act)

    def _own(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Returns the part of a range that is in this rank's share; empty if it ends before it
        begins.
        """
        return max(offset, self._first), min(offset + nbytes, self._last)


class SpreadHome(RankHome):
    """A home that each rank has whole, and updates its share of."""

    @property
    def memory(self) -> torch.UntypedStorage | None:
        """See `ByteHome`."""
        return self.local.memory

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`."""
        return self.local.read(offset, nbytes, into, into_offset)

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`."""
        return self.local.write(offset, nbytes, source, source_offset)

    def spread(self) -> TransferHandle:
        """See `ByteHome.spread`. In memory in place, else in pieces of 1 MiB a rank."""
        return self._group.submit(self._spread)

    def _spread(self, group: Group) -> None:
        whole = self.local.bytes
        if whole is not None:
            gather_in_place(group, bytes_view(whole, 0, self.nbytes), self._borders)
            self._group.received[self._purpose] += self.nbytes - self._last + self._first
            return
        shares = list(zip(self._borders, self._borders[1:], strict=False))
        longest = max(last - first for first, last in shares)
        staged = new_storage(min(SPREAD_BYTES, longest) * self._group.size)
        for start in range(0, longest, SPREAD_BYTES):
            parts = [(min(first + start, last), min(first + start + SPREAD_BYTES, last)) for first, last in shares]
            places = [0]
            for first, last in parts:
                places.append(places[-1] + last - first)
            first, last = parts[self._group.rank]
            self.local.read_next(first, last - first, staged, places[self._group.rank]).wait()
            gather_in_place(group, bytes_view(staged, 0, places[-1]), places)
            for rank, (first, last) in enumerate(parts):
                if rank != self._group.rank and last > first:
                    # Waited for: the next piece comes into the same memory.
                    self.local.write(first, last - first, staged, places[rank]).wait()
        self._group.received[self._purpose] += self.nbytes - self._last + self._first
        free_exchanged(bytes_view(staged, 0, staged.nbytes()))
