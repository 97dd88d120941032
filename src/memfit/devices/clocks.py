"""The clock that rates of a device are measured by.

In: a device. Out: a function that returns seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from memfit.devices.accelerator import is_accelerator


def clock_of(device: torch.device) -> Callable[[], float]:
    """Returns the clock by which work on a device is timed.

    Where a single thread computes, its seconds on a processor: without those in which others kept
    it waiting. Several threads, and accelerators, are waited for: the wall's.
    """
    is_one_thread = not is_accelerator(device) and torch.get_num_threads() == 1
    return time.thread_time if is_one_thread else time.perf_counter
