"""The clock that rates of a device are measured by, and waiting for what it works on.

In: a device. Out: a function that returns seconds; seconds of runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from memfit.devices.accelerator import is_accelerator, of


def clock_of(device: torch.device) -> Callable[[], float]:
    """Returns the clock by which work on a device is timed.

    Where a single thread computes, its seconds on a processor: without those in which others kept
    it waiting. Several threads, and accelerators, are waited for: the wall's.
    """
    is_one_thread = not is_accelerator(device) and torch.get_num_threads() == 1
    return time.thread_time if is_one_thread else time.perf_counter


def finish(device: torch.device) -> None:
    """Waits for the work of an accelerator; a processor's is done when it was asked for."""
    if is_accelerator(device):
        of(device).synchronize(device)


def least_seconds(device: torch.device, run: Callable[[], object], *, tries: int) -> float:
    """Seconds of the fastest of several runs, since other work can only slow one down.

    Args:
        device: that works.
        run: what is timed, to the end of the device's work.
        tries: of which the best counts.
    """
    clock, best = clock_of(device), float("inf")
    for _ in range(tries):
        finish(device)
        began = clock()
        run()
        finish(device)
        best = min(best, clock() - began)
    return best
