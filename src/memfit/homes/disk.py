"""A home on disk: a region of the store."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import torch

from memfit.core.layout import ALIGNMENT_BYTES
from memfit.core.limits import round_up
from memfit.core.tiers import Tier
from memfit.homes.home import DONE, ByteHome, TransferGroup, TransferHandle, TransferThen
from memfit.homes.staging import Staged, Staging
from memfit.store import Memory, Region, memory_of_storage
from memfit.tensors.trees import bytes_view, new_storage

_COPY_BYTES = 4 << 20


class DiskHome(ByteHome):
    """Home in a region of a store.

    Written in place (one slot), or version by version (two slots): then reads give the current
    version, writes go to the spare slot, and `complete` makes the spare slot whole before it
    becomes current.

    Memory: none beyond the store's staging, and where an accelerator computes that of
    `homes.staging`.

    Args:
        region: of an open store.
        ends: offsets at which tensors end that share their last page with nothing. A write up to
            such an end is extended to the end of the page, so that a version has no gaps and no
            page is read to be written in part.
        staging: pinned memory on the way to an accelerator; None: the thread that waits copies
            through a host buffer of the transfer's size.
    """

    tier = Tier.DISK

    def __init__(self, region: Region, ends: Collection[int] = (), staging: Staging | None = None) -> None:
        self.nbytes = region.nbytes
        self.name = region.name
        self._region = region
        self._ends = frozenset(ends)
        self._written: list[tuple[int, int]] = []
        self._staging = staging
        self.orders_reads = staging is not None
        # Of transfers that pass through the staging: where, and whether they write. See [Note:
        # order in staging].
        self._pending: deque[tuple[int, int, bool, Staged]] = deque()
        self._lock = threading.Lock()

    @property
    def is_stored(self) -> bool:
        """See `ByteHome`."""
        return True

    @property
    def has_versions(self) -> bool:
        """True: a version becomes current as a whole, by a commit."""
        return self._region.slots == 2

    @property
    def has_spare_slot(self) -> bool:
        """True if writes do not change what reads see. False between commits that are less frequent
        than steps: then steps overwrite each other, and only the committed version is kept.
        """
        return self.has_versions and not self._region.has_advanced

    @property
    def is_dirty(self) -> bool:
        """True if a new version has been begun since `begin_version`."""
        return bool(self._written) and self.has_versions

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`."""
        if nbytes == 0:
            return DONE
        if into.device.type == "cpu":
            # A transfer in the staging may still be about to write these bytes of the file.
            self._join(offset, offset + nbytes)
            return self._region.read(offset, nbytes, memory_of_storage(into, into_offset, nbytes))
        region, staging = self._region, self._staging
        if staging is None:
            staged = new_storage(nbytes)
            handle = region.read(offset, nbytes, memory_of_storage(staged))
            # Copied on the current stream: kernels enqueued after the wait see the bytes.
            return TransferThen(
                handle, lambda: bytes_view(into, into_offset, nbytes).copy_(bytes_view(staged, 0, nbytes))
            )
        return self._stage(
            offset,
            nbytes,
            lambda after: staging.bring(
                lambda first, count, memory: region.read(offset + first, count, memory),
                nbytes,
                into,
                into_offset,
                after,
            ),
            is_write=False,
        )

    def read_next(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read_next`: to memory of the host. What was not written comes from the
        version before.
        """
        if not self.has_spare_slot:
            return self.read(offset, nbytes, into, into_offset)
        end = offset + nbytes
        self._join(offset, end)
        written = [
            (max(a, offset), min(a + count, end)) for a, count in self._written if a < end and offset < a + count
        ]
        kept = [(offset + a, offset + b) for a, b in _gaps([(a - offset, b - a) for a, b in written], nbytes)]
        slots: tuple[tuple[Literal["spare", "current"], list[tuple[int, int]]], ...] = (
            ("spare", written),
            ("current", kept),
        )
        handles = [
            self._region.read(a, b - a, memory_of_storage(into, into_offset + a - offset, b - a), slot=slot)
            for slot, spans in slots
            for a, b in spans
        ]
        return TransferGroup(handles)

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`."""
        if nbytes == 0:
            return DONE
        end, pads, region = offset + nbytes, offset + nbytes in self._ends, self._region
        is_first_filling = region.step is None
        slot: Literal["spare", "current"] = "spare" if self.has_versions and not is_first_filling else "current"
        if slot == "spare":
            # Noted when it is asked for: `complete` copies all else from the version before.
            self._written.append((offset, region.end_of_write(end, pads=pads) - offset))
        staging = self._staging
        if staging is None and source.device.type != "cpu":
            staged = new_storage(nbytes)
            # A blocking copy on the current stream: it is ordered behind the kernels that made the
            # bytes.
            bytes_view(staged, 0, nbytes).copy_(bytes_view(source, source_offset, nbytes))
            source, source_offset = staged, 0
        if staging is None or source.device.type == "cpu":
            self._join(offset, end)
            return region.write(offset, nbytes, memory_of_storage(source, source_offset, nbytes), slot=slot, pads=pads)

        def move(first: int, count: int, memory: Memory) -> TransferHandle:
            is_last = first + count == nbytes
            return region.write(offset + first, count, memory, slot=slot, pads=pads and is_last)

        return self._stage(
            offset, nbytes, lambda after: staging.take(move, nbytes, source, source_offset, after), is_write=True
        )

    def _stage(
        self, offset: int, nbytes: int, begin: Callable[[Sequence[Staged]], Staged], *, is_write: bool
    ) -> Staged:
        """Begins a transfer after earlier ones of the same bytes."""
        # A write that pads reaches to the end of its page.
        start, end = offset, round_up(offset + nbytes, ALIGNMENT_BYTES)
        with self._lock:
            # Under the lock from here to the append: two threads that ask for the same bytes must
            # be put in one order, and the staging's queue in the same.
            while self._pending and self._pending[0][-1].has_ended:
                self._pending.popleft()
            staged = begin(
                [
                    older
                    for first, last, writes, older in self._pending
                    if (writes or is_write) and first < end and start < last
                ]
            )
            self._pending.append((start, end, is_write, staged))
        return staged

    def _join(self, start: int, end: int) -> None:
        """Waits until no transfer of these bytes is in the staging."""
        with self._lock:
            older = [staged for first, last, _, staged in self._pending if first < end and start < last]
        for staged in older:
            staged.join()

    def complete(self) -> None:
        """Copies what was not written of the new version from the committed one, so that the spare
        slot is complete.

        Costs one buffer of 4 MiB and reading and writing what was not updated (frozen or unused
        parameters, alignment).
        """
        if not self.has_versions or self._region.has_advanced:
            return  # where writes change what reads see, what was not written is there already
        self._join(0, self.nbytes)
        buffer = new_storage(min(_COPY_BYTES, self.nbytes))
        for start, stop in _gaps(self._written, self.nbytes):
            position = start
            while position < stop:
                count = min(stop - position, buffer.nbytes())
                memory = memory_of_storage(buffer, 0, count)
                # Waited for one by one: the one buffer is read into and written from in turn.
                self._region.read(position, count, memory).wait()
                self._region.write(position, count, memory, slot="spare").wait()
                position += count

    def begin_version(self) -> None:
        """Begins a new version, after the last one was committed or its step failed."""
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
