"""Python's side of the allocator: install it under torch, read its counts, set its limits.

In: `install()`, once a process. Out: `Allocator`, whose figures are exact for every CPU tensor made
after the call. Tensors that are older stay with the allocator that made them and are not counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from memfit.core.errors import TierUnavailableError, UsageError
from memfit.core.limits import format_bytes
from memfit.devices.compiling import load_library

Ledger = Literal["device", "host"]

_LEDGERS: dict[str, int] = {"device": 0, "host": 1}


@dataclass(frozen=True, kw_only=True)
class AllocatorStats:
    """The counts of one ledger at one moment.

    Attributes:
        live_bytes: bytes that torch asked for and still holds, to the byte.
        peak_bytes: the most `live_bytes` since `reset_peak`.
        live_blocks: blocks that are live. With `live_bytes` it is a leak detector without noise.
        pooled_bytes: freed large blocks kept for reuse; part of `mapped_bytes`.
        allocations: blocks ever allocated.
        mapped_bytes: what the process holds for this ledger: live blocks with their rounding, and
            the pool.
        mapped_peak_bytes: the most `mapped_bytes` since `reset_peak`; the limit is on this.
        limit_bytes: the limit on `mapped_bytes`, or None.
    """

    live_bytes: int
    peak_bytes: int
    live_blocks: int
    pooled_bytes: int
    allocations: int
    mapped_bytes: int
    mapped_peak_bytes: int
    limit_bytes: int | None


class _Stats(ctypes.Structure):
    """`MemfitStats` in allocator.cpp, in the same order."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "live",
            "peak",
            "mapped",
            "mapped_peak",
            "pooled",
            "blocks",
            "allocations",
            "limit",
        )
    ]


