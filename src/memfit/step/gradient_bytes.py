"""Gradients of parameters on the device: when they come, lie beside others, and leave.

In: `StepShape`, `SegmentFacts` and the actions of a step one by one. Out: changes of device bytes,
block by block; and what an action holds beside them while it runs.

A block's gradient is counted from the first backward that adds to it to its `clear`; for an
`accumulate`, to the end of the compute action after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memfit.core.layout import ALIGNMENT_BYTES, PINNED_STAGING_BYTES
from memfit.core.plan import Order, Plan
from memfit.core.profile import Profile, TraceProfile
from memfit.core.shape import StepShape
from memfit.core.step import ByteChange
from memfit.core.tiers import Tier, is_processor
from memfit.step.pieces import added_bytes, moved_weight_bytes, widened_bytes
from memfit.step.segment_facts import Arrival, KnownFacts, SegmentFacts
from memfit.step.sizes import (
    flat_gradient_bytes,
    flat_weight_bytes,
    gradient_home_bytes,
    input_bytes,
    kept_bytes_of,
    resting_master_bytes,
    state_home_bytes,
    uses_disk,
    weight_home_bytes,
)


class GradientBytes:
    """Follows the gradients of one step.

    Args:
        plan: the decisions.
        profile: of the model.
        facts: of the plan's segments.
        adds_apart: gradients of low-precision weights are added to sums in the masters' dtype as
            they come (`Plan.adds_apart`).
        change: is told of bytes that come to a block's gradient on the device, or leave it.

    Attributes:
        is_summed: gradients on the device are as they add up, in the masters' dtype; else as
            backward makes them.
    """

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        facts: SegmentFacts,
        *,
        adds_apart: bool,
        change: Callable[[int, int], None],
    ) -> None:
        self.is_summed = adds_apart or not profile.has_masters
        self._plan = plan
        self._profile = profile
        self._facts = facts
        self._shape: StepShape = facts.shape
        self._adds_apart = adds_apart
        self._change = change
        self._held: dict[int, int] = {}
        self._leaving: dict[int, int] = {}
        # Gradients that a tail has made: they are added when the tail is through, and lie beside
        # what was there until then.
        self._from_tail: set[int] = set()
        self._summed: set[int] = set()
        self._held_before: set[int] = set()
        self._arrived: dict[int, int] = {}
        # Sums of a shared weight's uses in one microbatch, which autograd makes apart.
        self._waiting: dict[int, int] = {}
        self._at_home: set[int] = set()

    def arrival(self, segment: int) -> Arrival:
        """Arrival of the gradients of a segment's backward, before they are counted."""
        blocks = self._shape.contributes[segment]
        is_shared = any(self._shape.blocks[b] in self._facts.shared_by for b in blocks)
        # Code between calls may hand loose ones over at any time.
        if is_shared or not blocks or self._shape.loose:
            return Arrival.UNKNOWN
        # Those of a tail come beside what is there, and are added when it is through.
        is_apart = segment >= self._shape.tail_segment or not self._held.keys() & {*blocks}
        if not self._adds_apart and is_apart:
            return Arrival.FRESH
        if self._adds_apart and is_apart and segment < self._shape.tail_segment:
            first, last = self._shape.segments[segment]
            peaks = [c.backward_summed_peak_bytes for c in self._facts.trace.calls[first : last + 1] if c.has_backward]
            return Arrival.ADDING if None in peaks else Arrival.SUMMED
        is_adding = self._adds_apart or self._held.keys() >= {*blocks}
        return Arrival.ADDING if is_adding and segment < self._shape.tail_segment else Arrival.UNKNOWN

    def holds(self, blocks: Iterable[int]) -> bool:
        """Tells whether gradients of blocks are on the device, to which backward adds others."""
        blocks = {*blocks}
        return bool(blocks) and blocks <= self._held.keys()

    def begin_pass(self) -> None:
        """Begins a pass at a seed: code after the last call may hand over gradients before the
        first call's backward begins.
        """
        self._held_before = set(self._held)
        self.contribute(self._shape.loose)

    def contribute(self, blocks: Iterable[int], segment: int | None = None, arrival: Arrival = Arrival.UNKNOWN) -> int:
        """Counts gradients from the first backward on that adds to them; returns the bytes of the
        largest one that is made beside the one it is added to.

        `arrival` is the result of `arrival` before. Of sums that begin, the traced rise holds what
        is copied into them.

        Where a shared weight's gradient waited in the trace, the traced rise holds the one that is
        added to it. What the tail has made lies on the parameter when the joint backward begins to
        sum its own part beside it.
        """
        blocks = sorted({*blocks})
        added = 0
        is_tail = segment is not None and segment >= self._shape.tail_segment
        if self._adds_apart:
            beside = self._contribute_apart(blocks, is_tail=is_tail)
            return 0 if arrival is Arrival.SUMMED else beside
        if is_tail:
            come = self._held_before.intersection(blocks)
            self._held_before -= come
            for b in sorted(come):
                self._arrived[b] = self._arrived.get(b, 0) + self._sum_bytes(b)
                self._change(b, self._sum_bytes(b))
        for b in blocks:
            if is_tail:
                self._from_tail.add(b)
            elif b in self._from_tail:
                self._from_tail.discard(b)
                if b in self._held:
                    self._hold(b)
                    continue
            if b not in self._held:
                self._hold(b)
                continue
            if segment is not None and self._facts.has_waited(self._shape.blocks[b], segment):
                continue
            if segment is not None and self._sums_uses_apart(b, segment):
                self._waiting[b] = self._sum_bytes(b)
                self._change(b, self._waiting[b])
                continue
            added = max(added, 0 if is_tail else self._adding_bytes(b))
        return added

    def end_arrivals(self) -> None:
        """Ends a tail's backward: what it made has been added to what was there."""
        while self._arrived:
            block, nbytes = self._arrived.popitem()
            self._change(block, -nbytes)

    def end_waiting(self, segment: int) -> None:
        """Ends the wait of sums of a shared weight's uses: when all uses in this microbatch are
        through, they are added to what earlier microbatches gave.
        """
        for b in [b for b in self._waiting if not self._facts.waits_on(self._shape.blocks[b], segment)]:
            self._change(b, -self._waiting.pop(b))

    def accumulate(self, block: int) -> int:
        """Counts a block's gradient as leaving for home; returns the bytes that are made for that,
        beside what leaves.
        """
        profile = self._profile.blocks[block]
        held = self._held.pop(block, 0)
        if self._plan.ranks > 1:
            # Widened and added in the buffers of the exchange.
            self._leaving[block] = held
            return 0
        is_narrow = not self.is_summed and held
        leaving, passing = widened_bytes(profile) if is_narrow else (0, 0)
        # The widened pieces take the place of the narrow gradient, which is given up parameter by
        # parameter.
        self._leaving[block] = max(held, leaving)
        self._change(block, self._leaving[block] - held)
        is_added = block in self._at_home
        self._at_home.add(block)
        return max(leaving + passing, added_bytes(profile) if is_added else 0)

    def end_leaving(self) -> None:
        """Ends the way home of gradients: they have no bytes on the device any more."""
        while self._leaving:
            block, nbytes = self._leaving.popitem()
            self._change(block, -nbytes)

    def clear(self, block: int) -> None:
        """Counts a block's gradient as freed."""
        self._change(block, -self._held.pop(block, 0))

    def _adding_bytes(self, block: int) -> int:
        """Bytes of the largest gradient that is added to one of an earlier microbatch.

        One backward for all microbatches holds the first one on its way to the parameter. A view of
        a product is not added to in place, but into a third tensor, once: that is a sum, and no
        view.
        """
        found = self._profile.blocks[block]
        if self._plan.order is Order.MICROBATCH_MAJOR or block in self._summed:
            return found.largest_gradient_bytes
        self._summed.add(block)
        viewed = self._profile.viewed_gradients
        return max((p.nbytes * (1 + (p.name in viewed)) for p in found.parameters if p.requires_grad), default=0)

    def _hold(self, block: int) -> None:
        nbytes = self._sum_bytes(block)
        self._held[block] = self._held.get(block, 0) + nbytes
        self._change(block, nbytes)

    def _sum_bytes(self, block: int) -> int:
        return flat_gradient_bytes(self._profile.blocks[block], is_summed=self.is_summed)

    def _sums_uses_apart(self, block: int, segment: int) -> bool:
        """Tells whether autograd sums a weight's uses in this backward apart, and only then adds
        them to the gradient that earlier microbatches gave.
        """
        is_alone = self._plan.order is Order.MICROBATCH_MAJOR and self._plan.microbatches > 1
        return is_alone and self._facts.waits_on(self._shape.blocks[block], segment)

    def _contribute_apart(self, blocks: list[int], *, is_tail: bool) -> int:
        """Counts gradients that are added to sums in the masters' dtype: each arrival, of the
        weights' dtype, lives beside the sum until it is added; those of a tail come all at once, at
        its end.
        """
        profiled = self._profile.blocks
        for b in blocks:
            if b not in self._held:
                self._hold(b)
        if is_tail:
            tail = {b for gets in self._shape.contributes[self._shape.tail_segment :] for b in gets}
            arrived = sum(flat_gradient_bytes(profiled[b], is_summed=False) for b in tail)
            return arrived + max((added_bytes(profiled[b]) for b in tail), default=0)
        return max((profiled[b].largest_gradient_bytes + added_bytes(profiled[b]) for b in blocks), default=0)


