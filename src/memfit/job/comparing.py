"""Comparison of a job's first steps with their prediction, action by action.

In: a prepared step, its measured timelines. Out: `StepComparison`: seconds of both, the actions
that are farthest apart, factors by group of classes; what a machine learns from it is kept
(`job.corrections`).

[Note: what is compared]
What the main thread computes, in seconds that it was on a processor: those do not tell whether
others kept it waiting, which is told apart. The fastest of the first steps behind the second
counts, since other work can only slow one down: whole, since the least of each action adds up to
5 % less than any step takes. Updates beside backward are another thread's: the median of its
seconds in a step. Of each direction of the disk the step in the middle counts, by seconds a byte
([Note: what links took] in `prediction.calibration`): a drive that buffers has steps that are much
too fast. Left out: actions that end in another thread than they began in. Stalls are compared by
cause, by the clock. Only steps of a processor say what is learnt: an accelerator's actions end
before their work does.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memfit import devices
from memfit.core.errors import MemfitWarning
from memfit.core.hardware import LinkTraffic
from memfit.core.rates import in_dtype
from memfit.core.step import Step, UpdatePlace
from memfit.core.tiers import Tier
from memfit.core.timeline import Moment, Timeline
from memfit.core.units import format_seconds
from memfit.core.work_kinds import Work, WorkKind
from memfit.job.corrections import (
    correction_path,
    corrections_are_on,
    load_correction,
    measurement_of,
    save_correction,
)
from memfit.job.saved_hardware import identity_of, load_measured, saved_path
from memfit.job.setup import Prepared, Setup
from memfit.prediction.calibration import LANES, Deviation, fit_factors, group_seconds, largest_deviations
from memfit.prediction.pace import work_seconds
from memfit.prediction.predict import predict

_WARM_STEPS = 2
_FEWEST, _MOST = 3, 8
_BUSY_MACHINE = 1.5
"""Seconds by the clock, in those on a processor, from which others use the machine."""


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """A step's prediction beside the fastest of several measured ones.

    Attributes:
        predicted_s, measured_s: of what the main thread computes.
        steps: that were measured.
        factors: measured by predicted seconds, by group of classes of work, and by direction of the
            disk ("disk read") where it moved enough.
        deviations: kinds of actions that are farthest apart, farthest first.
        predicted_stalls_s, measured_stalls_s: seconds of waiting by cause.
        is_quiet: the thread hardly waited for a processor; else nothing is learnt from it.
    """

    predicted_s: float
    measured_s: float
    steps: int
    factors: Mapping[str, float]
    deviations: tuple[Deviation, ...]
    predicted_stalls_s: Mapping[str, float]
    measured_stalls_s: Mapping[str, float]
    is_quiet: bool

    @property
    def ratio(self) -> float:
        """Measured by predicted seconds of what the main thread computes."""
        return self.measured_s / self.predicted_s if self.predicted_s else 1.0

    def sentence(self) -> str:
        """Says it in a line, with the farthest action."""
        said = (
            f"computing took {format_seconds(self.measured_s)} where {format_seconds(self.predicted_s)} were predicted"
        )
        if self.deviations:
            far = self.deviations[0]
            said += f"; farthest apart: {far.action} ({far.count} a step), {format_seconds(far.measured_s)} for {format_seconds(far.predicted_s)}"
        return said if self.is_quiet else f"{said}; others used the processors meanwhile"


class ComparedSteps:
    """Measured steps of one job. See [Note: what is compared].

    Args:
        setup: of the job, with the machine's description.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._prepared: Prepared | None = None
        self._fastest: list[Moment] = []
        self._fastest_s = math.inf
        self._stalls_s: dict[str, float] = {}
        self._beside_s: list[float] = []
        self._traffic: dict[str, list[LinkTraffic]] = {}
        self._measured = 0
        self._clock_s = self._busy_s = 0.0
        self._is_kept = False

    def note(self, prepared: Prepared, timeline: Timeline, steps_here: int) -> None:
        """Notes a measured step. The first shapes of a batch count, and no more than some steps.

        Args:
            prepared: that it ran.
            timeline: as measured.
            steps_here: steps that the job has made, this one included.
        """
        if steps_here <= _WARM_STEPS or self._measured >= _MOST:
            return
        if self._prepared is None:
            self._prepared = prepared
        actions = [str(operation.action) for operation in self._prepared.step]
        # Other shapes, or a journal's other order.
        if prepared is not self._prepared or actions != [moment.action for moment in timeline.moments]:
            return
        known = [moment for moment in timeline.moments if moment.busy_s is not None]
        self._clock_s += sum(moment.end_s - moment.start_s for moment in known) - sum(timeline.stalls_s.values())
        busy_s = sum(moment.busy_s or 0.0 for moment in known)
        self._busy_s += busy_s
        if busy_s < self._fastest_s:
            self._fastest, self._fastest_s = [*timeline.moments], busy_s
        for cause, seconds in timeline.stalls_s.items():
            self._stalls_s[cause] = min(seconds, self._stalls_s.get(cause, seconds))
        self._beside_s.append(timeline.beside_s)
        for lane, one in timeline.traffic.items():
            self._traffic.setdefault(lane, []).append(one)
        self._measured += 1
        if self._measured == _MOST:
            self.keep()

    def result(self) -> StepComparison | None:
        """Returns the comparison; None until some steps were measured."""
        if self._prepared is None or self._measured < _FEWEST:
            return None
        hardware = in_dtype(self._setup.hardware(), self._prepared.plan.compute_dtype)
        step, measured = self._prepared.step, self._timeline()
        predicted = predict(step, hardware)
        kept = _compared(step, self._fastest)
        seconds = [work_seconds(_of_actions(operation.work), hardware) for operation in step]
        return StepComparison(
            predicted_s=sum(seconds[index] for index in kept),
            measured_s=sum(_busy(self._fastest[index]) for index in kept),
            steps=self._measured,
            factors=fit_factors(step, measured, hardware),
            deviations=largest_deviations(
                replace(predicted, moments=_computing(step, kept, seconds)),
                replace(measured, moments=tuple(measured.moments[index] for index in kept)),
            ),
            predicted_stalls_s=dict(predicted.stalls_s),
            measured_stalls_s=dict(self._stalls_s),
            is_quiet=self._clock_s <= _BUSY_MACHINE * self._busy_s,
        )

    def keep(self) -> None:
        """Keeps what the machine's rates learn from it, once; see `job.corrections`."""
        machine = self._setup.machine
        if self._is_kept or self._measured < _FEWEST or not corrections_are_on():
            return
        if machine.is_emulated or devices.is_accelerator(machine.device):
            return
        self._is_kept = True
        # First, since to ask for the job's description may be to measure the disk.
        saved, path = load_measured(machine.device), correction_path(saved_path(identity_of(machine.device)))
        found = None if saved is None else self.result()
        if saved is None or found is None or not found.is_quiet:
            return
        hardware = self._setup.hardware()
        if measurement_of(saved) != measurement_of(hardware):
            return  # of another description than the saved one
        before = load_correction(saved, path)
        applied = before.applied(saved)
        if applied.rates != hardware.rates:
            return  # a description that was given, or another run has taught in between
        factors = found.factors
        # Of another disk than the one that was probed they say nothing of that one.
        if applied.link(Tier.DISK) != hardware.link(Tier.DISK):
            factors = {name: factor for name, factor in factors.items() if name not in LANES}
        assert self._prepared is not None, "there is a result"
        weights = group_seconds(self._prepared.step, in_dtype(hardware, self._prepared.plan.compute_dtype))
        try:
            save_correction(before.followed_by(factors, weights, found.ratio), path)
        except OSError as error:
            warnings.warn(
                f"what this run taught about the machine's rates cannot be kept in {path}: {error.strerror}",
                MemfitWarning,
                stacklevel=2,
            )

    def _timeline(self) -> Timeline:
        """The fastest of the steps, in seconds on a processor."""
        at = 0.0
        moments: list[Moment] = []
        for moment in self._fastest:
            moments.append(replace(moment, start_s=at, end_s=at + _busy(moment)))
            at += _busy(moment)
        return Timeline(
            moments=tuple(moments),
            bytes_read={},
            bytes_written={},
            stalls_s=dict(self._stalls_s),
            # A step's last update may end in the next one.
            beside_s=statistics.median(self._beside_s),
            traffic=median_traffic(self._traffic),
        )


