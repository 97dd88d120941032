"""Amounts of work: what segments and updates compute.

In: `Plan`, `Profile`. Out: operations and elements by kind, which `prediction` turns into seconds.
"""

from __future__ import annotations

import math

from memfit.core.plan import Plan
from memfit.core.profile import Profile, TraceProfile
from memfit.core.shape import StepShape
from memfit.core.step import WorkKind


def segment_flops(trace: TraceProfile, plan: Plan, shape: StepShape, segment: int, *, is_backward: bool) -> float:
    """Counts the floating point operations of a segment for one microbatch, replay included."""
    first, last = shape.segments[segment]
    calls = trace.calls[first : last + 1]
    forward = sum(c.forward_flops for c in calls)
    if not is_backward:
        return forward
    return sum(c.backward_flops for c in calls) + plan.call(first).saved.policy.replay_share * forward


def update_work(plan: Plan, profile: Profile, block: int) -> tuple[tuple[WorkKind, float], ...]:
    """Counts the elements that a block's update passes, by kind of work."""
    trained = sum(math.prod(p.shape) for p in profile.blocks[block].parameters if p.requires_grad)
    encoded = profile.encoded_elements.get(profile.blocks[block].name, 0)
    work = [(WorkKind.UPDATED, float(trained)), (WorkKind.ENCODED, float(encoded))]
    if plan.splits_masters:
        work.append((WorkKind.SPLIT, float(trained)))
    if plan.drops_masters:
        work.append((WorkKind.ROUNDED, float(trained)))
    return tuple(work)
