"""Ranks that fail, in tests of failures."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from distributed.processes import begin_group
from memfit.communicator import create


def one_fails(rank: int, size: int, how: str) -> tuple[str, str]:
    """Rank 1 fails between collectives of large buffers; returns what this rank raised, and whether the group went."""
    c = create()
    pending = []
    raised = ""
    try:
        with c:
            for turn in range(60):
                if rank == 1 and turn == 20:
                    if how == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise ValueError("the cause in its own words")
                if rank == 2 and turn == 15 and how == "while others compute":
                    time.sleep(0.3)
                pending.append(c.allreduce(torch.zeros(1 << 18), async_op=True))
                if len(pending) > 2:
                    pending.pop(0).wait()
    except Exception as error:  # noqa: BLE001, told to the test
        raised = f"{type(error).__name__}: {error}"
    return raised, f"{c._ranks.close()}"


def survivors_go_on(rank: int, size: int, port: int, prefix: str) -> list[int]:
    """Rank 1 fails; the others leave the process group and make one of their own."""
    c = create()
    try:
        with c:
            if rank == 1:
                raise ValueError("ends here")
            while True:
                c.allreduce([1])
    except Exception:  # noqa: BLE001, this test is about what comes after
        if rank == 1:
            return [0]
    dist.destroy_process_group()
    begin_group(port, prefix, [0, 2].index(rank), 2, 60.0)
    with create() as c:
        return c.allreduce([rank])
