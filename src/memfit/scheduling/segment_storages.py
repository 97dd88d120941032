"""Storages of a trace and the segments of a plan: who makes them, holds them, moves them, lets go.

In: `TraceProfile`, `Plan`, `StepShape`, `Profile`. Out: `SegmentStorages`, whatever the order of
events. Which of them are alive when is followed in `lifetimes`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from memfit.core.plan import Order, Plan
from memfit.core.profile import Profile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.shape import StepShape
from memfit.core.storage_profile import StorageProfile
from memfit.scheduling.trace_storages import END, TraceStorages

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
