"""Requirements of a journal on a plan: gradients at home on disk, updates after backward, what is
large at home on disk.

In: a plan and a profile. Out: the plan with that, or a refusal.
"""

from __future__ import annotations

from dataclasses import replace

from memfit.core.errors import PlanError
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.tiers import Tier
from memfit.core.units import format_bytes
from memfit.planning.movable import SMALL_BLOCK_BYTES


def journaled(plan: Plan, profile: Profile, like: Plan | None = None) -> Plan:
    """Returns the plan with gradients at home on disk and updates after backward.

    Homes of weights and states are left as they are.

    Args:
        plan: any.
        profile: of the model.
        like: the plan of a run that goes on: what rests on disk there, frozen since or not, has no
            other room, and does here.
    """
    blocks = dict(plan.blocks)
    for block in profile.blocks:
        if block.trains:
            blocks[block.name] = replace(plan.block(block.name), gradient_home=Tier.DISK)
        if like is not None and like.block(block.name).rests_on_disk:
            homes = blocks.get(block.name, BlockPlan())
            blocks[block.name] = replace(homes, weight_home=Tier.DISK, state_home=Tier.DISK)
    return replace(plan, blocks=blocks, update=UpdateTime.AFTER_BACKWARD)


def problem_of_journaled(plan: Plan, profile: Profile) -> str | None:
    """Returns what keeps a run with a journal from this plan, and what the plan must say instead;
    None if nothing does.
    """
    if plan.update is not UpdateTime.AFTER_BACKWARD:
        return "updates are made once all gradients are durable: it must say update='after-backward'"
    for block in (b for b in profile.blocks if b.trains):
        homes = plan.block(block.name)
        if homes.gradient_home is not Tier.DISK:
            return f"the gradient of block {block.name!r} must be durable before its update: it must say gradient_home='disk'"
        if not homes.rests_on_disk and block.weight_bytes >= SMALL_BLOCK_BYTES and not block.is_spanning:
            return (
                f"block {block.name!r} ({format_bytes(block.weight_bytes)}) does not rest on disk, where a journal saves room: it must say "
                "weight_home='disk' and state_home='disk'"
            )
    return None


def check_journaled(plan: Plan, profile: Profile) -> None:
    """Refuses a plan under which a journal cannot be kept, or saves no room.

    Raises:
        PlanError: says what to change.
    """
    problem = problem_of_journaled(plan, profile)
    if problem is not None:
        raise PlanError(f"the plan does not go with scheme='journal': {problem}, or take scheme='generations'")
