"""Refuses a schedule that is not of the model and the plan that it is to be lowered for.

In: `Schedule`, `Profile`, `StepShape`. Out: nothing, or `PlanError`. What is left refers to blocks,
segments and microbatches that exist, and may still be illegal (`scheduling.check`).
"""

from __future__ import annotations

from memfit.core.errors import PlanError
from memfit.core.profile import Profile
from memfit.core.schedule import (
    Accumulate,
    Action,
    Backward,
    Clear,
    Drop,
    Fetch,
    Forward,
    Keep,
    Offload,
    Release,
    Reload,
    Schedule,
    Seed,
    Spread,
    Start,
    Update,
)
from memfit.core.shape import StepShape


def check_references(schedule: Schedule, profile: Profile, shape: StepShape, *, microbatches: int) -> None:
    """Checks that a schedule is of this model and plan, and that all that its actions name exists.

    Args:
        schedule: built, edited or parsed.
        profile: of the model.
        shape: of the plan, with as many microbatches as the schedule.
        microbatches: of the plan; a forward-only pass may have others.

    Raises:
        PlanError: what differs; or the first action that names something unknown, with its index
            and the actions around it.
    """
    if schedule.blocks != shape.blocks:
        raise PlanError(f"the schedule's blocks are not the model's: {schedule.blocks} and {shape.blocks}")
    index = {name: i for i, name in enumerate(shape.blocks)}
    calls = next(iter(profile.traces.values())).calls
    if [(c.site, c.blocks) for c in schedule.calls] != [(c.site, tuple(index[b] for b in c.blocks)) for c in calls]:
        raise PlanError("the schedule's calls are not those of the model's trace; build the schedule again")
    if schedule.microbatches != microbatches and any(isinstance(action, Seed) for action in schedule):
        raise PlanError(f"the schedule has {schedule.microbatches} microbatches, the plan {microbatches}")
    segments = dict(shape.segments)
    for position, action in enumerate(schedule.actions):
        if reason := _unknown(action, len(shape.blocks), segments, schedule.microbatches):
            raise PlanError(point_at(schedule, position, reason))


def point_at(schedule: Schedule, index: int, reason: str) -> str:
    """Says what is wrong with an action, and shows the actions around it."""
    shown = range(max(0, index - 2), min(len(schedule.actions), index + 3))
    context = [f"  {'>' if i == index else ' '} {i:5d}  {schedule.actions[i]}" for i in shown]
    return "\n".join([f"action {index}, {schedule.actions[index]}: {reason}", *context])


def _unknown(action: Action, blocks: int, segments: dict[int, int], microbatches: int) -> str | None:
    # Told apart by class, not by patterns: every action of every candidate of a planner passes
    # here.
    if isinstance(action, Forward | Backward):
        if segments.get(action.first) != action.last:
            return "this is not a segment of the plan"
    elif isinstance(action, Offload | Drop | Reload):
        if action.call not in segments:
            return "no segment begins with this call"
    elif isinstance(action, Fetch | Release | Accumulate | Update | Spread | Clear):
        return None if action.block < blocks else "there is no such block"
    elif isinstance(action, Keep):
        return None if max(action.blocks, default=0) < blocks else "there is no such block"
    elif not isinstance(action, Start | Seed):
        return None
    last = action.last if isinstance(action, Seed) else action.microbatch
    return None if last < microbatches else "there is no such microbatch"
