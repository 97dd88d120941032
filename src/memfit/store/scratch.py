"""Scratch: room on disk for tensors that come and go inside one step, such as saved activations.

In: memory to put away. Out: extents to get it back from. Nothing of it outlives the process: the
file has no name.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from memfit.core.errors import UsageError
from memfit.core.limits import MIB, format_bytes, round_up
from memfit.core.process_state import ClosesAtExit
from memfit.store.checksums import ALIGNMENT_BYTES, Memory
from memfit.store.files import FileOperations, explain, open_unnamed, store_error
from memfit.store.io import DiskIO
from memfit.store.transfer import DiskTransfer

GROWTH_BYTES = 64 * MIB
"""The file grows by multiples of this, claimed from the disk at once."""


class ExtentAllocator:
    """Gives out ranges of a growing line of bytes: the first gap that is large enough.

    Gaps that touch are joined.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: list[int] = []

    def take(self, nbytes: int) -> int | None:
        """The start of a free range of this length, now taken; None if there is no such gap."""
        for number, size in enumerate(self._sizes):
            if size >= nbytes:
                start = self._starts[number]
                if size == nbytes:
                    del self._starts[number], self._sizes[number]
                else:
                    self._starts[number] += nbytes
                    self._sizes[number] -= nbytes
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Makes a range free, joined with its neighbours.

        The caller has taken it, or it lies behind all others.
        """
        number = bisect_left(self._starts, start)
        if number < len(self._starts) and start + nbytes == self._starts[number]:
            nbytes += self._sizes[number]
            del self._starts[number], self._sizes[number]
        if number and self._starts[number - 1] + self._sizes[number - 1] == start:
            self._sizes[number - 1] += nbytes
        else:
            self._starts.insert(number, start)
            self._sizes.insert(number, nbytes)

    def last_gap_bytes(self, end: int) -> int:
        """Length of the gap that reaches to `end`, 0 if there is none: growing the line lengthens
        it.
        """
        return self._sizes[-1] if self._starts and self._starts[-1] + self._sizes[-1] == end else 0

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The free ranges (start, length), in order."""
        return tuple(zip(self._starts, self._sizes, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Return:
    """A range that comes back to the allocator when the transfers that use it have ended."""

    offset: int
    allocated_bytes: int
    transfers: tuple[DiskTransfer, ...]


class Extent:
    """A piece of scratch that holds `nbytes` bytes.

    Dropping it frees it, as `ScratchFile.free` does.

    Attributes:
        nbytes: length of what is held.
        offset: first byte in the file, on a block.
        written: the transfer of the write; until it is done the memory that was put away must stay
            as it is.
    """

    __slots__ = ("_returns", "is_freed", "nbytes", "offset", "reads", "written")

    def __init__(self, *, offset: int, nbytes: int, written: DiskTransfer, returns: deque[_Return]) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.written = written
        self.reads: list[DiskTransfer] = []
        self.is_freed = False
        self._returns = returns

    @property
    def allocated_bytes(self) -> int:
        """Room that it takes, in whole blocks."""
        return round_up(max(self.nbytes, 1), ALIGNMENT_BYTES)

    def belongs_to(self, returns: deque[_Return]) -> bool:
        """True if the room goes back to this file's queue."""
        return self._returns is returns

    def give_back(self) -> None:
        """Hands the room back, once; the file takes it when the transfers have ended."""
        if self.is_freed:
            return
        # Freed twice, the room would be handed to two owners.
        self.is_freed = True
        # One append, which needs no lock: this may run in a finalizer, in any thread. The transfers
        # hold no memory once they are done.
        self._returns.append(
            _Return(offset=self.offset, allocated_bytes=self.allocated_bytes, transfers=(self.written, *self.reads))
        )

    def __del__(self) -> None:
        self.give_back()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScratchStatistics:
    """How much room was used."""

    live_bytes: int
    """Room of extents that are not free yet, in whole blocks."""
    high_water_bytes: int
    """Most that this ever was."""
    file_bytes: int
    """Disk that is claimed."""
    extents: int
    """Extents that are not free yet."""


class ScratchFile(ClosesAtExit):
    """An unnamed file with an allocator.

    Args:
        directory: an existing directory on the disk to use.
        io: threads, shared with others.
        tag: purpose, for the counters.
        limit_bytes: most disk that it may claim; without it, the disk is the limit.
        operations: the system calls.

    Raises:
        StoreError: the file cannot be made there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        io: DiskIO,
        *,
        tag: str = "activation",
        limit_bytes: int | None = None,
        operations: FileOperations | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.tag = tag
        self._io = io
        self._limit_bytes = limit_bytes
        self._operations = FileOperations() if operations is None else operations
        self._handle = open_unnamed(self.directory, self._operations)
        self._allocator = ExtentAllocator()
        # Appended to by finalizers in any thread, without a lock; everything else is under `_lock`.
        self._returns: deque[_Return] = deque()
        self._waiting: list[_Return] = []
        self._lock = threading.RLock()
        self._file_bytes = 0
        self._live_bytes = 0
        self._high_water_bytes = 0
        self._extents = 0

    def put(
        self, memory: Memory, nbytes: int | None = None, *, label: str = "activation", urgent: bool = False
    ) -> Extent:
        """Starts to put memory away.

        Args:
            memory: must not change or go until `Extent.written` is done.
            nbytes: length; all of it by default.
            label: what it is, for messages.
            urgent: before other writes.

        Raises:
            UsageError: longer than the memory.
            StoreError: the disk is full, the limit is reached, or the file is closed.
        """
        part = memory.narrow(0, memory.nbytes if nbytes is None else nbytes)
        room_bytes = round_up(max(part.nbytes, 1), ALIGNMENT_BYTES)
        with self._lock:
            self._check_open()
            # Room is taken before the write starts, and given back only when no transfer uses it.
            offset = self._take(room_bytes, label)
            try:
                written = self._io.write(self._handle, offset, part, tag=self.tag, label=label, urgent=urgent)
            except BaseException:
                self._allocator.give(offset, room_bytes)
                raise
            self._live_bytes += room_bytes
            self._extents += 1
            self._high_water_bytes = max(self._high_water_bytes, self._live_bytes)
            # From here on the write runs beside the caller: `part` must stay until `Extent.written`
            # ends.
            return Extent(offset=offset, nbytes=part.nbytes, written=written, returns=self._returns)

    def get(self, extent: Extent, memory: Memory, *, label: str = "activation", urgent: bool = False) -> DiskTransfer:
        """Starts to read an extent back; it waits for the write if that is still under way.

        May be repeated.

        Args:
            extent: from `put` of this file, not freed.
            memory: at least as long as the extent.
            label: what it is, for messages.
            urgent: before other reads.

        Raises:
            UsageError: the extent is freed or another file's, or the memory is too short.
            StoreError: the file is closed. If the extent could not be written, `DiskTransfer.wait`
                says so.
        """
        with self._lock:
            self._check_open()
            self._check_mine(extent)
            # A handle that has ended holds no memory, but the list would grow with every read.
            extent.reads = [transfer for transfer in extent.reads if not transfer.done()]
            transfer = self._io.read(
                self._handle,
                extent.offset,
                memory,
                extent.nbytes,
                tag=self.tag,
                label=label,
                urgent=urgent,
                # Memory may come back before its write has ended; the read waits for it.
                after=(extent.written,),
            )
            extent.reads.append(transfer)
            return transfer

    def free(self, extent: Extent) -> None:
        """Frees an extent: its room is used again after its transfers.

        A write that has not begun is given up.

        Raises:
            UsageError: it is freed already, or another file's.
        """
        with self._lock:
            self._check_mine(extent)
            # With a read behind it the write must run: cancelling it would fail that read.
            if not extent.reads:
                extent.written.cancel()
            extent.give_back()
            self._collect()

    def statistics(self) -> ScratchStatistics:
        """How much room is and was used."""
        with self._lock:
            self._collect()
            return ScratchStatistics(
                live_bytes=self._live_bytes,
                high_water_bytes=self._high_water_bytes,
                file_bytes=self._file_bytes,
                extents=self._extents,
            )

    def close(self) -> None:
        """Gives the disk back, when the transfers under way have ended.

        Repeating it does nothing.
        """
        with self._lock:
            # Closes when the last transfer has released it; see `FileHandle.acquire`.
            self._handle.close()

    def _check_open(self) -> None:
        if not self._handle.is_open:
            raise store_error(f"the scratch file in {self.directory} is closed")

    def _check_mine(self, extent: Extent) -> None:
        if not extent.belongs_to(self._returns):
            raise UsageError("this extent belongs to another scratch file")
        if extent.is_freed:
            raise UsageError(f"the extent of {extent.nbytes} bytes at {extent.offset} was freed before")

    def _collect(self) -> None:
        """Takes back the room of freed extents whose transfers have ended."""
        # Never iterated over: a finalizer may append at this moment.
        while self._returns:
            self._waiting.append(self._returns.popleft())
        still: list[_Return] = []
        for found in self._waiting:
            # A write under way would overwrite whoever gets this room next.
            if all(transfer.done() for transfer in found.transfers):
                self._allocator.give(found.offset, found.allocated_bytes)
                # Counted down only here: until then the bytes are on the disk and count against the
                # limit.
                self._live_bytes -= found.allocated_bytes
                self._extents -= 1
            else:
                still.append(found)
        self._waiting = still

    def _take(self, room_bytes: int, label: str) -> int:
        self._collect()
        offset = self._allocator.take(room_bytes)
        # The room that `_collect` could not take back counts as used: growing is the price of not
        # waiting.
        if offset is None:
            self._grow(room_bytes - self._allocator.last_gap_bytes(self._file_bytes), label)
            offset = self._allocator.take(room_bytes)
        assert offset is not None
        return offset

    def _grow(self, missing_bytes: int, label: str) -> None:
        growth_bytes = round_up(missing_bytes, GROWTH_BYTES)
        if self._limit_bytes is not None:
            room_bytes = (self._limit_bytes - self._file_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            if room_bytes < missing_bytes:
                raise store_error(
                    f"no room to put {label} away: the scratch file in {self.directory} holds "
                    f"{format_bytes(self._live_bytes)} in {format_bytes(self._file_bytes)}, "
                    f"{format_bytes(missing_bytes)} more are needed, and its limit is "
                    f"{format_bytes(self._limit_bytes)}; raise the disk limit, or offload less"
                )
            growth_bytes = min(growth_bytes, room_bytes)
        try:
            growth_bytes = self._claim(growth_bytes, missing_bytes)
        except OSError as error:
            raise explain(
                error, doing=f"grow the scratch file for {label}", path=self.directory, needed_bytes=missing_bytes
            ) from error
        self._allocator.give(self._file_bytes, growth_bytes)
        self._file_bytes += growth_bytes

    def _claim(self, growth_bytes: int, missing_bytes: int) -> int:
        """Claims disk behind the end, comfortably or, on a disk that is nearly full, just what is
        missing.
        """
        try:
            self._handle.allocate(self._file_bytes, growth_bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC or growth_bytes == missing_bytes:
                raise
        else:
            return growth_bytes
        self._handle.allocate(self._file_bytes, missing_bytes)
        return missing_bytes
