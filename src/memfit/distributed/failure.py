"""News of failures between ranks, by the store that the process group was made with.

In: the store. Out: each rank's first failure, told to all others at once, also to those that are
not in a collective.

[Note: how a rank hears of a failure]
A rank that fails writes its text to the mailbox of each other rank; a thread of each rank waits at
its own. A rank that is killed writes nothing: its sockets close, the collectives of others fail,
and whoever notices writes for it. Gloo's own ways unblock nobody: a group that is aborted keeps its
sockets open, so waits must not block inside of it (`collective_thread`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_WAITS = timedelta(minutes=10)
_CLOSED = ""
_GOES_ON = "goes on"
_LONGEST = 4000
_LOOKS = 10
_BETWEEN_LOOKS_S = 0.01


class FailureWatch:
    """The mailboxes of the ranks of one group. Starts a thread.

    Args:
        store: of the process group.
        prefix: of its keys; equal on all ranks, used once.
        rank: of this process.
        size: number of ranks.
        on_failure: called once, in the thread, with the text of another rank's failure.
    """

    def __init__(self, store: Store, prefix: str, rank: int, size: int, on_failure: Callable[[str], None]) -> None:
        self._prefix = prefix
        self._rank = rank
        self._size = size
        # A connection of its own: a store that waits holds its lock for as long.
        self._store = _connection(store)
        self._lock = threading.Lock()
        self._has_told = False
        self._store.set(f"{prefix}/process/{rank}", _this_process())
        self._thread = threading.Thread(
            target=_watch,
            args=(_connection(store), f"{prefix}/mail/{rank}", on_failure),
            name="memfit-watch",
            daemon=True,
        )
        self._thread.start()

    def tell(self, text: str) -> None:
        """Tells all other ranks of a failure of this one, or of what it has noticed. The first
        text counts; a store that is lost tells them itself.
        """
        with self._lock:
            if self._has_told:
                return
            self._has_told = True
        try:
            for rank in range(self._size):
                if rank != self._rank:
                    self._store.set(f"{self._prefix}/mail/{rank}", text[:_LONGEST])
        except dist.DistError:
            # Whoever holds the store has ended: the others' own waits at it fail as well.
            return

    def lost(self) -> list[int]:
        """Returns the ranks whose process has ended, as far as it runs on this machine. If none
        has, it looks again for a tenth of a second: a process closes its sockets before it ends.
        """
        for _ in range(_LOOKS):
            if found := self._lost():
                return found
            time.sleep(_BETWEEN_LOOKS_S)
        return []

    def mail(self) -> str:
        """Returns what another rank has told of its failure so far; empty if nothing came."""
        key = f"{self._prefix}/mail/{self._rank}"
        try:
            return self._store.get(key).decode(errors="replace") if self._store.check([key]) else _CLOSED
        except dist.DistError:
            return _CLOSED

    def meet(self, refusal: str | None, timeout_s: float) -> str | None:
        """Meets the other ranks behind a failure, when nobody is in a collective any more. Each
        comes once.

        Args:
            refusal: why this rank does not go on; then it waits for nobody.
            timeout_s: longest wait.

        Returns:
            None if all go on; else why they do not.
        """
        key = f"{self._prefix}/again"
        try:
            self._store.set(f"{key}/{self._rank}", _GOES_ON if refusal is None else refusal[:_LONGEST])
            ends_s = time.monotonic() + timeout_s
            for rank in range(self._size) if refusal is None else ():
                while not self._store.check([f"{key}/{rank}"]):
                    if lost := self._lost():
                        return f"rank {', '.join(map(str, lost))} was lost"
                    if time.monotonic() > ends_s:
                        return f"rank {rank} hangs"
                    time.sleep(_BETWEEN_LOOKS_S)
                said = self._store.get(f"{key}/{rank}").decode(errors="replace")
                if said != _GOES_ON:
                    return said
        except dist.DistError as error:
            return f"the store of the process group was lost ({str(error).splitlines()[0]})"
        return refusal

    def _lost(self) -> list[int]:
        here = socket.gethostname()
        found: list[int] = []
        for rank in range(self._size):
            try:
                host, pid, began = self._store.get(f"{self._prefix}/process/{rank}").decode().split("\n")
            except (dist.DistError, ValueError):
                return []
            if host == here and _began_at(int(pid)) != began:
                found.append(rank)
        return found

    def close(self) -> None:
        """Ends the thread. Must not be called by it."""
        try:
            self._store.set(f"{self._prefix}/mail/{self._rank}", _CLOSED)
        except dist.DistError:
            return  # the store is lost, and the thread has ended by that
        self._thread.join(timeout=5.0)


def _watch(store: Store, key: str, on_failure: Callable[[str], None]) -> None:
    while True:
        try:
            store.wait([key], _WAITS)
            text = store.get(key)
        except dist.DistStoreError:
            continue  # nothing came for so long
        except dist.DistError as error:
            on_failure(
                f"the store of the process group was lost ({str(error).splitlines()[0]}): rank 0 or torchrun, which holds it, has ended"
            )
            return
        if text:
            on_failure(text.decode(errors="replace"))
        return


def _connection(store: Store) -> Store:
    """Returns a connection of its own to a store."""
    return cast("Any", store).clone()  # missing in torch's type stubs


def _this_process() -> str:
    return f"{socket.gethostname()}\n{os.getpid()}\n{_began_at(os.getpid())}"


def _began_at(pid: int) -> str:
    """Returns when a process of this machine began; text that no process has if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "ended"
    # The command stands in parentheses and may hold spaces. Source: proc(5).
    fields = text.rpartition(")")[2].split()
    # A killed process is a zombie until its parent has heard of it.
    return "ended" if fields[0] in "ZX" else fields[19]