def median_traffic(found: Mapping[str, Sequence[LinkTraffic]]) -> dict[str, LinkTraffic]:
    """Returns by lane what the step in the middle took, by its seconds a byte."""
    moved = {lane: [one for one in every if one.nbytes] for lane, every in found.items()}
    return {
        lane: sorted(every, key=lambda one: one.seconds / one.nbytes)[len(every) // 2]
        for lane, every in moved.items()
        if every
    }


def _busy(moment: Moment) -> float:
    return moment.end_s - moment.start_s if moment.busy_s is None else moment.busy_s


def _compared(step: Step, measured: Sequence[Moment]) -> list[int]:
    """Indices of actions that compute in the main thread, and were measured there."""
    return [
        index
        for index, (operation, moment) in enumerate(zip(step, measured, strict=True))
        if operation.work and moment.busy_s is not None and operation.update_place in (None, UpdatePlace.AT_ONCE)
    ]


def _of_actions(work: Work) -> Work:
    """Without what a step takes beside its actions."""
    return tuple(amount for amount in work if amount[0] is not WorkKind.STEPS)


def _computing(step: Step, kept: Sequence[int], seconds: Sequence[float]) -> tuple[Moment, ...]:
    """Moments that take the predicted seconds of computing, without stalls."""
    operations = [*step]
    return tuple(
        Moment(
            action=str(operations[index].action),
            peak_bytes=0,
            after_bytes=0,
            end_s=seconds[index],
            by_category={},
        )
        for index in kept
    )
