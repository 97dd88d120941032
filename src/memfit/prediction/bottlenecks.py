"""Bottlenecks of a step over time: which lane works most in each of its phases.

In: a predicted `Timeline`. Out: `Phase`s, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from memfit.core.timeline import COMPUTE_LANE, Interval, Timeline


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a step.

    Attributes:
        name: "forward", "backward", or "the rest" (updates that are left, commits of a journal).
        start_s, end_s: since the step began.
        busy_s: for how long each lane works in it, the busiest first. The compute lane: without its
            stalls.
        stalls_s: for how long compute waits in it, by cause.
    """

    name: str
    start_s: float
    end_s: float
    busy_s: Mapping[str, float]
    stalls_s: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


def find_phases(timeline: Timeline) -> tuple[Phase, ...]:
    """Splits a step where its first backward begins and its last one ends, and says who works.

    A step that goes back and forth (microbatch by microbatch, or with a tail) has one phase
    "forward" until its first backward: the other forwards count as the backward's.
    """
    backward = [moment for moment in timeline.moments if moment.action.startswith("backward ")]
    end = max((moment.end_s for moment in timeline.moments), default=0.0)
    if not backward or not timeline.intervals:
        return ()
    bounds = [0.0, backward[0].start_s, backward[-1].end_s, end]
    names = ("forward", "backward", "the rest")
    return tuple(
        _phase(name, begin, until, timeline.intervals)
        for name, (begin, until) in zip(names, pairwise(bounds), strict=True)
        if until > begin
    )


def _phase(name: str, begin: float, until: float, intervals: tuple[Interval, ...]) -> Phase:
    busy: dict[str, float] = {}
    stalls: dict[str, float] = {}
    for each in intervals:
        seconds = min(each.end_s, until) - max(each.start_s, begin)
        if seconds <= 0:
            continue
        if each.kind == "stall":
            stalls[each.name] = stalls.get(each.name, 0.0) + seconds
        else:
            busy[each.lane] = busy.get(each.lane, 0.0) + seconds
    return Phase(
        name=name,
        start_s=begin,
        end_s=until,
        busy_s=dict(sorted(busy.items(), key=lambda item: (-item[1], item[0] != COMPUTE_LANE))),
        stalls_s=stalls,
    )
