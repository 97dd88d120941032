"""The CPU allocator under torch: who holds how many bytes, never more than a limit.

In: torch's requests for CPU memory, from the moment of `install()` on. Out: exact live, peak and
mapped bytes per ledger, a hard limit that raises `torch.OutOfMemoryError`, and a bounded pool.
`allocator.cpp` does it; `compiling.py` compiles it once per machine, `binding.py` speaks to it.
`fallback.py` is the poorer road for a machine without a compiler, `kernel.py` sets the kernel's own
limit on the process, and `procfs.py` reads what the operating system says. Nothing happens at
import.
"""

from memfit.allocator.binding import Allocator, AllocatorStats, Ledger, install, installed, shortfall_bytes
from memfit.allocator.fallback import FallbackAllocator, tame_malloc

__all__ = [
    "Allocator",
    "AllocatorStats",
    "FallbackAllocator",
    "Ledger",
    "install",
    "installed",
    "shortfall_bytes",
    "tame_malloc",
]
