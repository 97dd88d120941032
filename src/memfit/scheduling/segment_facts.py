"""What a trace's storages and peaks mean for the segments of a plan, whatever the order of events.

In: `TraceProfile`, `Plan`, `StepShape`, `Profile`. Out: `SegmentFacts`: what a segment holds, moves and makes again, how high it
rises, which gradients of activations are alive behind it.

[Note: how high it rises]
`forward_peak_bytes` is above what is alive at the segment's entry, and nothing made inside is counted as alive before
the segment's end, so that live + rise counts each byte once. In backward, gradients of activations are what the
traced plain run has alive beyond its saved tensors (`backward_leaves_bytes` summed from the end), and
`backward_peak_bytes` has the release of saved tensors subtracted already: what the plan still holds of those is added
again. A recomputed segment rises by the larger of its replay and its backward with everything replayed alive. Replay
drops what plain forward saves only at its end, so both bounds use the plain run's peaks: never below the truth. The
gradient of a weight that several calls share waits inside autograd until the last of them has added to it, and the
trace counts it as an activation meanwhile; here it is a gradient from its first part on, so it is taken out of
activations and of the rise of the backward that begins it.

[Note: gradients come one by one]
A block's gradient is counted from the begin of its backward to its end. But while the highest activations are alive, the gradients of the weights that
backward comes to later are not there yet, and while a segment is run again, none are. The trace knows both peaks, with gradients and without, so what cannot be
there at the same time is taken off the rise. Only for weights that no other call reads: of the others the trace cannot tell.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property

from memfit.core.plan import Order, Plan
from memfit.core.profile import Profile, StorageProfile, TraceProfile
from memfit.core.shape import StepShape

# Stands for a release that only the end of the microbatch brings.
END = -2
# Stands for the segment of glue that lets go as soon as backward begins.
SEED = -3


class Arrival(Enum):
    """How the gradients of a segment's parameters come. See [Note: gradients come one by one].

    FRESH: they are the first of the step, and counted whole from the segment's backward on. ADDING: all are added to gradients that are there, and the
    largest is counted beside them. UNKNOWN: neither, or shared with other calls.
    """

    FRESH = "fresh"
    ADDING = "adding"
    UNKNOWN = "unknown"


class SegmentFacts:
    """What storages and peaks mean for the segments of a plan; independent of the order of events."""

    def __init__(self, trace: TraceProfile, plan: Plan, shape: StepShape, profile: Profile) -> None:
        self.profile = profile
        self.trace = trace
        self.plan = plan
        self.shape = shape
        self.storages = tuple(s for s in trace.storages if not s.is_input)
        self.lasting_bytes = sum(s.nbytes for s in self.storages if s.is_lasting)
        # In turns, each microbatch has its own beside what the step before has left; else there is one at a time.
        self.shares_lasting = plan.microbatches == 1 or plan.order is Order.MICROBATCH_MAJOR

    @cached_property
    def segment_of(self) -> tuple[int, ...]:
        """Segment by call."""
        return tuple(i for i, (first, last) in enumerate(self.shape.segments) for _ in range(first, last + 1))

    @cached_property
    def made_in(self) -> dict[int, list[StorageProfile]]:
        """Storages by the segment that makes them; -1: the prologue."""
        made: dict[int, list[StorageProfile]] = {}
        for s in self.storages:
            made.setdefault(-1 if s.segment < 0 else self.segment_of[s.segment], []).append(s)
        return made

    def used_until(self, s: StorageProfile) -> int:
        """Last call's segment at whose end use still keeps it; below its own segment: not even there."""
        last = max(s.last_use, s.segment, *s.saved_inside, *s.saved_outside, *s.argument_of)
        until = s.held_until if s.held_until > last else last - 1
        # Recorded although nobody saves or receives it: then because it is alive at the end of its segment.
        is_noted = s.saved_inside or s.saved_outside or s.argument_of
        return until if is_noted else max(until, s.segment)

    def release_segment(self, call: int) -> int:
        """Segment whose backward lets go of what call `call` saved inside; `END` if none has a backward."""
        segment = self.segment_of[call]
        while segment >= 0 and not self.shape.has_backward[segment]:
            segment -= 1
        return segment if segment >= 0 else END

    def glue_release_segment(self, call: int) -> int:
        """Segment whose backward lets go of what the glue after `call` saved; `SEED`: right after the seed.

        At the tail's cut that is the segment before it: there the joint backward begins.
        """
        count = len(self.shape.segments)
        inside = -1 if call < 0 else self.segment_of[call]
        if inside >= 0 and call < self.shape.segments[inside][1]:
            return self.release_segment(call)
        segment = inside + 1
        while segment < count and not self.shape.has_backward[segment]:
            segment += 1
        has_cut = self.shape.tail_segment < count
        if has_cut and 0 <= inside < self.shape.tail_segment <= segment:
            return self.release_segment(call)
        return segment if segment < count else SEED

    @cached_property
    def related(self) -> dict[int, list[StorageProfile]]:
        """By call: storages that it saved, that its glue saved or that it received, each once, in order."""
        found: dict[int, list[StorageProfile]] = {}
        for s in self.storages:
            for call in sorted({*s.saved_inside, *s.saved_outside, *s.argument_of}):
                found.setdefault(call, []).append(s)
        return found

    def _related_to(self, first: int, last: int) -> list[StorageProfile]:
        found = {s.index: s for call in range(first, last + 1) for s in self.related.get(call, ())}
        return list(found.values())

    @cached_property
    def copies_bytes(self) -> tuple[int, ...]:
        """By segment: bytes that its offload moves and its reload makes: of what it saved (offload), or of its arguments (recompute)."""
        return tuple(sum(s.nbytes for s in self._movable(q) if s.leaves) for q in range(len(self.shape.segments)))

    def copy_bytes(self, segment: int) -> int:
        """Bytes that an offload of the segment moves, and a reload makes."""
        return self.copies_bytes[segment]

    def _movable(self, segment: int) -> list[StorageProfile]:
        """Bytes that a segment which does not keep moves, but for what stays: all it saved (offload), or its arguments (recompute)."""
        first, last = self.shape.segments[segment]
        related = self._related_to(first, last)
        if self.plan.call(first).saved.policy.offloads:
            return [s for s in related if first in s.saved_inside]
        return [s for s in related if self._is_argument(s, first, last)]

    def extra_held_bytes(self, segment: int, *, leaves: bool | None = None) -> int:
        """What a recomputed segment holds beyond its arguments: copies of mutated ones.

        Args:
            segment: by index.
            leaves: only those that leave if arguments are sent away, or only those that do not; None: all.
        """
        first, last = self.shape.segments[segment]
        is_replayed = self.plan.call(first).saved.policy.recomputes
        if not is_replayed or not any(c.mutates_inputs for c in self.trace.calls[first : last + 1]):
            return 0
        return sum(s.nbytes for s in self._movable(segment) if leaves is None or s.leaves is leaves)

    def selected_bytes(self, segment: int) -> int:
        """What a selective segment holds beyond its arguments and never moves."""
        first, last = self.shape.segments[segment]
        saved = self.plan.call(first).saved
        if not saved.policy.kept_operators or not self.shape.has_backward[segment]:
            return 0
        is_alone = first == last
        found = [(c, c.held(saved)) for c in self.trace.calls[first : last + 1]]
        return sum(
            self.trace.saved_bytes(c.index) if held is None else held.nbytes - is_alone * held.unneeded_bytes
            for c, held in found
        )

    @cached_property
    def plain_release(self) -> dict[int, int]:
        """By storage: the call whose backward lets go of it in the plain run; absent: forward does.

        The number of calls stands for the seed, `END` for the end.
        """
        release: dict[int, int] = {}
        calls = self.trace.calls
        for s in self.storages:
            found = [next((c for c in range(i, -1, -1) if calls[c].has_backward), END) for i in s.saved_inside]
            found += [
                next((c for c in range(i + 1, len(calls)) if calls[c].has_backward), len(calls))
                for i in s.saved_outside
            ]
            if self.used_until(s) >= len(calls) - 1:
                found.append(END)
            if s.is_lasting:
                found = [END]
            if found:
                release[s.index] = min(found)
        return release

    @cached_property
    def gradient_bytes(self) -> tuple[int, ...]:
        """By call: bytes of activations' gradients alive after its backward; at the number of calls: after the seed."""
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
        """Gradients of shared weights that wait for another contribution after a call's backward."""
        return sum(
            self.profile.block(name).gradient_bytes
            for name, calls in self.shared_by.items()
            if calls[0] < call <= calls[-1]
        )

    def _backward_peak(self, call: int) -> int:
        """A call's traced rise, without gradients of weights that begin to wait in it."""
        begun = sum(
            self.profile.block(name).gradient_bytes for name, calls in self.shared_by.items() if calls[-1] == call
        )
        return max(0, self.trace.calls[call].backward_peak_bytes - begun)

    def has_waited(self, block: str, segment: int) -> bool:
        """In the trace, a gradient of this block from a later call waits when this segment's backward adds to it."""
        calls = self.shared_by.get(block)
        return calls is not None and calls[-1] > self.shape.segments[segment][1]

    def waits_on(self, block: str, segment: int) -> bool:
        """After this segment's backward, earlier calls are still to add to the block's gradient."""
        calls = self.shared_by.get(block)
        return calls is not None and calls[0] < self.shape.segments[segment][0] <= calls[-1]

    def inner_bytes(self, first: int, call: int) -> int:
        """Bytes made by the calls from `first` on that are alive when `call` begins, everything kept."""
        return sum(
            s.nbytes
            for made in range(first, call)
            for s in self._made_at.get(made, ())
            if s.index in self.plain_release or self.used_until(s) >= call - 1 or s.argument_of[-1:] >= (call,)
        )

    @cached_property
    def _made_at(self) -> dict[int, list[StorageProfile]]:
        made: dict[int, list[StorageProfile]] = {}
        for s in self.storages:
            made.setdefault(s.segment, []).append(s)
        return made

    def replayed_bytes(self, first: int, last: int) -> int:
        """Bytes that replaying calls first..last makes anew and backward needs."""
        return sum(
            s.nbytes
            for s in self._related_to(first, last)
            if (any(first <= c <= last for c in s.saved_inside) and not self._is_argument(s, first, last))
            or (first < last and any(first <= c < last for c in s.saved_outside) and s.segment >= first)
        )

    def _is_argument(self, s: StorageProfile, first: int, last: int) -> bool:
        return s.segment < first and any(first <= c <= last for c in s.argument_of)

    def forward_rise(self, segment: int) -> int:
        """Rise of a segment's forward. See [Note: how high it rises]."""
        first, last = self.shape.segments[segment]
        rise = max(self.inner_bytes(first, c) + self.trace.calls[c].forward_peak_bytes for c in range(first, last + 1))
        return rise + self.extra_held_bytes(segment)

    def backward_rise(self, segment: int, arrival: Arrival = Arrival.UNKNOWN) -> int:
        """Rise of a segment's backward, without what the plan still holds of saved tensors.

        Args:
            segment: by index.
            arrival: of its gradients. Those that are counted from its begin on, and come later, are taken off; see [Note: gradients come one by one].
        """
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
        # What selection holds is counted already, and is handed out in the order in which it was made.
        out = [
            sum(r.nbytes for r in results[: call - first] if r is not None) if held else 0
            for call in range(first, last + 1)
        ]
        # A gradient of the output's size may already have been passed on when the first saved tensor is asked for.
        replay = max(
            self.inner_bytes(first, c)
            - out[c - first]
            + calls[c].inside_peak_bytes
            - handed[c - first]
            + calls[c].output_bytes
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
        """The same above what lies there and the segment's gradients, however these come."""
        first, last = self.shape.segments[segment]
        adding = self.backward_rise(segment, Arrival.ADDING) + self._largest_bytes(first, last)
        return min(self.backward_rise(segment), self.backward_rise(segment, Arrival.FRESH), adding)

    def _counted_bytes(self, first: int, last: int, arrival: Arrival) -> int:
        """What is counted of a segment's gradients from its begin on, and is not there before its first backward."""
        calls = self.trace.calls[first : last + 1]
        match arrival:
            case Arrival.FRESH:
                return sum(c.gradient_bytes for c in calls)
            case Arrival.ADDING:
                return self._largest_bytes(first, last)
            case Arrival.UNKNOWN:
                return 0

    def _late_bytes(self, first: int, call: int, arrival: Arrival) -> int:
        """Of these, what is not there either when this call's backward is at its highest."""
        found = self.trace.calls[call]
        match arrival:
            case Arrival.FRESH:
                peak, begun = found.backward_fresh_peak_bytes, found.gradient_bytes
                later = sum(c.gradient_bytes for c in self.trace.calls[first:call])
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
