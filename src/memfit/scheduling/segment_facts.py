"""Peaks of a trace and the segments of a plan: how high a segment rises, which gradients lie behind
it.

In: `TraceProfile`, `Plan`, `StepShape`, `Profile`. Out: `SegmentFacts`, whatever the order of
events.

[Note: how high it rises]
`CallProfile.forward_peak` is above what is alive at the segment's entry, and nothing made inside is
counted as alive before the segment's end, so that live + rise counts each byte once. Of a call that
is recomputed autograd keeps nothing (or what is selected), so that its forward peak is lower than
that of its replay. In backward, gradients of activations are what the traced plain run has alive
beyond its saved tensors (`backward_leaves_bytes` summed from the end), and `backward_peak_bytes`
has the release of saved tensors subtracted already: what the plan still holds of those is added
again. A recomputed segment rises by the larger of its replay and its backward with everything
replayed alive. Replay drops what plain forward saves only at its end, so both bounds use the plain
run's peaks: never below the truth. The gradient of a weight that several calls share waits inside
autograd until the last of them has added to it, and the trace counts it as an activation meanwhile;
here it is a gradient from its first part on, so it is taken out of activations and of the rise of
the backward that begins it.

[Note: gradients come one by one]
A block's gradient is counted from the begin of its backward to its end. But while the highest
activations are alive, the gradients of the weights that backward comes to later are not there yet,
and while a segment is run again, none are. The trace knows both peaks, with gradients and without,
so what cannot be there at the same time is taken off the rise. Only for weights that no other call
reads: of the others the trace cannot tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any

from memfit.core.profile import CallProfile
from memfit.scheduling.segment_storages import SegmentStorages

_OF_THE_TRACE = (
    "gradient_bytes",
    "shared_by",
    "_unknown_bytes",
    "related",
    "plain_release",
    "released_in",
    "made_at",
    "uses",
    "of_segments",
)


class Arrival(StrEnum):
    """How the gradients of a segment's parameters come. See [Note: gradients come one by one].

    FRESH: they are the first of the step, and counted whole from the segment's backward on. ADDING:
    all are added to gradients that are there, and the largest is counted beside them. UNKNOWN:
    neither, or shared with other calls. SUMMED: likewise the first of the step, each of which is
    copied into a sum of its own, in the masters' dtype, as it arrives.
    """

    FRESH = "fresh"
    SUMMED = "summed"
    ADDING = "adding"
    UNKNOWN = "unknown"


class SegmentFacts(SegmentStorages):
    """Meaning of a trace's storages and peaks for the segments of a plan; independent of the order
    of events.
    """

    @cached_property
    def known(self) -> dict[Any, Any]:
        """Facts that were found of the plan's calls before: costs of events and effects of actions
        (`scheduling.activation_bytes`), work (`scheduling.work_amounts`). A key begins with which.
        """
        return {}

    @cached_property
    def gradient_bytes(self) -> tuple[int, ...]:
        """By call: bytes of activations' gradients alive after its backward; at the number of
        calls: after the seed.
        """
        saved = sum(s.nbytes for s in self.storages if s.index in self.plain_release)
        freed: dict[int, int] = {}
        for s in self.storages:
            if s.index in self.plain_release:
                freed[self.plain_release[s.index]] = freed.get(self.plain_release[s.index], 0) + s.nbytes
        count = len(self.trace.calls)
        alive = saved + self.trace.seed_leaves_bytes
        saved -= freed.get(count, 0)
        gradients = [0] * count + [max(0, alive - saved)]
        for call in reversed(self.trace.calls):
            if call.has_backward:
                alive += call.backward_leaves_bytes
                saved -= freed.pop(call.index, 0)
                gradients[call.index] = max(0, alive - saved - self._waiting_bytes(call.index))
            else:
                gradients[call.index] = gradients[call.index + 1]
        return tuple(gradients)

    @cached_property
    def shared_by(self) -> dict[str, list[int]]:
        """Blocks to whose gradients several calls add, with those calls."""
        trains = {b.name for b in self.profile.blocks if b.gradient_bytes}
        calls: dict[str, list[int]] = {}
        for call in self.trace.calls:
            for name in {*call.blocks} & trains if call.has_backward else ():
                calls.setdefault(name, []).append(call.index)
        return {name: found for name, found in calls.items() if len(found) > 1}

    def _waiting_bytes(self, call: int) -> int:
        """Sums gradients of shared weights that wait for another part after a call's backward."""
        return sum(self._unknown_bytes[name] for name, calls in self.shared_by.items() if calls[0] < call <= calls[-1])

    @cached_property
    def _unknown_bytes(self) -> dict[str, int]:
        """By shared block: bytes of the first part of its gradient that the trace has among
        activations. Autograd may add the later parts to that one in place: then it is the gradient,
        and the trace knows it as such.
        """
        unknown: dict[str, int] = {}
        for name, calls in self.shared_by.items():
            begins = self.trace.calls[calls[-1]]
            own = sum(
                self.profile.block(other).gradient_bytes for other in begins.blocks if other not in self.shared_by
            )
            known = max(0, begins.gradient_bytes - own)
            # Of several that begin here the first are taken for known: it is their sum that counts.
            earlier = [other for other in unknown if self.shared_by[other][-1] == calls[-1]]
            known -= sum(self.profile.block(other).gradient_bytes - unknown[other] for other in earlier)
            nbytes = self.profile.block(name).gradient_bytes
            unknown[name] = nbytes - min(nbytes, known)
        return unknown

    def _backward_peak(self, call: int) -> int:
        """A call's traced rise, without gradients of weights that begin to wait in it."""
        begun = sum(self._unknown_bytes[name] for name, calls in self.shared_by.items() if calls[-1] == call)
        return max(0, self.trace.calls[call].backward_peak_bytes - begun)

    def has_waited(self, block: str, segment: int) -> bool:
        """Tells whether, in the trace, a gradient of this block from a later call waits when this
        segment's backward adds to it.
        """
        calls = self.shared_by.get(block)
        return calls is not None and calls[-1] > self.shape.segments[segment][1]

    def waits_on(self, block: str, segment: int) -> bool:
        """Tells whether earlier calls are still to add to the block's gradient after this segment's
        backward.
        """
        calls = self.shared_by.get(block)
        return calls is not None and calls[0] < self.shape.segments[segment][0] <= calls[-1]

    def code_before(self, segment: int) -> CallProfile | None:
        """Returns the call of a segment whose backward runs last, if that of code in front of the
        segment follows it and takes memory; else None. At the tail that is part of the tail's.
        """
        first, last = self.shape.segments[segment]
        if segment >= self.shape.tail_segment or not self.shape.has_backward[segment]:
            return None
        call = next(c for c in self.trace.calls[first : last + 1] if c.has_backward)
        return call if call.between_peak_bytes > 0 or call.between_leaves_bytes != 0 else None

    def bytes_before_code(self, segment: int) -> int:
        """Returns gradients of activations between the backward of a segment and that of the code
        in front of it.
        """
        call = self.code_before(segment)
        assert call is not None
        freed = sum(
            s.nbytes for s in self.released_in.get(call.index, ()) if any(map(self.is_between, s.saved_outside))
        )
        return max(0, self.gradient_bytes[self.shape.segments[segment][0]] - call.between_leaves_bytes - freed)

    def take_trace_facts(self, other: SegmentFacts) -> None:
        """Takes from another plan's facts what depends on the trace and the profile alone.

        Both are of the same trace and profile.
        """
        assert self.trace is other.trace and self.profile is other.profile
        for name in _OF_THE_TRACE:
            # Where a cached property keeps its value.
            self.__dict__[name] = getattr(other, name)

    def forward_rise(self, segment: int) -> int:
        """Rise of a segment's forward. See [Note: how high it rises]."""
        return self._of_segment("forward", segment, self._forward_rise)

    def _forward_rise(self, segment: int) -> int:
        first, last = self.shape.segments[segment]
        saved = self.plan.call(first).saved
        rise = max(
            self.forward_inner_bytes(first, c) + self.trace.calls[c].forward_peak(saved) for c in range(first, last + 1)
        )
        return rise + self.extra_held_bytes(segment)

    def backward_rise(self, segment: int, arrival: Arrival = Arrival.UNKNOWN) -> int:
        """Rise of a segment's backward, without what the plan still holds of saved tensors.

        Args:
            segment: by index.
            arrival: of its gradients. Those that are counted from its begin on, and come later, are
                taken off; see [Note: gradients come one by one].
        """
        return self._of_segment(arrival, segment, lambda q: self._backward_rise(q, arrival))

    def _backward_rise(self, segment: int, arrival: Arrival) -> int:
        first, last = self.shape.segments[segment]
        calls = self.trace.calls
        counted = self._counted_bytes(first, last, arrival)
        saved = self.plan.call(first).saved
        if not saved.policy.recomputes:
            return max(self._backward_peak(first) - self._late_bytes(first, first, arrival), -counted)
        before = self.gradient_bytes[last + 1]
        held, handed = 0, [0] * (last + 1 - first)
        results = [c.held(saved) for c in calls[first : last + 1]]
        traced = [r for r in results if r is not None and r.peak_bytes is not None]
        if saved.policy.kept_operators and len(traced) == len(results):
            held = self.selected_bytes(segment)
            handed = [
                c.inside_peak_bytes - (r.peak_bytes or 0) for c, r in zip(calls[first : last + 1], traced, strict=True)
            ]
        # What selection holds is counted already, and is handed out in the order in which it was
        # made.
        out = [
            sum(r.nbytes for r in results[: call - first] if r is not None) if held else 0
            for call in range(first, last + 1)
        ]
        replay = _passed_on_bytes(calls[first : last + 1]) + max(
            self.inner_bytes(first, c) - out[c - first] + calls[c].inside_peak_bytes - handed[c - first]
            for c in range(first, last + 1)
        )
        back = max(
            self.replayed_bytes(first, c)
            + self.gradient_bytes[c + 1]
            - before
            + self._backward_peak(c)
            - self._late_bytes(first, c, arrival)
            for c in range(first, last + 1)
        )
        return max(0, replay - counted, back - held)

    def least_backward_rise(self, segment: int) -> int:
        """Returns the least rise of a segment's backward above what lies there and the segment's
        gradients, however these come.
        """
        first, last = self.shape.segments[segment]
        adding = self.backward_rise(segment, Arrival.ADDING) + self._largest_bytes(first, last)
        fresh = (self.backward_rise(segment, arrival) for arrival in (Arrival.FRESH, Arrival.SUMMED))
        return min(self.backward_rise(segment), *fresh, adding)

    def _counted_bytes(self, first: int, last: int, arrival: Arrival) -> int:
        """Returns what is counted of a segment's gradients from its begin on, and is not there
        before its first backward.
        """
        calls = self.trace.calls[first : last + 1]
        match arrival:
            case Arrival.FRESH:
                return sum(c.gradient_bytes for c in calls)
            case Arrival.SUMMED:
                return sum(c.gradient_sum_bytes for c in calls)
            case Arrival.ADDING:
                return self._largest_bytes(first, last)
            case Arrival.UNKNOWN:
                return 0

    def _late_bytes(self, first: int, call: int, arrival: Arrival) -> int:
        """Returns what of these is not there either when this call's backward is at its highest."""
        found = self.trace.calls[call]
        match arrival:
            case Arrival.FRESH:
                peak, begun = found.backward_fresh_peak_bytes, found.gradient_bytes
                later = sum(c.gradient_bytes for c in self.trace.calls[first:call])
            case Arrival.SUMMED:
                peak, begun = found.backward_summed_peak_bytes, found.gradient_sum_bytes
                later = sum(c.gradient_sum_bytes for c in self.trace.calls[first:call])
            case Arrival.ADDING:
                peak, begun = found.backward_adding_peak_bytes, self._largest_bytes(first, self._last_of(call))
                later = 0
            case Arrival.UNKNOWN:
                return 0
        return 0 if peak is None else later + max(0, begun + found.backward_peak_bytes - peak)

    def _last_of(self, call: int) -> int:
        return self.shape.segments[self.segment_of[call]][1]

    def _largest_bytes(self, first: int, last: int) -> int:
        names = {name for c in self.trace.calls[first : last + 1] for name in c.blocks}
        return max((self.profile.block(name).largest_gradient_bytes for name in names), default=0)


def _passed_on_bytes(calls: Sequence[CallProfile]) -> int:
    """Bytes that a segment's backward has made when it is run again: at the first saved tensor that
    is asked for. Untraced calls may have passed on a gradient of their output's size.
    """
    return max(c.output_bytes if c.passed_on_bytes is None else c.passed_on_bytes for c in calls)
