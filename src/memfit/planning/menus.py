"""Options of single blocks and calls, which mixed plans choose among.

In: the tiers there are, what gradients and updates may do. Out: homes of a block, policies of a
call. Uniform plans (`planning.candidates`) give one option to all; mixed ones each block and call
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memfit.core.plan import BlockPlan, CallPlan, Order, Plan
from memfit.core.profile import BlockProfile, CallProfile, Profile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier


@dataclass(frozen=True, kw_only=True)
class HomeRules:
    """Limits on the homes of a plan.

    Attributes:
        tiers: beside the device.
        gradients_wait: for other microbatches or for the norm, so that it may pay to send them
            away.
        may_update_on_host: the host's cores may run the optimizer, beside an accelerator.
    """

    tiers: tuple[Tier, ...]
    gradients_wait: bool
    may_update_on_host: bool


def home_rules(
    plan: Plan, profile: Profile, tiers: tuple[Tier, ...], *, clips_norm: bool, may_update_on_host: bool
) -> HomeRules:
    """Returns what the homes of a plan's blocks may be, its order and dtype given.

    Gradients that hooks read have to stay on the device.
    """
    one_by_one = plan.microbatches > 1 and plan.order is Order.MICROBATCH_MAJOR
    is_free = not profile.read_gradients
    return HomeRules(
        tiers=tiers,
        gradients_wait=is_free and (clips_norm or plan.scales_losses or one_by_one),
        may_update_on_host=is_free and may_update_on_host,
    )


def list_homes(rules: HomeRules) -> tuple[BlockPlan, ...]:
    """Lists homes of a block that trains, simplest first.

    Weights rest where states do, or nearer: a visit reads them twice a step, an update reads states
    once.
    """
    found = [BlockPlan()]
    for states in rules.tiers:
        places = [Tier.DEVICE, *(tier for tier in rules.tiers if tier is states or tier is Tier.HOST)]
        for weights in places:
            found.append(BlockPlan(weight_home=weights, state_home=states))
            if rules.gradients_wait:
                found.append(BlockPlan(weight_home=weights, gradient_home=states, state_home=states))
            if rules.may_update_on_host and Tier.HOST in rules.tiers and states in (Tier.HOST, Tier.DISK):
                found.append(
                    BlockPlan(weight_home=weights, gradient_home=Tier.HOST, state_home=states, update_on=Tier.HOST)
                )
    return tuple(dict.fromkeys(found))


def homes_for(block: BlockProfile, homes: BlockPlan) -> BlockPlan:
    """Returns homes as a block can have them: what is read between calls stays on the device, what
    does not train has no update.
    """
    if block.is_spanning:
        homes = replace(homes, weight_home=Tier.DEVICE)
    if not block.trains:
        homes = BlockPlan(weight_home=homes.weight_home)
    return homes


def list_policies(trace: TraceProfile, calls: frozenset[int], tiers: Sequence[Tier]) -> tuple[CallPlan, ...]:
    """Lists policies of the calls that are decided, those that repeat least first.

    A policy whose results were not traced is priced as holding everything, and left out: it is no
    better than keeping.
    """
    found = [CallPlan()]
    again = sorted((s for s in Saved if s.policy.recomputes), key=lambda s: s.policy.replay_share) if calls else []
    for saved in again:
        if not saved.policy.kept_operators or all(trace.calls[i].held(saved) is not None for i in calls):
            found += [CallPlan(saved=saved, boundary_home=tier) for tier in (Tier.DEVICE, *tiers)]
    if calls:
        found += [CallPlan(saved=Saved.OFFLOAD, saved_home=tier) for tier in tiers]
    return tuple(found)


def may_have(call: CallProfile, policy: CallPlan, written: frozenset[str]) -> bool:
    """Tells whether a call may have a policy.

    One that changes what it was given (a key-value cache), a weight or what it keeps cannot be run
    again.

    Args:
        call: of the model.
        policy: that it might have.
        written: blocks with a parameter that the forward changes.
    """
    if policy.saved.policy.keeps_all:
        return True
    changes = call.runs_once or not written.isdisjoint(call.blocks)
    return not call.must_keep and not (policy.saved.policy.recomputes and changes)
