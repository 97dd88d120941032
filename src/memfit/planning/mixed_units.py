"""Units of a mixed plan: the decided calls in order, each with the blocks that it alone reads; all
other blocks that may move are the *ends* (embedding, head), the largest decided one by one.

In: `Profile`, options by unit. Out: the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.profile import Profile
from memfit.planning.candidates import decided_calls
from memfit.planning.menus import homes_for, may_have
from memfit.planning.movable import movable_blocks

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
