"""Watchers of steps: functions of the user's that are told of each step when it is over.

In: an assembly and what a step gave. Out: `StepReport`s, made only where somebody is told.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.errors import LOG
from memfit.core.step import Timeline
from memfit.core.step_report import StepReport, TierUse
from memfit.core.tiers import Tier
from memfit.devices.binding import Allocator
from memfit.engine.measured_step import StepRecorder
from memfit.homes.factories import used_by
from memfit.job.assembly import Assembly
from memfit.job.results import StepResult
from memfit.machine.meters import DeviceMeter
from memfit.planner.setup import Prepared
from memfit.tensors.trees import tensors_in

# Measurement of a job's steps, for its report.
#
# In: an assembly, before a step. Out: `MeasuredStep`: a timeline of the form of the predicted one.
#
# [Note: what a measured byte is]
# Bytes of the device's allocator, less what was there before the step and is not the job's (data,
# another model): so they stand beside predicted ones. With memfit's allocator the peak of each
# action is exact. Other meters tell only what lives when an action ends: what it held in between is
# not seen, and asking takes some tenths of a millisecond, so that only a job's first steps are
# measured.

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


class StepWatchers:
    """Functions that are told of steps, in the order in which they came.

    Attributes:
        entries: by the number of a handle (`torch.utils.hooks.RemovableHandle`).
    """

    def __init__(self) -> None:
        # Ordered: a handle holds it weakly, and plain dictionaries cannot be held so.
        self.entries: OrderedDict[int, Callable[[StepReport], object]] = OrderedDict()
        self._moved: tuple[int, int] | None = None

    def tell_step(self, assembly: Assembly, result: StepResult, measured: MeasuredStep | None) -> None:
        """Tells of a step that `job.step` made.

        Args:
            assembly: that made it.
            result: of the step.
            measured: the last step that was measured.
        """
        if not self._is_heard:
            return
        self._tell(
            assembly,
            result.peak_bytes,
            loss=result.loss,
            norm=result.norm,
            rows=result.rows,
            tokens=result.tokens,
            seconds=result.seconds,
            waits_s=_waits(assembly, measured),
            departures=result.departures,
        )

    def tell_lines_step(
        self,
        assembly: Assembly,
        seconds: float,
        peak_bytes: int,
        departures: tuple[str, ...],
        measured: MeasuredStep | None,
    ) -> None:
        """Tells of a step that lines of the user's own made; its first backward and its update are
        what is measured.
        """
        if self._is_heard:
            self._tell(
                assembly,
                peak_bytes,
                loss=None,
                norm=None,
                rows=None,
                tokens=None,
                seconds=seconds,
                waits_s=_waits(assembly, measured),
                departures=departures,
            )

    @property
    def _is_heard(self) -> bool:
        return bool(self.entries) or LOG.isEnabledFor(logging.DEBUG)

    def _tell(self, assembly: Assembly, peak_bytes: int, **figures: Any) -> None:
        report = StepReport(
            step=assembly.steps,
            tiers=tier_uses(assembly, peak_bytes),
            microbatches=assembly.plan.microbatches,
            **self._traffic(assembly),
            **figures,
        )
        loss = "" if report.loss is None else f", loss {report.loss:.6g}"
        LOG.debug("step %d%s, %.3g s, %s", report.step, loss, report.seconds, report.tiers[0].in_words())
        # A copy: a function may take itself off.
        for watcher in tuple(self.entries.values()):
            watcher(report)

    def _traffic(self, assembly: Assembly) -> dict[str, int]:
        read, written = (sum(by_purpose.values()) for by_purpose in assembly.house.bytes_moved)
        before = self._moved
        self._moved = read, written
        # Another plan's homes count from 0; before the first report nothing is known of its step.
        if before is None or read < before[0] or written < before[1]:
            return {}
        return {"read_bytes": read - before[0], "written_bytes": written - before[1]}


def _waits(assembly: Assembly, measured: MeasuredStep | None) -> dict[str, float]:
    """Returns what compute waited for in the last step; nothing where it was not measured."""
    is_of_it = measured is not None and measured.step == assembly.steps
    return dict(measured.timeline.stalls_s) if measured is not None and is_of_it else {}


def tier_uses(assembly: Assembly, peak_bytes: int) -> tuple[TierUse, ...]:
    """Returns the tiers that a job uses, after a step.

    Args:
        assembly: that made it.
        peak_bytes: of the device, measured in the step; of other tiers it is what is claimed there.
    """
    machine = assembly.machine
    name = "memory" if machine.counts_process else str(Tier.DEVICE)
    beside = {
        tier: factory.held_bytes for tier, factory in assembly.house.factories.items() if not tier.traits.is_device
    }
    own = TierUse(name=name, used_bytes=peak_bytes, limit_bytes=machine.limits.device_bytes)
    return own, *(
        TierUse(name=str(tier), used_bytes=nbytes, limit_bytes=machine.limits.of(tier))
        for tier, nbytes in beside.items()
        if nbytes
    )
