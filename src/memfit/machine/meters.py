"""Measuring memory: the process as the system sees it, a device as its allocator counts it.

In: an allocator or a device, and the phases of a run. Out: bytes, each with a name that says who
counted them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from memfit import devices
from memfit.core.errors import TierUnavailableError, UsageError
from memfit.core.limits import MIB, format_bytes
from memfit.core.step_report import STEP_PHASES
from memfit.devices import procfs
from memfit.devices.binding import Allocator, Ledger
from memfit.devices.fallback import FallbackAllocator
from memfit.devices.kernel import page_out_libraries

# Memory that the children of a process hold beside it: the workers of a loader, processes that a
# compiler starts.
#
# In: /proc. Out: bytes.

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


# Pages of files that are worth giving back: the next step reads what it uses of them again, in 20
# to 200 ms.
_LEAST_FILE_BYTES = 32 * MIB


@dataclass(frozen=True, kw_only=True)
class ResidentBytes:
    """Memory of a process and, where asked for, its children.

    Attributes:
        private_bytes: RssAnon + RssShmem: what only the end of the process, or freeing, gives back.
            Compare limits with this.
        whole_bytes: the same plus the mapped files of this process (VmRSS), which the kernel can
            drop when it needs the memory.
    """

    private_bytes: int
    whole_bytes: int


class ProcessMeter:
    """This process's memory as the kernel counts it: exact to about 0.1 MB, 50 us a reading.

    It does not sample: peaks are the kernel's own.

    [Note: pages that come back]
    Pages of libraries leave when a limited job begins, and a step brings back those that it uses.
    A plan that was made without them would pass its limit. So pages of files are counted as they
    were when planning ended, which runs what a step runs: pages that leave after it make no room
    for tensors, but for those that came since then (an import of the user's).

    Args:
        with_children: adds what living children, grandchildren and so on hold beside it. See [Note:
            shared pages].
    """

    def __init__(self, *, with_children: bool = False) -> None:
        self._family = Family() if with_children else None
        self._files_left_bytes = self._files_used_bytes = 0

    def resident_bytes(self) -> ResidentBytes:
        """Returns the bytes in memory now.

        Raises:
            TierUnavailableError: no /proc.
        """
        own = procfs.read_status()
        beside = 0 if self._family is None else self._family.beside_bytes()
        return ResidentBytes(
            private_bytes=private_bytes(own) + beside,
            whole_bytes=own.resident_bytes + beside,
        )

    def counted_bytes(self) -> int:
        """Returns the resident bytes, with the pages of libraries that come back when a step runs.

        See [Note: pages that come back].
        """
        missing = self._files_used_bytes - procfs.read_status().file_bytes
        return self.resident_bytes().whole_bytes + max(0, missing)

    def give_back_libraries(self) -> None:
        """Gives clean pages of libraries back to the kernel, where many have come since the last
        time.
        """
        if procfs.read_status().file_bytes - self._files_left_bytes >= _LEAST_FILE_BYTES:
            page_out_libraries()
            self._files_left_bytes = procfs.read_status().file_bytes

    def note_used_files(self) -> None:
        """Notes that the mapped pages of files are in use: from now on no fewer are counted."""
        self._files_used_bytes = procfs.read_status().file_bytes

    def reset_peak(self) -> None:
        """Starts the kernel's peak again at what is resident now, for every reader of it.

        Raises:
            TierUnavailableError: no /proc, or `clear_refs` cannot be written (some containers).
        """
        procfs.reset_peak()
        if self._family is not None:
            self._family.reset_peaks()

    def peak_bytes(self) -> ResidentBytes:
        """The most that was in memory since `reset_peak`.

        `private_bytes` is VmHWM minus the RssFile of *now*: right where mapped files do not come
        and go between peak and reading. Peaks of children are added, though they need not have come
        at the same moment: the sum is an upper bound. A child that came and went since the last
        reading is not seen.

        Raises:
            TierUnavailableError: no /proc.
        """
        own = procfs.read_status()
        beside = 0 if self._family is None else self._family.beside_bytes(at_peak=True)
        return ResidentBytes(
            private_bytes=own.resident_peak_bytes - own.file_bytes + beside,
            whole_bytes=own.resident_peak_bytes + beside,
        )

    def swap_bytes(self) -> int:
        """Bytes swapped out.

        Anything but 0 makes the other figures too small: say so beside them.
        """
        others = [] if self._family is None else self._family.statuses().values()
        return sum(status.swap_bytes for status in (procfs.read_status(), *others))


class DeviceMeter(Protocol):
    """Counters of an allocator."""

    def live_bytes(self) -> int:
        """Bytes of live tensors."""
        ...

    def live_blocks(self) -> int:
        """Live blocks: the same number after each step, or something leaks."""
        ...

    def peak_bytes(self) -> int:
        """The most `live_bytes` since `reset_peak`."""
        ...

    def held_peak_bytes(self) -> int:
        """The most the allocator held since `reset_peak`, its pools and rounding included.

        Limits are on this.
        """
        ...

    def reset_peak(self) -> None:
        """Starts the peaks again at what is live and held now."""
        ...

    def limit_bytes(self) -> int | None:
        """The limit now; None without one."""
        ...

    def set_limit(self, limit_bytes: int | None) -> None:
        """Sets or lifts a hard limit; a breach raises `torch.OutOfMemoryError`."""
        ...


class CpuMeter:
    """CPU tensors, counted by memfit's allocator (or, on a machine without a compiler, measured by
    the fallback).
    """

    def __init__(self, allocator: Allocator | FallbackAllocator, ledger: Ledger = "device") -> None:
        self._allocator = allocator
        self._ledger: Ledger = ledger

    def live_bytes(self) -> int:
        """Requested bytes of live tensors in the ledger."""
        return self._allocator.stats(self._ledger).live_bytes

    def live_blocks(self) -> int:
        """Live blocks in the ledger (0 with the fallback, which cannot know)."""
        return self._allocator.stats(self._ledger).live_blocks

    def peak_bytes(self) -> int:
        """The most `live_bytes` since `reset_peak`."""
        return self._allocator.stats(self._ledger).peak_bytes

    def held_peak_bytes(self) -> int:
        """The most mapped bytes (rounding and pool included) since `reset_peak`."""
        return self._allocator.stats(self._ledger).mapped_peak_bytes

    def reset_peak(self) -> None:
        """Starts both peaks again at what is live and mapped now."""
        self._allocator.reset_peak(self._ledger)

    def limit_bytes(self) -> int | None:
        """The ledger's limit on mapped bytes now; None without one."""
        return self._allocator.stats(self._ledger).limit_bytes

    def set_limit(self, limit_bytes: int | None) -> None:
        """Sets or lifts the ledger's limit on mapped bytes."""
        self._allocator.set_limit(limit_bytes, self._ledger)


