"""News of failures between ranks, by the store that the process group was made with.

In: the store. Out: each rank's first failure, told to all others at once, also to those that are
not in a collective.

[Note: how a rank hears of a failure]
A rank that fails writes its text to the mailbox of each other rank; a thread of each rank waits at
its own. A rank that is killed writes nothing: its sockets close, the collectives of others fail,
and whoever notices writes for it. Gloo's own ways unblock nobody: a group that is aborted keeps its
sockets open, so waits must not block inside of it (`rank_group`).

[Note: a store that does not answer]
The store may lie in a rank's process, and a process that is stopped neither answers nor closes its
sockets. So whatever waits for an answer of the store does so in a thread, which is left behind when
its time is over; from then on the store is not asked again (`FailureWatch._asked`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from memfit.mesh.transport import gather_small, rank_and_size

# The processes of the ranks: how ranks learn of them, and whether they live.
#
# In: a process group. Out: `Peers`, which says of each rank on this machine whether its process has
# ended or is stopped.
#
# [Note: how ranks meet]
# A rank may be killed before anybody has heard of its process. Only sockets that are there tell the
# others then, and those are of the process group that the program has initialized. So ranks
# exchange their processes over that group, before they make a group of their own. Sockets that are
# being made tell nothing: torch.distributed waits for keys that a killed rank does not write. So
# from then on whoever waits for new sockets looks at the processes (`RankGroup.watched`). Ranks on
# other machines are not seen so: there the timeout of the group ends the wait.

_RECORD_BYTES = 256
_LOOKS = 10
_BETWEEN_LOOKS_S = 0.01
_ENDED, _STOPPED = "ended", "stopped"


class Peers:
    """The ranks of one group, by process.

    Args:
        rank: of this process.
        records: by rank: machine, process number, its beginning, and a random number, as lines.

    Attributes:
        rank: of this process.
        size: number of ranks.
        serial: the random number of rank 0, the same on all ranks and of this meeting only.
    """

    def __init__(self, rank: int, records: Sequence[str]) -> None:
        self.rank = rank
        self.size = len(records)
        self._processes = [record.split("\n") for record in records]
        self.serial = self._processes[0][3]

    def ended(self, *, looks: int = 1) -> list[int]:
        """Returns the ranks whose process has ended, as far as it runs on this machine.

        Args:
            looks: at most, a hundredth of a second apart, while none has: a process closes its
                sockets before it ends.
        """
        for turn in range(looks):
            if turn:
                time.sleep(_BETWEEN_LOOKS_S)
            if ranks := self._ranks_that_are(_ENDED):
                return ranks
        return []

    def account(self) -> str:
        """Returns the words for a rank that does not answer; empty where none is known to be at
        fault.
        """
        if ended := self.ended(looks=_LOOKS):
            return f"rank {', '.join(map(str, ended))} was lost"
        stopped = self._ranks_that_are(_STOPPED)
        return f"rank {', '.join(map(str, stopped))} is stopped (SIGSTOP)" if stopped else ""

    def _ranks_that_are(self, state: str) -> list[int]:
        here = _machine()
        return [
            rank
            for rank, (machine, pid, began, _) in enumerate(self._processes)
            if machine == here and rank != self.rank and _state_of(int(pid), began) == state
        ]


def meet(group: dist.ProcessGroup | None) -> Peers:
    """Exchanges the processes of all ranks; collective. See [Note: how ranks meet].

    Args:
        group: that moves tensors of the processor; None: this process alone.

    Raises:
        BrokenTransportError: a rank was lost, or did not come in the group's time.
    """
    record = "\n".join((_machine(), str(os.getpid()), _status(os.getpid())[1], os.urandom(7).hex()))
    row = torch.frombuffer(bytearray(record.encode().ljust(_RECORD_BYTES)), dtype=torch.uint8)
    rows = gather_small(group, row).tolist()
    return Peers(rank_and_size(group)[0], [bytes(row).decode().rstrip() for row in rows])


def _machine() -> str:
    """Returns a name of this machine and its space of process numbers: containers that share a
    host's name number their processes each for itself.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _state_of(pid: int, began: str) -> str:
    state, began_now = _status(pid)
    if began_now != began:
        return _ENDED
    # "t" is a process that a debugger has stopped.
    return _STOPPED if state in {"T", "t"} else ""


