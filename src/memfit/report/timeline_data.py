"""Columns of a timeline, as the page draws them.

In: `Timeline`. Out: JSON values: a list for each field, with an entry an action.

[Note: small columns]
Bytes and times are written as differences to the entry before, in whole bytes and tenths of a
microsecond: most of them are 0 or short. Beyond `MOST_MOMENTS` actions, equal numbers of
neighbours are folded into one that shows the highest of them; beyond `MOST_INTERVALS`, neighbours
of a lane that are of one kind are joined, and the shortest left out. So a page stays small whatever
the model, and every peak stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from memfit.core.profile import StorageProfile, TraceProfile
from memfit.core.schedule import Backward, Forward, Schedule
from memfit.core.step import CATEGORIES, COMPUTE_LANE, Interval, Moment, Timeline
from memfit.core.step_report import joined_names
from memfit.report.memory_tables import trace_of
from memfit.report.subject import ReportSubject

MOST_MOMENTS = 20_000
MOST_INTERVALS = 30_000
TICKS_PER_S = 10_000_000
"""Times are counted in tenths of a microsecond."""


@dataclass(frozen=True, kw_only=True)
class FoldedTimeline:
    """A timeline with at most so many moments and intervals.

    Attributes:
        timeline: folded.
        first: index of the first action of each moment; its length is that of the moments.
        begins_s: when the main thread comes to each.
    """

    timeline: Timeline
    first: tuple[int, ...]
    begins_s: tuple[float, ...]


def fold(timeline: Timeline, *, moments: int = MOST_MOMENTS, intervals: int = MOST_INTERVALS) -> FoldedTimeline:
    """Folds a timeline that is too long to be drawn action by action; see [Note: small columns]."""
    begins = main_thread_begins(timeline)
    width = -(-len(timeline.moments) // moments) or 1
    first = tuple(range(0, len(timeline.moments), width))
    folded = replace(
        timeline,
        moments=tuple(_folded(timeline.moments[i : i + width]) for i in first) if width > 1 else timeline.moments,
        intervals=tuple(
            _joined_intervals([i._replace(moment=i.moment // width) for i in timeline.intervals], intervals)
        ),
    )
    return FoldedTimeline(timeline=folded, first=first, begins_s=tuple(begins[i] for i in first))


def main_thread_begins(timeline: Timeline) -> list[float]:
    """Returns when the main thread comes to each action: after all that it computed and waited for
    before. Without intervals (a measured timeline) that is when the action began.
    """
    if not timeline.intervals:
        return [moment.start_s for moment in timeline.moments]
    ends = [0.0] * (len(timeline.moments) + 1)
    for interval in timeline.intervals:
        if interval.lane == COMPUTE_LANE:
            ends[interval.moment + 1] = max(ends[interval.moment + 1], interval.end_s)
    for index in range(1, len(ends)):
        ends[index] = max(ends[index], ends[index - 1])
    return ends[:-1]


def peak_index(timeline: Timeline) -> int:
    """Returns the first action with the peak on the device; -1 without actions."""
    peaks = [moment.peak_bytes for moment in timeline.moments]
    return peaks.index(max(peaks)) if peaks else -1


def timeline_data(timeline: Timeline, *, tiers: Iterable[tuple[str, Sequence[int]]] = ()) -> dict[str, Any]:
    """Returns a timeline's columns.

    Args:
        timeline: predicted or measured.
        tiers: bytes of other tiers by action.

    Returns:
        Columns by name; "by_category" has one for each category that is ever used. At every action
        they sum to its peak.
    """
    folded = fold(timeline)
    moments = folded.timeline.moments
    shown = [_shown(moment) for moment in moments]
    by_category = {
        category: _differences(column)
        for category in (*CATEGORIES, *sorted({name for each in shown for name in each} - set(CATEGORIES)))
        if any(column := [each.get(category, 0) for each in shown])
    }
    width = folded.first[1] if len(folded.first) > 1 else 1
    return {
        "ticks_per_s": TICKS_PER_S,
        "actions": [moment.action for moment in moments],
        "first": list(folded.first) if width > 1 else None,
        "peak_bytes": _differences([moment.peak_bytes for moment in moments]),
        "after_bytes": _differences([moment.after_bytes for moment in moments]),
        "by_category": by_category,
        "begin": _differences(_ticks(folded.begins_s)),
        "start": _differences(_ticks(moment.start_s for moment in moments)),
        "end": _differences(_ticks(moment.end_s for moment in moments)),
        "seconds": timeline.seconds,
        "commit_s": timeline.commit_s,
        "peak_index": peak_index(folded.timeline),
        "tiers": {
            name: _differences([max(column[i : i + width]) for i in folded.first])
            for name, column in tiers
            if any(column)
        },
        "peaks": {str(tier): nbytes for tier, nbytes in timeline.peaks.items()},
        "read": dict(timeline.bytes_read),
        "written": dict(timeline.bytes_written),
        "stalls_s": dict(timeline.stalls_s),
        "lanes": _lanes(folded.timeline.intervals),
    }


def _lanes(intervals: Iterable[Interval]) -> list[dict[str, Any]]:
    """Returns the lanes: compute first, then in the order of their names."""
    lanes: dict[str, list[Interval]] = {}
    for interval in intervals:
        lanes.setdefault(interval.lane, []).append(interval)
    for found in lanes.values():
        found.sort(key=lambda i: i.start_s)
    return [
        {
            "name": lane,
            "start": _differences(_ticks(i.start_s for i in found)),
            "ticks": _ticks(i.end_s - i.start_s for i in found),
            "kinds": kinds,
            "kind": [kinds.index(f"{i.kind} {i.name}") for i in found],
            "moment": _differences([i.moment for i in found]),
            "bytes": [i.nbytes for i in found] if any(i.nbytes for i in found) else None,
        }
        for lane, found in sorted(lanes.items(), key=lambda pair: (pair[0] != COMPUTE_LANE, pair[0]))
        for kinds in [sorted({f"{i.kind} {i.name}" for i in found})]
    ]


def _folded(group: Sequence[Moment]) -> Moment:
    """Returns one moment for several: the bytes of the highest, the time of all."""
    highest = max(group, key=lambda moment: moment.peak_bytes)
    return replace(
        highest,
        after_bytes=group[-1].after_bytes,
        start_s=min(moment.start_s for moment in group),
        end_s=max(moment.end_s for moment in group),
    )


def _joined_intervals(intervals: Sequence[Interval], most: int) -> Iterable[Interval]:
    width = -(-len(intervals) // most) or 1
    if width == 1:
        return intervals
    joined: list[Interval] = []
    by_lane = sorted(range(len(intervals)), key=lambda i: (intervals[i].lane, intervals[i].start_s, i))
    for _, found in groupby((intervals[i] for i in by_lane), key=lambda i: (i.lane, i.kind, i.name)):
        run = list(found)
        for begin in range(0, len(run), width):
            part = run[begin : begin + width]
            joined.append(part[0]._replace(nbytes=sum(i.nbytes for i in part), end_s=max(i.end_s for i in part)))
    # Where work and stalls alternate nothing joins: the shortest are left out.
    return sorted(joined, key=lambda i: i.start_s - i.end_s)[:most]


def _shown(moment: Moment) -> dict[str, int]:
    """Returns bytes by category, none below 0 and with the same sum: what was counted too early in
    one category is taken off the largest.
    """
    shown = dict(moment.by_category)
    for category in [category for category, nbytes in shown.items() if nbytes < 0]:
        debt, shown[category] = -shown[category], 0
        for larger in sorted(shown, key=lambda name: -shown[name]):
            paid = min(debt, max(0, shown[larger]))
            shown[larger] -= paid
            debt -= paid
    return shown


def _ticks(times_s: Iterable[float]) -> list[int]:
    return [round(time_s * TICKS_PER_S) for time_s in times_s]


def _differences(column: Sequence[int]) -> list[int]:
    return [value - before for value, before in zip(column, (0, *column[:-1]), strict=True)]


# Lifetimes of activations: where they are made, used last and needed again, and how long they lie
# idle in between.
#
# In: the trace of a microbatch, the plan, the predicted timeline. Out: JSON values, for microbatch
# 0.
#
# [Note: idle]
# What a call saves is used until forward leaves the call that uses it last, and again from the
# backward of the call that saved it. In between it is idle: kept, it takes its bytes for those
# seconds; recomputed it is gone; offloaded it is away. Idle byte-seconds of what is kept are what a
# plan can win.
#
# [Note: uses]
# A use is an operation that reads a storage: in forward; again in the second run of each call that
# recomputes, which repeats what that call's forward read; and in backward.
#
# [Note: break-even]
# To keep a storage costs its bytes for its idle seconds. To send it away and back takes its bytes
# twice over a link, hidden where it is idle for longer. To make it again takes its share, by bytes,
# of what recomputing the call that saves it takes. So there is a speed of a link at which the two
# cost the same: a faster link moves it sooner than the device makes it again.

MOST_STORAGES = 40


def lifetime_data(subject: ReportSubject) -> dict[str, Any]:
    """Returns the lifetimes.

    Returns:
        "calls": for each call with a backward, in forward order: its site, policy, bytes that it
        saves beyond its arguments, bytes of its arguments, [begin, end] of its forward and of its
        backward in seconds, their actions' indices, and the seconds that recomputing it takes more
        than keeping what it saves (null: not known). "storages": the ones with the most idle
        byte-seconds, with the uses of one, and what moving one by each link, or making it again,
        takes; see [Note: uses] and [Note: break-even].
    """
    trace, plan = trace_of(subject), subject.plan
    spans = _Spans(subject.schedule, subject.predicted)
    calls: list[dict[str, Any]] = []
    for call in trace.calls:
        forward, backward = spans.forward.get(call.index), spans.backward.get(call.index)
        if forward is None or backward is None:
            continue
        calls.append(
            {
                "site": call.site,
                "call": call.index,
                "policy": str(plan.call(call.index).saved),
                "saved_bytes": trace.saved_bytes(call.index),
                "boundary_bytes": trace.boundary_bytes(call.index),
                "forward": forward,
                "backward": backward,
                "forward_s": spans.seconds(forward),
                "backward_s": spans.seconds(backward),
                "recompute_s": _recompute_s(subject, call.index),
            }
        )
    return {"calls": calls, "storages": _idlest(trace, subject, spans)}


class _Spans:
    """Actions of each call's forward and backward of microbatch 0, and their seconds."""

    def __init__(self, schedule: Schedule, timeline: Timeline) -> None:
        self.forward: dict[int, int] = {}
        self.backward: dict[int, int] = {}
        self._moments = timeline.moments
        for index, action in enumerate(schedule.actions):
            if isinstance(action, Forward | Backward) and action.microbatch == 0:
                actions = self.forward if isinstance(action, Forward) else self.backward
                for call in range(action.first, action.last + 1):
                    actions.setdefault(call, index)

    def seconds(self, action: int) -> list[float]:
        """Returns begin and end of an action."""
        moment = self._moments[action]
        return [moment.start_s, moment.end_s]


