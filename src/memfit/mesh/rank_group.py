"""The ranks that work together: a process group of its own, one thread for its collectives, and
news of failures.

In: torch.distributed, initialized or started by `torchrun`. Out: a `RankGroup`.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from memfit.core.errors import PeerError, UsageError
from memfit.homes.home import TransferHandle
from memfit.mesh.failure import FailureWatch, Peers, meet
from memfit.mesh.transport import BrokenTransportError, Group, transporting

# The thread that does the collectives of one process group, in the order in which they were
# submitted.
#
# In: functions that call torch.distributed. Out: handles to wait for, which a failure elsewhere
# ends at once.
#
# [Note: one group, one thread]
# Two threads inside one group would interleave its collectives in another order on each rank: with
# buffers of equal sizes the sums are wrong, silently; with others Gloo ends the process. So only
# this thread is ever inside of a collective of its group, and it takes them first in, first out:
# ranks that submit in the same order meet in the same order.
#
# [Note: memory of a collective]
# Gloo and NCCL hold pointers. A handle that was failed from outside returns while its collective
# may still run, so whatever it reads or writes must keep its bytes until the thread has ended
# (`close`): holding the storage object is not enough where somebody resizes it to 0.
#
# [Note: after a failure]
# A rank whose sockets stay open keeps the others in their collectives. So behind a failure, when
# the collective that runs has ended, the thread itself gives the group up (`on_end`), whether or
# not somebody closes it. An error's traceback keeps the frames of its collective, and these the
# group: its frames are cleared.

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


DEFAULT_TIMEOUT_S = 600.0
_BETWEEN_LOOKS_S = 0.02
T = TypeVar("T")


class RankGroup:
    """Ranks of one axis. Collectives run in a thread of its own, over sockets of its own.

    Args:
        peers: the ranks; one for this process alone.
        timeout_s: of the collectives.

    Attributes:
        rank: of this process.
        size: number of ranks.
        received: bytes of weights, gradients and states that came from other ranks, by purpose.

    Raises:
        PeerError: another rank was lost, or hangs, while sockets were made.
    """

    def __init__(self, peers: Peers, timeout_s: float) -> None:
        self.rank, self.size = peers.rank, peers.size
        self.received: Counter[str] = Counter()
        self._peers, self._timeout_s = peers, timeout_s
        self._dropping = threading.Lock()
        self._begin(f"memfit/{peers.serial}")

    def _begin(self, prefix: str) -> None:
        self._group: Group = None
        self._watch: FailureWatch | None = None
        self._prefix = prefix
        # Weak: both threads live as long as the process if nobody closes the group.
        own: weakref.ref[RankGroup] = weakref.ref(self)
        self._thread = CollectiveThread("memfit-ranks", lambda error: _notice(own, error), lambda: _drop(own))
        if self.size > 1:
            self.watched(self._connect)

    def _connect(self) -> None:
        """Starts the watch and makes the sockets."""
        own: weakref.ref[RankGroup] = weakref.ref(self)
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001, torchrun's store has no public name
        # First: a rank that fails from here on is heard of.
        self._watch = FailureWatch(store, self._prefix, self._peers, lambda text: _hear(own, text))
        group = dist.new_group(timeout=timedelta(seconds=self._timeout_s), backend=_backend())
        if not isinstance(group, dist.ProcessGroup):
            raise PeerError("this process is not a member of the default process group")
        self._group = group
        if self.failure is not None:
            self._drop_group()  # nobody waits for it any more

    def watched(self, act: Callable[[], T]) -> T:
        """Does what makes sockets with other ranks, in a thread, while this one looks at their
        processes: see `failure`, [Note: how ranks meet].

        Args:
            act: calls torch.distributed.

        Raises:
            PeerError: another rank was lost, or hangs; the group has failed by it. The act may go
                on.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                with transporting():
                    results.append(act())
            except BaseException as error:  # noqa: BLE001, raised below, in the thread that waits
                errors.append(error)

        thread = threading.Thread(target=work, name="memfit-connecting", daemon=True)
        thread.start()
        ends_s = time.monotonic() + self._timeout_s
        while thread.is_alive() and self.failure is None and not self._peers.ended() and time.monotonic() < ends_s:
            thread.join(_BETWEEN_LOOKS_S)
        if results:
            return results[0]
        cause = errors[0] if errors else BrokenTransportError("sockets between the ranks could not be made", ())
        if isinstance(cause, BrokenTransportError):
            cause = PeerError(f"{self._peers.account() or UNKNOWN}: {cause}")
        error = self.failure or cause
        self._end(error, str(error))
        raise error

    @property
    def failure(self) -> BaseException | None:
        """The error by which the group ended; None while all is well."""
        return self._thread.failure

    def submit(self, act: Callable[[Group], object]) -> CollectiveHandle:
        """Submits a collective, which all ranks must do in the same order.

        Args:
            act: called in the group's thread.
        """
        return self._thread.submit(lambda: act(self._group))

    def call(self, act: Callable[[Group], T]) -> T:
        """Does a collective and returns its result."""
        found: list[T] = []
        self.submit(lambda group: found.append(act(group))).wait()
        return found[0]

    def words_of(self, error: BaseException) -> str:
        """Returns the words by which the other ranks hear of an error of this one."""
        return f"rank {self.rank}: {type(error).__name__}: {error}"

    def fail(self, error: BaseException) -> None:
        """Ends the group on all ranks, because this one failed: the others get its text as a
        `PeerError` at once, wherever they wait.
        """
        self._end(error, self.words_of(error))

    def _end(self, error: BaseException, text: str) -> None:
        # The others first: what this rank waits for is ended by the next line, and then it may end
        # as a process.
        if self._watch is not None and self._thread.failure is None:
            self._watch.tell(text)
        self._thread.fail(error)

    def note_lost(self, error: BaseException) -> None:
        """Tells the others of a collective that failed here because a rank was lost."""
        # Held: the job's thread may close the group meanwhile, told by another rank.
        watch = self._watch
        if watch is None or self._thread.failure is not None:
            return
        account = self._peers.account()
        if told := watch.mail():
            # A rank that has failed tells its cause first, and gives its sockets up then.
            self._thread.fail(PeerError(told))
            return
        if account:
            error.args = (f"{account}: {str(error).removeprefix(f'{UNKNOWN}: ')}",)
        watch.tell(str(error))

    def close(self, timeout_s: float = 30.0) -> bool:
        """Ends the threads and gives the sockets up. May be repeated.

        Returns:
            False if a collective still runs, which may touch its memory: another rank, or the
            group's timeout, has yet to end it.
        """
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if not self._thread.close(timeout_s):
            return False
        self._drop_group()
        return True

    def renew(self, refusal: str | None = None) -> None:
        """Makes the group anew behind a failure that all ranks have survived. All of them call it,
        also one that does not go on, so that nobody waits for it.

        Args:
            refusal: why this rank does not go on; then the others raise it.

        Raises:
            PeerError: another rank does not go on, or was lost.
        """
        assert self.failure is not None, "a group without a failure goes on as it is"
        watch = self._watch
        if watch is None or refusal is not None:
            if watch is not None:
                watch.meet(refusal, self._timeout_s)
            return
        # First: a collective that still runs touches memory that the job is about to give up.
        why = None if self._thread.close(self._timeout_s) else "a collective still runs"
        why = watch.meet(None if why is None else f"rank {self.rank}: {why}", self._timeout_s)
        if why is not None:
            raise PeerError(why)
        self.close()
        self._begin(f"{self._prefix}/again")

    def _drop_group(self) -> None:
        with self._dropping:
            group, self._group = self._group, None
        if group is not None:
            # After a failure the program may have ended all groups itself, which torch tells so.
            with suppress(ValueError) if self._thread.failure is not None else nullcontext():
                dist.destroy_process_group(group)
            del group
            # Sockets close with the last reference to the group, and peers may wait for that.
            gc.collect()


