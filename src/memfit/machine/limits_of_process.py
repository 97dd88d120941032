"""Limits that cannot be meant, refused before anything is built on them.

In: limits and the machine that they are for. Out: nothing, or an error that says how a limit is
written.
"""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch

from memfit import devices
from memfit.core.errors import UsageError
from memfit.core.hardware import Hardware
from memfit.core.limits import MIB, Limits, format_bytes
from memfit.core.tiers import is_processor
from memfit.devices.binding import Allocator, installed
from memfit.devices.fallback import FallbackAllocator
from memfit.devices.kernel import KernelLimit, drop_mapped_files, page_out_libraries
from memfit.machine.host.read import SET_BY_MEMFIT, read_cgroup, read_host
from memfit.trace.batch import gives_batches

__all__ = ["check_kind", "check_limit", "gives_batches"]


def check_limit(limits: Limits, device: torch.device, *, is_emulated: bool) -> None:
    """Refuses a limit of the device that is a number without its unit, or more than there is.

    Args:
        limits: as the user wrote them.
        device: of the model.
        is_emulated: the device is a part of the process, whose size is the user's to say.

    Raises:
        UsageError: less than 1 MiB for a process; more than the machine, its cgroup or the GPU has.
    """
    limit = limits.device_bytes
    if limit is None or is_emulated:
        return
    if device.type == "cpu" and limit < MIB:
        raise UsageError(
            f"the limit is {format_bytes(limit)} for the whole process: a number counts bytes. Write it with its unit, such as '8GiB'"
        )
    there, whose = _memory_of(device)
    # A cgroup's limit is one in whole pages: what it was told as may be a part of a page more.
    if limit >= there + mmap.PAGESIZE:
        raise UsageError(
            f"the limit of {format_bytes(limit)} is more than {whose} has ({format_bytes(there)}): nobody could be held to it. Give less, or None for no limit; "
            "plans for another machine are made by `memfit plan --hardware`"
        )


def check_kind(hardware: Hardware | None, device: torch.device, *, is_emulated: bool) -> None:
    """Refuses to run by a description of the other kind of device: weights there visit, or stay.

    Args:
        hardware: as the user stated it; None: it will be probed.
        device: of the model.
        is_emulated: a device of its own is counted inside the process; it stands for either kind.

    Raises:
        UsageError: an accelerator is described and the model lies on the processor, or the other
            way round.
    """
    if hardware is None or is_emulated or is_processor(hardware.device) == is_processor(device.type):
        return
    raise UsageError(
        f"hardware describes {hardware.device!r:.80}, and the model lies on {str(device)!r}: what was predicted would not be what runs. "
        "Leave hardware out, or plan for a machine that is not here with `memfit plan --hardware`"
    )


def _memory_of(device: torch.device) -> tuple[int, str]:
    """Bytes that there are, and what has them, in words."""
    if devices.is_accelerator(device):
        return devices.of(device).total_bytes(device), f"the device {device}"
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = read_cgroup(Path("/")).memory
    if group is not None and group.value < machine:
        return int(group.value), f"this process's cgroup ({group.file})"
    return machine, "this machine"


# Room that a limit on a process leaves to tensors, step by step.
#
# In: a limit, and what the process holds. Out: `Room`: the hard limit of the allocator, and of the
# kernel where that is asked for; refusals in words.
#
# [Note: memory outside of tensors]
# A limit on a process counts everything: interpreter, libraries, NumPy's arrays, workers. The
# allocator can refuse tensors alone. So what is left to them is what the limit leaves beside all
# else, and since all else changes, it is measured again when a step begins. So are the tensors that
# live and that no prediction of the job counts: a queue, a buffer of replays, what another job has
# saved for its backward. Growth inside the job's own calls is that of libraries and kernels (11 to
# 67 MiB in a first step, nothing in later ones), which the reserve is for. Growth between them is
# the user's: it is taken off what is left. A step that is predicted not to fit what is left is
# refused before it begins: so nothing is torn, and the process does not pass the limit to find out.
#
# Between steps the process holds the pool of freed tensors beside what the user takes: it gives way
# as far as half of the limit, or the most that the user ever took between two calls. What grows
# inside a step is refused by nobody but the kernel, where its limit is armed too; what two steps in
# succession took and gave back is kept free for the next one (as far as the reserve goes: a single
# step that took much must not shut out all others).

# A loader, a list of losses, modules that are imported between `fit` and the first step: part of
# the reserve, as in what a refusal names as the smallest limit.
_SMALL_GROWTH_BYTES = 8 * MIB
# Blocks that a step makes are rounded up to pages, or have a header: up to this share of its peak,
# or this much (0.1 to 0.4 % seen).
_ROUNDING_SHARE, _MOST_ROUNDING_BYTES = 1 / 128, MIB
# Of the limit, what is free between steps where pooled memory can make it so: a user's arrays come
# there, and nothing can refuse them. Taking its pages anew costs the next step up to 4 % of its CPU
# time (measured: 0.54 to 0.56 s, 0.65 to 0.67 s, 1.33 to 1.33 s with the whole pool given back).
_FREE_BETWEEN_STEPS = 0.5


