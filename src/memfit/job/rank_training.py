"""Training of the command line on several ranks: they come together, and each takes its rows.

In: the environment of `torchrun`, batches that are the same on all ranks. Out: this rank's number,
and its part of each batch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from memfit.core.errors import UsageError
from memfit.mesh.rank_group import DEFAULT_TIMEOUT_S
from memfit.trace.cutting import ways_of


def join_ranks() -> tuple[int, int]:
    """Initializes torch.distributed if `torchrun` has started this process beside others.

    Returns:
        This process's rank, and the number of ranks.
    """
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
            return 0, 1
        dist.init_process_group("gloo", timeout=timedelta(seconds=DEFAULT_TIMEOUT_S))
    return dist.get_rank(), dist.get_world_size()


def leave_ranks() -> None:
    """Ends what `join_ranks` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Runs `memfit` with the arguments on several ranks of this machine, by `torchrun`; waits for
    them.

    Returns:
        The exit code.
    """
    # What torchrun sets where nothing is said is one thread, with a warning.
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen([*command, "-m", "memfit", *arguments], env={"OMP_NUM_THREADS": threads, **os.environ})
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the ranks have it too, and end by it


def own_rows(sample: Any, rank: int, ranks: int) -> Callable[[Any], Any]:
    """Returns what takes a rank's rows out of a batch.

    Args:
        sample: a batch.
        rank: of this process.
        ranks: their number.

    Raises:
        UsageError: it cannot be told what rows are, or there are fewer than ranks; also later, for
            a batch that has fewer.
    """
    way = next(ways_of(sample), None)
    if way is None:
        raise UsageError(
            f"a batch is divided among {ranks} ranks by rows, and it cannot be told what counts the rows of this one: give tensors whose dimension 0 they are"
        )

    def take(batch: Any) -> Any:
        if way.most(batch, ranks) < ranks:
            raise UsageError(f"a batch of {way.rows(batch)} rows is too small for {ranks} ranks: make it larger")
        return way.parts(batch, ranks)[rank]

    take(sample)
    return take
