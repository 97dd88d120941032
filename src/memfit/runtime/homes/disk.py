"""A home on disk: a region of the store."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from memfit.core.plan import Tier
from memfit.runtime.homes.base import DONE, Then, Ticket
from memfit.runtime.store import Region, memory_of_storage
from memfit.runtime.trees import bytes_view, new_storage

_COPY_BYTES = 4 << 20


class DiskHome:
    """Bytes in a region.

    Written in place (one slot), or version by version (two slots): then reads give the committed version, writes go to the spare slot, and
    `complete` makes the spare slot whole before a commit.

    Memory: none beyond the store's staging. CUDA: bytes pass through a host buffer of the transfer's size.

    Args:
        region: of an open store.
        ends: of the tensors in it that have their last page for themselves. What is written up to such an end is written to the end of the page, so
            that a version has no gaps, and no page is read to be written in part.
    """

    tier = Tier.DISK
    memory: torch.UntypedStorage | None = None

    def __init__(self, region: Region, ends: Collection[int] = ()) -> None:
        self.nbytes = region.nbytes
        self.name = region.name
        self._region = region
        self._ends = frozenset(ends)
        self._written: list[tuple[int, int]] = []

    @property
    def has_versions(self) -> bool:
        """What is written becomes current by a commit, whole."""
        return self._region.slots == 2

    @property
    def has_spare_slot(self) -> bool:
        """Writes leave alone what reads see. Not between rarer commits: then steps write over each other, and only the commit is kept."""
        return self.has_versions and not self._region.has_advanced

    @property
    def is_dirty(self) -> bool:
        """A new version has been begun since `begin_version`."""
        return bool(self._written) and self.has_versions

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> Ticket:
        """See `ByteHome.read`."""
        if nbytes == 0:
            return DONE
        if into.device.type == "cpu":
            return self._region.read(offset, nbytes, memory_of_storage(into, into_offset, nbytes))
        staged = new_storage(nbytes)
        ticket = self._region.read(offset, nbytes, memory_of_storage(staged))
        # Copied on the current stream: kernels enqueued after the wait see the bytes.
        return Then(ticket, lambda: bytes_view(into, into_offset, nbytes).copy_(bytes_view(staged, 0, nbytes)))

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> Ticket:
        """See `ByteHome.write`."""
        if nbytes == 0:
            return DONE
        if source.device.type != "cpu":
            staged = new_storage(nbytes)
            # A blocking copy on the current stream: it is ordered behind the kernels that made the bytes.
            bytes_view(staged, 0, nbytes).copy_(bytes_view(source, source_offset, nbytes))
            source, source_offset = staged, 0
        memory, pads = memory_of_storage(source, source_offset, nbytes), offset + nbytes in self._ends
        is_first_filling = self._region.step is None
        if self.has_versions and not is_first_filling:
            self._written.append((offset, self._region.end_of_write(offset + nbytes, pads=pads) - offset))
            return self._region.write(offset, nbytes, memory, slot="spare", pads=pads)
        return self._region.write(offset, nbytes, memory, slot="current", pads=pads)

    def complete(self) -> None:
        """Copies what the new version did not write (all of it, if nothing was) from the committed one, so that the spare slot is whole.

        Costs one buffer of 4 MiB and reading and writing what was not updated (frozen or unused parameters, alignment).
        """
        if not self.has_versions or self._region.has_advanced:
            return  # where writes change what reads see, what was not written is there already
        buffer = new_storage(min(_COPY_BYTES, self.nbytes))
        for start, stop in _gaps(self._written, self.nbytes):
            position = start
            while position < stop:
                count = min(stop - position, buffer.nbytes())
                memory = memory_of_storage(buffer, 0, count)
                self._region.read(position, count, memory).wait()
                self._region.write(position, count, memory, slot="spare").wait()
                position += count

    def begin_version(self) -> None:
        """What is written from now on is a new version: the last one was committed, or its step failed and is forgotten."""
        self._written.clear()


def _gaps(written: Sequence[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    gaps: list[tuple[int, int]] = []
    end = 0
    for start, count in sorted(written):
        if start > end:
            gaps.append((end, start))
        end = max(end, start + count)
    if end < nbytes:
        gaps.append((end, nbytes))
    return gaps
