"""Amounts of work: what segments and updates compute.

In: `Plan`, `Profile`. Out: amounts by kind, which `clock` turns into seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from memfit.core.plan import Plan
from memfit.core.profile import BlockProfile, CallProfile, Profile, TraceProfile, UpdateProfile
from memfit.core.saved_policies import Saved
from memfit.core.shape import StepShape
from memfit.core.tiers import Tier
from memfit.core.work_kinds import Work, WorkKind, as_work, summed
from memfit.step.segment_facts import SegmentFacts
from memfit.step.sizes import update_share

STEP_ITSELF: Work = ((WorkKind.STEPS, 1.0),)
"""Work of a step beside its actions.
"""
SEED_ENTRY: Work = ((WorkKind.CALLS, 1.0),)
"""Work of a seed beside the backward of the loss: autograd is entered as a call is.
"""
# Of a tail besides: its graph is cut from those of the other microbatches (measured: 0.7 ms in
# models of 4 to 6 layers, where a switch took 0.2).
_TAIL_ENTRY: Work = ((WorkKind.SWITCHES, 3.0),)
# Joining and splitting a piece's masters launches as many operations as the updates of 2.5 pieces
# do, drawing noise and rounding as many as one.
_SPLIT_PIECES, _ROUNDED_PIECES = 2.5, 1.0


def start_work(trace: TraceProfile, *, is_first: bool) -> Work:
    """Counts the code before a microbatch's first call; of the first one, the step itself too."""
    return summed([(trace.prologue_work, 1.0), (STEP_ITSELF if is_first else (), 1.0)])


def seed_work(traces: Sequence[TraceProfile], *, cuts_tail: bool) -> Work:
    """Counts the losses of microbatches and where their backward begins."""
    entries = summed([(SEED_ENTRY, 1.0), (_TAIL_ENTRY if cuts_tail else (), 1.0)])
    return summed([*((trace.seed_work, 1.0) for trace in traces), (entries, float(len(traces)))])


def computed_work(facts: SegmentFacts, segment: int, *, is_backward: bool, is_adding: bool, is_switch: bool) -> Work:
    """Counts the work of a segment's forward or backward, or knows it.

    Args:
        facts: of the plan's segments.
        segment: by index.
        is_backward: of the backward.
        is_adding: its gradients are added to others.
        is_switch: it belongs to another microbatch than what ran before.
    """
    here = "work", segment, is_backward, is_adding, is_switch
    found = facts.known.get(here)
    if found is not None:
        return found
    # Plans that do the same with these calls share it.
    key = ("work", facts.roles[segment], is_backward, is_adding, is_switch)
    found = facts.of_segments.get(key)
    if found is None:
        work = segment_work(facts.trace, facts.plan, facts.shape, segment, is_backward=is_backward)
        sums = adding_work(facts.profile, facts.shape.contributes[segment]) if is_adding else ()
        switches: Work = ((WorkKind.SWITCHES, 1.0),) if is_switch else ()
        found = facts.of_segments[key] = summed([(work, 1.0), (sums, 1.0), (switches, 1.0)])
    facts.known[here] = found
    return found


def segment_work(trace: TraceProfile, plan: Plan, shape: StepShape, segment: int, *, is_backward: bool) -> Work:
    """Counts the work of a segment for one microbatch, replay and the entries of its calls
    included.
    """
    first, last = shape.segments[segment]
    calls = trace.calls[first : last + 1]
    saved = plan.call(first).saved
    policy = saved.policy
    operations = sum(amount for c in calls for kind, amount in c.forward_work if kind is WorkKind.OPERATIONS)
    # In the forward, and once more where that is run again.
    is_watched = not policy.keeps_all and (policy.recomputes or not is_backward)
    entries: Work = as_work(
        {
            WorkKind.CALLS: float(last - first + 1),
            WorkKind.FRAMES: 0.0 if policy.keeps_all else 1.0,
            WorkKind.WATCHED: operations if is_watched else 0.0,
            WorkKind.SELECTED: operations if policy.kept_operators else 0.0,
        }
    )
    if not is_backward:
        return summed([(entries, 1.0), *((_forward(c), 1.0) for c in calls)])
    return summed(
        [
            (entries, 1.0),
            *((_backward(c), 1.0) for c in calls),
            *(p for c in calls for p in _replay(c, saved, is_last=c is calls[-1])),
        ]
    )


