"""Measurement of a job's steps, for its report.

In: an assembly, before a step. Out: `MeasuredStep`: a timeline of the form of the predicted one.

[Note: what a measured byte is]
Bytes of the device's allocator, less what was there before the step and is not the job's (data,
another model): so they stand beside predicted ones. With memfit's allocator the peak of each action
is exact. Other meters tell only what lives when an action ends: what it held in between is not
seen, and asking takes some tenths of a millisecond, so that only a job's first steps are measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.allocator import Allocator
from memfit.core.tiers import Tier
from memfit.core.timeline import Timeline
from memfit.engine.measured_step import StepRecorder
from memfit.homes.factories import used_by
from memfit.job.assembly import Assembly
from memfit.job.setup import Prepared
from memfit.tensors.trees import tensors_in
from memfit.verification.meters import DeviceMeter

_FIRST_STEPS = 3
"""Steps of a job that are measured where measuring takes time."""

_ALL_OF_FIRST, _ONE_OF = 16, 16
"""Where peaks are exact: steps that are all measured, and one of how many after them. To measure a
step takes some milliseconds.
"""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A step that was measured, and its number in the run.

    Attributes:
        prepared: the schedule that it ran, with its prediction.
        timeline: as measured.
        step: from 1.
    """

    prepared: Prepared
    timeline: Timeline
    step: int


class WatchedBytes:
    """Bytes of memfit's allocator above those of others, with exact peaks."""

    def __init__(self, allocator: Allocator, others_bytes: int) -> None:
        self._allocator = allocator
        self._others_bytes = others_bytes

    def live_bytes(self) -> int:
        """Returns the bytes in use."""
        return self._allocator.stats().live_bytes - self._others_bytes

    def take_peak(self) -> int:
        """Returns the peak bytes in use since the last call; the peaks that phases read stay."""
        peak = self._allocator.watched_peak_bytes() - self._others_bytes
        self._allocator.watch()
        return peak


class BytesAtEnds:
    """Bytes of any meter, as they are when an action ends."""

    def __init__(self, meter: DeviceMeter, others_bytes: int) -> None:
        self._meter = meter
        self._others_bytes = others_bytes

    def live_bytes(self) -> int:
        """Returns the bytes in use."""
        return self._meter.live_bytes() - self._others_bytes

    def take_peak(self) -> int:
        """Returns 0: what was in use in between is not known."""
        return 0


def step_recorder(assembly: Assembly, prepared: Prepared, batch: Any, steps_here: int) -> StepRecorder | None:
    """Returns a recorder for the step that comes next; None if it is not measured.

    Args:
        assembly: between two steps.
        prepared: for the batch's shapes.
        batch: of the step.
        steps_here: steps that the job has made.
    """
    machine = assembly.machine
    is_exact = isinstance(machine.allocator, Allocator)
    if not is_exact and steps_here >= _FIRST_STEPS:
        return None
    if steps_here >= _ALL_OF_FIRST and steps_here % _ONE_OF:
        return None
    own = [*assembly.held(), *assembly.model.buffers(), *tensors_in(batch)]
    # Buffers of the disk's threads live from the first transfer on, and nobody lists them.
    buffers = sum(c.nbytes for c in prepared.step.resting if c.tier is Tier.DEVICE and c.category == "staging")
    others_bytes = max(0, machine.meter.live_bytes() - _storage_bytes(own, machine.device) - buffers)
    meter = (
        WatchedBytes(machine.allocator, others_bytes)
        if isinstance(machine.allocator, Allocator)
        else BytesAtEnds(machine.meter, others_bytes)
    )
    factories = assembly.house.factories
    return StepRecorder(
        meter,
        lambda: assembly.house.bytes_moved,
        beside=assembly.updates.busy_s,
        links=lambda: used_by(factories),
    )


def _storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()  # noqa: SLF001, by identity: an address to write to takes marks off
    return sum(found.values())
