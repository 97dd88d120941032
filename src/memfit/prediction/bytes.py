"""Bytes at every operation of a step, tier by tier.

In: `Step`. Out: `TierBytes` for each operation; peaks by tier; or bytes by owner at one operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
    return peaks_and_slots(step)[0]


def peaks_and_slots(step: Step) -> tuple[dict[Tier, int], dict[Slot, int]]:
    """Returns the peak bytes by tier, as `peaks`, and the device's by slot: at each segment's
    forward or backward, of any microbatch, and at what stands between it and the one before.

    What stands behind the last one has the slot `AT_THE_END`.
    """
    device = Tier.DEVICE
    alive = sum(change.nbytes for change in step.resting if change.tier is device)
    beside = _Beside([change for change in step.resting if change.tier is not device])
    slots: dict[Slot, int] = {}
    highest = alive
    # Each plan that a planner looks at passes here: the device apart, since most changes are its,
    # and both loops in place (0 is a change's tier, 3 its bytes).
    for operation in step.operations:
        rising = alive
        others: list[ByteChange] = []
        for change in operation.during:
            if change[0] is device:
                rising += change[3]
            else:
                others.append(change)
        if others:
            beside.rise(others)
            others = []
        for change in operation.changes:
            if change[0] is device:
                alive += change[3]
            else:
                others.append(change)
        if others:
            beside.change(others)
        highest = max(highest, rising, alive)
        action = operation.action
        if isinstance(action, Forward | Backward):
            slot = isinstance(action, Backward), action.first
            slots[slot] = max(slots.get(slot, 0), highest)
            highest = alive
    slots[AT_THE_END] = highest
    return {device: max(slots.values()), **beside.most}, slots


class _Beside:
    """Bytes of the tiers beside the device.

    Attributes:
        most: peak bytes by tier.
    """

    def __init__(self, resting: Sequence[ByteChange]) -> None:
        self._alive: dict[Tier, int] = {}
        self.most: dict[Tier, int] = {}
        self.change(resting)

    def rise(self, changes: Sequence[ByteChange]) -> None:
        """Takes bytes that are there for one operation."""
        for tier, nbytes in self._with(changes).items():
            self.most[tier] = max(self.most.get(tier, 0), nbytes)

    def change(self, changes: Sequence[ByteChange]) -> None:
        """Takes bytes that come or go."""
        self.rise(changes)
        self._alive.update(self._with(changes))

    def _with(self, changes: Sequence[ByteChange]) -> dict[Tier, int]:
        found: dict[Tier, int] = {}
        for tier, _, _, nbytes in changes:
            found[tier] = found.get(tier, self._alive.get(tier, 0)) + nbytes
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
