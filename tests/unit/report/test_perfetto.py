"""The Perfetto trace against the timeline that it is made of."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

import pytest

from memfit.core.step import Moment, Timeline
from memfit.report.perfetto import render_perfetto
from memfit.report.subject import ReportSubject
from unit.report.subjects import seconds_of_the_device, subject_of


def events(subject: ReportSubject, kind: str, process: int = 1) -> list[dict[str, Any]]:
    return [e for e in json.loads(render_perfetto(subject))["traceEvents"] if (e["ph"], e["pid"]) == (kind, process)]


def test_threads_carry_the_lanes_second_by_second_and_byte_by_byte() -> None:
    subject = subject_of()
    names = {e["tid"]: e["args"]["name"] for e in events(subject, "M") if e["name"] == "thread_name"}
    assert list(names.values()) == [
        "compute",
        *("disk read", "disk read for updates", "disk write", "disk write for updates"),
        "updates",
    ]
    lasting, moved, stalled = defaultdict[str, float](float), Counter[str](), defaultdict[str, float](float)
    for event in events(subject, "X"):
        lasting[names[event["tid"]]] += event["dur"] / 1e6
        moved[names[event["tid"]].removesuffix(" for updates")] += event["args"].get("bytes", 0)
        if event["cat"] == "stall":
            stalled[event["name"].removeprefix("wait for ")] += event["dur"] / 1e6
    assert moved["disk read"] == sum(subject.predicted.bytes_read.values())
    assert moved["disk write"] == sum(subject.predicted.bytes_written.values())
    assert dict(stalled) == pytest.approx(dict(subject.predicted.stalls_s))
    assert seconds_of_the_device(subject.predicted) == pytest.approx(subject.predicted.seconds, rel=1e-3)
    for lane, seconds in lasting.items():
        own = sum(i.end_s - i.start_s for i in subject.predicted.intervals if i.lane == lane)
        assert seconds == pytest.approx(own, rel=1e-3)
    fetch = next(e for e in events(subject, "X") if e["args"]["action"] == "fetch B1")
    assert fetch["args"]["of"] == "h.0"


def test_counters_reach_the_peak_and_categories_sum_to_it() -> None:
    subject = subject_of()
    counters = events(subject, "C")
    device = [e["args"]["bytes"] for e in counters if e["name"] == "device memory"]
    assert max(device) == subject.predicted.peak_bytes
    by_category = [sum(e["args"].values()) for e in counters if e["name"] == "device memory by category"]
    assert by_category == device[:-1]
    times = [e["ts"] for e in counters if e["name"] == "device memory"]
    assert times == sorted(times) and len(set(times[:-1])) == len(times) - 1
    disk = [e["args"]["bytes"] for e in counters if e["name"] == "disk memory"]
    assert max(disk) <= subject.predicted.peaks[next(t for t in subject.tiers if t == "disk")]


def test_a_measured_step_stands_beside_the_predicted_one() -> None:
    moments = tuple(
        Moment(
            action=f"forward C{i} m0",
            peak_bytes=10 * i,
            after_bytes=i,
            start_s=i / 2,
            end_s=i / 2 + 0.25,
            by_category={},
        )
        for i in range(3)
    )
    subject = subject_of(measured=Timeline(moments=moments, bytes_read={}, bytes_written={}))
    found = events(subject, "X", process=2)
    assert [(e["name"], e["ts"], e["dur"]) for e in found] == [(f"forward C{i} m0", i * 5e5, 2.5e5) for i in range(3)]
    assert [e["args"]["bytes"] for e in events(subject, "C", process=2)] == [0, 10, 20]
