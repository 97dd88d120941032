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

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

from memfit.core.plan import CallPlan, Order, Plan
from memfit.core.profile import CallProfile, Profile, StorageProfile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.shape import (
    CallShape,
    StepShape,
    describe_calls,
    describe_homes,
    describe_model,
    describe_segments,
    describe_step,
)

# Storages of a trace by themselves: who makes, uses and lets go of them in the plain run.
#
# In: `TraceProfile`. Out: `TraceStorages`, which all plans of a profile share (`KnownFacts`). What
# a plan's segments make of them is in `SegmentStorages`.

# Stands for a release that only the end of the microbatch brings.
END = -2


class TraceStorages:
    """Storages of one microbatch in the plain run.

    Args:
        trace: of the microbatch.
        storages: as they were found for the same trace before.
    """

    def __init__(self, trace: TraceProfile, storages: tuple[StorageProfile, ...] | None) -> None:
        self.trace = trace
        self.storages = merged(s for s in trace.storages if not s.is_input) if storages is None else storages
        self.lasting_bytes = sum(s.nbytes for s in self.storages if s.is_lasting)

    def used_until(self, s: StorageProfile) -> int:
        """Last call of the trace at the end of whose segment use still keeps the storage alive;
        below the storage's own segment: not even there.
        """
        found = self.uses.get(s.index)
        if found is None:
            found = self.uses[s.index] = self._used_until(s)
        return found

    @cached_property
    def uses(self) -> dict[int, int]:
        """Results of `used_until` by storage."""
        return {}

    def _used_until(self, s: StorageProfile) -> int:
        last = max(s.last_use, s.segment, *s.saved_inside, *s.saved_outside, *s.argument_of)
        until = s.held_until if s.held_until > last else last - 1
        # Recorded although nobody saves or receives it: then because it is alive at the end of its
        # segment.
        is_noted = s.saved_inside or s.saved_outside or s.argument_of
        return until if is_noted else max(until, s.segment)

    @cached_property
    def related(self) -> dict[int, list[StorageProfile]]:
        """By call: storages that it saved, that the code behind it saved or that it received, each
        once, in order.
        """
        found: dict[int, list[StorageProfile]] = {}
        for s in self.storages:
            for call in sorted({*s.saved_inside, *s.saved_outside, *s.argument_of}):
                found.setdefault(call, []).append(s)
        return found

    def _related_to(self, first: int, last: int) -> list[StorageProfile]:
        found = {s.index: s for call in range(first, last + 1) for s in self.related.get(call, ())}
        return list(found.values())

    @cached_property
    def made_at(self) -> dict[int, list[StorageProfile]]:
        """Storages by the call in whose segment they were made."""
        made: dict[int, list[StorageProfile]] = {}
        for s in self.storages:
            made.setdefault(s.segment, []).append(s)
        return made

    @cached_property
    def released_in(self) -> dict[int, list[StorageProfile]]:
        """By call: storages that its backward lets go of in the plain run; by the number of calls:
        those that the seed does.
        """
        found: dict[int, list[StorageProfile]] = {}
        for s in self.storages:
            found.setdefault(self.plain_release.get(s.index, END), []).append(s)
        return found

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
    def of_segments(self) -> dict[object, Any]:
        """Facts about segments by their roles, whatever plan they belong to."""
        return {}


def merged(storages: Iterable[StorageProfile]) -> tuple[StorageProfile, ...]:
    """Returns storages of which those that are made, held and let go by the same are one. All that
    is asked of them are sums of bytes.
    """
    found: dict[object, StorageProfile] = {}
    for s in storages:
        role = tuple(value for name, value in vars(s).items() if name not in ("index", "nbytes"))
        known = found.get(role)
        found[role] = s if known is None else replace(known, nbytes=known.nbytes + s.nbytes)
    return tuple(found.values())


# Storages of a trace and the segments of a plan: who makes them, holds them, moves them, lets go.
#
# In: `TraceProfile`, `Plan`, `StepShape`, `Profile`. Out: `SegmentStorages`, whatever the order of
# events. Which of them are alive when is followed in `lifetimes`.

# Stands for the code between calls that lets go as soon as backward begins.
SEED = -3


