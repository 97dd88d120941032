"""A machine that plans are made for: this one, or one that is known by its description only.

In: a `Hardware` that somebody stated, or none, and a limit. Out: what `choose` asks of a machine,
its tiers and limits, and the budget of its device. Nothing is allocated on what is described.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from memfit.core.errors import UsageError
from memfit.core.hardware import Hardware
from memfit.core.limits import Budget, Limits, device_reserve_bytes
from memfit.core.profile import Profile
from memfit.core.tiers import Tier, is_processor
from memfit.core.units import format_bytes
from memfit.job.machine import Machine, device_of, open_machine


class PlannedMachine(Protocol):
    """A machine as the search for a plan sees it."""

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where bytes may rest, the device first."""
        ...

    @property
    def limits(self) -> Limits:
        """Limits by tier."""
        ...

    @property
    def counts_process(self) -> bool:
        """The device is a process, whose size varies between runs."""
        ...


@dataclass(frozen=True, kw_only=True)
class DescribedAccelerator:
    """An accelerator that need not be here, with nothing on it but the job.

    Not modelled: that other kernels than this processor's save other tensors for backward.
    """

    tiers: tuple[Tier, ...]
    limits: Limits
    counts_process: bool = False

    def budget(self, profile: Profile) -> Budget:
        """Returns what is left to tensors of a profile's step on the empty device."""
        reserve = device_reserve_bytes(profile.libraries)
        return Budget(limit_bytes=self.limits.device_bytes, base_bytes=0, reserve_bytes=reserve)


@dataclass(frozen=True, kw_only=True)
class PlannedFor:
    """A machine that plans are made for, and what is there before the job.

    Attributes:
        machine: its tiers and limits.
        budget: measures what is left to tensors of its device, once the model has been traced.
        load_bytes: held while weights move home; 0 where it is not known.
        here: it is this machine, which can be probed; None where a description is planned for.
    """

    machine: PlannedMachine
    budget: Callable[[Profile], Budget]
    load_bytes: int
    here: Machine | None


def plan_for(
    model: nn.Module,
    limit: int | str | None,
    hardware: Hardware | None,
    beside: Sequence[torch.Tensor],
    *,
    loads: bool,
    host_limit: int | str | None = None,
    disk_limit: int | str | None = None,
    is_emulated: bool = False,
    encoding_bytes: int = 0,
) -> PlannedFor:
    """Opens the machine that plans are made for.

    A described processor is a process like this one: what this one holds is its base, too. A
    described accelerator is empty; its limit is its capacity where none is given.

    Args:
        model: its weights may be without bytes.
        limit: of the device.
        hardware: the description; None: this machine.
        beside: as in `Machine.budget`.
        loads: how the model's weights come home is known, so that what that takes counts.
        host_limit: of host memory beside a device; None: what the machine has.
        disk_limit: of files; None likewise.
        is_emulated: as `fit(emulate_device=True)`.
        encoding_bytes: as in `Machine.load_bytes`.

    Raises:
        UsageError: the limit is more than the described device has.
    """
    wanted = Limits.read(limit, host_limit, disk_limit)
    if hardware is not None and not is_processor(hardware.device):
        machine = DescribedAccelerator(tiers=tuple(hardware.tiers), limits=_limits(wanted, hardware))
        return PlannedFor(machine=machine, budget=machine.budget, load_bytes=0, here=None)
    limits = wanted if hardware is None else _limits(wanted, hardware)
    device = device_of(model) if hardware is None else torch.device("cpu")
    opened = open_machine(device, limits, is_emulated=is_emulated)
    return PlannedFor(
        machine=opened,
        budget=lambda found: opened.planned_budget(
            model, beside, kernel_bytes=found.kernel_bytes, libraries=found.libraries
        ),
        load_bytes=opened.load_bytes(model, encoding_bytes=encoding_bytes) if loads else 0,
        here=opened if hardware is None else None,
    )


def _limits(given: Limits, hardware: Hardware) -> Limits:
    """The described capacities; limits that are given take their places, but for more than there
    is.
    """
    wanted = given.device_bytes
    if wanted is not None and wanted > hardware.device_bytes:
        raise UsageError(
            f"the limit of {format_bytes(wanted)} is more than {hardware.device} has ({format_bytes(hardware.device_bytes)}): give less, or another "
            f"capacity: --tiers device={format_bytes(wanted).replace(' ', '')}"
        )
    capacities = {tier: spec.nbytes for tier, spec in hardware.tiers.items()} | {Tier.DEVICE: hardware.device_bytes}
    return Limits(by_tier={tier: min(nbytes, given.by_tier.get(tier, nbytes)) for tier, nbytes in capacities.items()})
