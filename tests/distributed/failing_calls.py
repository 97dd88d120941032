"""Ranks that fail, in tests of failures."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import memfit
from distributed.processes import begin_group
from memfit import parameter_server
from memfit.communicator import create
from memfit.mesh.agreement import agree
from memfit.mesh.rank_group import open_group


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


def signalled(rank: int, size: int, instant: str, how: str, victim: int, port: int) -> str:
    """A rank gets a signal while the ranks meet, or while they make sockets; returns what the others raise.

    Args:
        instant: "before" the ranks meet, in the first "group", in a group made "again", in a server's "pair".
        how: "SIGKILL" or "SIGSTOP".
        port: of a store that rank 0 has; 0: the store outlives the ranks.
    """
    if port:
        # A rank that left before the others had connected to it would end their first group, not this one.
        first = dist.distributed_c10d._get_default_store()
        first.set(f"connected/{rank}", "")
        first.wait([f"connected/{other}" for other in range(size)])
        dist.destroy_process_group()
        store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=100.0))
    new_group, left = dist.new_group, [{"before": 0, "group": 1, "again": 2, "pair": 2}[instant]]

    def counted(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and rank == victim:
            os.kill(os.getpid(), getattr(signal, how))
        return new_group(*args, **options)

    dist.barrier()  # until then waits are torch's own
    if instant == "before" and rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), getattr(signal, how))
    dist.new_group = counted
    try:
        if instant == "pair":
            model = torch.nn.Linear(2, 2)
            parameter_server.create(model, torch.optim.SGD(model.parameters(), lr=0.1), servers=1)
        ranks = open_group()
        if instant == "again":
            with suppress(memfit.PeerError):  # of a rank that is through before this one
                agree(ranks, "all have the group")
            ranks.fail(ValueError("all survive it"))
            ranks.renew()
    except Exception as error:  # noqa: BLE001, told to the test
        return f"{type(error).__name__}: {error}"
    finally:
        dist.new_group = new_group
    return ""
