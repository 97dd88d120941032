"""Prediction of a step's timeline, or of its sums alone.

In: `Step`, `Hardware`. Out: `Timeline` (`predict`), or its sums (`appraise`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from memfit.core.hardware import Hardware
from memfit.core.step import Step
from memfit.core.tiers import Tier
from memfit.core.timeline import COMPUTE_LANE, HOST_LANE, UPDATE_LANE, Moment, Timeline, for_updates
from memfit.prediction.bytes import Slot, follow_tier, peaks, peaks_and_slots
from memfit.prediction.clock import LAST_BACKWARD, Clock
from memfit.prediction.pace import Pace


@dataclass(frozen=True, kw_only=True)
class Appraisal:
    """Sums of a `Timeline`.

    Attributes:
        peaks: predicted, by tier.
        seconds: of a step.
        slots: predicted peaks of the device by slot (`prediction.bytes.peaks_and_slots`).
        busy_s: for how long each lane works, by its name as in `Interval`; compute without what
            links slow it by.
        late_s: how long a step takes at least because of what each lane does behind a turn from
            forward to backward, the first or the last one: what the device computes before the
            turn, and that. Operations are given out in order: none behind the turn begins before.
            And because the device and each link serve updates as well.
        behind_s: the same of what each lane does behind the last backward, which bounds say and
            searches do not look at: with it as a lane they found slower plans.
    """

    peaks: Mapping[Tier, int]
    seconds: float
    slots: Mapping[Slot, int] = field(default_factory=dict[Slot, int])
    busy_s: Mapping[str, float] = field(default_factory=dict[str, float])
    late_s: Mapping[str, float] = field(default_factory=dict[str, float])
    behind_s: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def peak_bytes(self) -> int:
        """The device's."""
        return self.peaks[Tier.DEVICE]


def predict(step: Step, hardware: Hardware | None = None) -> Timeline:
    """Predicts bytes and seconds of a step.

    Args:
        step: made by `scheduling.lower`.
        hardware: None: bytes only, all seconds are 0.

    Returns:
        One moment an action; peaks by tier; bytes moved by category; stalls by cause; intervals of
        the lanes.

    Raises:
        PlanError: the step uses a tier that the hardware does not have.
    """
    clock = Clock(hardware, records=True)
    times = clock.run(step)
    moments = tuple(
        Moment(
            action=str(operation.action),
            peak_bytes=b.peak_bytes,
            after_bytes=b.after_bytes,
            start_s=t.start_s,
            end_s=t.end_s,
            by_category=b.by_category,
        )
        for operation, b, t in zip(step, follow_tier(step), times, strict=True)
    )
    return Timeline(
        moments=moments,
        peaks=peaks(step),
        bytes_read=dict(clock.bytes_read),
        bytes_received=dict(clock.bytes_received),
        bytes_written=dict(clock.bytes_written),
        stalls_s=dict(clock.stalls_s),
        commit_s=clock.commit_seconds(step),
        intervals=tuple(clock.intervals),
        interval_s=None if hardware is None else _interval(step, hardware),
    )


def _interval(step: Step, hardware: Hardware) -> tuple[float, float]:
    """See [Note: the interval] in `prediction.pace`."""
    fast, expected, slow = (_seconds(step, hardware, sign) for sign in (1, 0, -1))
    if not expected:
        return 0.0, 0.0
    below = math.hypot(expected / fast - 1, hardware.step_spread)
    above = math.hypot(slow / expected - 1, hardware.step_spread)
    return expected / (1 + below), expected * (1 + above)


def _seconds(step: Step, hardware: Hardware, sign: int) -> float:
    clock = Clock(Pace(hardware, sign=sign))
    times = clock.run(step)
    return max((t.end_s for t in times), default=0.0) + clock.commit_seconds(step)


def appraise(step: Step, hardware: Hardware | Pace) -> Appraisal:
    """Predicts the sums only, for searches that look at many schedules.

    Args:
        step: made by `scheduling.lower`.
        hardware: the machine, or its speeds where many steps are predicted for it.
    """
    pace = Pace(hardware) if isinstance(hardware, Hardware) else hardware
    clock = Clock(pace)
    times, instants = clock.run_with_turns(step)
    late = _late(clock.busy_s, instants, pace.hardware)
    by_tier, slots = peaks_and_slots(step)
    return Appraisal(
        peaks=by_tier,
        seconds=max((t.end_s for t in times), default=0.0) + clock.commit_seconds(step),
        slots=slots,
        busy_s=clock.busy_s,
        late_s={name: seconds for name, seconds in late.items() if not name.endswith(LAST_BACKWARD)},
        behind_s={name: seconds for name, seconds in late.items() if name.endswith(LAST_BACKWARD)},
    )


def _late(
    busy_s: Mapping[str, float], instants: Mapping[str, Mapping[str, float]], hardware: Hardware
) -> dict[str, float]:
    """Seconds of what is behind each instant, and of what the device and links do in all."""
    shared = {"compute": (COMPUTE_LANE, UPDATE_LANE)} | _with_updates(hardware)
    late = {f"{name} with updates": sum(busy_s.get(lane, 0.0) for lane in lanes) for name, lanes in shared.items()}
    behind = {UPDATE_LANE: (UPDATE_LANE,), HOST_LANE: (HOST_LANE,)} | _with_updates(hardware)
    for which, instant in instants.items():
        for name, lanes in behind.items():
            left_s = sum(busy_s.get(lane, 0.0) - instant.get(lane, 0.0) for lane in lanes)
            late[f"{name}, after the {which}"] = instant.get(COMPUTE_LANE, 0.0) + left_s
    return late


def _with_updates(hardware: Hardware) -> dict[str, tuple[str, str]]:
    """Both lanes of each direction of each link, by its name."""
    ways = [f"{tier} {way}" for tier in hardware.away for way in ("read", "write")]
    return {way: (way, for_updates(way)) for way in ways}
