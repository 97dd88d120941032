"""Caches of the processors, as the kernel tells them.

In: /sys and the processors that this process may run on. Out: bytes by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from memfit.host.kernel_files import read_text
from memfit.host.processors import parse_cpu_list

_KINDS = {"Data": "L{level} data cache", "Instruction": "L{level} instruction cache", "Unified": "L{level} cache"}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cache_bytes(root: Path, processors: Collection[int]) -> dict[str, int]:
    """Returns the bytes of each kind of cache of the first of some processors, with how many of the
    processors share one; empty where the kernel tells nothing.

    Source: the kernel's Documentation/ABI/testing/sysfs-devices-system-cpu, "cache".

    Args:
        root: where sys is.
        processors: that may be run on.
    """
    found: dict[str, int] = {}
    for number in sorted(processors)[:1]:
        for index in sorted((root / f"sys/devices/system/cpu/cpu{number}/cache").glob("index*")):
            level, kind, size = (read_text(index / name) or "" for name in ("level", "type", "size"))
            nbytes = re.fullmatch(r"(\d+)([KMG]?)", size)
            if kind not in _KINDS or not level.isdigit() or nbytes is None or not int(nbytes[1]):
                continue
            shared = set(parse_cpu_list(read_text(index / "shared_cpu_list") or str(number))) & set(processors)
            of = f" of {len(shared)} processors" if len(shared) > 1 else " of a processor"
            found[_KINDS[kind].format(level=level) + of] = int(nbytes[1]) * _UNITS[nbytes[2]]
    return found
