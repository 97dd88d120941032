"""Memories on an accelerator's chip, and whether its memory is the host's.

In: a device. Out: bytes by name, for people; nothing where the backend does not tell. Of backends
torch tells these of CUDA's alone.
"""

from __future__ import annotations

from typing import Any

import torch

_REGISTER_BYTES = 4


def on_chip_bytes(device: torch.device) -> dict[str, int]:
    """Returns bytes of registers, shared memory and caches of the whole chip, as far as its
    properties tell them.
    """
    found = _properties(device)
    count = _number(found, "multi_processor_count")
    named = {
        "registers": count * _number(found, "regs_per_multiprocessor") * _REGISTER_BYTES,
        "shared memory": count * _number(found, "shared_memory_per_multiprocessor"),
        "L2 cache": _number(found, "L2_cache_size"),
    }
    return {name: nbytes for name, nbytes in named.items() if nbytes}


def is_unified(device: torch.device) -> bool:
    """Tells whether device and host share one memory, as in a chip that holds both."""
    return bool(getattr(_properties(device), "is_integrated", False))


def architecture(device: torch.device) -> str:
    """Returns the chip's name as compilers write it ("sm_90", "gfx942"); "" where none is told."""
    found = _properties(device)
    if found is None:
        return ""
    return found.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{found.major}{found.minor}"


def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device) if device.type == "cuda" else None


def _number(properties: Any, name: str) -> int:
    found = getattr(properties, name, 0)
    return found if isinstance(found, int) else 0
