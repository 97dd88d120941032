"""Lifetimes of activations: where they are made, used last and needed again, and how long they lie
idle in between.

In: the trace of a microbatch, the plan, the predicted timeline. Out: JSON values, for microbatch 0.

[Note: idle]
What a call saves is used until forward leaves the call that uses it last, and again from the
backward of the call that saved it. In between it is idle: kept, it takes its bytes for those
seconds; recomputed it is gone; offloaded it is away. Idle byte-seconds of what is kept are what a
plan can win.

[Note: uses]
A use is an operation that reads a storage: in forward; again in the second run of each call
that recomputes, which repeats what that call's forward read; and in backward.

[Note: break-even]
To keep a storage costs its bytes for its idle seconds. To send it away and back takes its bytes
twice over a link, hidden where it is idle for longer. To make it again takes its share, by bytes,
of what recomputing the call that saves it takes. So there is a speed of a link at which the two
cost the same: a faster link moves it sooner than the device makes it again.
"""

from __future__ import annotations

from typing import Any

from memfit.core.numbered_names import joined_names
from memfit.core.profile import TraceProfile
from memfit.core.schedule import Backward, Forward, Schedule
from memfit.core.storage_profile import StorageProfile
from memfit.core.timeline import Timeline
from memfit.report.memory_tables import trace_of
from memfit.report.subject import ReportSubject

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