class Room:
    """Room that is left to the tensors of a process under its limit.

    See [Note: memory outside of tensors].

    Args:
        limit_bytes: of the process.
        reserve_bytes: what of it plans leave free.
        outside_bytes: tells what the process holds outside of tensors.
        allocator: of tensors.
        kernel: its limit is armed too, from the second step on.
        planned_bytes: what was held outside of tensors, and in tensors that no prediction counts,
            when the budget of plans was made, if that was before now.
    """

    def __init__(
        self,
        limit_bytes: int,
        reserve_bytes: int,
        outside_bytes: Callable[[], int],
        allocator: Allocator | FallbackAllocator,
        *,
        kernel: KernelLimit | None = None,
        planned_bytes: tuple[int, int] | None = None,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._outside_bytes = outside_bytes
        self._allocator = allocator
        self._kernel = kernel
        self._at_arming = self._last = outside_bytes()
        self._least_bytes, self._planned_others_bytes = (0, 0) if planned_bytes is None else planned_bytes
        """When a plan was made: outside of tensors, until a step was made, since homes that nothing
        was written to are the allocator's and not resident; and in tensors of others.
        """
        if planned_bytes is not None:
            self._at_arming = min(self._at_arming, self._least_bytes)
        self._users_bytes = 0
        self._most_growth_bytes = 0
        """Between two calls."""
        self._scratch_bytes = (0, 0)
        """Scratch of the last two steps."""
        self._has_stepped = False

    @property
    def left_bytes(self) -> int:
        """Bytes that tensors may take now. Measures."""
        outside = max(self._outside_bytes(), self._least_bytes)
        return self._limit_bytes - outside - min(*self._scratch_bytes, self._reserve_bytes)

    @property
    def planned_bytes(self) -> int:
        """Bytes that a step which never ran may be predicted to take: what `fit` planned with, less
        what the user took since then.
        """
        return self._planned_beside(self._planned_others_bytes)

    @property
    def reserve_left_bytes(self) -> int:
        """Part of the reserve that libraries have not taken yet."""
        taken = self._last - self._at_arming - self._users_bytes
        return max(_SMALL_GROWTH_BYTES, self._reserve_bytes - max(0, taken))

    @property
    def has_stepped(self) -> bool:
        """True if a step was made: what libraries take at their first use is there."""
        return self._has_stepped

    def change_limit(self, limit_bytes: int) -> None:
        """Changes the limit of the process. Pooled memory goes back first: it counts."""
        self._limit_bytes = limit_bytes
        self._allocator.trim()

    def note_planned(self, reserve_bytes: int, outside_bytes: int, others_bytes: int) -> None:
        """Notes what is held when a plan is made, before any step: the reserve, all of it, is for
        what comes after it, and a first step is begun by the sum that its plan was chosen by.
        """
        if not self._has_stepped:
            self._reserve_bytes = reserve_bytes
            self._at_arming = self._last = self._least_bytes = outside_bytes
            self._planned_others_bytes, self._users_bytes = others_bytes, 0

    def begin_plan(self) -> int:
        """Begins the steps of a plan whose homes are there: what the process grew by until now was
        for planning.

        Returns:
            What tensors may take.
        """
        self.end()
        # Weights that another allocator gave were part of what was outside, until they moved home.
        self._at_arming = max(min(self._at_arming, self._last), self._least_bytes)
        return self.left_bytes

    def begin(self) -> int:
        """Begins a call of the job: what grew since the last one is the user's.

        Returns:
            What tensors may take, for the allocator's limit.
        """
        self._note_users()
        if self._kernel is not None and self._has_stepped:
            self._kernel.arm(self._limit_bytes - self._outside_bytes() - self._allocator.stats().mapped_bytes)
        return self.left_bytes

    def end(self, scratch_bytes: int | None = None) -> None:
        """Ends a call of the job: what grew in it is the libraries'.

        Args:
            scratch_bytes: what a step held at its peak beside its tensors and what is held now;
                None: it was no step.
        """
        self._last = self._outside_bytes()
        if scratch_bytes is not None:
            self._scratch_bytes = (self._scratch_bytes[1], max(0, scratch_bytes))
            self._has_stepped, self._least_bytes = True, 0
            self._make_free()

    def excess(self, peak_bytes: int, others: Callable[[], int]) -> str | None:
        """Returns why a step does not fit what is left, in words; None if it does.

        Where it seems not to, what is in cycles, malloc's free pages and the pages of mapped files
        and libraries go first.

        Args:
            peak_bytes: that the step is predicted to take of tensors.
            others: tells the bytes of live tensors that the peak does not count.
        """
        # All that is alive is more than the others are: mostly there is nothing to add up.
        if self._fits(peak_bytes, self._allocator.stats().live_bytes) or self._fits(peak_bytes, others()):
            return None
        gc.collect()
        self._allocator.trim()
        drop_mapped_files()
        page_out_libraries()
        self._note_users()
        beside = others()
        if self._fits(peak_bytes, beside):
            return None
        left = self.left_bytes - beside - self._rounding_bytes(peak_bytes)
        if not self._has_stepped:
            left = min(left, self._planned_beside(beside))
        grown = self._last - self._at_arming
        return (
            f"{excess_text(peak_bytes, left, self._limit_bytes, beside)}; outside of tensors the process holds {format_bytes(self._last)}, "
            f"{format_bytes(max(0, grown))} more than when the job began (NumPy's arrays, a loader's workers, libraries)"
        )

    def lift(self) -> None:
        """Takes the kernel's limit off."""
        if self._kernel is not None:
            self._kernel.lift()

    def _make_free(self) -> None:
        """Gives pooled memory back to the system, oldest first, as far as what happens between two
        steps may need its bytes.
        """
        if not isinstance(self._allocator, Allocator):
            return
        # A pool beside which the kernel refuses the user's memory would be of no use to anybody.
        share = 1.0 if self._kernel is not None else _FREE_BETWEEN_STEPS
        wanted = max(int(share * self._limit_bytes), self._most_growth_bytes * 5 // 4)
        stats = self._allocator.stats()
        missing = wanted - (self._limit_bytes - self._last - stats.mapped_bytes)
        if missing > 0 and stats.pooled_bytes > 0:
            before = self._allocator.pool_limit_bytes
            self._allocator.set_pool_limit(max(0, stats.pooled_bytes - missing))
            self._allocator.set_pool_limit(before)

    def _fits(self, peak_bytes: int, others_bytes: int) -> bool:
        needed = peak_bytes + others_bytes + self._rounding_bytes(peak_bytes)
        # Before a first step, the libraries' growth in it is still to come.
        return needed <= self.left_bytes and (self._has_stepped or peak_bytes <= self._planned_beside(others_bytes))

    def _planned_beside(self, others_bytes: int) -> int:
        """Bytes that a step which never ran may be predicted to take beside so many of others."""
        planned = self._limit_bytes - self._at_arming - self._planned_others_bytes - self._reserve_bytes
        grown = self._users_bytes + others_bytes - self._planned_others_bytes
        return planned - max(0, grown - _SMALL_GROWTH_BYTES)

    def _rounding_bytes(self, peak_bytes: int) -> int:
        """Bytes that the allocator holds for live tensors above theirs: now, and of a step."""
        stats = self._allocator.stats()
        rounded = stats.mapped_bytes - stats.pooled_bytes - stats.live_bytes
        return rounded + min(int(_ROUNDING_SHARE * peak_bytes), _MOST_ROUNDING_BYTES)

    def _note_users(self) -> None:
        now = self._outside_bytes()
        self._users_bytes += now - self._last
        self._most_growth_bytes = max(self._most_growth_bytes, now - self._last)
        self._last = now


def excess_text(peak_bytes: int, left_bytes: int, limit_bytes: int, others_bytes: int) -> str:
    """Says that a step does not fit what is left of a limit, by how much, and what tensors are in
    its way.
    """
    left = max(0, left_bytes)
    beside = f", {format_bytes(peak_bytes - left)} too few"
    if others_bytes >= MIB:
        beside += (
            f": {format_bytes(others_bytes)} are alive in tensors that are not this job's (batches, queues, features that are kept, what another job "
            "has saved for its backward)"
        )
    return f"it is predicted to take {format_bytes(peak_bytes)} of tensors, and {format_bytes(left)} are left of the limit of {format_bytes(limit_bytes)}{beside}"


# Settings of the machine and of the process that a run used, for its report.
#
# In: this process. Out: one line a subject. Nothing is measured and nothing is set.


def used_settings() -> tuple[tuple[str, str], ...]:
    """(what, how it was) for processors, threads, waiting and malloc variables, allocator, huge
    pages and swap, as this process has them now.
    """
    host = read_host()
    processors, memory = host.processors, host.memory
    own = host.set_by_memfit
    variables = [
        f"{name}={value}" + (" (set by memfit)" if name in own else "")
        for name, value in host.environment.items()
        if name != SET_BY_MEMFIT
    ]
    allocator = "memfit's own" if installed() is not None else "malloc, told to give freed tensors back"
    return (
        ("processors", f"{processors.usable_cores} of {processors.machine_cores} cores"),
        ("threads", f"{torch.get_num_threads()} to compute"),
        ("variables", ", ".join(variables) or "none set"),
        ("allocator", allocator),
        ("huge pages", host.huge_pages.mode or "none in this kernel"),
        ("swapped out", format_bytes(memory.process_swap_bytes)),
    )
