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

from memfit.core.step import CATEGORIES
from memfit.core.timeline import COMPUTE_LANE, Interval, Moment, Timeline

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