def _status(pid: int) -> tuple[str, str]:
    """Returns the state of a process of this machine and when it began; a beginning that no process
    has if it has ended.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", _ENDED
    # The command stands in parentheses and may hold spaces. Source: proc(5).
    fields = text.rpartition(")")[2].split()
    # A killed process is a zombie until its parent has heard of it.
    return fields[0], _ENDED if fields[0] in "ZX" else fields[19]


_WAITS = timedelta(minutes=10)
_CLOSED = ""
_GOES_ON = "goes on"
_LONGEST = 4000
_PATIENCE_S = 2.0
_GRACE_S = 1.0
T = TypeVar("T")


class FailureWatch:
    """The mailboxes of the ranks of one group. Starts a thread.

    Args:
        store: of the process group.
        prefix: of its keys; equal on all ranks, used once.
        peers: the ranks.
        on_failure: called once, in the thread, with the text of another rank's failure.
    """

    def __init__(self, store: Store, prefix: str, peers: Peers, on_failure: Callable[[str], None]) -> None:
        self._prefix = prefix
        self._peers = peers
        # A connection of its own: a store that waits holds its lock for as long.
        self._store = _connection(store)
        self._lock = threading.Lock()
        self._has_told = False
        self._is_silent = False
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=_watch,
            args=(_connection(store), f"{prefix}/mail/{peers.rank}", peers, self._is_closed, on_failure),
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
        self._asked(_PATIENCE_S, lambda: self._write(text), None)

    def _write(self, text: str) -> None:
        for rank in range(self._peers.size):
            if rank != self._peers.rank:
                self._store.set(f"{self._prefix}/mail/{rank}", text[:_LONGEST])

    def mail(self) -> str:
        """Returns what another rank has told of its failure so far; empty if nothing came."""
        return self._asked(_PATIENCE_S, self._read, _CLOSED)

    def _read(self) -> str:
        key = f"{self._prefix}/mail/{self._peers.rank}"
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else _CLOSED

    def meet(self, refusal: str | None, timeout_s: float) -> str | None:
        """Meets the other ranks behind a failure, when nobody is in a collective any more. Each
        comes once.

        Args:
            refusal: why this rank does not go on; then it waits for nobody.
            timeout_s: longest wait.

        Returns:
            None if all go on; else why they do not.
        """
        lost = "the store of the process group was lost, or does not answer"
        return self._asked(timeout_s + _PATIENCE_S, lambda: self._met(refusal, timeout_s), lost)

    def _met(self, refusal: str | None, timeout_s: float) -> str | None:
        key, ends_s = f"{self._prefix}/again", time.monotonic() + timeout_s
        self._store.set(f"{key}/{self._peers.rank}", _GOES_ON if refusal is None else refusal[:_LONGEST])
        for rank in range(self._peers.size) if refusal is None else ():
            while not self._store.check([f"{key}/{rank}"]):
                if self._peers.ended():
                    return self._peers.account()
                if time.monotonic() > ends_s:
                    return self._peers.account() or f"rank {rank} hangs"
                time.sleep(_BETWEEN_LOOKS_S)
            said = self._store.get(f"{key}/{rank}").decode(errors="replace")
            if said != _GOES_ON:
                return said
        return refusal

    def close(self) -> None:
        """Ends the thread. Must not be called by it."""
        self._is_closed.set()
        key = f"{self._prefix}/mail/{self._peers.rank}"
        self._asked(_PATIENCE_S, lambda: self._store.set(key, _CLOSED), None)
        if not self._is_silent:
            self._thread.join(timeout=_PATIENCE_S)

    def _asked(self, seconds: float, act: Callable[[], T], otherwise: T) -> T:
        """Returns what the store answers to an act, or something else if it does not answer in time
        or is lost. See [Note: a store that does not answer].
        """
        answers: list[T] = []

        def ask() -> None:
            with suppress(dist.DistError):
                answers.append(act())

        thread = threading.Thread(target=ask, name="memfit-news", daemon=True)
        if not self._is_silent:
            thread.start()
            thread.join(seconds)
            self._is_silent = thread.is_alive()
        return answers[0] if answers else otherwise


def _watch(store: Store, key: str, peers: Peers, is_closed: threading.Event, on_failure: Callable[[str], None]) -> None:
    while True:
        try:
            store.wait([key], _WAITS)
            text = store.get(key)
        except dist.DistStoreError:
            continue  # nothing came for so long
        except dist.DistError as error:
            # A rank that has the store and is through may end before this one is.
            if not is_closed.wait(_GRACE_S):
                why = peers.account() or "rank 0 or torchrun, which holds it, has ended"
                on_failure(f"{why}: the store of the process group was lost ({str(error).splitlines()[0]})")
            return
        if text:
            on_failure(text.decode(errors="replace"))
        return


def _connection(store: Store) -> Store:
    """Returns a connection of its own to a store."""
    return cast("Any", store).clone()  # missing in torch's type stubs
