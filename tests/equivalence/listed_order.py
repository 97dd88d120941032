"""Jobs whose every step is measured and held against its list: the same operations in the same order.

In: a function that makes a job. Out: one that makes a job which is looked at.
"""

from __future__ import annotations

from typing import Any

import torch

from equivalence.compare import JobLike, MakeJob
from equivalence.zoo import Case
from memfit.core.step import Timeline
from memfit.engine.measured_step import ByteMeter, StepRecorder


class FollowedJob:
    """A job of memfit's own; `step` fails where the engine does anything but what the list says. Steps with departures are told by those."""

    def __init__(self, job: Any, meter: ByteMeter | None = None) -> None:
        self._job = job
        self._meter = meter
        self.timelines: list[Timeline] = []

    def step(self, batch: Any, /) -> Any:
        assembly = self._job._assembly
        recorder = StepRecorder(self._meter)
        with assembly.engine.recording(recorder):
            result = self._job.step(batch)
        timeline = recorder.timeline()
        self.timelines.append(timeline)
        if not result.departures:
            listed = [str(operation.action) for operation in assembly.shapes.prepare(batch).step]
            assert [moment.action for moment in timeline.moments] == listed
        begins = [moment.start_s for moment in timeline.moments]
        assert begins == sorted(begins)
        assert all(moment.start_s <= moment.end_s for moment in timeline.moments)
        named = {
            token.kind for o in assembly.shapes.prepare(batch).step for token in (*o.waits, *o.waits_after, *o.after)
        }
        assert set(timeline.stalls_s) <= named | {"fetch"}, "waited for what no operation names"
        return result

    def gradient(self, name: str, /) -> torch.Tensor | None:
        return self._job.gradient(name)

    def weights(self) -> Any:
        return self._job.weights()

    def close(self) -> None:
        self._job.close()


def following(make: MakeJob) -> MakeJob:
    """The same jobs, followed."""

    def followed(case: Case, optimizer: torch.optim.Optimizer) -> JobLike:
        return FollowedJob(make(case, optimizer))

    return followed
