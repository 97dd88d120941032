"""Which transfers of one slot must wait for which, and which of its bytes are fit to be read or
committed.

In: reads and writes as they are asked for. Out: the older transfers that each must follow. No
threads, no files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memfit.core.errors import StoreError
from memfit.store.disk_transfer import DiskTransfer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Access:
    transfer: DiskTransfer
    start: int
    end: int


class ByteRanges:
    """A set of bytes, as sorted ranges that do not touch."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        """Puts a range in."""
        if start >= end:
            return
        apart = [found for found in self._ranges if found[1] < start or found[0] > end]
        joined = [found for found in self._ranges if found[1] >= start and found[0] <= end]
        low = min([start, *(found[0] for found in joined)])
        high = max([end, *(found[1] for found in joined)])
        self._ranges = sorted([*apart, (low, high)])

    def remove(self, start: int, end: int) -> None:
        """Takes a range out."""
        kept: list[tuple[int, int]] = []
        for low, high in self._ranges:
            kept.extend(part for part in ((low, min(high, start)), (max(low, end), high)) if part[0] < part[1])
        self._ranges = kept

    def overlaps(self, start: int, end: int) -> bool:
        """True if some byte of the range is in the set."""
        return any(low < end and start < high for low, high in self._ranges)

    def clear(self) -> None:
        """Empties the set."""
        self._ranges = []

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges, first and one past the last byte of each."""
        return tuple(self._ranges)

    @property
    def nbytes(self) -> int:
        """How many bytes are in the set."""
        return sum(high - low for low, high in self._ranges)


class AccessLog:
    """The transfers of one slot since it was last made current or spare.

    A read follows the writes that it overlaps; a write follows the reads and writes that it
    overlaps. Reads pass each other. A range whose write failed is *damaged* until it is written
    again.
    """

    def __init__(self) -> None:
        self._reads: list[_Access] = []
        self._writes: list[_Access] = []
        self._written = ByteRanges()
        self._damaged = ByteRanges()
        self._failed: DiskTransfer | None = None

    def before_read(self, start: int, end: int) -> list[DiskTransfer]:
        """The transfers that a read must follow.

        Raises:
            StoreError: a write of these bytes failed; its own error.
        """
        self._drop_ended()
        # Checked before the order: a read behind a failed write would give the bytes of an older
        # version as new ones.
        if self._damaged.overlaps(start, end):
            failure = self.failure()
            assert failure is not None
            raise failure
        return _overlapping(self._writes, start, end)

    def before_write(self, start: int, end: int) -> list[DiskTransfer]:
        """The transfers that a write must follow."""
        self._drop_ended()
        # Reads too: they still take the old bytes from the place that this write changes.
        return _overlapping(self._reads, start, end) + _overlapping(self._writes, start, end)

    def note(self, transfer: DiskTransfer, start: int, end: int) -> None:
        """Notes a transfer that was started, after `before_read` or `before_write`."""
        if transfer.is_write:
            self._written.add(start, end)
            # Optimistic: if this write fails as well, `_drop_ended` marks the range as damaged
            # again.
            self._damaged.remove(start, end)
        (self._writes if transfer.is_write else self._reads).append(_Access(transfer=transfer, start=start, end=end))

    def pending(self) -> list[DiskTransfer]:
        """All transfers that have not been seen to end."""
        return [access.transfer for access in (*self._reads, *self._writes)]

    def pending_writes(self) -> list[DiskTransfer]:
        """The writes that have not been seen to end."""
        return [access.transfer for access in self._writes]

    def failure(self) -> StoreError | None:
        """The latest error of a write whose bytes have not been written again since."""
        self._drop_ended()
        # A fresh exception each time: one that is raised holds the frames it went through.
        return self._failed.failure if self._failed is not None and self._damaged.nbytes else None

    @property
    def written_bytes(self) -> int:
        """Bytes written, or about to be, since `forget_writes`."""
        return self._written.nbytes

    def forget_writes(self) -> None:
        """Starts a new version: nothing of it is written or damaged.

        Transfers under way are still followed.
        """
        self._drop_ended()
        # Only the notes are dropped, not the transfers: a write under way still orders what comes
        # next.
        self._written.clear()
        self._damaged.clear()
        self._failed = None

    def _drop_ended(self) -> None:
        """Lets go of transfers that have ended, and notes what failed writes have left behind."""
        # `done` may turn true at any moment, in a thread of the disk. Each transfer is asked once,
        # so that it is either still followed or judged, never neither.
        self._reads = [access for access in self._reads if not access.transfer.done()]
        under_way: list[_Access] = []
        for number, access in enumerate(self._writes):
            if not access.transfer.done():
                under_way.append(access)
            elif access.transfer.failure is not None:
                self._failed = access.transfer
                left = ByteRanges()
                left.add(access.start, access.end)
                # What a later write covers is for that one to answer.
                for later in self._writes[number + 1 :]:
                    left.remove(later.start, later.end)
                for start, end in left.ranges:
                    self._damaged.add(start, end)
        self._writes = under_way


def _overlapping(accesses: Iterable[_Access], start: int, end: int) -> list[DiskTransfer]:
    return [access.transfer for access in accesses if access.start < end and start < access.end]
