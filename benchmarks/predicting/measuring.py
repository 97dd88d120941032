"""One case of `predictions.py`, in a process of its own: what was predicted, and what was measured.

In: a `Case`. Out: figures as JSON says them. Who imports torch, transformers and memfit first finds
what is resident after that (`resident_after_imports`); everything is compared above it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.core.step import Timeline
    from memfit.devices.binding import Allocator
    from predicting.drawing import Case

STEPS = 3


def load(case: Case) -> int:
    """Imports all that the case needs; returns what is resident then."""
    import torch

    import memfit.api  # noqa: F401 - memfit loads its names when they are used
    from limiting import building
    from memfit.devices import procfs
    from memfit.machine.machine import prepare_process

    building.load(case.family)
    torch.set_num_threads(1)
    prepare_process()
    return procfs.read_status().resident_bytes


def build(case: Case) -> tuple[Any, ...]:
    """Model, optimizer, loss and batch, from a fixed seed."""
    import torch

    from limiting import building

    torch.manual_seed(0)
    model = building.build_model(case.family, case.config)
    optimizer = building.build_optimizer(case.optimizer[0], case.optimizer[1], model)
    autocast = "bfloat16" if case.precision == "autocast" else None
    loss = building.build_loss(case.family, case.batch, autocast)
    return model, optimizer, loss, building.build_batch(case.batch, case.sizes)


def measure(case: Case) -> dict[str, Any]:
    """Trains under the case's plan: three steps for peaks and seconds, one more for the timeline."""
    resident = load(case)
    import gc

    from memfit.devices.binding import install
    from memfit.engine.measured_step import StepRecorder
    from memfit.step.lower import lower
    from memfit.step.predict import predict
    from predicting.drawing import begun

    allocator = install()
    before = allocator.stats().live_bytes
    parts = build(case)
    gc.collect()
    batch = parts[3]
    outside = {"built": _outside(allocator)}
    began_cpu, began = time.process_time(), time.perf_counter()
    with begun(case, parts) as job:
        fit_s, fit_cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        planned = job._assembly.planned  # noqa: SLF001 - the bench looks inside
        timeline = predict(lower(job.schedule, job.plan, job.profile, staging_bytes=0), planned.setup.hardware())
        outside["fitted"] = _outside(allocator)
        steps = [_timed(job, batch)]
        outside["one step"] = _outside(allocator)
        steps += [_timed(job, batch) for _ in range(STEPS - 1)]
        outside["steps"] = _outside(allocator)
        phases = {
            record.name: {
                "tensors": record.peak_bytes - before,
                "held": record.held_peak_bytes,
                "process": record.process_peak_bytes,
            }
            for record in job.proof().phases
        }
        recorder = StepRecorder(_Meter(allocator, before))
        with job._assembly.engine.recording(recorder):  # noqa: SLF001
            job.step(batch)
        measured = recorder.timeline()
        return {
            "resident_bytes": resident,
            "predicted_process_bytes": job.predicted_peak_bytes,
            "process_bytes": max(phase["process"] for phase in phases.values()),
            "predicted_tensor_bytes": timeline.peak_bytes,
            "tensor_bytes": max(phase["tensors"] for name, phase in phases.items() if "step" in name or name == "steady"),
            "staging_bytes": _staging(timeline),
            "phases": phases,
            "load_bytes": planned.setup.load_bytes,
            "outside": outside,
            "peak": _compared(timeline, measured),
            "predicted_s": timeline.seconds,
            "steps": steps,
            "measured_step_s": measured.seconds,
            "fit_s": fit_s,
            "fit_cpu_s": fit_cpu_s,
            "microbatches": job.plan.microbatches,
        }  # fmt: skip


class _Meter:
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


def _outside(allocator: Allocator) -> dict[str, int]:
    """Memory of the process beside tensors: private memory, and pages of mapped files."""
    from memfit.devices import procfs

    status = procfs.read_status()
    return {"private": status.anonymous_bytes - allocator.stats().mapped_bytes, "files": status.file_bytes}


def _timed(job: Any, batch: Any) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = job.step(batch)
    if result.departures:
        raise RuntimeError(f"a step departed from its schedule: {result.departures}")
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def _staging(timeline: Timeline) -> int:
    peak = timeline.peak
    return 0 if peak is None else peak.by_category["staging"]


def _compared(predicted: Timeline, measured: Timeline) -> dict[str, Any]:
    """Where the peaks are, each beside the other timeline's bytes at that action."""
    told = max(range(len(predicted.moments)), key=lambda index: predicted.moments[index].peak_bytes)
    found = max(range(len(measured.moments)), key=lambda index: measured.moments[index].peak_bytes)
    return {
        "predicted_at": predicted.moments[told].action,
        "measured_at": measured.moments[found].action,
        "measured_bytes": measured.moments[found].peak_bytes,
        "measured_where_predicted_bytes": measured.moments[told].peak_bytes,
        "predicted_where_measured_bytes": predicted.moments[found].peak_bytes,
        "by_category": {name: n for name, n in predicted.moments[told].by_category.items() if n},
        "actions": len(measured.moments),
    }
