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
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from memfit.core.errors import StoreError, UsageError
from memfit.core.hardware import LinkTraffic
from memfit.core.limits import MIB, round_up
from memfit.store.checksums import ALIGNMENT_BYTES, Memory, aligned_memory
from memfit.store.files import FileHandle, explain, store_error
from memfit.store.transfer import DiskTransfer, ShortReadError, Watcher, move

# One direction of the disk: a queue of transfers and the threads that serve it, piece by piece.
#
# In: transfers. Out: the same, ended. The threads know the channel, never the `DiskIO` in front of
# it, so that dropping that object ends them.
#
# [Note: order]
# Threads take pieces from the transfer at the head of the queue until it is used up, then go on
# with the next: first in, first out, several threads on one big transfer, urgent transfers before
# the others at the next piece. A transfer may have to come after others, in either direction; it
# enters the queue when the last of them has ended. Transfers only ever wait for older ones: no
# cycles.
#
# [Note: what a direction takes]
# A direction is busy while at least one piece is under way: from the first that a thread takes to
# the end of the last, however many threads share them. Its bytes by those seconds are its speed in
# use, as prediction prices it; the other direction and all else that slowed it are in it, and a
# queue that was empty is not. Transfers of less than `METERED_BYTES` are not counted: they say more
# of what a transfer costs than of its bytes.

METERED_BYTES = 1 << 18


@dataclass(slots=True)
class ChannelTraffic:
    """Counters of a channel for one purpose."""

    moved_bytes: int = 0
    cached_bytes: int = 0
    transfers: int = 0
    failed_transfers: int = 0


