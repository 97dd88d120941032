"""Memory that the children of a process hold beside it: the workers of a loader, processes that a
compiler starts.

In: /proc. Out: bytes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping

from memfit.allocator import procfs
from memfit.core.errors import TierUnavailableError

_READING_SHARE = 20.0
"""Shares of pages are read again when so many times the seconds of the last reading have passed."""


def private_bytes(status: procfs.ProcessStatus) -> int:
    """Memory that only freeing, or the end of the process, gives back: all but mapped files."""
    return status.anonymous_bytes + status.shared_bytes


class Family:
    """Returns the memory that the children of this process hold beside it.

    [Note: shared pages]
    A forked worker of a loader maps all that its parent had: its resident size counts those pages
    once more for each worker, and the sum of resident sizes may be several times what the processes
    hold. Shares (PSS) count a page once in all. So what children hold beside this process is the
    sum of the shares of all of them, this one included, less what this one holds by itself; pages
    that a parent has overwritten since a fork, and that its children keep, are in it. Mapped files
    are not counted of children: libraries and data sets that the kernel drops when it needs the
    memory, and that this process maps as well.

    Reading shares walks page tables. So they are read where children came or went, and else when
    twenty times what the last reading took has passed (5 % of the time at most); in between a
    child's growth counts as its own. A child whose share may not be read (another user's) counts by
    its resident size.
    """

    def __init__(self) -> None:
        self._beside_bytes = 0
        self._sizes: dict[int, int] = {}
        """By child, its private and shared memory when shares were read last."""
        self._read_again_at = 0.0

    def statuses(self) -> dict[int, procfs.ProcessStatus]:
        """The living children, by id."""
        found: dict[int, procfs.ProcessStatus] = {}
        for pid in procfs.descendants(os.getpid()) if procfs.has_children() else ():
            # it ended since the listing: no memory any more
            with contextlib.suppress(ProcessLookupError):
                found[pid] = procfs.read_status(pid)
        return found

    def beside_bytes(self, *, at_peak: bool = False) -> int:
        """Private and shared memory of children that is not this process's too.

        Args:
            at_peak: adds how much more each child held when it held most.
        """
        statuses = self.statuses()
        if not statuses:
            self._sizes = {}
            return 0
        if statuses.keys() != self._sizes.keys() or time.perf_counter() >= self._read_again_at:
            self._read(statuses)
        grown = sum(private_bytes(status) - self._sizes[pid] for pid, status in statuses.items())
        beside = max(0, self._beside_bytes + grown)
        if at_peak:
            beside += sum(status.resident_peak_bytes - status.resident_bytes for status in statuses.values())
        return beside

    def reset_peaks(self) -> None:
        """Starts the children's peaks again.

        Those of another user's children stay what they were.
        """
        for pid in self.statuses():
            with contextlib.suppress(ProcessLookupError, TierUnavailableError):
                procfs.reset_peak(pid)

    def _read(self, statuses: Mapping[int, procfs.ProcessStatus]) -> None:
        began = time.thread_time()  # other work on the machine must not make a reading look dear
        shares = procfs.read_shares()
        beside = 0 if shares is None else shares.share_bytes - private_bytes(procfs.read_status())
        alone = 0
        for pid, status in statuses.items():
            found = None
            if shares is not None:
                with contextlib.suppress(ProcessLookupError):
                    found = procfs.read_shares(pid)
            beside += private_bytes(status) if found is None else found.share_bytes
            alone += 0 if found is None else found.dirty_bytes
        # What this process shares with the one that forked it makes its share too small.
        self._beside_bytes = max(beside, alone)
        self._sizes = {pid: private_bytes(status) for pid, status in statuses.items()}
        self._read_again_at = time.perf_counter() + _READING_SHARE * (time.thread_time() - began)