class AcceleratorMeter:
    """Tensors of an accelerator, as torch's caching allocator counts them.

    Memory outside of it (a driver's context, workspaces of libraries that bypass it) is not seen.

    Args:
        device: kind and index; without an index the current device of the kind.

    Raises:
        TierUnavailableError: no such device.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        wanted = torch.device(device)
        if not devices.is_accelerator(wanted):
            raise UsageError(f"this meter measures accelerators, not {wanted}")
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != wanted.type:
            raise TierUnavailableError(
                f"this machine has no {wanted.type} device that torch can use: move the model to the CPU, or find out why torch.accelerator.is_available() is False"
            )
        self._accelerator = devices.of(wanted)
        index = self._accelerator.index(wanted)
        if index >= self._accelerator.count():
            raise TierUnavailableError(
                f"there is no device {wanted.type}:{index}: torch sees {self._accelerator.count()}"
            )
        self._device = torch.device(wanted.type, index)

    def live_bytes(self) -> int:
        """Bytes of live tensors, rounded to the caching allocator's 512."""
        return self._read("allocated_bytes.all.current")

    def live_blocks(self) -> int:
        """Live blocks."""
        return self._read("allocation.all.current")

    def peak_bytes(self) -> int:
        """The most `live_bytes` since `reset_peak`."""
        return self._read("allocated_bytes.all.peak")

    def held_bytes(self) -> int:
        """Returns the bytes that the caching allocator holds, free blocks included."""
        return self._read("reserved_bytes.all.current")

    def held_peak_bytes(self) -> int:
        """The most `held_bytes` since `reset_peak`."""
        return self._read("reserved_bytes.all.peak")

    def reset_peak(self) -> None:
        """Starts both peaks again at what is allocated and reserved now."""
        self._accelerator.reset_peaks(self._device)

    def set_limit(self, limit_bytes: int | None) -> None:
        """Limits what the caching allocator may reserve, for this process and device; None lifts
        it.

        Raises:
            UsageError: negative, or more than the device has.
        """
        total_bytes = self._accelerator.total_bytes(self._device)
        if limit_bytes is not None and not 0 <= limit_bytes <= total_bytes:
            raise UsageError(
                f"{self._device} has {format_bytes(total_bytes)}: its limit cannot be {format_bytes(limit_bytes)}"
            )
        self._accelerator.set_limit_bytes(self._device, limit_bytes)

    def limit_bytes(self) -> int | None:
        """Bytes that the caching allocator may reserve; None where that is all of the device."""
        limit = self._accelerator.limit_bytes(self._device)
        return None if limit >= self._accelerator.total_bytes(self._device) else limit

    def release(self) -> None:
        """Gives back what the caching allocator holds without a tensor in it."""
        self._accelerator.empty_cache()

    def _read(self, name: str) -> int:
        # Before the first allocation torch reports an empty dictionary, which means 0.
        return int(self._accelerator.statistics(self._device).get(name, 0))


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """The memory of one phase, over all times it was entered.

    Attributes:
        name: such as "load", "first step", "steady", "evaluate", "save".
        times: how often it was entered.
        peak_bytes: the most live bytes of the device's allocator inside it.
        held_peak_bytes: the most that the allocator held from the system inside it.
        process_peak_bytes: the most that was resident of the process inside it (VmHWM: mapped files
            included, as an outside observer counts); None where it was not measured.
        live_at_end_bytes: live bytes when it was left last: what the phase leaves behind.
        is_behind_step: a step had been made when it was entered last.
    """

    name: str
    times: int
    peak_bytes: int
    held_peak_bytes: int
    process_peak_bytes: int | None
    live_at_end_bytes: int
    is_behind_step: bool = False


