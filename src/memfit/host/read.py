"""Reads what the machine gives a process, before any tensor is made.

In: /proc, /sys, the environment; a directory, where its disk matters. Out: `Host`. A few
milliseconds; nothing is changed, and torch is not needed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from memfit.core.errors import TierUnavailableError
from memfit.host.cgroups import Ceiling, read_cgroup
from memfit.host.file_systems import Disk, read_disk
from memfit.host.kernel_files import chosen, kilobytes, read_fields, read_number, read_text
from memfit.host.processors import Processors, read_processors

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
