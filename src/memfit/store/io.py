"""Asynchronous disk transfers: worker threads that move memory to and from files without the page
cache.

In: open files, file ranges, memory ranges. Out: transfers to wait for, and counters of what was
moved.

Memory: the bounce buffers, `(read_threads + write_threads) * staging_bytes`, held from construction
to `close`. System calls and copies run without the interpreter lock, so that compute goes on
meanwhile.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from memfit.core.errors import StoreError, UsageError
from memfit.core.hardware import LinkTraffic
from memfit.core.units import MIB
from memfit.store.channel import Channel, ChannelTraffic, check_sizes
from memfit.store.disk_transfer import DiskTransfer, Watcher
from memfit.store.file_operations import FileHandle
from memfit.store.memory_ranges import Memory
from memfit.store.os_errors import store_error

DEFAULT_THREADS = 2
DEFAULT_PIECE_BYTES = 4 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class IOTraffic:
    """Bytes and numbers of transfers for one purpose, or in all."""

    read_bytes: int = 0
    """Bytes that arrived in memory; the blocks around unaligned edges are not counted."""
    written_bytes: int = 0
    """Bytes that arrived in files."""
    cached_bytes: int = 0
    """Bytes of both that went through the page cache because the file system refused direct I/O.
    """
    transfers: int = 0
    """Transfers that ended."""
    failed_transfers: int = 0
    """Transfers of these that failed or were cancelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IOStatistics:
    """Counters since construction."""

    total: IOTraffic
    by_tag: Mapping[str, IOTraffic]
    staging_bytes: int
    """Bounce buffers held now."""


