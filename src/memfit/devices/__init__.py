"""Accelerators beside the processor: streams, pins, limits, statistics and generators, over
`torch.accelerator`.

In: a `torch.device`. Out: its `Accelerator`. The rest of memfit asks here and names no backend;
what torch has no generic interface for is one small class a backend (`cuda.py`).
"""

from memfit.devices.accelerator import Accelerator, initialized, is_accelerator, of
from memfit.devices.chips import architecture, is_unified, on_chip_bytes
from memfit.devices.clocks import clock_of, finish, least_seconds

__all__ = [
    "Accelerator",
    "architecture",
    "clock_of",
    "finish",
    "initialized",
    "is_accelerator",
    "is_unified",
    "least_seconds",
    "of",
    "on_chip_bytes",
]
