"""One piece of a transfer, in the calling thread: straight where all is aligned, else through a
bounce buffer.

In: an open file, a range of it and a range of memory. Out: bytes moved, all of them or an
`OSError`.

[Note: edges]
Direct I/O moves whole aligned blocks. A read that is not aligned reads the blocks around it into
the bounce buffer and copies its part out. A write that is not aligned must keep its neighbours'
bytes: it reads the first and last block, changes its part and writes them back, under the file's
edge lock, because the neighbour may be doing the same. Such a write repeats the neighbours' old
bytes, so a reader of them sees nothing change. A write that *pads* makes zeros of the rest of its
last block, which is nobody's, and reads nothing there.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.core.errors import StoreError
from memfit.core.limits import round_up
from memfit.store.checksums import ALIGNMENT_BYTES, Memory, view_of
from memfit.store.files import FileHandle, store_error

if TYPE_CHECKING:
    from memfit.store.io import Channel


# The handle of one read or write, to wait for.
#
# In: a request. Out: done, failed or cancelled, with the seconds it took. The memory and the file
# are let go when it is done.

Watcher = Callable[[int, int, int], None]


class DiskTransfer:
    """One read or write of `nbytes` bytes, under way or done.

    Made by `DiskIO.read` and `DiskIO.write`.

    Attributes:
        nbytes: length of the transfer.
        is_write: memory to file, else file to memory.
        label: what is moved, for messages: a block, a region.
        tag: purpose, for the counters.
        path: the file.
        is_urgent: served before transfers that are not.
        pads: a write that also makes zeros of what is left of its last block in the file.
        watcher: called by the thread that moved a part of the transfer, with (position in the
            transfer, address, bytes) of what now is in both places; a `StoreError` from it fails
            the transfer.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_channel",
        "_event",
        "_failure",
        "_finished_s",
        "_handle",
        "_lock",
        "_memory",
        "_started_s",
        "blockers",
        "cursor",
        "in_flight",
        "is_over",
        "is_urgent",
        "is_write",
        "label",
        "nbytes",
        "offset",
        "pads",
        "path",
        "tag",
        "watcher",
    )

    def __init__(
        self,
        *,
        handle: FileHandle,
        offset: int,
        memory: Memory,
        is_write: bool,
        label: str,
        tag: str,
        is_urgent: bool,
        channel: Channel,
        watcher: Watcher | None = None,
        pads: bool = False,
    ) -> None:
        self.nbytes = memory.nbytes
        self.offset = offset
        self.is_write = is_write
        self.label = label
        self.tag = tag
        self.is_urgent = is_urgent
        self.path = handle.path
        self.watcher = watcher
        self.pads = pads
        # The next four belong to the channel and change under its lock.
        self.cursor = 0
        self.in_flight = 0
        self.blockers = 0
        self.is_over = False
        # These two keep the file open and the memory alive while threads of the disk use them,
        # until `finish`.
        self._handle: FileHandle | None = handle
        self._memory: Memory | None = memory
        self._channel: Channel | None = channel
        self._failure: StoreError | None = None
        self._callbacks: list[Callable[[DiskTransfer], None]] | None = []
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._started_s: float | None = None
        self._finished_s: float | None = None

    def done(self) -> bool:
        """True when the transfer has ended, well or not: its memory and its file range may be used
        again.
        """
        return self._event.is_set()

    def wait(self) -> None:
        """Waits until the transfer has ended.

        Raises:
            StoreError: it failed or was cancelled. Every waiter gets an exception of its own.
        """
        self.join()
        failure = self.failure
        if failure is not None:
            raise failure

    def join(self) -> None:
        """Waits until the transfer has ended, well or not, and raises nothing.

        Look at `failure` then.

        An exception of a signal handler comes through only when the transfer has ended: whoever
        handles it may give up the memory.
        """
        try:
            # An interrupt must not return while a thread of the disk still writes to this memory:
            # the caller would free it.
            self._event.wait()
        except BaseException:
            self._event.wait()
            raise

    def cancel(self) -> bool:
        """Gives the transfer up.

        Pieces under way still end, so wait before the memory is used again.

        Returns:
            True if something was prevented; waiting then raises. False if the transfer had ended or
            all of it is under way.
        """
        # One read of the attribute: `finish` sets it to None in a thread of the disk.
        channel = self._channel
        return channel.cancel(self) if channel is not None else False

    @property
    def failure(self) -> StoreError | None:
        """Error of the transfer, as a fresh exception; None without one, or not yet."""
        failed = self._failure
        if failed is None or not self.done():
            return None
        # Raising one exception object from two threads would mix their tracebacks, and keep the
        # frames of the first waiter alive.
        copy = store_error(str(failed), failed.errno)
        copy.__cause__ = failed.__cause__
        return copy

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first piece to the end of the last; 0 before."""
        if self._started_s is None or self._finished_s is None:
            return 0.0
        return self._finished_s - self._started_s

    def call_when_done(self, callback: Callable[[DiskTransfer], None]) -> None:
        """Calls back once, from the thread that ends the transfer, or at once if it has ended.

        It must not raise.
        """
        with self._lock:
            # Under the lock, so that a callback added while the transfer ends is called exactly
            # once.
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback(self)

    # ---- for the channel that serves the transfer

    @property
    def handle(self) -> FileHandle:
        """The file, while the transfer has not ended."""
        assert self._handle is not None
        return self._handle

    @property
    def memory(self) -> Memory:
        """The memory, while the transfer has not ended."""
        assert self._memory is not None
        return self._memory

    @property
    def has_failed(self) -> bool:
        """A piece failed or the transfer was cancelled; pieces may still be under way."""
        return self._failure is not None

    def fail(self, failure: StoreError) -> None:
        """Notes the first failure; later ones follow from it."""
        if self._failure is None:
            self._failure = failure

    def note_start(self) -> None:
        """Notes when the first piece starts."""
        if self._started_s is None:
            self._started_s = time.perf_counter()

    def finish(self) -> None:
        """Drops memory and file, wakes the waiters, then tells the transfers that come after."""
        self._finished_s = time.perf_counter()
        # Memory and file go before the event is set: whoever wakes up may count on both being free.
        handle, self._handle, self._memory, self._channel = self._handle, None, None, None
        self.watcher = None
        if handle is not None:
            handle.release()
        del handle
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
            self._event.set()
        # Outside of the lock: a callback may ask this transfer again, or start another.
        for callback in callbacks or ():
            callback(self)


_MOST_FRUITLESS = 8
"""Calls in a row that move less than a block, after which the device counts as broken, or the file
as ended.
"""


class ShortReadError(OSError):
    """The file ended before the range did."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(errno.EIO, os.strerror(errno.EIO))
        self.missing_bytes = missing_bytes