class Channel:
    """Transfers of one direction and the threads that serve them.

    Args:
        is_write: the direction.
        threads: how many pieces are under way at once.
        piece_bytes: largest piece, in whole blocks.
        staging_bytes: bounce buffer of each thread, in whole blocks; held from construction to the
            end of the thread.
    """

    def __init__(self, *, is_write: bool, threads: int, piece_bytes: int, staging_bytes: int) -> None:
        self._is_write = is_write
        self._piece_bytes = piece_bytes
        # Condition's own lock is reentrant: a finalizer may run in a thread that is inside this
        # lock and ask for the end.
        self._condition = threading.Condition()
        self._urgent: deque[DiskTransfer] = deque()
        self._background: deque[DiskTransfer] = deque()
        self._unfinished = 0
        self._is_closing = False
        self._is_cancelling = False
        self._pid = os.getpid()
        self._traffic: dict[str, ChannelTraffic] = {}
        # Under the lock, of metered transfers: bytes that went, pieces under way, since when there
        # are any, and seconds that are over.
        self._metered_bytes = 0
        self._under_way = 0
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self.staging_bytes = threads * staging_bytes
        name = "memfit-disk-write" if is_write else "memfit-disk-read"
        self._threads = [
            # Daemon threads: ordinary ones would be joined at interpreter exit before anyone has
            # told them to end.
            threading.Thread(
                target=self._serve, args=(aligned_memory(staging_bytes),), name=f"{name}-{number}", daemon=True
            )
            for number in range(threads)
        ]
        started: list[threading.Thread] = []
        try:
            for thread in self._threads:
                thread.start()
                started.append(thread)
        except RuntimeError as error:
            self._threads = started
            self.request_end(cancel=True)
            self.join()
            raise store_error(
                f"could not start {threads} threads for the disk: {error}; raise `ulimit -u` or use fewer threads"
            ) from error

    # ---- for the owner

    def submit(self, transfer: DiskTransfer, after: tuple[DiskTransfer, ...]) -> None:
        """Takes a transfer, to be served after others have ended.

        Its handle is acquired; its end releases it.

        Raises:
            StoreError: the channel is closed, or this process is a fork of the one that has the
                threads.
        """
        if os.getpid() != self._pid:
            raise store_error(
                f"disk transfer of {transfer.label} in a forked process: the worker threads live in process {self._pid}; "
                "open the store in the process that uses it"
            )
        with self._condition:
            if self._is_closing:
                raise store_error(f"disk transfer of {transfer.label} after the disk was closed; make a new DiskIO")
            self._unfinished += 1
            # One blocker more than there are: the transfer must not start before all of them are
            # counted.
            transfer.blockers = len(after) + 1
        for other in after:
            other.call_when_done(functools.partial(self._unblock, transfer))
        self._unblock(transfer, None)

    def cancel(self, transfer: DiskTransfer) -> bool:
        """Gives up what has not been started of a transfer; True if there was something."""
        with self._condition:
            if transfer.is_over or transfer.has_failed or transfer.cursor == transfer.nbytes:
                return False
            transfer.fail(_cancelled(transfer))
            is_over = self._is_over(transfer)
        if is_over:
            transfer.finish()
        return True

    def request_end(self, *, cancel: bool) -> None:
        """Tells the threads to end: after all transfers, or, with `cancel`, after the pieces under
        way.
        """
        if os.getpid() != self._pid:
            return  # A fork: no threads here, and the lock may have been copied in a locked state.
        with self._condition:
            self._is_closing = True
            self._is_cancelling = self._is_cancelling or cancel
            self._condition.notify_all()

    def join(self) -> None:
        """Waits for the threads to end; call `request_end` first.

        A worker that gets here does not wait for itself.
        """
        if os.getpid() != self._pid:
            return
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def traffic(self) -> dict[str, ChannelTraffic]:
        """A copy of the counters by purpose."""
        with self._condition:
            return {
                tag: ChannelTraffic(
                    moved_bytes=found.moved_bytes,
                    cached_bytes=found.cached_bytes,
                    transfers=found.transfers,
                    failed_transfers=found.failed_transfers,
                )
                for tag, found in self._traffic.items()
            }

    def used(self) -> LinkTraffic:
        """Bytes of metered transfers that went so far, and the seconds that it was busy with them;
        see [Note: what a direction takes].
        """
        with self._condition:
            open_s = time.perf_counter() - self._busy_since_s if self._under_way else 0.0
            return LinkTraffic(nbytes=self._metered_bytes, seconds=self._busy_s + open_s)

    # ---- the life of a transfer

    def _unblock(self, transfer: DiskTransfer, earlier: DiskTransfer | None) -> None:
        """Counts one transfer that had to come first as ended.

        The last one lets this transfer into the queue.

        It ends no transfer itself, not even one that has failed: it runs inside the end of another
        transfer, and a long row of transfers that wait for each other would nest as deep.
        """
        with self._condition:
            transfer.blockers -= 1
            if transfer.is_over or transfer.has_failed:
                return
            if earlier is not None and earlier.is_write and not transfer.is_write and earlier.has_failed:
                # A read of what was not written would give old bytes as new ones. A write may
                # follow anything.
                transfer.fail(
                    store_error(f"{transfer.label} was not read because it was not written: {earlier.failure}")
                )
            elif transfer.blockers:
                return
            (self._urgent if transfer.is_urgent else self._background).append(transfer)
            # All: a waiter that an exception of a signal handler took away would swallow the
            # wake-up that was meant for another.
            self._condition.notify_all()

    def _is_over(self, transfer: DiskTransfer) -> bool:
        """With the lock held: nothing is left to do or under way.

        True once only: who sees it finishes the transfer.
        """
        if transfer.is_over or transfer.in_flight or (transfer.cursor < transfer.nbytes and not transfer.has_failed):
            return False
        transfer.is_over = True
        self._unfinished -= 1
        counted = self._traffic.setdefault(transfer.tag, ChannelTraffic())
        counted.transfers += 1
        counted.failed_transfers += transfer.has_failed
        if self._is_closing:
            self._condition.notify_all()
        return True

    def _take(self) -> tuple[DiskTransfer, int, int] | None:
        """Returns the next piece (transfer, position, length); None when the thread shall end."""
        while True:
            with self._condition:
                while not self._urgent and not self._background:
                    if self._is_closing and not self._unfinished:
                        return None
                    self._condition.wait()
                queue = self._urgent or self._background
                transfer = queue[0]
                if self._is_cancelling:
                    transfer.fail(_cancelled(transfer))
                if not transfer.has_failed and transfer.cursor < transfer.nbytes:
                    start = transfer.cursor
                    # Pieces end on blocks of the file, so that only the first and the last can have
                    # edges.
                    end = (transfer.offset + start + self._piece_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
                    transfer.cursor = min(transfer.nbytes, end - transfer.offset)
                    transfer.in_flight += 1
                    if transfer.nbytes >= METERED_BYTES:
                        if not self._under_way:
                            self._busy_since_s = time.perf_counter()
                        self._under_way += 1
                    if transfer.cursor == transfer.nbytes:
                        queue.popleft()
                    return transfer, start, transfer.cursor - start
                queue.popleft()
                is_over = self._is_over(transfer)
            # Outside of the lock: the transfers that wait for this one may belong to the other
            # channel, which has a lock of its own.
            if is_over:
                transfer.finish()
            # This thread may now wait for work, and must not keep the transfer alive meanwhile.
            del transfer, queue

    def _serve(self, staging: Memory) -> None:
        while (work := self._take()) is not None:
            self._perform(*work, staging)
            # While this thread waits for work it must not keep the last transfer alive.
            del work

    def _perform(self, transfer: DiskTransfer, position: int, nbytes: int, staging: Memory) -> None:
        transfer.note_start()
        failure: StoreError | None = None
        try:
            move(
                transfer.handle,
                is_write=self._is_write,
                offset=transfer.offset + position,
                address=transfer.memory.address + position,
                nbytes=nbytes,
                staging=staging,
                pads=transfer.pads and position + nbytes == transfer.nbytes,
            )
            if transfer.watcher is not None:
                transfer.watcher(position, transfer.memory.address + position, nbytes)
        except BaseException as error:  # noqa: BLE001
            # Whatever happens is raised where the transfer is waited for; the thread must live on
            # for the next one.
            failure = _explain_transfer(error, transfer, position, nbytes)
        with self._condition:
            counted = self._traffic.setdefault(transfer.tag, ChannelTraffic())
            if failure is None:
                counted.moved_bytes += nbytes
                counted.cached_bytes += 0 if transfer.handle.is_direct else nbytes
            else:
                transfer.fail(failure)
            transfer.in_flight -= 1
            if transfer.nbytes >= METERED_BYTES:
                self._metered_bytes += nbytes if failure is None else 0
                self._under_way -= 1
                if not self._under_way:
                    self._busy_s += time.perf_counter() - self._busy_since_s
            is_over = self._is_over(transfer)
        if is_over:
            transfer.finish()


def check_sizes(*, threads: int, piece_bytes: int, staging_bytes: int) -> str | None:
    """Returns the problem with the sizes of a channel, in words, or None."""
    if threads < 1 or threads > 64:
        return f"threads must be 1 to 64, not {threads}"
    for name, size in (("piece_bytes", piece_bytes), ("staging_bytes", staging_bytes)):
        if size < ALIGNMENT_BYTES or round_up(size, ALIGNMENT_BYTES) != size or size > 1 << 30:
            return f"{name} must be a multiple of {ALIGNMENT_BYTES} up to 1 GiB, not {size}"
    return None


def _cancelled(transfer: DiskTransfer) -> StoreError:
    return store_error(
        f"the {'write' if transfer.is_write else 'read'} of {transfer.label} in {transfer.path} was cancelled"
    )


def _explain_transfer(error: BaseException, transfer: DiskTransfer, position: int, nbytes: int) -> StoreError:
    """A `StoreError` that names the block, the file and the range."""
    if isinstance(error, StoreError):
        # A watcher's own words; frames of this thread would keep the transfer and its memory alive.
        return error.with_traceback(None)
    start = transfer.offset + position
    verb = "write" if transfer.is_write else "read"
    doing = f"{verb} {transfer.label} (bytes {start} to {start + nbytes} of the file)"
    if isinstance(error, ShortReadError):
        failure = store_error(
            f"could not {doing} at {transfer.path}: the file ends {error.missing_bytes} bytes too early; it was cut or "
            "replaced from outside: go back to a saved state, or start the store anew",
            error.errno,
        )
    elif isinstance(error, OSError):
        failure = explain(error, doing=doing, path=transfer.path)
    else:
        failure = store_error(
            f"could not {doing} at {transfer.path}: {type(error).__name__}: {error}; this is a bug of memfit"
        )
    # Frames of this thread would keep the transfer and its memory alive.
    failure.__cause__ = error.with_traceback(None)
    error.__context__ = None
    return failure


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
    order]). A read and a write have no order between them unless `after` gives one;
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
        [Note: what a direction takes].
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
