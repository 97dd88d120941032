"""Random plans, wider than the planner draws them: every block and every call on its own.

In: a profile and a generator. Out: a legal `Plan` with so many microbatches, and whether it needs a device beside host memory.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from memfit.core.errors import PlanError
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier

_MOODS = ("mixed", "mixed", "mostly kept", "mostly away")
"""How the fates and homes of a plan are weighted, so that some plans are near those that people write."""


def draw_plan(profile: Profile, microbatches: int, dice: random.Random, *, has_host: bool) -> Plan:
    """A random legal plan: a home drawn for each block's weights, gradients and states, a fate for each call, segments, order, update time, tail."""
    mood = dice.choice(_MOODS)
    homes = [Tier.DEVICE, Tier.DISK, *([Tier.HOST] if has_host else [])]
    weights = {"mixed": 1.0, "mostly kept": 6.0, "mostly away": 0.3}[mood]

    def home() -> Tier:
        return dice.choices(homes, weights=[weights, *[1.0] * (len(homes) - 1)])[0]

    blocks = {
        block.name: BlockPlan(weight_home=home(), gradient_home=home(), state_home=home())
        for block in profile.blocks
        if not block.is_spanning
    }
    number = len(next(iter(profile.traces.values())).calls)
    tail = dice.choice([None, None, dice.randrange(number)]) if number else None
    settings: dict[str, Any] = {
        "microbatches": microbatches,
        "order": dice.choice(list(Order)),
        "blocks": blocks,
        "calls": _calls(number, tail, dice, homes, kept=weights),
        "tail": tail,
        "update": dice.choice(list(UpdateTime)),
        "prefetch": dice.randrange(4),
    }
    plan = Plan(**settings, is_atomic=dice.random() < 0.3)
    try:
        plan.check([block.name for block in profile.blocks], number)
    except PlanError:
        # An atomic step has wishes of its own; without it any draw is legal.
        plan = replace(plan, is_atomic=False)
        plan.check([block.name for block in profile.blocks], number)
    return plan


def _calls(
    number: int, tail: int | None, dice: random.Random, homes: list[Tier], *, kept: float
) -> tuple[CallPlan, ...]:
    fates: list[CallPlan] = []
    away = [home for home in homes if home is not Tier.DEVICE]
    for index in range(number):
        saved = dice.choices(list(Saved), weights=[kept if fate is Saved.KEEP else 1.0 for fate in Saved])[0]
        can_join = index > 0 and index != tail and saved in (Saved.RECOMPUTE, Saved.SELECT) and fates[-1].saved is saved
        fates.append(
            CallPlan(
                saved=saved,
                saved_home=dice.choice(away),
                boundary_home=dice.choice(homes),
                joins_previous=can_join and dice.random() < 0.5,
            )
        )
    return tuple(fates)


def relaxed(plan: Plan) -> list[tuple[str, Plan]]:
    """What a refusal may ask to change, from the least to the most: each with its name."""
    found: list[tuple[str, Plan]] = []
    if plan.tail is not None:
        plan = replace(plan, tail=None)
        found.append(("without a tail", plan))
    if plan.microbatches > 1 and plan.order is Order.LAYER_MAJOR:
        plan = replace(plan, order=Order.MICROBATCH_MAJOR)
        found.append(("microbatch by microbatch", plan))
    if plan.calls:
        kept = tuple(
            CallPlan(saved=Saved.KEEP)
            if c.saved in (Saved.RECOMPUTE, Saved.SELECT)
            else replace(c, joins_previous=False)
            for c in plan.calls
        )
        plan = replace(plan, calls=kept)
        found.append(("nothing run twice", plan))
    plan = replace(
        plan,
        blocks={name: replace(block, weight_home=Tier.DEVICE) for name, block in plan.blocks.items()},
        is_atomic=False,
    )
    found.append(("weights on the device", plan))
    return found