class SegmentStorages(TraceStorages):
    """Meaning of a trace's storages for the segments of a plan."""

    def __init__(
        self,
        trace: TraceProfile,
        plan: Plan,
        shape: StepShape,
        profile: Profile,
        storages: tuple[StorageProfile, ...] | None = None,
    ) -> None:
        super().__init__(trace, storages)
        self.profile = profile
        self.plan = plan
        self.shape = shape
        # In turns, each microbatch has its own beside what the step before has left; else there is
        # one at a time.
        self.shares_lasting = plan.microbatches == 1 or plan.order is Order.MICROBATCH_MAJOR

    @cached_property
    def segment_of(self) -> tuple[int, ...]:
        """Segment by call."""
        return tuple(i for i, (first, last) in enumerate(self.shape.segments) for _ in range(first, last + 1))

    @cached_property
    def logits_segment(self) -> int | None:
        """Segment of the last call, unless that is one of a series: it makes the logits, and the
        loss comes behind it.
        """
        calls = self.trace.calls
        return self.segment_of[-1] if calls and not calls[-1].is_repeated else None

    @cached_property
    def logits_owners(self) -> frozenset[str]:
        """Owners of what that segment makes, and of its gradients, where bytes are itemized."""
        if self.logits_segment is None:
            return frozenset()
        first, last = self.shape.segments[self.logits_segment]
        return frozenset({*(f"C{call}" for call in range(first, last + 1)), "gradients of logits"})

    @cached_property
    def made_in(self) -> dict[int, list[StorageProfile]]:
        """Storages by the segment that makes them; -1: the prologue."""
        made: dict[int, list[StorageProfile]] = {}
        for s in self.storages:
            made.setdefault(-1 if s.segment < 0 else self.segment_of[s.segment], []).append(s)
        return made

    def release_segment(self, call: int) -> int:
        """Segment whose backward lets go of what call `call` saved inside; `END` if none has a
        backward.
        """
        segment = self.segment_of[call]
        while segment >= 0 and not self.shape.has_backward[segment]:
            segment -= 1
        return segment if segment >= 0 else END

    def release_segment_between(self, call: int) -> int:
        """Segment whose backward lets go of what the code after `call` saved; `SEED`: right after
        the seed.

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

    def is_between(self, call: int) -> bool:
        """Tells whether the code after `call` stands between two segments that have a backward."""
        inside = -1 if call < 0 else self.segment_of[call]
        return self.release_segment_between(call) > inside

    @cached_property
    def roles(self) -> tuple[tuple[int, int, Saved], ...]:
        """By segment: its calls and its policy. What the trace says of a segment depends on nothing
        else.
        """
        return tuple((first, last, self.plan.call(first).saved) for first, last in self.shape.segments)

    def _of_segment(self, what: str, segment: int, find: Callable[[int], int]) -> int:
        key = what, self.roles[segment]
        found = self.of_segments.get(key)
        if found is None:
            found = self.of_segments[key] = find(segment)
        return found

    def copy_bytes(self, segment: int) -> int:
        """Bytes that an offload of the segment moves, and a reload makes: of what it saved
        (offload), or of its arguments (recompute).
        """
        return self._of_segment("copies", segment, lambda q: sum(s.nbytes for s in self.movable(q) if s.leaves))

    def movable(self, segment: int) -> list[StorageProfile]:
        """Storages that a segment moves if it does not keep them: all it saved (offload), or its
        arguments (recompute). Of these some stay (`StorageProfile.leaves`).
        """
        first, last = self.shape.segments[segment]
        related = self._related_to(first, last)
        if self.plan.call(first).saved.policy.offloads:
            return [s for s in related if first in s.saved_inside]
        return [s for s in related if _is_argument(s, first, last)]

    def extra_held_bytes(self, segment: int, *, leaves: bool | None = None) -> int:
        """Returns what a recomputed segment holds beyond its arguments: copies of mutated ones.

        Args:
            segment: by index.
            leaves: only those that leave if arguments are sent away, or only those that do not;
                None: all.
        """
        first, last, saved = self.roles[segment]
        if not saved.policy.recomputes or not any(c.mutates_inputs for c in self.trace.calls[first : last + 1]):
            return 0
        return sum(s.nbytes for s in self.movable(segment) if leaves is None or s.leaves is leaves)

    def selected_bytes(self, segment: int) -> int:
        """Returns what a selective segment holds beyond its arguments and never moves."""
        return self._of_segment("selected", segment, self._selected_bytes)

    def _selected_bytes(self, segment: int) -> int:
        first, last, saved = self.roles[segment]
        if not saved.policy.kept_operators or not self.shape.has_backward[segment]:
            return 0
        is_alone = first == last
        found = [(c, c.held(saved)) for c in self.trace.calls[first : last + 1]]
        return sum(
            self.trace.saved_bytes(c.index) if held is None else held.nbytes - is_alone * held.unneeded_bytes
            for c, held in found
        )

    def inner_bytes(self, first: int, call: int) -> int:
        """Bytes made by the calls from `first` on that are alive when `call` begins, everything
        kept.
        """
        return self._alive_inside(first, call, lambda s: s.index in self.plain_release)

    def forward_inner_bytes(self, first: int, call: int) -> int:
        """Returns the same in the forward of their segment, under its policy."""
        policy, last = self.plan.call(first).saved.policy, self.shape.segments[self.segment_of[first]][1]
        if not policy.recomputes or policy.kept_operators:
            return self.inner_bytes(first, call)

        def stays(s: StorageProfile) -> bool:
            is_kept = bool(s.saved_outside) or s.is_unseen or s.is_lasting
            return is_kept or self.is_held_apart(s, first, last)

        return self._alive_inside(first, call, stays)

    def _alive_inside(self, first: int, call: int, stays: Callable[[StorageProfile], bool]) -> int:
        return sum(
            s.nbytes
            for made in range(first, call)
            for s in self.made_at.get(made, ())
            if stays(s) or self.used_until(s) >= call - 1 or s.argument_of[-1:] >= (call,)
        )

    def replayed_bytes(self, first: int, last: int) -> int:
        """Bytes that replaying calls first..last makes anew and backward needs."""
        return sum(
            s.nbytes
            for s in self._related_to(first, last)
            if (
                any(first <= c <= last for c in s.saved_inside)
                and not _is_argument(s, first, last)
                and not self.is_held_apart(s, first, last)
            )
            or (first < last and any(first <= c < last for c in s.saved_outside) and s.segment >= first)
        )

    def is_held_apart(self, s: StorageProfile, first: int, last: int) -> bool:
        """Tells whether a recomputed segment of these calls holds a storage that it makes itself:
        of an argument that running it again does not give.
        """
        return s.segment >= first and any(first < c <= last for c in s.given_apart)


def _is_argument(s: StorageProfile, first: int, last: int) -> bool:
    return s.segment < first and any(first <= c <= last for c in s.argument_of)


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
        (`step.activation_bytes`), work (`step.work_amounts`). A key begins with which.
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


# Facts that many plans of one profile share, found once: for searches that lower hundreds of plans.
#
# In: a profile, plans one after the other. Out: `SegmentFacts`, pieces and traffic of updates. What
# is found here never depends on more than its key says; a plan that is lowered with these facts has
# the same step as without.

_FoundT = TypeVar("_FoundT")

# Traces of a plan's microbatches, of a training step and of a pass without gradients.
_FACTS_OF_A_PLAN = 4


class KnownFacts:
    """Facts of one profile; held by whoever lowers many plans of it. Steps and passes without
    gradients have each their own: what is found first of a trace says what later ones share.

    Args:
        most_kept: items of what is kept as long as there is room (`keep`): a plan of many
            microbatches has thousands, of some 0.5 KiB each; as many segments of plans whose facts
            are known.
    """

    def __init__(self, most_kept: float = math.inf) -> None:
        self._most_kept = most_kept
        self._kept: deque[tuple[dict[Any, Any], Any, int]] = deque()
        self._kept_items = 0
        self._of_traces: dict[int, SegmentFacts] = {}
        # The ones that were asked for last come last.
        self._of_plans: dict[Any, SegmentFacts] = {}
        self._segments = 0
        self._found: dict[Any, Any] = {}
        self._alike: dict[str, str] = {}
        # A plan is looked at by several in turn: the last one is known.
        self._described: tuple[Plan, StepShape] | None = None
        self._numbered: tuple[Plan, int, int] | None = None
        self._numbers: dict[Any, int] = {}

    def shape(self, plan: Plan, profile: Profile) -> StepShape:
        """Returns the shape of a plan's step."""
        if self._described is None or self._described[0] is not plan:
            homes, calls = self.homes_of(plan), self.calls_of(plan)
            of_homes = self.found(("shape of homes", homes), lambda: describe_homes(plan, profile))
            of_calls = self.found(("shape of calls", calls), lambda: self._describe_calls(plan, profile))
            of_model = self.found("shape of model", lambda: describe_model(profile))
            key = "shape", homes, calls, plan.microbatches, plan.order, plan.scales_losses
            self._described = plan, self.found(key, lambda: describe_step(plan, profile, of_calls, of_homes, of_model))
        return self._described[1]

    def _describe_calls(self, plan: Plan, profile: Profile) -> CallShape:
        joined = tuple(index for index, call in enumerate(plan.calls) if call.joins_previous)
        key = "segments", joined, plan.cut_tail
        return describe_calls(plan, profile, self.found(key, lambda: describe_segments(plan, profile)))

    def homes_of(self, plan: Plan) -> int:
        """Returns the number of a plan's decisions about blocks: homes, masters, formats, ranks.
        Plans that decide the same share it.
        """
        return self._numbers_of(plan)[1]

    def calls_of(self, plan: Plan) -> int:
        """Returns the number of a plan's decisions about calls, the tail among them."""
        return self._numbers_of(plan)[2]

    def _numbers_of(self, plan: Plan) -> tuple[Plan, int, int]:
        if self._numbered is None or self._numbered[0] is not plan:
            homes = (
                "homes",
                *plan.blocks.items(),
                plan.ranks,
                plan.is_atomic,
                plan.update,
                plan.splits_masters,
                plan.drops_masters,
                plan.state_format,
                plan.frozen_format,
            )
            calls = "calls", plan.calls, plan.tail, plan.cut_tail
            numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in (homes, calls)]
            self._numbered = plan, numbers[0], numbers[1]
        return self._numbered

    def segments(
        self, trace: TraceProfile, plan: Plan, shape: StepShape, profile: Profile, *, is_training: bool = True
    ) -> SegmentFacts:
        """Returns the facts of a plan's segments, of a step or of a pass without gradients: homes
        do not change them.
        """
        if not is_training:
            plan = _without_saving(plan, trace)
            shape = describe_step(plan, profile)
        key = trace.rows, self.calls_of(plan), plan.microbatches, plan.order, plan.ranks
        found = self._of_plans.pop(key, None)
        if found is None:
            first = self._of_traces.get(trace.rows)
            found = SegmentFacts(trace, plan, shape, profile, None if first is None else first.storages)
            found.take_trace_facts(self._of_traces.setdefault(trace.rows, found))
            self._segments += len(shape.segments)
        self._of_plans[key] = found
        while self._segments > self._most_kept and len(self._of_plans) > _FACTS_OF_A_PLAN:
            self._segments -= len(self._of_plans.pop(next(iter(self._of_plans))).shape.segments)
        return found

    def alike(self, profile: Profile, name: str) -> str:
        """Returns the name of the first block that is equal to this one in all that an update does
        with it: parameters, gradients, states.
        """
        if not self._alike:
            first: dict[Any, str] = {}
            for block in profile.blocks:
                role = (
                    tuple((p.shape, p.dtype, p.nbytes, p.requires_grad, p.master_nbytes) for p in block.parameters),
                    tuple(profile.updates.get(p.name) for p in block.parameters),
                    profile.state_bytes.get(block.name),
                    profile.resting_state_bytes(block.name),
                    profile.encoded_elements.get(block.name),
                    block.encoded_bytes,
                )
                self._alike[block.name] = first.setdefault(role, block.name)
        return self._alike[name]

    def of_update(
        self, plan: Plan, name: str, key: Any, find: Callable[[], _FoundT], *, like: str | None = None
    ) -> _FoundT:
        """Returns what is known of a block's update, or finds it.

        Args:
            plan: its decisions about the block, masters and states are part of the key.
            name: of the block.
            key: what else it depends on.
            find: finds it.
            like: name of a block of which it would be the same (`alike`).
        """
        whole = (
            name if like is None else like,
            plan.block(name),
            plan.ranks,
            plan.splits_masters,
            plan.drops_masters,
            plan.state_format,
            plan.frozen_format,
            key,
        )
        return self.found(whole, find)

    def keep(self, where: dict[Any, Any], key: Any, kept: Any, items: int) -> None:
        """Keeps what has so many items under a key of a dict, until newer ones need the room."""
        where[key] = kept
        self._kept.append((where, key, items))
        self._kept_items += items
        while self._kept_items > self._most_kept and len(self._kept) > 1:
            oldest, its_key, count = self._kept.popleft()
            oldest.pop(its_key, None)
            self._kept_items -= count

    def found(self, key: Any, find: Callable[[], _FoundT]) -> _FoundT:
        """Returns what is known under a key, or finds it. The key says all that it depends on."""
        known = self._found.get(key, self)  # what is found may be None
        if known is self:
            known = self._found[key] = find()
        return known

    def shared(self, made: _FoundT) -> _FoundT:
        """Returns the first of all that are equal to this one: many are, of equal layers."""
        return self._found.setdefault(("shared", made), made)


def _without_saving(plan: Plan, trace: TraceProfile) -> Plan:
    """Returns the plan of a pass without gradients: whatever calls would save, autograd keeps
    nothing of it, as in the forward of a recomputed call.
    """
    calls = [*plan.calls, *[CallPlan()] * len(trace.calls)][: len(trace.calls)]
    return replace(
        plan, calls=tuple(CallPlan(saved=Saved.RECOMPUTE, joins_previous=call.joins_previous) for call in calls)
    )
