"""Reads what the machine gives a process, before any tensor is made.

In: /proc, /sys, the environment; a directory, where its disk matters. Out: `Host`. A few
milliseconds; nothing is changed, and torch is not needed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from memfit.core.errors import TierUnavailableError
from memfit.machine.host.system_files import (
    Disk,
    Mount,
    chosen,
    kilobytes,
    read_disk,
    read_fields,
    read_mounts,
    read_number,
    read_text,
)

# Limits of a container or a service manager: processor quota and memory, cgroup v1 and v2.
#
# In: /proc/self/cgroup, /proc/self/mountinfo and the files of the groups. Out: `Cgroup`. A group is
# bound by its parents too, so each figure is the least one on the way up. Source: cgroups(7);
# Linux, Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst.

# v1 writes "no limit" as the largest whole number of pages below 2**63 bytes.
_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """A bound that somebody set, and the file that sets it."""

    value: float
    file: str


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """Bounds of this process's groups; None where there is none.

    Attributes:
        quota: processor seconds a second.
        memory: bytes; above it the kernel kills. Page cache counts, and is dropped first.
        memory_high: bytes; above it the kernel slows the process down (v2 only).
    """

    quota: Ceiling | None
    memory: Ceiling | None
    memory_high: Ceiling | None


def read_cgroup(root: Path) -> Cgroup:
    """Reads the bounds; some machines have v1 and v2 at once, and then both hold."""
    groups = _groups(root)
    quotas: list[Ceiling] = []
    limits: list[Ceiling] = []
    highs: list[Ceiling] = []
    for mount in read_mounts(root):
        if mount.file_system == "cgroup2" and "" in groups:
            for directory in _way_up(root, mount, groups[""]):
                quotas += _quota_v2(root, directory)
                limits += _bytes(root, directory / "memory.max")
                highs += _bytes(root, directory / "memory.high")
        elif mount.file_system == "cgroup":
            if "cpu" in mount.options & groups.keys():
                for directory in _way_up(root, mount, groups["cpu"]):
                    quotas += _quota_v1(root, directory)
            if "memory" in mount.options & groups.keys():
                for directory in _way_up(root, mount, groups["memory"]):
                    limits += _bytes(root, directory / "memory.limit_in_bytes")
    return Cgroup(quota=_least(quotas), memory=_least(limits), memory_high=_least(highs))


def _groups(root: Path) -> dict[str, str]:
    """Controller -> path of this process's group; "" for v2.

    Lines are "4:memory:/path", for v2 "0::/path".
    """
    found: dict[str, str] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _way_up(root: Path, mount: Mount, group: str) -> Iterator[Path]:
    """Directories of the group and its parents, as far as this process sees them."""
    try:
        below = PurePosixPath(group).relative_to(mount.root)
    except ValueError:
        # the group is told by its name outside of the container: the mount is all there is
        below = PurePosixPath()
    if ".." in below.parts:
        below = PurePosixPath()
    for part in (below, *below.parents):
        yield root / mount.point.lstrip("/") / part


def _quota_v2(root: Path, directory: Path) -> Iterable[Ceiling]:
    words = (read_text(directory / "cpu.max") or "max").split()
    if words[0] == "max":
        return []
    period = int(words[1]) if len(words) > 1 else 100_000  # microseconds, the kernel's default
    return [Ceiling(value=int(words[0]) / period, file=_name(root, directory / "cpu.max"))]


def _quota_v1(root: Path, directory: Path) -> Iterable[Ceiling]:
    quota, period = read_number(directory / "cpu.cfs_quota_us"), read_number(directory / "cpu.cfs_period_us")
    if quota is None or quota <= 0 or not period:  # -1: no quota
        return []
    return [Ceiling(value=quota / period, file=_name(root, directory / "cpu.cfs_quota_us"))]


def _bytes(root: Path, path: Path) -> Iterable[Ceiling]:
    nbytes = read_number(path)  # "max" is no number
    return [] if nbytes is None or nbytes >= _UNLIMITED_BYTES else [Ceiling(value=nbytes, file=_name(root, path))]


def _name(root: Path, path: Path) -> str:
    return f"/{path.relative_to(root)}"


def _least(found: list[Ceiling]) -> Ceiling | None:
    return min(found, key=lambda ceiling: ceiling.value, default=None)


# How many processors a process may really use.
#
# In: /sys and the affinity of the process. Out: `Processors`.


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


SET_BY_MEMFIT = "MEMFIT_HOST_SETTINGS"
"""Environment variable: names, with commas between, of what memfit's command line has set.

