"""Bytes that are there before the first operation of a step.

In: `Plan`, `Profile`, `StepShape`. Out: `ByteChange`s, tier by tier and owner by owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.core.layout import ALIGNMENT_BYTES, PINNED_STAGING_BYTES
from memfit.core.plan import Plan
from memfit.core.profile import Profile, TraceProfile
from memfit.core.shape import StepShape
from memfit.core.step import ByteChange
from memfit.core.tiers import Tier, is_processor
from memfit.scheduling.known_facts import KnownFacts
from memfit.scheduling.microbatch_traces import input_bytes
from memfit.scheduling.pieces import moved_weight_bytes
from memfit.scheduling.segment_facts import SegmentFacts
from memfit.scheduling.sizes import (
    flat_weight_bytes,
    gradient_home_bytes,
    kept_bytes_of,
    resting_master_bytes,
    state_home_bytes,
    uses_disk,
    weight_home_bytes,
)

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
        device: as `scheduling.lower` takes it.
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
