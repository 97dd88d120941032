"""Limits that cannot be meant, refused before anything is built on them.

In: limits and the machine that they are for. Out: nothing, or an error that says how a limit is
written.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from memfit import devices
from memfit.batches.batch import gives_batches
from memfit.core.errors import UsageError
from memfit.core.hardware import Hardware
from memfit.core.limits import Limits
from memfit.core.tiers import is_processor
from memfit.core.units import MIB, format_bytes
from memfit.host.cgroups import read_cgroup

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
