"""A step as a trace of events, which ui.perfetto.dev and chrome://tracing read.

In: `ReportSubject`. Out: JSON text: a process for what is predicted, with a thread for each lane
and counters of memory by category, and one for what was measured, if there is that.

Source: "Trace Event Format" (Google, 2016), events X (complete), C (counter) and M (metadata).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from memfit.core.schedule import Schedule
from memfit.core.step import COMPUTE_LANE, Timeline
from memfit.core.version import VERSION
from memfit.report.subject import ReportSubject
from memfit.report.timeline_data import main_thread_begins

_PREDICTED, _MEASURED = 1, 2


def render_perfetto(subject: ReportSubject) -> str:
    """Returns the trace of a report's step. Times are microseconds since the step began."""
    events = [*_predicted(subject)]
    if subject.measured is not None:
        events += _measured(subject.measured, subject.schedule)
    other = {"title": subject.title, "version": f"memfit {VERSION}", "reason": subject.reason}
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, separators=(",", ":"), allow_nan=False
    )


def _predicted(subject: ReportSubject) -> Iterator[dict[str, Any]]:
    timeline = subject.predicted
    lanes = sorted({i.lane for i in timeline.intervals}, key=lambda lane: (lane != COMPUTE_LANE, lane))
    threads = {lane: number for number, lane in enumerate(lanes, start=1)}
    yield from _names(_PREDICTED, "predicted", threads)
    for interval in timeline.intervals:
        action = timeline.moments[interval.moment].action
        name = f"wait for {interval.name}" if interval.kind == "stall" else action
        told: dict[str, Any] = {"action": action, "of": _in_words(action, subject.schedule)}
        if interval.kind == "transfer":
            told.update(category=interval.name, bytes=interval.nbytes)
        yield {
            "ph": "X",
            "pid": _PREDICTED,
            "tid": threads[interval.lane],
            "ts": interval.start_s * 1e6,
            "dur": (interval.end_s - interval.start_s) * 1e6,
            "name": name,
            "cat": interval.kind,
            "args": told,
        }
    begins = main_thread_begins(timeline)
    categories = sorted({category for moment in timeline.moments for category in moment.by_category})
    for index in _highest(timeline, begins):
        moment = timeline.moments[index]
        held = {category: moment.by_category.get(category, 0) for category in categories}
        yield _counter(_PREDICTED, "device memory by category", begins[index], held)
        yield _counter(_PREDICTED, "device memory", begins[index], {"bytes": moment.peak_bytes})
        for tier, column in subject.tiers.items():
            yield _counter(_PREDICTED, f"{tier} memory", begins[index], {"bytes": column[index]})
    yield _counter(_PREDICTED, "device memory", timeline.seconds, {"bytes": timeline.moments[-1].after_bytes})


def _measured(timeline: Timeline, schedule: Schedule) -> Iterator[dict[str, Any]]:
    yield from _names(_MEASURED, "measured", {"main thread": 1})
    for moment in timeline.moments:
        yield {
            "ph": "X",
            "pid": _MEASURED,
            "tid": 1,
            "ts": moment.start_s * 1e6,
            "dur": (moment.end_s - moment.start_s) * 1e6,
            "name": moment.action,
            "cat": "action",
            "args": {"of": _in_words(moment.action, schedule), "peak_bytes": moment.peak_bytes},
        }
    begins = [moment.start_s for moment in timeline.moments]
    for index in _highest(timeline, begins):
        yield _counter(_MEASURED, "device memory", begins[index], {"bytes": timeline.moments[index].peak_bytes})


def _names(process: int, name: str, threads: dict[str, int]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for lane, number in threads.items():
        yield {"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": {"name": lane}}
        yield {"ph": "M", "pid": process, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


def _highest(timeline: Timeline, begins: list[float]) -> Iterator[int]:
    """Yields an action for each instant: of those that begin at once, the one with most bytes. A
    later value at the same time would hide it.
    """
    for _, group in groupby(range(len(begins)), key=begins.__getitem__):
        yield max(group, key=lambda i: timeline.moments[i].peak_bytes)


def _counter(process: int, name: str, time_s: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "pid": process, "name": name, "ts": time_s * 1e6, "args": values}


def _in_words(action: str, schedule: Schedule) -> str:
    """Names of the blocks and calls of an action."""
    names = [schedule.blocks[int(number)] for number in re.findall(r"\bB(\d+)\b", action)]
    names += [schedule.calls[int(number)].site for number in re.findall(r"\bC(\d+)", action)]
    return ", ".join(name or "(model)" for name in names)