# Bytes that are there before the first operation of a step.
#
# In: `Plan`, `Profile`, `StepShape`. Out: `ByteChange`s, tier by tier and owner by owner.

# State of torch's generator on a processor. An accelerator's are some bytes of host memory.
_GENERATOR_BYTES = 5056


def resting_bytes(
    plan: Plan,
    profile: Profile,
    shape: StepShape,
    facts: SegmentFacts,
    *,
    staging_bytes: int,
    traces: Sequence[TraceProfile],
    device: str,
    known: KnownFacts,
) -> Iterable[ByteChange]:
    """Yields what rests in each tier, and what is held all the time for transfers.

    Args:
        plan: the decisions.
        profile: of the model.
        shape: of the plan.
        facts: of the plan's segments, with the trace of the largest microbatch.
        staging_bytes: of the disk's threads; 0 where nothing rests on disk.
        traces: of each microbatch that the batch is cut into.
        device: as `step.lower` takes it.
        known: facts about the profile that were found before.
    """
    batch_bytes = profile.buffer_bytes + input_bytes(traces, known)
    if batch_bytes:
        yield ByteChange(Tier.DEVICE, "weight", "batch and buffers", batch_bytes)
    if plan.ranks > 1:
        yield ByteChange(Tier.DEVICE, "transient", "numbers of ranks", ALIGNMENT_BYTES)
    beside = Tier.DEVICE if is_processor(device) else Tier.HOST
    if plan.microbatches > 1:
        yield ByteChange(beside, "staging", "random numbers", _random_bytes(plan.microbatches))
    if lasting := facts.lasting_bytes:
        yield ByteChange(Tier.DEVICE, "activation", "kept by the program", lasting)
    if staging_bytes:
        yield ByteChange(beside, "staging", "disk buffers", staging_bytes)
    if uses_disk(plan, shape) and beside is Tier.HOST:
        yield ByteChange(Tier.HOST, "staging", "pinned pieces", PINNED_STAGING_BYTES)
    if moved := moved_weight_bytes(plan, profile, device):
        yield ByteChange(Tier.HOST, "staging", "weights of updates", moved)
    for index, block in enumerate(profile.blocks):
        is_visiting = index in shape.visiting
        yield from known.of_update(
            plan,
            block.name,
            ("resting", is_visiting, plan.is_atomic),
            lambda: tuple(_of_block(plan, profile, index, is_visiting=is_visiting)),  # noqa: B023, asked at once
        )


