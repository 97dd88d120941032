"""Where no compiler is at hand: malloc that gives memory back, and coarse counts from the operating
system.

In: glibc and /proc. Out: `FallbackAllocator`, with the same `stats`, `reset_peak`, `set_limit` and
`trim` as `Allocator`, measured instead of counted.
"""

from __future__ import annotations

import ctypes
import resource

from memfit.core.errors import TierUnavailableError, UsageError
from memfit.devices import procfs
from memfit.devices.binding import AllocatorStats

_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_THRESHOLD = -3
_THRESHOLD_BYTES = 128 << 10


def tame_malloc() -> None:
    """Makes glibc's malloc give freed memory back: it unmaps freed blocks of 128 KiB and more and
    trims the heap.

    The process's peak then follows the live tensors within about 2 % (glibc's defaults: 15 to 33 %
    above), for 10 to 30 % of time in page faults; `THP_MEM_ALLOC_ENABLE=1` in the environment
    before torch's first large tensor wins most of that back. `install()` has done this already. It
    holds for the whole process and cannot be undone.

    Raises:
        TierUnavailableError: the C library is not glibc, or refuses.
    """
    libc = _glibc()
    # Either option also ends glibc's own adjusting, which raises both with each large block that is
    # freed: freed tensors would stay in the heap from then on.
    for name, option in (("M_MMAP_THRESHOLD", _M_MMAP_THRESHOLD), ("M_TRIM_THRESHOLD", _M_TRIM_THRESHOLD)):
        if libc.mallopt(option, _THRESHOLD_BYTES) != 1:
            raise TierUnavailableError(f"glibc refused mallopt({name}, {_THRESHOLD_BYTES})")


def _glibc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        raise TierUnavailableError(
            "the C library of this process is not glibc: its malloc cannot be told to give memory back"
        )
    return libc


class FallbackAllocator:
    """Process memory above what was resident at `create()`, from /proc: the figures of `Allocator`,
    less precise.

    - Bytes are resident private and shared pages, not requested bytes: they hold malloc's rounding
      and holes, library scratch and Python's objects, and lack pages that were never touched.
      Expect 2 % and up to 65 MB of difference.
    - `live_blocks` and `allocations` are not known and always 0; there is no pool and no "host"
      ledger.
    - `peak_bytes` needs `reset_peak`, which resets the process's VmHWM for every reader.
    - `set_limit` sets the soft RLIMIT_DATA. A breach is an error of whoever allocates: torch raises
      `RuntimeError` ("can't allocate memory"), Python `MemoryError`; a library that does not check
      (OpenMP starting threads) ends the process: warm up before arming.
    """

    def __init__(self, *, base_bytes: int, unlimited: tuple[int, int]) -> None:
        self._base_bytes = base_bytes
        self._unlimited = unlimited
        self._limit_bytes: int | None = None

    @classmethod
    def create(cls) -> FallbackAllocator:
        """Tames malloc and takes the memory of this moment as zero.

        Raises:
            TierUnavailableError: no glibc or no /proc.
        """
        tame_malloc()
        # The limit is read before any of ours is set: it is what `set_limit(None)` goes back to.
        status = procfs.read_status()
        base_bytes = status.anonymous_bytes + status.shared_bytes
        return cls(base_bytes=base_bytes, unlimited=resource.getrlimit(resource.RLIMIT_DATA))

    def stats(self, ledger: str = "device") -> AllocatorStats:
        """Returns the bytes that the process holds above the base (about 60 us)."""
        _only_device(ledger)
        status = procfs.read_status()
        live_bytes = max(0, status.anonymous_bytes + status.shared_bytes - self._base_bytes)
        # The kernel counts in each thread apart, so its peak may lag behind what lives now.
        peak_bytes = max(live_bytes, status.resident_peak_bytes - status.file_bytes - self._base_bytes)
        return AllocatorStats(
            live_bytes=live_bytes,
            peak_bytes=peak_bytes,
            live_blocks=0,
            pooled_bytes=0,
            allocations=0,
            mapped_bytes=live_bytes,
            mapped_peak_bytes=peak_bytes,
            limit_bytes=self._limit_bytes,
        )

    def reset_peak(self, ledger: str = "device") -> None:
        """Starts the peak again at what is resident now."""
        _only_device(ledger)
        procfs.reset_peak()

    def set_limit(self, limit_bytes: int | None, ledger: str = "device") -> None:
        """Arms, or with None lifts, the soft RLIMIT_DATA so that the bytes above the base stay
        within `limit_bytes`.

        The kernel limits private writable address space, touched or not; its gap to what is
        resident (some 85 to 173 MB of stacks and arenas that are never filled) is measured now, so
        arm after a warm-up step. Without a limit on files: MAP_SHARED is not counted.

        Raises:
            UsageError: a negative limit, or one above the hard RLIMIT_DATA.
        """
        _only_device(ledger)
        soft, hard = self._unlimited
        if limit_bytes is not None:
            if limit_bytes < 0:
                raise UsageError(f"a limit cannot be negative: {limit_bytes}")
            status = procfs.read_status()
            # Measured at once before it is armed: what other threads map meanwhile counts as used.
            gap_bytes = status.data_bytes - status.anonymous_bytes
            soft = self._base_bytes + limit_bytes + gap_bytes
            if hard != resource.RLIM_INFINITY and soft > hard:
                raise UsageError(
                    f"the limit needs RLIMIT_DATA of {soft} bytes, above this process's hard limit of {hard}"
                )
        # The soft one only: without privileges a hard limit can never be lifted again.
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        # Noted when the kernel has taken it: a refused limit is not in force.
        self._limit_bytes = limit_bytes

    def trim(self) -> int:
        """Gives malloc's free pages back; returns by how much that made the process smaller."""
        # Other threads allocate between the two readings: the difference may be negative.
        before = procfs.read_status().anonymous_bytes
        _glibc().malloc_trim(0)
        return max(0, before - procfs.read_status().anonymous_bytes)


def _only_device(ledger: str) -> None:
    if ledger != "device":
        raise TierUnavailableError(
            f"the fallback allocator measures the whole process and has no ledger {ledger!r}: install a C++ compiler"
        )