def _recompute_s(subject: ReportSubject, call: int) -> float | None:
    return subject.recompute_s[call] if subject.recompute_s else None


def _break_even(trace: TraceProfile, subject: ReportSubject, saver: int, nbytes: int) -> dict[str, Any]:
    """Seconds of moving a storage away and back, by tier, and of making it again; bytes a second of
    a link at which both take the same. See [Note: break-even].
    """
    away = {} if subject.hardware is None else subject.hardware.away
    links = {tier: spec.link for tier, spec in away.items() if spec.link is not None}
    reload_s = {
        str(tier): nbytes / link.write_bytes_per_s + nbytes / link.read_bytes_per_s for tier, link in links.items()
    }
    whole_s, saved = _recompute_s(subject, saver), trace.saved_bytes(saver)
    again_s = None if whole_s is None or not saved else whole_s * min(1.0, nbytes / saved)
    return {
        "reload_s": reload_s,
        "recompute_s": again_s,
        "break_even_bytes_per_s": 2 * nbytes / again_s if again_s else None,
    }


def _uses(storage: StorageProfile, trace: TraceProfile, subject: ReportSubject) -> dict[str, int]:
    """How often operations read a storage, by when they do. See [Note: uses]."""
    again = [
        count
        for segment, count in storage.uses
        if segment >= 0 and trace.calls[segment].has_backward and subject.plan.call(segment).saved.policy.recomputes
    ]
    forward = sum(count for _, count in storage.uses)
    return {"forward": forward, "recompute": sum(again), "backward": storage.backward_uses}


