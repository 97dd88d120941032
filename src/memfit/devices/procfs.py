"""Reads the kernel's figures about a process: resident bytes, peaks, swap, shared pages,
and the reset of the peak.

In: a process id. Out: integers of bytes from `/proc/<pid>/status` and `smaps_rollup`. Source:
proc_pid_status(5), proc_pid_smaps(5), proc_pid_clear_refs(5), waitid(2).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from memfit.core.errors import TierUnavailableError

_WALL = 0x40000000
"""From Linux's wait.h, since 4.7: children however they were made."""
_FIELDS = {
    b"VmRSS": "resident_bytes",
    b"VmHWM": "resident_peak_bytes",
    b"RssAnon": "anonymous_bytes",
    b"RssFile": "file_bytes",
    b"RssShmem": "shared_bytes",
    b"VmSwap": "swap_bytes",
    b"VmData": "data_bytes",
}
_LINE = re.compile(rb"^(%s):\s+(\d+) kB" % b"|".join(_FIELDS), re.MULTILINE)
_SHARES = frozenset(("Pss_Anon", "Pss_Shmem", "Private_Dirty"))


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """Memory of one process, exact to about 0.1 MB: the kernel counts pages in each thread and adds
    up now and then.

    Attributes:
        resident_bytes: VmRSS: everything in memory, mapped files included.
        resident_peak_bytes: VmHWM: the most VmRSS since the start or the last `reset_peak`.
        anonymous_bytes: RssAnon: private memory: tensors, malloc, stacks.
        file_bytes: RssFile: mapped files: libraries, mmap'ed checkpoints. The kernel can drop these
            pages at will.
        shared_bytes: RssShmem: shared memory, such as tensors that went through `share_memory_`.
        swap_bytes: VmSwap.
        data_bytes: VmData: private writable address space, touched or not; what RLIMIT_DATA limits.
    """

    resident_bytes: int
    resident_peak_bytes: int
    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    swap_bytes: int
    data_bytes: int


@dataclass(frozen=True, kw_only=True)
class PageShares:
    """A process's part of shared pages. Mapped files are left out.

    Attributes:
        share_bytes: Pss_Anon + Pss_Shmem: each page counts by 1 / (processes that map it).
        dirty_bytes: Private_Dirty: pages that it wrote and no other process maps.
    """

    share_bytes: int
    dirty_bytes: int


def read_status(pid: int | str = "self") -> ProcessStatus:
    """Reads `/proc/<pid>/status` (about 40 us).

    Raises:
        ProcessLookupError: the process has gone (a zombie has no memory and counts as gone).
        TierUnavailableError: this system has no /proc as Linux has it.
    """
    try:
        # Unbuffered and as bytes: it is read several times a step.
        with Path(f"/proc/{pid}/status").open("rb", buffering=0) as file:
            text = file.read()
    except FileNotFoundError as error:
        if not Path("/proc/self/status").exists():
            raise TierUnavailableError(
                "this system has no /proc/self/status: process memory can be measured on Linux only"
            ) from error
        raise ProcessLookupError(f"process {pid} has gone") from error
    found = {_FIELDS[line[1]]: int(line[2]) * 1024 for line in _LINE.finditer(text)}
    if "resident_bytes" not in found:
        raise ProcessLookupError(f"process {pid} has no memory any more")
    if len(found) != len(_FIELDS):
        raise TierUnavailableError(
            f"/proc/{pid}/status lacks {sorted(set(_FIELDS.values()) - found.keys())}: Linux 4.5 or later is needed"
        )
    return ProcessStatus(**found)


def read_shares(pid: int | str = "self") -> PageShares | None:
    """Reads `/proc/<pid>/smaps_rollup`; None where the kernel does not tell (before Linux 5.9,
    hardened, or a process of another user).

    It walks the page table: 5 ms a GiB in huge pages, some 20 in small ones. Not for hot loops.

    Raises:
        ProcessLookupError: the process has gone.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError) as error:
        if Path(f"/proc/{pid}/status").exists():
            return None
        raise ProcessLookupError(f"process {pid} has gone") from error
    except OSError:
        return None
    found = {name: int(value.split()[0]) * 1024 for name, _, value in map(_split, text.splitlines()) if name in _SHARES}
    if len(found) != len(_SHARES):
        return None
    return PageShares(share_bytes=found["Pss_Anon"] + found["Pss_Shmem"], dirty_bytes=found["Private_Dirty"])


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def reset_peak(pid: int | str = "self") -> None:
    """Sets VmHWM back to what is resident now, by writing 5 to `clear_refs`.

    Raises:
        ProcessLookupError: the process has gone.
        TierUnavailableError: the kernel or the container does not allow it.
    """
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5", "ascii")
    except ProcessLookupError:
        raise
    except OSError as error:
        if pid != "self" and not Path(f"/proc/{pid}").exists():
            raise ProcessLookupError(f"process {pid} has gone") from error
        raise TierUnavailableError(
            f"the peak of process {pid} cannot be reset through /proc/{pid}/clear_refs: {error}"
        ) from error


def has_children() -> bool:
    """This process has children that live, or that it has not waited for yet: one system call, of
    about a microsecond.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)
    except ChildProcessError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    """Ids of all living children, grandchildren and so on.

    One pass over /proc, some 10 us a process of the machine.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text("utf-8", errors="replace")
            except OSError:
                continue  # it ended between the listing and the reading
            # The name may hold spaces and brackets; the fields after its last bracket are: state,
            # parent.
            parent = int(text.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found.extend(below)
        queue.extend(below)
    return found
