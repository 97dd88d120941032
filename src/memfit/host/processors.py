"""How many processors a process may really use.

In: /sys and the affinity of the process. Out: `Processors`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from memfit.host.cgroups import Ceiling
from memfit.host.kernel_files import read_text


@dataclass(frozen=True, kw_only=True)
class Processors:
    """Logical and physical processors, and how much of them is this process's.

    Attributes:
        logical: processors that are switched on in the machine.
        allowed: those that this process may run on (taskset, cpuset), ascending.
        physical_cores: cores behind the allowed ones; hyper-threads of one core count once. Where
            /sys does not say, each is its own core.
        machine_cores: cores behind all that are switched on.
        quota: processor seconds a second that a cgroup allows, and the file that says so; None: no
            quota.
        load: threads of the whole machine that ran or wanted to, a mean over the last minute; 0
            where the kernel does not say.
    """

    logical: int
    allowed: tuple[int, ...]
    physical_cores: int
    machine_cores: int
    quota: Ceiling | None
    load: float

    @property
    def is_busy(self) -> bool:
        """More than half of the machine was at work in the last minute: what is measured now is
        rough.
        """
        return self.load > self.logical / 2

    @property
    def usable_cores(self) -> int:
        """Threads that compute at the same time without sharing a core or being stopped by the
        quota; at least 1.

        A quota is rounded down: the fraction is left to the threads that move bytes, and a team of
        threads is as slow as the one that is stopped.
        """
        whole = self.physical_cores if self.quota is None else min(self.physical_cores, int(self.quota.value))
        return max(1, whole)


def read_processors(root: Path, allowed: Collection[int] | None, quota: Ceiling | None) -> Processors:
    """Reads the processors.

    Args:
        root: where proc and sys are.
        allowed: the affinity; that of the calling thread if None. (Once OpenMP is loaded under
            `OMP_PROC_BIND`, that thread is bound to one place and the process's own affinity can no
            longer be read.)
        quota: as `read_cgroup` found it.
    """
    mine = tuple(sorted(os.sched_getaffinity(0) if allowed is None else allowed))
    online_text = read_text(root / "sys/devices/system/cpu/online")
    online = parse_cpu_list(online_text) if online_text else mine
    return Processors(
        logical=len(online),
        allowed=mine,
        physical_cores=_count_cores(root, mine),
        machine_cores=_count_cores(root, online),
        quota=quota,
        load=float((read_text(root / "proc/loadavg") or "0").split()[0]),
    )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Reads "0-2,8" as (0, 1, 2, 8).

    Source: the kernel's cpu list format, cpuset(7), section FORMATS.
    """
    found: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def format_cpu_list(numbers: Collection[int]) -> str:
    """Writes (0, 1, 2, 8) as "0-2,8"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _count_cores(root: Path, processors: Collection[int]) -> int:
    """Distinct groups of hyper-threads.

    Core ids are not enough: each socket counts its own from 0.
    """
    groups: set[tuple[int, ...]] = set()
    for number in processors:
        siblings = read_text(root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        groups.add(parse_cpu_list(siblings) if siblings else (number,))
    return len(groups)
