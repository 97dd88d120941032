"""A step measured operation by operation, beside what was predicted for it.

In: a job and its predicted timeline. Out: `Interval`s, with the allocator's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import memfit
from memfit.core.step import Timeline
from memfit.core.tiers import Tier
from memfit.devices.binding import Allocator
from memfit.engine.measured_step import StepRecorder


@dataclass(frozen=True)
class Interval:
    """One operation.

    Attributes:
        index: in the step.
        action: its text.
        predicted_peak_bytes: what it may reach.
        predicted_bytes: what should be alive at its end.
        peak_bytes, live_bytes: the allocator's.
    """

    index: int
    action: str
    predicted_peak_bytes: int
    predicted_bytes: int
    peak_bytes: int
    live_bytes: int


class AllocatorMeter:
    """The allocator's bytes above what was alive before."""

    def __init__(self, allocator: Allocator, before_bytes: int) -> None:
        self._allocator = allocator
        self._before_bytes = before_bytes

    def live_bytes(self) -> int:
        return self._allocator.stats().live_bytes - self._before_bytes

    def take_peak(self) -> int:
        peak = self._allocator.stats().peak_bytes - self._before_bytes
        self._allocator.reset_peak()
        return peak


def measure_step(
    job: memfit.Job, batch: Any, timeline: Timeline, allocator: Allocator, before_bytes: int
) -> list[Interval]:
    """One step, each operation beside its prediction. `before_bytes` were alive before the model was built."""
    recorder = StepRecorder(AllocatorMeter(allocator, before_bytes))
    with job._assembly.engine.recording(recorder):
        result = job.step(batch)
    assert result.departures == ()
    measured = recorder.timeline()
    assert measured.peak_in(Tier.DEVICE) == measured.peak_bytes
    return [
        Interval(
            index=index,
            action=is_there.action,
            predicted_peak_bytes=told.peak_bytes,
            predicted_bytes=told.after_bytes,
            peak_bytes=is_there.peak_bytes,
            live_bytes=is_there.after_bytes,
        )
        for index, (told, is_there) in enumerate(zip(timeline.moments, measured.moments, strict=True))
    ]