def _random_bytes(microbatches: int) -> int:
    """A state of torch's generator for each microbatch, and two for those that take turns; one is
    there while the others' seeds are drawn (`tensors.random_streams`).
    """
    return (microbatches + 2) * _GENERATOR_BYTES


def _of_block(plan: Plan, profile: Profile, index: int, *, is_visiting: bool) -> Iterable[ByteChange]:
    block = profile.blocks[index]
    homes, owner = plan.block(block.name), f"B{index}"
    states = state_home_bytes(plan, profile, block) + resting_master_bytes(plan, profile, block)
    if not is_visiting:
        yield ByteChange(Tier.DEVICE, "weight", owner, flat_weight_bytes(block))
    elif homes.weight_home is Tier.DEVICE:
        yield ByteChange(Tier.DEVICE, "weight", owner, weight_home_bytes(plan, profile, block))
    if homes.state_home is Tier.DEVICE and states:
        yield ByteChange(Tier.DEVICE, "state", owner, states)
    used = dict.fromkeys((homes.weight_home, homes.state_home, homes.gradient_home))
    for tier in (tier for tier in used if not tier.traits.is_device):
        if kept := kept_bytes_of(plan, profile, block, tier):
            yield ByteChange(tier, "state", owner, kept)
        if homes.gradient_home is tier and block.trains:
            yield ByteChange(tier, "gradient", owner, gradient_home_bytes(plan, profile, block))
    if homes.gradient_home is Tier.DEVICE and block.trains and plan.ranks > 1:
        yield ByteChange(Tier.DEVICE, "gradient", owner, gradient_home_bytes(plan, profile, block))
