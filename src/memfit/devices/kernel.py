"""The kernel's own limit on this process, and what the kernel can have back: memory that no
allocator of ours gives.

In: bytes that the process may still take. Out: RLIMIT_DATA, set and taken off again; errors that
tell of it; pages of mapped files given back.

[Note: the kernel's limit]
RLIMIT_DATA bounds private writable address space, touched or not (VmData). What of it was never
touched (thread stacks, arenas of malloc: some 85 to 173 MB) is no memory yet: it is measured when
the limit is armed, and left out. So the limit follows what is resident to the bytes that such space
fills later, and it is armed anew at each step. A process that starts threads at the limit is ended
by libraries that do not check (OpenMP): it is armed after a first step has brought threads and
kernels up. Shared mappings do not count: shared memory of loaders, mapped files. Children inherit
it. Source: getrlimit(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from memfit.core.errors import LimitBreachError
from memfit.core.limits import format_bytes
from memfit.devices import procfs
from memfit.devices.binding import LIMIT_MET

_TEXTS = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "bad allocation")
"""Text of torch's `RuntimeError`: its own allocator's, that of a failed system call, and C++'s
`std::bad_alloc`.
"""
_IN_MEMORY = frozenset(("tmpfs", "ramfs", "hugetlbfs", "devtmpfs"))
_MADV_PAGEOUT = 21
"""Advice that takes pages out at once; `mmap` has no name for it. Source: madvise(2)."""
REFUSALS = (torch.OutOfMemoryError, MemoryError, RuntimeError, OSError)
"""Kinds of what `is_refusal` looks at."""


class KernelLimit:
    """RLIMIT_DATA of this process, as far as it is this object's."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._armed: int | None = None

    def arm(self, room_bytes: int) -> None:
        """From now on the process may take so many bytes more than it has.

        See [Note: the kernel's limit].

        What is above is refused by the kernel: `MemoryError` of Python and NumPy,
        `torch.OutOfMemoryError` of memfit's allocator.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft != self._armed:
            self._before = soft  # somebody else's, or nobody's
        # Read last: what this function itself allocates is part of what the process has.
        wanted = procfs.read_status().data_bytes + max(0, room_bytes)
        for other in (hard, self._before):
            if other is not None and other != resource.RLIM_INFINITY:
                wanted = min(wanted, other)
        # The soft limit alone: a hard one could not be raised again.
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
        self._armed = wanted

    def lift(self) -> None:
        """Puts back what was there before, unless another has set its own since.

        May be repeated.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        # Somebody else's newer limit stays: it is not this object's to lift.
        if self._armed is not None and soft == self._armed and self._before is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (self._before, hard))
        self._armed = self._before = None


def kernel_limit_bytes() -> int | None:
    """The RLIMIT_DATA of this process, whoever set it; None without one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft


def is_refusal(error: BaseException) -> bool:
    """An allocation that a limit refused: memfit's allocator or a device's did, or, where the
    process has an RLIMIT_DATA, the kernel.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if kernel_limit_bytes() is None:
        return False
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS))
    )


def refusal_words(error: BaseException) -> str:
    """The first line of what refused, with a full stop.

    Who refused where the error does not say.
    """
    lines = str(error).strip().splitlines()
    words = f"{lines[0] if lines else type(error).__name__}".rstrip(".")
    met = LIMIT_MET.search(str(error))
    # By the first line of `limit_message` of allocator.cpp: the last is the same for both ledgers.
    if met is not None and "limit of host memory" not in words:
        # Without what to try, which is said by who tells of it.
        asked, mapped, limit = (format_bytes(int(met[name])) for name in ("asked", "mapped", "limit"))
        return f"{asked} were asked for, and of the {limit} for tensors {mapped} are taken."
    limit = kernel_limit_bytes()
    if limit is not None and not isinstance(error, torch.OutOfMemoryError):
        words += f" (refused by the kernel: {type(error).__name__} under RLIMIT_DATA of {limit} bytes)"
    return f"{words}."