class Allocator:
    """The process's CPU allocator, once `install()` has put it under torch. One object a process.

    Blocks from 128 KiB on are whole pages (start at a multiple of 4096 bytes, so that direct I/O
    can fill them), with huge pages inside where they fit, and go to a bounded pool when freed.
    Smaller ones come from malloc, aligned to 64 bytes, and cost 64 to 79 bytes more. What is *not*
    seen: memory that libraries take for themselves (oneDNN scratch, OpenMP stacks), numpy's, mapped
    files, and the holes in malloc's heap; `memfit.machine.meters` reads the whole process.

    Threads: safe. Forks: a child goes on with its own copy of the counts, limits and pool.
    Coroutines: `ledger()` is the thread's, not the coroutine's; do not switch inside its `with`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # Counting is shorter than to give Python's lock away and to wait until it comes back.
        self._counts = ctypes.PyDLL(None, handle=library._handle)
        for each in (library, self._counts):
            _declare(each)

    def stats(self, ledger: Ledger = "device") -> AllocatorStats:
        """The counts of a ledger, all of one moment.

        About 0.1 us in C, 3 us with Python around it.
        """
        raw = _Stats()
        self._counts.memfit_stats(_index(ledger), ctypes.byref(raw))
        return AllocatorStats(
            live_bytes=raw.live,
            peak_bytes=raw.peak,
            live_blocks=raw.blocks,
            pooled_bytes=raw.pooled,
            allocations=raw.allocations,
            mapped_bytes=raw.mapped,
            mapped_peak_bytes=raw.mapped_peak,
            limit_bytes=None if raw.limit < 0 else raw.limit,
        )

    def reset_peak(self, ledger: Ledger = "device") -> None:
        """Starts both peaks again at what is live and mapped now."""
        self._counts.memfit_reset_peak(_index(ledger))

    def watch(self, ledger: Ledger = "device") -> None:
        """Starts a second peak of a ledger at what is live now; those of `stats` stay.
        There is one a ledger: who watches inside of another's watch ends it.
        """
        self._counts.memfit_watch(_index(ledger))

    def watched_peak_bytes(self, ledger: Ledger = "device") -> int:
        """Returns the most live bytes of a ledger since `watch`."""
        return int(self._counts.memfit_watched_peak(_index(ledger)))

    def hidden_bytes(self, run: Callable[[], object], ledger: Ledger = "device") -> int:
        """Runs an operation, and tells the most bytes that were live meanwhile above what is live
        after it, with its result held.

        The peaks of `stats` and those who reset them are not disturbed. What other threads allocate
        meanwhile is counted with it.

        Args:
            run: runs it.
            ledger: that its allocations are counted in.
        """
        self.watch(ledger)
        # Between the two calls other threads' allocations count too: nothing else may run that
        # should not be in the figure.
        result = run()
        # Before the result goes: what the operation freed inside itself lies between the two
        # figures.
        peak = self.watched_peak_bytes(ledger)
        left = self.stats(ledger).live_bytes
        del result
        return max(0, peak - left)

    def set_limit(self, limit_bytes: int | None, ledger: Ledger = "device") -> None:
        """Sets or lifts the limit on the ledger's mapped bytes.

        An allocation that would pass it first has the ledger's pool emptied, oldest block first, as
        far as needed. If that is not enough it raises `torch.OutOfMemoryError` with requested,
        live, mapped and limit bytes; nothing has changed then and everything stays usable. A limit
        below what is mapped now gives the pool back and refuses every allocation that needs new
        memory.

        Raises:
            UsageError: a negative limit.
        """
        self._library.memfit_set_limit(
            _index(ledger), -1 if limit_bytes is None else _checked_bytes("limit", limit_bytes)
        )

    @property
    def pool_limit_bytes(self) -> int | None:
        """The most bytes of freed blocks that are kept, both ledgers together; None, as at install,
        if only the peak of use bounds them.
        """
        found = int(self._library.memfit_pool_limit())
        return None if found < 0 else found

    def set_pool_limit(self, limit_bytes: int | None) -> None:
        """Bounds the pool further; what is above goes back to the system at once, oldest first. 0
        switches it off.

        Without it, freed blocks are kept as long as they and what is in use stay below the most
        that was in use since the last `trim`: the pool does not raise the peak of the process. A
        pooled block serves smaller requests of its own ledger with parts of it, and freed parts
        that touch become one block again.
        """
        self._library.memfit_set_pool_limit(-1 if limit_bytes is None else _checked_bytes("pool limit", limit_bytes))

    def trim(self) -> int:
        """Gives the pool and malloc's free pages back to the system, and forgets the peak of use
        that bounds the pool.

        Returns:
            The bytes that left the pool.
        """
        return int(self._library.memfit_trim())

    @contextlib.contextmanager
    def ledger(self, ledger: Ledger) -> Iterator[None]:
        """Counts this thread's allocations inside the `with` in `ledger`.

        Wherever freed, a block stays in its ledger.

        Threads that an operator starts inside (OpenMP, autograd's device threads) still count in
        "device".
        """
        # Thread-local in the library: another thread's allocations are not moved.
        before = self._counts.memfit_set_ledger(_index(ledger))
        try:
            yield
        finally:
            # Also after an error: the thread's later allocations would be counted in another ledger
            # for ever.
            self._counts.memfit_set_ledger(before)


_lock = threading.Lock()
# torch has one CPU allocator a process, so this is the process's too
_installed: Allocator | None = None


def install() -> Allocator:
    """Puts memfit's allocator under torch for the rest of the process.

    The second call returns the first one's.

    Also sets glibc's mmap and trim thresholds to 128 KiB for the whole process, so that libraries'
    scratch memory is given back too. Builds the library where this user's cache has none (about 2
    seconds).

    Returns:
        The allocator. It cannot be taken out again: memory of its own may live as long as the
            process.

    Raises:
        TierUnavailableError: no compiler, a failed build, or another allocator of higher priority
            that stays in place.
    """
    global _installed
    # Two threads must not both install: torch keeps the first allocator's deleter in live tensors.
    with _lock:
        if _installed is None:
            library = load_library()
            # For good: memory that it gave is freed by it, so that it can never be taken out again.
            if library.memfit_install() != 0:
                raise TierUnavailableError(
                    "another library holds torch's CPU allocator with a higher priority; import memfit without it"
                )
            # After the install: blocks that malloc gave before keep its old thresholds, and are
            # few.
            library.memfit_tame_malloc()
            _installed = Allocator(library)
        return _installed


def installed() -> Allocator | None:
    """The allocator if `install()` was called in this process, else None."""
    return _installed


LIMIT_MET = re.compile(r"In bytes: requested (?P<asked>\d+), mapped (?P<mapped>\d+), limit (?P<limit>\d+)")
"""The last line of `limit_message` of allocator.cpp: torch passes on the words of an error in C++,
and nothing else.
"""


def shortfall_bytes(error: BaseException) -> int | None:
    """By how much an allocation that the limit refused passed it; None for what this allocator did
    not refuse.

    Args:
        error: an error as torch raises it; its text is `limit_message` of allocator.cpp.
    """
    found = LIMIT_MET.search(str(error))
    if found is None:
        return None
    requested, mapped, limit = map(int, found.groups())
    return requested + mapped - limit


def _index(ledger: str) -> int:
    try:
        return _LEDGERS[ledger]
    except KeyError:
        raise UsageError(f"unknown ledger {ledger!r}: one of {', '.join(_LEDGERS)}") from None


def _checked_bytes(what: str, size_bytes: int) -> int:
    if isinstance(size_bytes, bool) or not isinstance(size_bytes, int):
        raise UsageError(f"a {what} is an integer of bytes, not {size_bytes!r}")
    if not 0 <= size_bytes < 1 << 62:
        raise UsageError(f"a {what} of {format_bytes(size_bytes)} is out of range")
    return size_bytes


def _declare(library: ctypes.CDLL) -> None:
    i64, number, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
    for name, result, arguments in (
        ("memfit_set_ledger", number, [number]),
        ("memfit_stats", None, [number, pointer]),
        ("memfit_reset_peak", None, [number]),
        ("memfit_watch", None, [number]),
        ("memfit_watched_peak", i64, [number]),
        ("memfit_set_limit", None, [number, i64]),
        ("memfit_pool_limit", i64, []),
        ("memfit_set_pool_limit", None, [i64]),
        ("memfit_trim", i64, []),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
