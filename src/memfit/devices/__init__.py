"""Devices: accelerators beside the processor, and the allocator of the processor's memory.

In: a `torch.device`; torch's requests for memory. Out: streams, pins, limits, statistics and
generators of an `Accelerator`, over `torch.accelerator` (the rest of memfit names no backend;
`cuda` has the calls without a generic interface); exact live, peak and mapped bytes of the
processor's tensors, with a hard limit (`binding`, `allocator.cpp`); the kernel's figures and limits
(`procfs`, `kernel`); one buffer for many tensors (`buffer_arena`).
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
