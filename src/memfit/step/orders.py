"""The order of computing: which microbatch runs through which segment when. All other passes work
around it.

In: `Plan` and `StepShape`. Out: `ComputeOrder`, the starts, forwards, seeds and backwards in order;
`merge` weaves the actions that other passes placed into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from memfit.core.plan import Order, Plan
from memfit.core.schedule import Action, Backward, Forward, Joint, Seed, Start
from memfit.core.shape import StepShape

_BY_PHASE = attrgetter("phase")


class GapPhase(IntEnum):
    """Where an action stands among those in one gap between two computing actions.

    First come the actions that follow from what was computed, those that start something before
    those that wait; then those that make ready what comes: needed things before what is only
    fetched ahead, because links serve in order. An update of a gradient that is home already comes
    before gradients that begin to go there, or it would be waiting for these too.
    """

    LATE_UPDATE = -1
    ACCUMULATE = 0
    UPDATE = 1
    OFFLOAD = 2
    DROP = 3
    CLEAR = 4
    RELEASE = 5
    FETCH = 6
    RELOAD = 7
    PREFETCH = 8
    END = 9


class Placed(NamedTuple):
    """An action in the gap before computing action `gap` (the number of computing actions: after
    the last).
    """

    gap: int
    phase: GapPhase
    action: Action


class Compute(NamedTuple):
    """A forward or backward: its position among all computing actions, and what runs."""

    position: int
    segment: int
    microbatch: int
    is_backward: bool


@dataclass(frozen=True, kw_only=True)
class ComputeOrder:
    """Starts, forwards, seeds, the joint and backwards of a step.

    Attributes:
        actions: in order.
        shape: of the step.
        is_microbatch_major: one microbatch after the other.
        keeps_tail: the tail's blocks stay on the device while any microbatch is in the tail.
        is_interleaved: microbatches take turns at the entries of segments.
        tail: first call of the tail that is cut off; None: none is.
    """

    actions: tuple[Action, ...]
    shape: StepShape
    is_microbatch_major: bool
    keeps_tail: bool
    is_interleaved: bool
    tail: int | None = None

    @cached_property
    def computes(self) -> tuple[Compute, ...]:
        """The forwards and backwards; an index into this tuple is an *ordinal*."""
        segment = {first: i for i, (first, _) in enumerate(self.shape.segments)}
        return tuple(
            Compute(
                position=position,
                segment=segment[action.first],
                microbatch=action.microbatch,
                is_backward=isinstance(action, Backward),
            )
            for position, action in enumerate(self.actions)
            if isinstance(action, Forward | Backward)
        )

    @cached_property
    def runs(self) -> tuple[int, ...]:
        """By ordinal: the number of its run. A run is the same segment in the same direction, all
        microbatches that come one right after the other.
        """
        runs: list[int] = []
        for ordinal, compute in enumerate(self.computes):
            previous = self.computes[ordinal - 1] if ordinal else compute
            is_same = (previous.segment, previous.is_backward) == (compute.segment, compute.is_backward)
            runs.append(0 if not ordinal else runs[-1] + (not is_same))
        return tuple(runs)

    @cached_property
    def forwards(self) -> Mapping[tuple[int, int], int]:
        """Ordinals of forwards, by segment and microbatch."""
        return {(c.segment, c.microbatch): i for i, c in enumerate(self.computes) if not c.is_backward}

    def of_shape(self, shape: StepShape) -> ComputeOrder:
        """Returns the same order for a shape that differs in what visits, leaves and goes home."""
        other = replace(self, shape=shape)
        for name in ("computes", "runs", "forwards", "_tail_ends", "stages"):
            # Where a cached property keeps its value.
            other.__dict__[name] = getattr(self, name)
        return other

    def gap_before(self, ordinal: int) -> int:
        """The gap right before a forward or backward."""
        return self.computes[ordinal].position

    def gap_after(self, ordinal: int) -> int:
        """The gap right after a forward or backward."""
        return self.computes[ordinal].position + 1

    def gap_whole(self, ordinal: int) -> int:
        """The gap in which what a forward or backward has made is whole: right after it; of a
        tail's backward, after the tail's last one.

        A microbatch's tail runs back in one piece: its gradients reach the parameters, and its
        weights may leave, when all of it has (`engine.tail`).
        """
        return self.gap_after(self._tail_ends.get(ordinal, ordinal))

    @cached_property
    def _tail_ends(self) -> dict[int, int]:
        """By ordinal of a tail's backward: that of the same microbatch's last one."""
        if not self.keeps_tail:
            return {}
        of_tail = [c.is_backward and c.segment >= self.shape.tail_segment for c in self.computes]
        last = {c.microbatch: ordinal for ordinal, c in enumerate(self.computes) if of_tail[ordinal]}
        return {ordinal: last[c.microbatch] for ordinal, c in enumerate(self.computes) if of_tail[ordinal]}

    def stays(self, ordinal: int, following: int) -> bool:
        """Tells whether a block that both use stays between them: they are neighbours, or both in a
        tail that keeps its blocks.
        """
        if following == self._tail_ends.get(ordinal, ordinal) + 1:
            return True
        tail = self.shape.tail_segment
        return self.keeps_tail and self.computes[ordinal].segment >= tail and self.computes[following].segment >= tail

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Positions of seeds and backwards, by stage: at a stage's end the gradients made in it are
        whole.

        A stage is a microbatch's backward (microbatch-major), all of the tail's backwards, or the
        joint backward.
        """
        segment = {c.position: c.segment for c in self.computes}
        stages: dict[int, list[int]] = {}
        for position, action in enumerate(self.actions):
            if isinstance(action, Seed | Joint | Backward):
                if self.is_microbatch_major:
                    key = action.microbatch if isinstance(action, Backward) else action.first
                else:
                    is_early = isinstance(action, Backward) and segment[position] < self.shape.tail_segment
                    key = int(is_early or isinstance(action, Joint))
                stages.setdefault(key, []).append(position)
        if len(stages) == 2 and not self.is_microbatch_major and self.shape.tail_segment == len(self.shape.segments):
            return (tuple(sorted(stages[0] + stages[1])),)
        return tuple(tuple(s) for s in stages.values())


