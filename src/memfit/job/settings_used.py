"""Settings of the machine and of the process that a run used, for its report.

In: this process. Out: one line a subject. Nothing is measured and nothing is set.
"""

from __future__ import annotations

import torch

from memfit.allocator import installed
from memfit.core.units import format_bytes
from memfit.host import read_host
from memfit.host.read import SET_BY_MEMFIT


def used_settings() -> tuple[tuple[str, str], ...]:
    """(what, how it was) for processors, threads, waiting and malloc variables, allocator, huge
    pages and swap, as this process has them now.
    """
    host = read_host()
    processors, memory = host.processors, host.memory
    own = host.set_by_memfit
    variables = [
        f"{name}={value}" + (" (set by memfit)" if name in own else "")
        for name, value in host.environment.items()
        if name != SET_BY_MEMFIT
    ]
    allocator = "memfit's own" if installed() is not None else "malloc, told to give freed tensors back"
    return (
        ("processors", f"{processors.usable_cores} of {processors.machine_cores} cores"),
        ("threads", f"{torch.get_num_threads()} to compute"),
        ("variables", ", ".join(variables) or "none set"),
        ("allocator", allocator),
        ("huge pages", host.huge_pages.mode or "none in this kernel"),
        ("swapped out", format_bytes(memory.process_swap_bytes)),
    )
