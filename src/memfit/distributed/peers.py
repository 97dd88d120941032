"""The processes of the ranks: how ranks learn of them, and whether they live.

In: a process group. Out: `Peers`, which says of each rank on this machine whether its process has
ended or is stopped.

[Note: how ranks meet]
A rank may be killed before anybody has heard of its process. Only sockets that are there tell the
others then, and those are of the process group that the program has initialized. So ranks exchange
their processes over that group, before they make a group of their own. Sockets that are being made
tell nothing: torch.distributed waits for keys that a killed rank does not write. So from then on
whoever waits for new sockets looks at the processes (`RankGroup.watched`). Ranks on other machines
are not seen so: there the timeout of the group ends the wait.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from memfit.distributed.transport import gather_small, rank_and_size

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
