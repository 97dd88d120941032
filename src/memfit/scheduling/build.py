"""Plan -> Schedule: one small pass a concern, woven into the order of computing.

In: `Plan` and `Profile`. Out: `Schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.core.errors import PlanError
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.schedule import Action, Scale, Schedule, ScheduledCall
from memfit.core.shape import describe_step
from memfit.scheduling.activation_actions import place_activations
from memfit.scheduling.gradient_actions import place_accumulates, place_updates, updates_in_backward
from memfit.scheduling.known_facts import KnownFacts
from memfit.scheduling.orders import ComputeOrder, merge, order_forward, order_step
from memfit.scheduling.visit_actions import find_visits, place_visits


def build_step(plan: Plan, profile: Profile, *, clips_norm: bool, known: KnownFacts | None = None) -> Schedule:
    """Builds a training step.

    In layer-major order each block's weights are fetched at most twice (forward and backward; the
    last segment before backward begins, once), whatever the number of microbatches; a block that
    several calls read, once more for each call and direction that has no neighbour reading it.

    Args:
        plan: the decisions.
        profile: blocks and calls; any of its traces (all have the same calls).
        clips_norm: gradients are clipped by their global norm, so all updates wait for the end of
            backward.
        known: facts about the profile that were found before, and are added to.

    Raises:
        PlanError: the plan does not belong to the model, or contradicts itself.
    """
    known = known or KnownFacts()
    shape = known.shape(plan, profile)
    key = "order", shape.segments, plan.microbatches, plan.order, shape.tail_segment
    # Homes and policies change what is placed around it, not the order of computing itself.
    order = known.found(key, lambda: order_step(plan, shape)).of_shape(shape)
    updates = updates_in_backward(plan, order, clips_norm=clips_norm)
    placed = [
        *place_visits(order, find_visits(order, updates, plan.backlog), plan.prefetch),
        *place_activations(plan, order),
        *place_accumulates(plan, order),
        *place_updates(plan, order, updates, clips_norm=clips_norm),
    ]
    begin: tuple[Action, ...] = (Scale(),) if plan.scales_losses else ()
    actions = (*begin, *merge(order, placed))
    return _schedule(profile, plan.microbatches, order, actions, known)


def build_forward(plan: Plan, profile: Profile, microbatches: int) -> Schedule:
    """Builds a forward-only pass (evaluation): starts, fetches, forwards and releases.

    Args:
        plan: the decisions; those about backward have no effect.
        profile: blocks and calls.
        microbatches: how many run together; 1 for a single one.

    Raises:
        PlanError: as in `build_step`, or `microbatches` below 1.
    """
    if microbatches < 1:
        raise PlanError(f"a forward pass needs at least one microbatch, not {microbatches}")
    plan = replace(plan, microbatches=microbatches)
    order = order_forward(plan, describe_step(plan, profile))
    visits = find_visits(order, {}, plan.backlog)
    actions = merge(order, place_visits(order, visits, plan.prefetch))
    return _schedule(profile, microbatches, order, actions, KnownFacts())


def _schedule(
    profile: Profile, microbatches: int, order: ComputeOrder, actions: tuple[Action, ...], known: KnownFacts
) -> Schedule:
    names = tuple(b.name for b in profile.blocks)
    return Schedule(
        blocks=names,
        calls=known.found("calls", lambda: _calls(profile, names)),
        microbatches=microbatches,
        actions=actions,
        tail=order.tail,
        is_interleaved=order.is_interleaved,
    )


def _calls(profile: Profile, names: Sequence[str]) -> tuple[ScheduledCall, ...]:
    index = {name: i for i, name in enumerate(names)}
    calls = next(iter(profile.traces.values())).calls
    return tuple(ScheduledCall(site=c.site, blocks=tuple(index[b] for b in c.blocks)) for c in calls)