class DiskIO:
    """Reads and writes file ranges with worker threads.

    Order: reads are served first in, first out, and so are writes, urgent ones first (see [Note:
    order] in `channel`). A read and a write have no order between them unless `after` gives one;
    `Region` and `ScratchFile` do that for their callers.

    Dropping the object cancels what is not under way and ends the threads; `close` ends them in
    order.

    Args:
        read_threads: reads under way at once.
        write_threads: writes under way at once.
        piece_bytes: largest single system call. Smaller pieces let an urgent transfer in sooner.
        staging_bytes: bounce buffer of each thread, for what is not aligned to 4096 bytes.

    Raises:
        UsageError: a size or count out of range.
    """

    def __init__(
        self,
        *,
        read_threads: int = DEFAULT_THREADS,
        write_threads: int = DEFAULT_THREADS,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
        staging_bytes: int = 1 * MIB,
    ) -> None:
        for threads in (read_threads, write_threads):
            problem = check_sizes(threads=threads, piece_bytes=piece_bytes, staging_bytes=staging_bytes)
            if problem is not None:
                raise UsageError(problem)
        self.piece_bytes = piece_bytes
        make = functools.partial(Channel, piece_bytes=piece_bytes, staging_bytes=staging_bytes)
        self._reads = make(is_write=False, threads=read_threads)
        try:
            self._writes = make(is_write=True, threads=write_threads)
        except StoreError:
            # The read threads run already: without this they would wait for work for ever.
            self._reads.request_end(cancel=True)
            raise
        self._is_closed = False
        channels = (self._reads, self._writes)
        # At interpreter exit the threads are joined; when the object is dropped they are only told,
        # because a finalizer may run in any thread, inside any lock. Both hold the channels, never
        # this object: a reference to it would keep it from being dropped.
        at_exit = functools.partial(_end_at_exit, channels)
        atexit.register(at_exit)
        self._finalizer = weakref.finalize(self, _tell_to_end, channels, at_exit)
        self._finalizer.atexit = False

    def read(
        self,
        handle: FileHandle,
        file_offset: int,
        memory: Memory,
        nbytes: int | None = None,
        *,
        tag: str = "other",
        label: str = "",
        urgent: bool = False,
        after: Iterable[DiskTransfer] = (),
        watcher: Watcher | None = None,
    ) -> DiskTransfer:
        """Starts a read of a file range into memory.

        Args:
            handle: the file.
            file_offset: first byte in the file.
            memory: where the bytes go; must not be touched, freed or resized until the transfer is
                done.
            nbytes: length; all of `memory` by default.
            tag: purpose, for the counters: "weight", "state", "gradient", "activation".
            label: what is read, for messages.
            urgent: before all transfers of this direction that are not.
            after: transfers that must end first. If one is a write and fails, so does this read.
            watcher: see `DiskTransfer`; runs in the threads of the disk.

        Raises:
            UsageError: a range that cannot be.
            StoreError: closed, or in a forked process. Errors of the transfer itself come from
                `DiskTransfer.wait`.
        """
        return self._start(
            handle,
            file_offset,
            memory,
            nbytes,
            is_write=False,
            tag=tag,
            label=label,
            urgent=urgent,
            after=after,
            watcher=watcher,
        )

    def write(
        self,
        handle: FileHandle,
        file_offset: int,
        memory: Memory,
        nbytes: int | None = None,
        *,
        tag: str = "other",
        label: str = "",
        urgent: bool = False,
        after: Iterable[DiskTransfer] = (),
        watcher: Watcher | None = None,
        pads: bool = False,
    ) -> DiskTransfer:
        """Starts a write of memory to a file range.

        Arguments and errors as `read`, and `pads` as in `DiskTransfer`.

        The memory must not change until it is done. The range should lie inside the file's
        allocated length: direct I/O writes whole blocks of 4096 bytes.
        """
        return self._start(
            handle,
            file_offset,
            memory,
            nbytes,
            is_write=True,
            tag=tag,
            label=label,
            urgent=urgent,
            after=after,
            watcher=watcher,
            pads=pads,
        )

    def _start(
        self,
        handle: FileHandle,
        file_offset: int,
        memory: Memory,
        nbytes: int | None,
        *,
        is_write: bool,
        tag: str,
        label: str,
        urgent: bool,
        after: Iterable[DiskTransfer],
        watcher: Watcher | None,
        pads: bool = False,
    ) -> DiskTransfer:
        channel = self._writes if is_write else self._reads
        if file_offset < 0:
            raise UsageError(f"a file offset cannot be negative: {file_offset}")
        # A part holds its owner: the memory stays as long as the transfer does.
        part = memory.narrow(0, memory.nbytes if nbytes is None else nbytes)
        name = label or handle.path.name
        try:
            # Acquired here and released by `DiskTransfer.finish`: `close` of a file waits for
            # nobody, so a transfer holds its own reference.
            handle.acquire()
        except ValueError as error:
            raise store_error(f"could not start the transfer of {name}: {error}; open the store again") from error
        try:
            transfer = DiskTransfer(
                handle=handle,
                offset=file_offset,
                memory=part,
                is_write=is_write,
                label=name,
                tag=tag,
                is_urgent=urgent,
                channel=channel,
                watcher=watcher,
                pads=pads,
            )
            # May start, and even end, before this returns.
            channel.submit(transfer, tuple(after))
        except BaseException:
            handle.release()
            raise
        return transfer

    @property
    def staging_bytes(self) -> int:
        """Bounce buffers held now, in bytes."""
        return 0 if self._is_closed else self._reads.staging_bytes + self._writes.staging_bytes

    def statistics(self) -> IOStatistics:
        """Counters so far."""
        reads, writes = self._reads.traffic(), self._writes.traffic()
        by_tag = {
            tag: _merged([reads[tag]] if tag in reads else [], [writes[tag]] if tag in writes else [])
            for tag in sorted({*reads, *writes})
        }
        return IOStatistics(
            total=_merged(reads.values(), writes.values()),
            by_tag=MappingProxyType(by_tag),
            staging_bytes=self.staging_bytes,
        )

    def used(self) -> Mapping[str, LinkTraffic]:
        """Bytes so far and seconds that each direction ("read", "write") was busy; see
        [Note: what a direction takes] in `channel`.
        """
        return {"read": self._reads.used(), "write": self._writes.used()}

    def close(self, *, cancel: bool = False) -> None:
        """Ends the threads and waits for them. Repeating it does nothing.

        Args:
            cancel: give up what is not under way; by default all transfers are brought to their
                end. Failures stay in the transfers.
        """
        if self._is_closed:
            return
        # Set first: `staging_bytes` and repeated closes see a closed object while threads still
        # end.
        self._is_closed = True
        for channel in (self._reads, self._writes):
            # Both are told before either is waited for: a write may wait for a read, and the other
            # way round.
            channel.request_end(cancel=cancel)
        for channel in (self._reads, self._writes):
            channel.join()
        # Also takes the handler for interpreter exit away, which would keep the channels alive.
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception_type: object, exception: object, traceback: object) -> None:
        self.close(cancel=exception is not None)


def _merged(reads: Iterable[ChannelTraffic], writes: Iterable[ChannelTraffic]) -> IOTraffic:
    read, written = tuple(reads), tuple(writes)
    return IOTraffic(
        read_bytes=sum(found.moved_bytes for found in read),
        written_bytes=sum(found.moved_bytes for found in written),
        cached_bytes=sum(found.cached_bytes for found in read + written),
        transfers=sum(found.transfers for found in read + written),
        failed_transfers=sum(found.failed_transfers for found in read + written),
    )


def _tell_to_end(channels: tuple[Channel, ...], at_exit: functools.partial[None]) -> None:
    # Tells only: a finalizer may run in a thread of the channel itself, which cannot wait for its
    # own end.
    atexit.unregister(at_exit)
    for channel in channels:
        channel.request_end(cancel=True)


def _end_at_exit(channels: tuple[Channel, ...]) -> None:
    for channel in channels:
        channel.request_end(cancel=True)
    # At exit the main thread may wait: the threads are daemons, and would be killed inside a write.
    for channel in channels:
        channel.join()