It also says that it has started again already.
"""

# What decides about threads, waiting and malloc. Names end the matter: everything else in the
# environment stays unread.
_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_")
_NAMES = frozenset({"GLIBC_TUNABLES", "LD_PRELOAD", "LOCAL_WORLD_SIZE", "THP_MEM_ALLOC_ENABLE", SET_BY_MEMFIT})
_OTHER_MALLOCS = ("tcmalloc", "jemalloc", "mimalloc", "tbbmalloc")
_COMPILERS = ("g++", "c++", "clang++")


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """RAM, what of it this process may have, and what is outside of it.

    Attributes:
        total_bytes, available_bytes: of the machine; available as the kernel estimates it.
        ceiling: the cgroup's limit, and the file that sets it.
        slow_above: where the cgroup begins to slow the process down.
        swap_total_bytes, swap_used_bytes: of the machine.
        process_swap_bytes: of this process; anything but 0 makes every other figure of it too
            small.
        swappiness: how readily the kernel swaps, 0 to 200.
        lockable_bytes: RLIMIT_MEMLOCK; None: as much as there is.
        locked_bytes: locked by this process now.
    """

    total_bytes: int
    available_bytes: int
    ceiling: Ceiling | None
    slow_above: Ceiling | None
    swap_total_bytes: int
    swap_used_bytes: int
    process_swap_bytes: int
    swappiness: int | None
    lockable_bytes: int | None
    locked_bytes: int


@dataclass(frozen=True, kw_only=True)
class HugePages:
    """Transparent huge pages.

    Attributes:
        mode: "always", "madvise" or "never"; None where the kernel has none.
        defrag: whether a fault may wait for a huge page to be made: "always", "defer",
            "defer+madvise", "madvise", "never".
        page_bytes: length of one.
        reserved: huge pages that are set aside (vm.nr_hugepages) and so missing elsewhere; memfit
            does not use them.
    """

    mode: str | None
    defrag: str | None
    page_bytes: int | None
    reserved: int


@dataclass(frozen=True, kw_only=True)
class Malloc:
    """Who serves malloc, and whether memfit's own allocator can be built beside it.

    Attributes:
        glibc: its version; None where the C library is another one.
        preloaded: name of a malloc in LD_PRELOAD that takes glibc's place.
        compiler: path of the C++ compiler that would build memfit's allocator; None: there is none.
    """

    glibc: str | None
    preloaded: str | None
    compiler: str | None


@dataclass(frozen=True, kw_only=True)
class Host:
    """Everything that was found.

    Attributes:
        processors, memory, huge_pages, malloc: see there.
        environment: the variables that decide about threads, waiting and malloc, as this process
            sees them.
        disk: under the directory that was asked about.
    """

    processors: Processors
    memory: HostMemory
    huge_pages: HugePages
    malloc: Malloc
    environment: Mapping[str, str]
    disk: Disk | None

    @property
    def set_by_memfit(self) -> frozenset[str]:
        """Variables that memfit's command line set when it started again."""
        return frozenset(filter(None, self.environment.get(SET_BY_MEMFIT, "").split(",")))


def read_host(
    directory: str | Path | None = None,
    *,
    root: Path = Path("/"),
    environment: Mapping[str, str] | None = None,
    allowed_cpus: Collection[int] | None = None,
) -> Host:
    """Reads what is there.

    Args:
        directory: whose disk is looked at; none if None.
        root: where `proc` and `sys` are; another tree is for tests.
        environment: os.environ if None.
        allowed_cpus: the affinity; this thread's if None.

    Raises:
        TierUnavailableError: no /proc as Linux has it.
        UsageError: the directory is not there or cannot be written.
    """
    variables = os.environ if environment is None else environment
    cgroup = read_cgroup(root)
    return Host(
        processors=read_processors(root, allowed_cpus, cgroup.quota),
        memory=_read_memory(root, cgroup.memory, cgroup.memory_high),
        huge_pages=_read_huge_pages(root),
        malloc=_read_malloc(variables),
        environment={
            name: value for name, value in sorted(variables.items()) if name.startswith(_PREFIXES) or name in _NAMES
        },
        disk=None if directory is None else read_disk(root, Path(directory)),
    )


def _read_memory(root: Path, ceiling: Ceiling | None, slow_above: Ceiling | None) -> HostMemory:
    machine = read_fields(root / "proc/meminfo")
    process = read_fields(root / "proc/self/status")
    total = kilobytes(machine.get("MemTotal"))
    if total is None:
        raise TierUnavailableError(f"{root / 'proc/meminfo'} is not there: host settings are read on Linux only")
    swap_total = kilobytes(machine.get("SwapTotal")) or 0
    return HostMemory(
        total_bytes=total,
        available_bytes=kilobytes(machine.get("MemAvailable")) or 0,
        ceiling=ceiling,
        slow_above=slow_above,
        swap_total_bytes=swap_total,
        swap_used_bytes=swap_total - (kilobytes(machine.get("SwapFree")) or 0),
        process_swap_bytes=kilobytes(process.get("VmSwap")) or 0,
        swappiness=read_number(root / "proc/sys/vm/swappiness"),
        lockable_bytes=_lockable_bytes(root),
        locked_bytes=kilobytes(process.get("VmLck")) or 0,
    )


def _lockable_bytes(root: Path) -> int | None:
    for line in (read_text(root / "proc/self/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return None if soft == "unlimited" else int(soft)
    return None


def _read_huge_pages(root: Path) -> HugePages:
    transparent = root / "sys/kernel/mm/transparent_hugepage"
    return HugePages(
        mode=chosen(read_text(transparent / "enabled"))[0],
        defrag=chosen(read_text(transparent / "defrag"))[0],
        page_bytes=read_number(transparent / "hpage_pmd_size"),
        reserved=int(read_fields(root / "proc/meminfo").get("HugePages_Total", "0")),
    )


def _read_malloc(environment: Mapping[str, str]) -> Malloc:
    preloaded = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    others = [Path(library).name for library in preloaded if any(name in library for name in _OTHER_MALLOCS)]
    # As the allocator's own build looks for it: `$CXX` if set, and then nothing else.
    wanted = environment.get("CXX")
    compilers = [shutil.which(name, path=environment.get("PATH")) for name in ([wanted] if wanted else _COMPILERS)]
    return Malloc(
        glibc=_glibc_version(),
        preloaded=others[0] if others else None,
        compiler=next(filter(None, compilers), None),
    )


def _glibc_version() -> str | None:
    if sys.platform != "linux" or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return None
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")
    except OSError:  # another C library does not know the name
        return None
    return text.removeprefix("glibc ") if text else None


# Caches of the processors, as the kernel tells them.
#
# In: /sys and the processors that this process may run on. Out: bytes by name.

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