def order_step(plan: Plan, shape: StepShape) -> ComputeOrder:
    """Orders a training step.

    Microbatch-major: each microbatch forward and back, ascending. Layer-major: all microbatches
    through a segment, then through the next: descending in forward, so that autograd, which runs
    the latest-made node first, takes them ascending in backward and adds gradients in the order of
    plain accumulation. The tail runs per microbatch, ascending, forward to the loss and back to its
    first call; then all go on together.
    """
    count = plan.microbatches
    tail = shape.tail_segment
    segments = range(len(shape.segments))
    is_microbatch_major = plan.order is Order.MICROBATCH_MAJOR
    actions: list[Action] = []
    if is_microbatch_major:
        for m in range(count):
            actions.append(Start(m))
            actions += [_forward(shape, s, m) for s in segments]
            actions.append(Seed(m, m))
            actions += [_backward(shape, s, m) for s in reversed(segments) if shape.has_backward[s]]
    else:
        actions += [Start(m) for m in reversed(range(count))]
        actions += [_forward(shape, s, m) for s in segments[:tail] for m in reversed(range(count))]
        if tail == len(segments):
            actions.append(Seed(0, count - 1))
        for m in range(count) if tail < len(segments) else ():
            actions += [_forward(shape, s, m) for s in segments[tail:]]
            actions.append(Seed(m, m))
            actions += [_backward(shape, s, m) for s in reversed(segments[tail:]) if shape.has_backward[s]]
        early = [
            _backward(shape, s, m) for s in reversed(segments[:tail]) if shape.has_backward[s] for m in range(count)
        ]
        actions += [Joint(0, count - 1)] if early and tail < len(segments) else []
        actions += early
    return ComputeOrder(
        actions=tuple(actions),
        shape=shape,
        is_microbatch_major=is_microbatch_major,
        keeps_tail=tail < len(segments),
        is_interleaved=count > 1 and not is_microbatch_major,
        tail=shape.segments[tail][0] if tail < len(segments) else None,
    )


def order_forward(plan: Plan, shape: StepShape) -> ComputeOrder:
    """Orders a forward-only pass: as in `order_step`, without backwards."""
    microbatches = plan.microbatches
    tail = shape.tail_segment
    segments = range(len(shape.segments))
    is_microbatch_major = plan.order is Order.MICROBATCH_MAJOR
    actions: list[Action] = []
    if is_microbatch_major:
        for m in range(microbatches):
            actions.append(Start(m))
            actions += [_forward(shape, s, m) for s in segments]
    else:
        actions += [Start(m) for m in reversed(range(microbatches))]
        actions += [_forward(shape, s, m) for s in segments[:tail] for m in reversed(range(microbatches))]
        actions += [_forward(shape, s, m) for m in range(microbatches) for s in segments[tail:]]
    return ComputeOrder(
        actions=tuple(actions),
        shape=shape,
        is_microbatch_major=is_microbatch_major,
        keeps_tail=tail < len(segments),
        is_interleaved=microbatches > 1 and not is_microbatch_major,
    )


def merge(order: ComputeOrder, placed: Iterable[Placed]) -> tuple[Action, ...]:
    """Weaves placed actions into the order: by gap, then phase, then as they were placed."""
    gaps: list[list[Placed]] = [[] for _ in range(len(order.actions) + 1)]
    for p in placed:
        gaps[p.gap].append(p)
    actions: list[Action] = []
    for position, gap in enumerate(gaps):
        if len(gap) > 1:
            gap.sort(key=_BY_PHASE)
        actions += [p.action for p in gap]
        if position < len(order.actions):
            actions.append(order.actions[position])
    return tuple(actions)


def _forward(shape: StepShape, segment: int, microbatch: int) -> Forward:
    return Forward(*shape.segments[segment], microbatch)


def _backward(shape: StepShape, segment: int, microbatch: int) -> Backward:
    return Backward(*shape.segments[segment], microbatch)
