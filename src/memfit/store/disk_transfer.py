"""The handle of one read or write, to wait for.

In: a request. Out: done, failed or cancelled, with the seconds it took. The memory and the file are
let go when it is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from memfit.core.errors import StoreError
from memfit.store.file_operations import FileHandle
from memfit.store.memory_ranges import Memory
from memfit.store.os_errors import store_error

if TYPE_CHECKING:
    from memfit.store.channel import Channel

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
