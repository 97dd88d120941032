"""Bytes at every operation of a step, tier by tier.

In: `Step`. Out: `TierBytes` for each operation; peaks by tier; or bytes by owner at one operation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memfit.core.schedule import Backward, Forward
from memfit.core.step import CATEGORIES, ByteChange, Step
from memfit.core.tiers import Tier

Slot = tuple[bool, int]
"""A place in a step, whatever its plan moves: (it is a backward, first call of the segment)."""
AT_THE_END: Slot = (True, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TierBytes:
    """Bytes of one tier at one operation: at its peak, after it, and at its peak by category."""

    peak_bytes: int
    after_bytes: int
    by_category: dict[str, int]


def follow_tier(step: Step, tier: Tier = Tier.DEVICE) -> Iterator[TierBytes]:
    """Yields the bytes of one tier, operation by operation."""
    alive = _sums(step.resting, tier, dict.fromkeys(CATEGORIES, 0))
    for operation in step:
        during = _sums(operation.during, tier, alive)
        alive = _sums(operation.changes, tier, alive)
        peak, after = sum(during.values()), sum(alive.values())
        yield TierBytes(
            peak_bytes=max(peak, after), after_bytes=after, by_category=dict(alive) if peak < after else during
        )


def peaks(step: Step) -> dict[Tier, int]:
    """Returns the peak bytes by tier: of the device, and of every tier that is ever used."""
    alive: dict[Tier, int] = defaultdict(int, {Tier.DEVICE: 0})
    for change in step.resting:
        alive[change.tier] += change.nbytes
    most = defaultdict(int, alive)
    for operation in step:
        high: dict[Tier, int] = {}
        for change in operation.during:
            high[change.tier] = high.get(change.tier, 0) + change.nbytes
        for tier, nbytes in high.items():
            most[tier] = max(most[tier], alive[tier] + nbytes)
        for change in operation.changes:
            alive[change.tier] += change.nbytes
        for tier in {change.tier for change in operation.changes}:
            most[tier] = max(most[tier], alive[tier])
    return dict(most)


def peaks_by_slot(step: Step) -> dict[Slot, int]:
    """Returns the device's peak bytes by slot: at each segment's forward or backward, of any
    microbatch, and at what stands between it and the one before.

    What stands behind the last one has the slot `AT_THE_END`.
    """
    alive = sum(change.nbytes for change in step.resting if change.tier is Tier.DEVICE)
    found: dict[Slot, int] = {}
    highest = alive
    for operation in step:
        during = alive
        for change in operation.during:
            if change.tier is Tier.DEVICE:
                during += change.nbytes
        for change in operation.changes:
            if change.tier is Tier.DEVICE:
                alive += change.nbytes
        highest = max(highest, during, alive)
        action = operation.action
        if isinstance(action, Forward | Backward):
            slot = isinstance(action, Backward), action.first
            found[slot] = max(found.get(slot, 0), highest)
            highest = alive
    found[AT_THE_END] = highest
    return found


def held_at(step: Step, index: int, tier: Tier = Tier.DEVICE) -> dict[tuple[str, str], int]:
    """Returns bytes by (category, owner) at the peak of operation `index`; they sum to its
    `peak_bytes`.
    """
    before: Counter[tuple[str, str]] = Counter()
    for changes in (step.resting, *(o.changes for o in step.operations[:index])):
        before.update(_by_owner(changes, tier))
    during, after = before.copy(), before.copy()
    during.update(_by_owner(step.operations[index].during, tier))
    after.update(_by_owner(step.operations[index].changes, tier))
    highest = during if during.total() >= after.total() else after
    return {key: nbytes for key, nbytes in highest.items() if nbytes}


def _sums(changes: Iterable[ByteChange], tier: Tier, before: dict[str, int]) -> dict[str, int]:
    sums = dict(before)
    for change in changes:
        if change.tier is tier:
            sums[change.category] += change.nbytes
    return sums


def _by_owner(changes: Iterable[ByteChange], tier: Tier) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for change in changes:
        if change.tier is tier:
            found[change.category, change.owner] += change.nbytes
    return found