def replayed_work(call: CallProfile, saved: Saved) -> Work:
    """Counts what backward repeats of a call's forward under a policy, where the call is run again
    alone: up to the last tensor that it saved.
    """
    return summed(_replay(call, saved, is_last=True))


def recomputing_work(call: CallProfile) -> Work:
    """Counts what it takes more to recompute a call than to keep what it saves."""
    operations = sum(amount for kind, amount in call.forward_work if kind is WorkKind.OPERATIONS)
    beside = as_work({WorkKind.WATCHED: 2 * operations, WorkKind.FRAMES: 2.0})
    return summed([(replayed_work(call, Saved.RECOMPUTE), 1.0), (beside, 1.0)])


def _forward(call: CallProfile) -> Work:
    return call.forward_work or ((WorkKind.FLOPS, float(call.forward_flops)),)


def _backward(call: CallProfile) -> Work:
    return call.backward_work or ((WorkKind.FLOPS, float(call.backward_flops)),)


def _replay(call: CallProfile, saved: Saved, *, is_last: bool) -> Iterable[tuple[Work, float]]:
    policy = saved.policy
    if not policy.recomputes:
        return []
    held = call.held(saved)
    if policy.kept_operators and (not call.forward_work or held is None):
        # Not traced under this policy: its own estimate.
        return [(_forward(call), policy.replay_share)]
    if held is not None:
        return [(_forward(call), 1.0), (held.spared_work, -1.0)]
    # A call whose outputs a later one takes is run to its end.
    return [(_forward(call), 1.0), *([(call.unreached_work, -1.0)] if is_last else [])]


def adding_work(profile: Profile, blocks: Iterable[int]) -> Work:
    """Counts the bytes by which gradients of blocks are added to those that are there."""
    nbytes = sum(profile.blocks[b].gradient_bytes for b in blocks)
    return ((WorkKind.STREAMED, 3.0 * nbytes),) if nbytes else ()


def visit_work(block: BlockProfile) -> Work:
    """Counts the visit of a block's weights to a processor, whose main thread does it."""
    return ((WorkKind.VISITS, 1.0), (WorkKind.VISITED, float(len(block.parameters))))


def leaving_work(block: BlockProfile, home: Tier) -> Work:
    """Counts gradients that a processor's main thread gives to a home in files."""
    if not home.traits.is_files:
        return ()
    return ((WorkKind.PIECE_TRANSFERS, float(sum(p.requires_grad for p in block.parameters))),)


def update_work(plan: Plan, profile: Profile, block: int) -> Work:
    """Counts the elements that a block's update passes, by kind of work."""
    trained = updated = pieces = transfers = 0.0
    homes = plan.block(profile.blocks[block].name)
    # Copies to and from memory are launched, and cost little but their bytes.
    beside = int(homes.gradient_home.traits.is_files) + 2 * int(homes.weight_home.traits.is_files)
    for parameter in profile.blocks[block].parameters:
        if parameter.requires_grad:
            elements = math.prod(parameter.shape)
            update = profile.updates.get(parameter.name)
            trained += elements
            count = 1 if update is None or not elements else math.ceil(elements / update.piece_elements)
            pieces += count
            # Weight and states come and go, the gradient only comes.
            states = 0 if update is None or not homes.state_home.traits.is_files else _states(update, elements)
            transfers += count * (beside + 2 * states)
            updated += elements * (1.0 if update is None else update.work_share)
    encoded = profile.encoded_elements.get(profile.blocks[block].name, 0)
    share = update_share(plan, profile, profile.blocks[block])
    trained, updated, encoded = trained * share, updated * share, encoded * share
    pieces *= 1 + plan.splits_masters * _SPLIT_PIECES + plan.drops_masters * _ROUNDED_PIECES
    work = [(WorkKind.PIECES, pieces), (WorkKind.UPDATED, updated), (WorkKind.ENCODED, float(encoded))]
    if transfers:
        work.append((WorkKind.PIECE_TRANSFERS, transfers))
    if plan.splits_masters:
        work.append((WorkKind.SPLIT, trained))
    if plan.drops_masters:
        work.append((WorkKind.ROUNDED, trained))
    return tuple(work)


def _states(update: UpdateProfile, elements: int) -> int:
    """Number of states as large as the parameter, from their bytes in fp32; at least one of any."""
    return max(1, round(update.state_bytes / (4 * elements))) if update.state_bytes and elements else 0
