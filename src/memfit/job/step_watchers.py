"""Watchers of steps: functions of the user's that are told of each step when it is over.

In: an assembly and what a step gave. Out: `StepReport`s, made only where somebody is told.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from memfit.core.log import LOG
from memfit.core.step_report import StepReport, TierUse
from memfit.core.tiers import Tier
from memfit.job.assembly import Assembly
from memfit.job.measured_steps import MeasuredStep
from memfit.job.results import StepResult


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
