"""Units of a mixed plan: the decided calls in order, each with the blocks that it alone reads; all
other blocks that may move are the *ends* (embedding, head), the largest decided one by one.

In: `Profile`, options by unit. Out: the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memfit.core.plan import BlockPlan, CallPlan, Order, Plan
from memfit.core.profile import BlockProfile, CallProfile, Profile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.planner.search.candidates import decided_calls, movable_blocks

# Options of single blocks and calls, which mixed plans choose among.
#
# In: the tiers there are, what gradients and updates may do. Out: homes of a block, policies of a
# call. Uniform plans (`planner.search.candidates`) give one option to all; mixed ones each block
# and call its own.


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


_ENDS_ALONE = 2


@dataclass(frozen=True, kw_only=True)
class Units:
    """Calls and blocks that a mixed plan decides.

    Attributes:
        calls: the decided ones, in forward order: one a unit.
        blocks: by unit: names of the blocks that may move and that no other unit reads.
        ends: names of all other blocks that may move: the largest by themselves, the rest together.
    """

    calls: tuple[int, ...]
    blocks: tuple[tuple[str, ...], ...]
    ends: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Decisions of a mixed plan: policies and homes by unit, homes by group of ends."""

    policies: tuple[CallPlan, ...]
    homes: tuple[BlockPlan, ...]
    ends: tuple[BlockPlan, ...]


def find_units(profile: Profile) -> Units:
    """Finds the units of a model."""
    trace = next(iter(profile.traces.values()))
    calls = tuple(sorted(decided_calls(trace)))
    readers: dict[str, set[int]] = {}
    for call in trace.calls:
        for name in call.blocks:
            readers.setdefault(name, set()).add(call.index)
    may_move = movable_blocks(profile)
    movable = [b.name for b in profile.blocks if b.name in may_move]
    own = {call: tuple(name for name in movable if readers.get(name) == {call}) for call in calls}
    taken = {name for names in own.values() for name in names}
    ends = [name for name in movable if name not in taken]
    sizes = {block.name: block.weight_bytes for block in profile.blocks}
    alone = sorted(ends, key=lambda name: -sizes[name])[:_ENDS_ALONE]
    rest = tuple(name for name in ends if name not in alone)
    groups = [(name,) for name in ends if name in alone] + ([rest] if rest else [])
    return Units(calls=calls, blocks=tuple(own[call] for call in calls), ends=tuple(groups))


def joined_to(before: CallPlan, call: CallPlan) -> CallPlan:
    """Returns a call's policy behind another one's: a segment ends before a call of another
    policy.
    """
    is_alone = call.joins_previous and before.saved is not call.saved
    return replace(call, joins_previous=False) if is_alone else call


def mixed_plan(frame: Plan, profile: Profile, units: Units, mixture: Mixture) -> Plan:
    """Returns the plan of a mixture.

    Args:
        frame: says everything else: microbatches, order, dtype, prefetch.
        profile: of the model; a block or call that cannot have an option keeps what it can.
        units: of the model.
        mixture: the decisions.
    """
    trace = next(iter(profile.traces.values()))
    policies = [CallPlan()] * len(trace.calls)
    written = profile.written_blocks
    for index, policy in zip(units.calls, mixture.policies, strict=True):
        if may_have(trace.calls[index], policy, written):
            policies[index] = joined_to(policies[index - 1], policy)
    wanted: dict[str, BlockPlan] = {}
    groups = zip((*units.blocks, *units.ends), (*mixture.homes, *mixture.ends), strict=True)
    for names, homes in groups:
        wanted.update(dict.fromkeys(names, homes))
    blocks = {b.name: homes_for(b, wanted[b.name]) for b in profile.blocks if b.name in wanted}
    return replace(
        frame,
        calls=tuple(policies) if any(not p.saved.policy.keeps_all for p in policies) else (),
        blocks={name: homes for name, homes in blocks.items() if homes != BlockPlan()},
    )


def spread(counts: Sequence[int]) -> tuple[int, ...]:
    """Returns indices of options, each as often as `counts` says, spread evenly."""
    total = sum(counts)
    given = [0] * len(counts)
    order: list[int] = []
    for place in range(1, total + 1):
        behind = [count * place / total - given[i] for i, count in enumerate(counts)]
        most = max(range(len(counts)), key=lambda i: behind[i])
        given[most] += 1
        order.append(most)
    return tuple(order)


def whole_counts(shares: Sequence[float], total: int) -> list[int]:
    """Rounds shares that sum to 1 to counts that sum to `total`, by largest remainders."""
    exact = [max(0.0, share) * total for share in shares]
    counts = [int(one + 1e-9) for one in exact]
    left = total - sum(counts)
    for i in sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))[: max(0, left)]:
        counts[i] += 1
    return counts


# How many units of a mixture have which option, and the counts next to them.
#
# In: counts. Out: counts that differ in one move.


@dataclass(frozen=True, kw_only=True)
class OptionCounts:
    """How many units have each option, and which one each group of ends has."""

    policies: tuple[int, ...]
    homes: tuple[int, ...]
    ends: tuple[int, ...]


def other_ends(ends: tuple[int, ...], options: Sequence[int]) -> list[tuple[int, ...]]:
    """Lists ends of which one group has another option.

    Args:
        ends: option of each group.
        options: how many there are of each.
    """
    return [
        (*ends[:group], other, *ends[group + 1 :])
        for group, count in enumerate(options)
        for other in range(count)
        if other != ends[group]
    ]


def all_shifted(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Lists counts of which a half, a quarter, an eighth, or one of all, has gone from one option
    to another; the most first.
    """
    total = sum(counts)
    sizes = sorted({max(1, total // part) for part in (2, 4, 8, total)}, reverse=True)
    return list(dict.fromkeys(moved for size in sizes for moved in _shifted(counts, size)))


def _shifted(counts: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    for source, there in enumerate(counts):
        for target in range(len(counts)):
            if target != source and there:
                moved = min(size, there)
                yield tuple(c - moved if i == source else c + moved if i == target else c for i, c in enumerate(counts))