def move(
    handle: FileHandle,
    *,
    is_write: bool,
    offset: int,
    address: int,
    nbytes: int,
    staging: Memory,
    pads: bool = False,
) -> None:
    """Moves bytes between a file and memory and returns when they are there.

    Nothing stays in the page cache.

    Args:
        handle: the file; acquired by the caller.
        is_write: memory to file, else file to memory.
        offset: first byte in the file.
        address: first byte in memory, kept alive by the caller.
        nbytes: length.
        staging: an aligned bounce buffer of whole blocks that no other thread uses.
        pads: a write also makes zeros of what is left of its last block.

    Raises:
        OSError: what the system said; `ShortReadError` if the file is too short.
    """
    if not handle.is_direct:
        _straight(handle, offset, address, nbytes, is_write=is_write, needed_bytes=nbytes)
        padding_bytes = padding_after(offset + nbytes) if pads else 0
        # The staging buffer is this thread's own: no lock is needed to overwrite it.
        ctypes.memset(staging.address, 0, padding_bytes)
        _straight(handle, offset + nbytes, staging.address, padding_bytes, is_write=True, needed_bytes=padding_bytes)
        _forget(handle, offset, nbytes + padding_bytes, is_write=is_write)
        return
    # Direct I/O wants file offset, length and address on blocks. What is not goes through the
    # staging buffer; the aligned middle goes straight.
    bounced = functools.partial(_write_bounced, pads=pads) if is_write else _read_bounced
    head_bytes = min(nbytes, -offset % ALIGNMENT_BYTES)
    if (address + head_bytes) % ALIGNMENT_BYTES:
        bounced(handle, offset, address, nbytes, staging)
        return
    body_bytes = (nbytes - head_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    tail_bytes = nbytes - head_bytes - body_bytes
    # Head and tail share a block with neighbours: a write reads that block, changes its part and
    # writes it back, so transfers of one block must be ordered by the caller.
    if head_bytes:
        bounced(handle, offset, address, head_bytes, staging)
    if body_bytes:
        start = head_bytes
        _straight(handle, offset + start, address + start, body_bytes, is_write=is_write, needed_bytes=body_bytes)
    if tail_bytes:
        start = head_bytes + body_bytes
        bounced(handle, offset + start, address + start, tail_bytes, staging)


def padding_after(position: int) -> int:
    """Bytes from a position of a file to the end of its block."""
    return -position % ALIGNMENT_BYTES


def _straight(handle: FileHandle, offset: int, address: int, nbytes: int, *, is_write: bool, needed_bytes: int) -> None:
    """Repeats the system call until at least `needed_bytes` of `nbytes` are moved.

    A call may move fewer than asked.
    """
    call = handle.operations.pwrite if is_write else handle.operations.pread
    done = fruitless = 0
    while done < needed_bytes:
        moved = call(handle.descriptor, view_of(address + done, nbytes - done), offset + done)
        if moved > 0 and done + moved >= needed_bytes:
            return
        if handle.is_direct and moved > 0:
            # The next direct call must start on a block again: the part of a block is moved a
            # second time, with the same bytes. Where that was all, the next call tells why, or gets
            # further.
            fruitless = fruitless + 1 if moved < ALIGNMENT_BYTES else 0
            moved = moved // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            if 0 < fruitless < _MOST_FRUITLESS:
                continue
        if moved <= 0:
            if is_write:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            raise ShortReadError(needed_bytes - done)
        done += moved


def _read_bounced(handle: FileHandle, offset: int, address: int, nbytes: int, staging: Memory) -> None:
    position, end = offset, offset + nbytes
    while position < end:
        start = position - position % ALIGNMENT_BYTES
        stop = min(start + staging.nbytes, round_up(end, ALIGNMENT_BYTES))
        part_end = min(end, stop)
        # The last block may reach beyond the end of the file: only the asked bytes must come.
        _straight(handle, start, staging.address, stop - start, is_write=False, needed_bytes=part_end - start)
        # ctypes gives up the interpreter lock while it copies.
        ctypes.memmove(address + position - offset, staging.address + position - start, part_end - position)
        position = part_end


def _write_bounced(handle: FileHandle, offset: int, address: int, nbytes: int, staging: Memory, *, pads: bool) -> None:
    position, end = offset, offset + nbytes
    while position < end:
        start = position - position % ALIGNMENT_BYTES
        stop = min(start + staging.nbytes, round_up(end, ALIGNMENT_BYTES))
        part_end = min(end, stop)
        filled_end = stop if pads else part_end
        if start == position and stop == filled_end:
            _fill(staging.address, address + position - offset, part_end - position, filled_end - part_end)
            _straight(handle, start, staging.address, stop - start, is_write=True, needed_bytes=stop - start)
        else:
            with handle.edge_lock:
                _read_edges(handle, start, stop, position, filled_end, staging)
                place = staging.address + position - start
                _fill(place, address + position - offset, part_end - position, filled_end - part_end)
                _straight(handle, start, staging.address, stop - start, is_write=True, needed_bytes=stop - start)
        position = part_end


def _fill(place: int, address: int, nbytes: int, padding_bytes: int) -> None:
    ctypes.memmove(place, address, nbytes)
    ctypes.memset(place + nbytes, 0, padding_bytes)


def _read_edges(handle: FileHandle, start: int, stop: int, position: int, part_end: int, staging: Memory) -> None:
    """Reads the first and last block of the range into the bounce buffer, where the write does not
    cover them.
    """
    last = stop - ALIGNMENT_BYTES
    if position > start or last == start:
        _straight(handle, start, staging.address, ALIGNMENT_BYTES, is_write=False, needed_bytes=ALIGNMENT_BYTES)
    if part_end < stop and last != start:
        address = staging.address + last - start
        _straight(handle, last, address, ALIGNMENT_BYTES, is_write=False, needed_bytes=ALIGNMENT_BYTES)


def _forget(handle: FileHandle, offset: int, nbytes: int, *, is_write: bool) -> None:
    """Empties the page cache of a range.

    Dirty pages cannot be dropped, so a written range goes to the device first.
    """
    if is_write:
        handle.operations.fdatasync(handle.descriptor)
    handle.operations.forget(handle.descriptor, offset, nbytes)


# Which transfers of one slot must wait for which, and which of its bytes are fit to be read or
# committed.
#
# In: reads and writes as they are asked for. Out: the older transfers that each must follow. No
# threads, no files.


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