def open_group(*, timeout_s: float | None = None) -> RankGroup:
    """Makes a group of all ranks of the default process group; all ranks call it. Without one it is
    initialized from the environment of `torchrun`; without that this process is alone.

    Args:
        timeout_s: after it a collective that a rank does not come to is an error; None: that of the
            default process group, as `init_process_group(timeout=...)` was told it.

    Raises:
        UsageError: torch was built without torch.distributed.
        PeerError: another rank was lost, or hangs.
    """
    if not is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
            return RankGroup(meet(None), DEFAULT_TIMEOUT_S)
        if not dist.is_available():
            raise UsageError("torchrun has started several ranks, and this torch was built without torch.distributed")
        dist.init_process_group(_backend(), timeout=timedelta(seconds=DEFAULT_TIMEOUT_S))
    default = dist.group.WORLD
    if default is None or default.size() == 1:
        return RankGroup(meet(None), DEFAULT_TIMEOUT_S)
    if timeout_s is None:
        options = default._get_backend(default._device_types[0]).options  # noqa: SLF001, no public name
        timeout_s = options._timeout.total_seconds()  # noqa: SLF001
    if torch.device("cpu") not in default._device_types:  # noqa: SLF001
        default = dist.new_group(backend="gloo")
    assert isinstance(default, dist.ProcessGroup), "all ranks of the default group are its members"
    try:
        peers = meet(default)
    except BrokenTransportError as error:
        # Without the cause: its frames hold the group.
        raise PeerError(f"{UNKNOWN} before all ranks were in memfit: {error}") from None
    return RankGroup(peers, timeout_s)


def _backend() -> str:
    """Returns the backends: small things that ranks agree on lie in host memory in any case."""
    return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.accelerator.is_available() else "gloo"


def is_initialized() -> bool:
    """Tells whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


def _notice(own: weakref.ref[RankGroup], error: BaseException) -> None:
    group = own()
    if group is not None:
        group.note_lost(error)


def _drop(own: weakref.ref[RankGroup]) -> None:
    group = own()
    if group is not None:
        group._drop_group()  # noqa: SLF001, in this module


def _hear(own: weakref.ref[RankGroup], text: str) -> None:
    group = own()
    if group is not None:
        group._thread.fail(PeerError(text))  # noqa: SLF001, in this module
