"""The thread that does the collectives of one process group, in the order in which they were
submitted.

In: functions that call torch.distributed. Out: handles to wait for, which a failure elsewhere ends
at once.

[Note: one group, one thread]
Two threads inside one group would interleave its collectives in another order on each rank: with
buffers of equal sizes the sums are wrong, silently; with others Gloo ends the process. So only this
thread is ever inside of a collective of its group, and it takes them first in, first out: ranks
that submit in the same order meet in the same order.

[Note: memory of a collective]
Gloo and NCCL hold pointers. A handle that was failed from outside returns while its collective may
still run, so whatever it reads or writes must keep its bytes until the thread has ended (`close`):
holding the storage object is not enough where somebody resizes it to 0.

[Note: after a failure]
A rank whose sockets stay open keeps the others in their collectives. So behind a failure, when the
collective that runs has ended, the thread itself gives the group up (`on_end`), whether or not
somebody closes it. An error's traceback keeps the frames of its collective, and these the group:
its frames are cleared.
"""

from __future__ import annotations

import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from memfit.core.errors import PeerError
from memfit.distributed.transport import BrokenTransportError
from memfit.homes.home import TransferHandle

UNKNOWN = "a rank was lost, or hangs"


class CollectiveHandle(TransferHandle):
    """A collective that was submitted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Ends the handle, once: the first outcome counts."""
        with self._lock:
            if not self._done.is_set():
                # Before the event: whoever wakes up reads it without a lock.
                self._error = error
                self._done.set()

    @property
    def is_done(self) -> bool:
        """Tells whether it has ended, with or without an error."""
        return self._done.is_set()

    def wait(self) -> None:
        """Returns when the collective is complete on this rank.

        Raises:
            PeerError: another rank failed or was lost. The collective may still be running; see
                [Note: memory of a collective].
        """
        self._done.wait()
        if self._error is not None:
            raise self._error


class _Failed:
    """Mark in the queue: everything has ended with an error."""


class _Jobs:
    """Collectives to be done: what the thread shares with its owner, who may be dropped."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[Callable[[], object], CollectiveHandle] | _Failed | None] = (
            queue.SimpleQueue()
        )
        self.lock = threading.Lock()
        self.pending: set[CollectiveHandle] = set()
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> BaseException:
        """Ends all handles with the error, and all that come; returns the first such error."""
        with self.lock:
            is_first, self.failure = self.failure is None, self.failure or error
            ended, self.pending = self.pending, set()
        for handle in ended:
            handle.finish(self.failure)
        if is_first:
            self.queue.put(_Failed())
        return self.failure


class CollectiveThread:
    """See [Note: one group, one thread]. The thread starts with the first collective.

    Args:
        name: of the thread.
        on_failure: called in the thread with the error of a collective that failed, before whoever
            waits hears of it.
        on_end: called in the thread after a failure, when no collective runs; see [Note: after a
            failure].
    """

    def __init__(
        self,
        name: str,
        on_failure: Callable[[BaseException], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._jobs = _Jobs()
        self._on_failure = on_failure
        self._on_end = on_end
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._is_closed = False

    @property
    def failure(self) -> BaseException | None:
        """The error by which everything ended; None while all is well."""
        return self._jobs.failure

    def submit(self, act: Callable[[], object]) -> CollectiveHandle:
        """Submits a collective. All ranks must submit the same ones in the same order.

        Args:
            act: calls torch.distributed and returns when the collective is complete.
        """
        handle = CollectiveHandle()
        jobs = self._jobs
        with jobs.lock:
            failure = jobs.failure
            if failure is None:
                jobs.pending.add(handle)
        if failure is not None:
            handle.finish(failure)
            return handle
        self._start()
        jobs.queue.put((act, handle))
        return handle

    def _start(self) -> None:
        # A failure may come from another thread than collectives do.
        with self._starting:
            if self._thread is not None or self._is_closed:
                return
            arguments = (self._jobs, self._on_failure, self._on_end)
            self._thread = threading.Thread(target=_work, args=arguments, name=self._name, daemon=True)
            self._thread.start()
            # A group that is dropped without `close` ends its thread as well.
            weakref.finalize(self, self._jobs.queue.put, None)

    def fail(self, error: BaseException) -> None:
        """Ends everything that was submitted and everything that will be with the error, at once
        and from any thread. The collective that runs goes on; no other is begun.
        """
        self._jobs.fail(error)
        if self._on_end is not None:
            self._start()

    def close(self, timeout_s: float | None = None) -> bool:
        """Ends the thread, after all that was submitted, or after a failure when the collective
        that runs has ended.

        Returns:
            False if it still runs after `timeout_s`.
        """
        with self._starting:
            self._is_closed = True
            thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._jobs.queue.put(None)
        thread.join(timeout_s)
        if thread.is_alive():
            self._thread = thread
            return False
        return True


def _work(jobs: _Jobs, on_failure: Callable[[BaseException], None] | None, on_end: Callable[[], None] | None) -> None:
    with torch.no_grad():
        while (job := jobs.queue.get()) is not None:
            if isinstance(job, _Failed):
                # Here: between two collectives, of which none begins any more.
                if on_end is not None:
                    on_end()
                continue
            act, handle = job
            if jobs.failure is not None:
                continue  # its handle was ended; on another rank the collective is not begun either
            error: BaseException | None = None
            left: Sequence[dist.Work] = ()
            try:
                act()
            except BrokenTransportError as failed:
                left = failed.left
                # A new error, without frames: they would keep the group, and its sockets open.
                error = PeerError(f"{UNKNOWN}: {failed}")
                # After one collective failed, ranks stand at different places: none may follow.
                if on_failure is not None:
                    on_failure(error)
                error = jobs.fail(error)
            except BaseException as failed:  # noqa: BLE001, raised where the handle is waited for
                # Its frames hold the group, and whoever keeps the error would keep its sockets.
                traceback.clear_frames(failed.__traceback__)
                error = failed
            with jobs.lock:
                jobs.pending.discard(handle)
            # Before whoever waits goes on: what the collective worked on is theirs again.
            del job, act
            handle.finish(error)
            for work in left:
                # This thread must not end before them: see [Note: memory of a collective].
                with suppress(RuntimeError):
                    work.wait()
            del handle, error, left