class _OpenPhase:
    """Peaks of a phase that is still open, from the pieces between resets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.peak_bytes = self.held_peak_bytes = self.process_peak_bytes = 0


class Phases:
    """Records peaks phase by phase: `phases = Phases(meter, ProcessMeter())`, then `with
    phases("load"): ...`.

    It resets the peaks of its meters at every border between phases, so nobody else may reset them
    meanwhile. Phases may nest: the outer one's peak includes the inner one's. A phase that ends in
    an exception is recorded as well. One thread only.

    Args:
        meter: the device's.
        process: the process's, or None to leave it out (where there is no /proc).
    """

    def __init__(self, meter: DeviceMeter, process: ProcessMeter | None = None) -> None:
        self._meter = meter
        self._process = process
        self._open: list[_OpenPhase] = []
        self.last: PhaseRecord | None = None
        """The phase that ended last, that time alone."""
        self._records: dict[str, PhaseRecord] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measures what is inside the `with` under `name`.

        A name that comes again keeps the larger peaks.
        """
        self._fold()
        self._open.append(_OpenPhase(name))
        try:
            yield
        finally:
            self._fold()
            self._record(self._open.pop())

    @property
    def records(self) -> tuple[PhaseRecord, ...]:
        """The phases that have ended, in the order in which they first did."""
        return tuple(self._records.values())

    def begin_anew(self) -> None:
        """Forgets the phases that have ended."""
        self._records.clear()

    def _fold(self) -> None:
        """Adds the peaks since the last border to every open phase, and starts them again."""
        peak_bytes, held_bytes = self._meter.peak_bytes(), self._meter.held_peak_bytes()
        process_bytes = self._process.peak_bytes().whole_bytes if self._process else 0
        for phase in self._open:
            phase.peak_bytes = max(phase.peak_bytes, peak_bytes)
            phase.held_peak_bytes = max(phase.held_peak_bytes, held_bytes)
            phase.process_peak_bytes = max(phase.process_peak_bytes, process_bytes)
        self._meter.reset_peak()
        if self._process:
            self._process.reset_peak()

    def _record(self, phase: _OpenPhase) -> None:
        self.last = PhaseRecord(
            name=phase.name,
            times=1,
            peak_bytes=phase.peak_bytes,
            held_peak_bytes=phase.held_peak_bytes,
            process_peak_bytes=phase.process_peak_bytes if self._process else None,
            live_at_end_bytes=self._meter.live_bytes(),
            is_behind_step=not STEP_PHASES.isdisjoint(self._records),
        )
        before = self._records.get(phase.name)
        self._records[phase.name] = self.last if before is None else _joined(before, self.last)


def _joined(before: PhaseRecord, now: PhaseRecord) -> PhaseRecord:
    """A phase that was entered again: the larger peaks."""
    process = None
    if now.process_peak_bytes is not None:
        process = max(now.process_peak_bytes, before.process_peak_bytes or 0)
    return replace(
        now,
        times=before.times + now.times,
        peak_bytes=max(now.peak_bytes, before.peak_bytes),
        held_peak_bytes=max(now.held_peak_bytes, before.held_peak_bytes),
        process_peak_bytes=process,
    )