@contextmanager
def limit_breaches(
    phase: str, text: Callable[[BaseException], str], where: Callable[[], str] | None = None
) -> Iterator[None]:
    """Context whose refused allocations become `LimitBreachError`s of work that changed nothing.

    Args:
        phase: of the job.
        text: makes the message; see `refusal_words`.
        where: names the action under way; None: the phase.
    """
    try:
        yield
    except REFUSALS as error:
        if not is_refusal(error):
            raise
        at = phase if where is None else where()
        raise LimitBreachError(text(error), phase=phase, where=at, torn=False) from error


def drop_mapped_files() -> None:
    """Gives the pages of data files that this process maps shared back to the page cache: they come
    again when they are read.

    Memory-mapped data sets and safetensors count as resident as long as the kernel does not need
    their pages; nothing is lost, neither what was written to them. Not libraries, not private
    mappings (their changes would be lost), not files in memory.
    """
    # Before the maps are read: mappings may go while they are gone through, and advice about a
    # range that is gone is refused.
    kinds = _file_systems()
    for mapped in _mapped_files():
        if mapped.access[3] == "s" and mapped.access[2] != "x":
            kind = kinds.get(mapped.device)
            if kind is not None and kind not in _IN_MEMORY:
                mapped.advise(mmap.MADV_DONTNEED)


def page_out_libraries() -> None:
    """Gives clean pages of libraries back to the kernel: they come again, from their files, when
    they are used.

    An import reads many pages that nothing uses afterwards: 60 MiB with torch built for the CPU,
    270 to 500 with torch built for CUDA. Pages stay that another process maps as well, those of a
    file that this user neither owns nor may write, and all of them before Linux 5.4.

    Never MADV_DONTNEED, which loses what the loader has written into private pages.
    """
    files = _mapped_files()
    libraries = {mapped.path for mapped in files if mapped.access[2] == "x"}
    for mapped, behind in zip(files, [*files[1:], None], strict=True):
        # Pages that the loader wrote and then protected lie before the library's writable ones:
        # they are no longer the file's, and would go to swap space.
        is_written = behind is not None and behind.path == mapped.path and behind.access[1] == "w"
        if mapped.path in libraries and mapped.access[1] != "w" and (mapped.access[2] == "x" or not is_written):
            mapped.advise(_MADV_PAGEOUT)


@dataclass(frozen=True, kw_only=True)
class _MappedFile:
    """A mapping of a file into this process.

    Attributes:
        low, high: its addresses.
        access: such as "r-xp"; the last letter is "s" where it is shared.
        device: number of the file system.
        path: of the file.
    """

    low: int
    high: int
    access: str
    device: tuple[int, int]
    path: str

    def advise(self, advice: int) -> None:
        """Gives the kernel advice on these pages. Where it is refused (locked pages, a mapping that
        has gone), they stay.
        """
        ctypes.CDLL(None).madvise(ctypes.c_void_p(self.low), ctypes.c_size_t(self.high - self.low), advice)


def _mapped_files() -> list[_MappedFile]:
    """The mappings of files, by address. Source: proc_pid_maps(5)."""
    found: list[_MappedFile] = []
    for line in Path("/proc/self/maps").read_text("utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            low, high = (int(word, 16) for word in fields[0].split("-"))
            found.append(_MappedFile(low=low, high=high, access=fields[1], device=_device(fields[3]), path=fields[5]))
    return found


def _file_systems() -> dict[tuple[int, int], str]:
    """The kind of file system by device number. Source: proc_pid_mountinfo(5)."""
    found: dict[tuple[int, int], str] = {}
    for line in Path("/proc/self/mountinfo").read_text("utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        major, minor = before.split()[2].split(":")
        found[int(major), int(minor)] = after.split()[0]
    return found


def _device(text: str) -> tuple[int, int]:
    major, minor = text.split(":")
    return int(major, 16), int(minor, 16)