def _idlest(trace: TraceProfile, subject: ReportSubject, spans: _Spans) -> list[dict[str, Any]]:
    """Returns the storages that lie idle longest in this step where their calls keep them; those
    of equal calls in one row, with the times of the first.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    names: dict[tuple[Any, ...], tuple[list[str], list[str]]] = {}
    for storage in trace.storages:
        savers = [call for call in (*storage.saved_inside, *storage.saved_outside) if call in spans.backward]
        if storage.is_input or not savers or storage.segment not in spans.forward:
            continue
        used = min(max(storage.last_use, storage.segment), len(trace.calls) - 1)
        last_used_s = spans.seconds(spans.forward.get(used, spans.forward[storage.segment]))[1]
        # Backward comes to the last of the calls first.
        again_s = spans.seconds(spans.backward[max(savers)])[0]
        maker, saver = trace.calls[storage.segment], trace.calls[min(savers)]
        policies = dict.fromkeys(str(subject.plan.call(call).saved) for call in storage.saved_inside)
        policy = ", ".join(policies) or "keep (between calls)"
        key = (maker.kind, saver.kind, storage.nbytes, policy)
        row = found.setdefault(
            key,
            {
                "policy": policy,
                "nbytes": storage.nbytes,
                "count": 0,
                "made_s": spans.seconds(spans.forward[storage.segment])[0],
                "used_s": last_used_s,
                "again_s": again_s,
                "idle_byte_s": 0.0,
                "uses": _uses(storage, trace, subject),
                **_break_even(trace, subject, min(savers), storage.nbytes),
            },
        )
        row["count"] += 1
        row["idle_byte_s"] += storage.nbytes * max(0.0, again_s - last_used_s)
        made_by, saved_by = names.setdefault(key, ([], []))
        made_by.append(maker.site)
        saved_by.append(saver.site)
    for key, (made_by, saved_by) in names.items():
        found[key].update(made_by=joined_names(made_by), saved_by=joined_names(saved_by))
    # Without seconds all are idle for none of them: the largest are shown then.
    rows = sorted(found.values(), key=lambda row: (-row["idle_byte_s"], -row["nbytes"] * row["count"]))
    return rows[:MOST_STORAGES]
