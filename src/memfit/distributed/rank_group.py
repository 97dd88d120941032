"""The ranks that work together: a process group of its own, one thread for its collectives, and
news of failures.

In: torch.distributed, initialized or started by `torchrun`. Out: a `RankGroup`.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from memfit.core.errors import PeerError, UsageError
from memfit.distributed.collective_thread import CollectiveHandle, CollectiveThread
from memfit.distributed.failure import FailureWatch
from memfit.distributed.transport import Group, broadcast, rank_and_size

DEFAULT_TIMEOUT_S = 600.0
T = TypeVar("T")


class RankGroup:
    """Ranks of one axis. Collectives run in a thread of its own, over sockets of its own.

    Args:
        group: of torch.distributed, used by nobody else; None: this process alone.
        store: by which ranks hear of failures; None: this process alone.
        prefix: of its keys.

    Attributes:
        rank: of this process.
        size: number of ranks.
        received: bytes of weights, gradients and states that came from other ranks, by purpose.
    """

    def __init__(self, group: Group, store: Store | None, prefix: str) -> None:
        self.rank, self.size = rank_and_size(group)
        self.received: Counter[str] = Counter()
        self._dropping = threading.Lock()
        self._begin(group, store, prefix)

    def _begin(self, group: Group, store: Store | None, prefix: str) -> None:
        self._group, self._store, self._prefix = group, store, prefix
        # Weak: both threads live as long as the process if nobody closes the group.
        own: weakref.ref[RankGroup] = weakref.ref(self)
        self._thread = CollectiveThread("memfit-ranks", lambda error: _notice(own, error), lambda: _drop(own))
        self._watch: FailureWatch | None = None
        if store is not None and group is not None:
            self._watch = FailureWatch(store, prefix, self.rank, self.size, lambda text: _hear(own, text))

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
        # The others first: what this rank waits for is ended by the next line, and then it may end
        # as a process.
        if self._watch is not None and self._thread.failure is None:
            self._watch.tell(self.words_of(error))
        self._thread.fail(error)

    def note_lost(self, error: BaseException) -> None:
        """Tells the others of a collective that failed here because a rank was lost."""
        # Held: the job's thread may close the group meanwhile, told by another rank.
        watch = self._watch
        if watch is None or self._thread.failure is not None:
            return
        lost = watch.lost()
        if not lost and (told := watch.mail()):
            # A rank that has failed tells its cause first, and gives its sockets up then.
            self._thread.fail(PeerError(told))
            return
        if lost:
            error.args = (f"rank {', '.join(map(str, lost))} was lost: {error}",)
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

    def renew(self, refusal: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Makes the group anew behind a failure that all ranks have survived. All of them call it,
        also one that does not go on, so that nobody waits for it.

        A rank that is killed after all have met, while sockets are made, is noticed by the timeout
        of that alone, or by `torchrun`, which ends the others.

        Args:
            refusal: why this rank does not go on; then the others raise it.
            timeout_s: of the collectives from then on, and of the wait for the other ranks.

        Raises:
            PeerError: another rank does not go on, or was lost; the group stays as it is.
        """
        assert self.failure is not None, "a group without a failure goes on as it is"
        watch = self._watch
        if watch is None or refusal is not None:
            if watch is not None:
                watch.meet(refusal, timeout_s)
            return
        # First: a collective that still runs touches memory that the job is about to give up.
        why = None if self._thread.close(timeout_s) else "a collective still runs"
        why = watch.meet(None if why is None else f"rank {self.rank}: {why}", timeout_s)
        if why is not None:
            raise PeerError(why)
        store, prefix = self._store, f"{self._prefix}/again"
        self.close()
        group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend=_backend())
        if not isinstance(group, dist.ProcessGroup):
            raise PeerError("this process is not a member of the default process group")
        self._begin(group, store, prefix)

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


def open_group(*, timeout_s: float = DEFAULT_TIMEOUT_S) -> RankGroup:
    """Makes a group of all ranks of the default process group; all ranks call it. Without one it is
    initialized from the environment of `torchrun`; without that this process is alone.

    Args:
        timeout_s: after it a collective that a rank does not come to is an error.

    Raises:
        UsageError: torch was built without torch.distributed.
    """
    if not is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
            return RankGroup(None, None, "memfit/alone")
        if not dist.is_available():
            raise UsageError("torchrun has started several ranks, and this torch was built without torch.distributed")
        dist.init_process_group(_backend())
    if dist.get_world_size() == 1:
        return RankGroup(None, None, "memfit/alone")
    group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend=_backend())
    if not isinstance(group, dist.ProcessGroup):
        raise PeerError("this process is not a member of the default process group")
    # Rank 0's, so that a process that takes a lost one's place reads the same keys as the others.
    serial = torch.tensor([int.from_bytes(os.urandom(7)) if dist.get_rank(group) == 0 else 0])
    broadcast(group, serial, 0)
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001, torchrun's store has no public name
    return RankGroup(group, store, f"memfit/{int(serial):x}")


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
