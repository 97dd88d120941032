"""Bytes at every operation of a step, tier by tier.

In: `Step`. Out: `TierBytes` for each operation; peaks by tier; or bytes by owner at one operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memfit.core.limits import format_bytes
from memfit.core.schedule import Backward, Forward
from memfit.core.step import CATEGORIES, ByteChange, Step, owner_name
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


# Residents: the holders of memory at the peak by name, as messages and reports show them.
#
# In: `Step`. Out: `Resident`s, largest first, or a table of them.


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A holder of memory: its category (as in `Timeline`), its owner's name, its bytes."""

    category: str
    name: str
    nbytes: int


def residents_at(step: Step, index: int) -> tuple[Resident, ...]:
    """Returns the residents of the device at the peak of operation `index`, largest first. They sum
    to its `peak_bytes`.

    Activations are named by the call whose forward made them, all microbatches together, where the
    step was lowered with `is_itemized`.
    """
    names, sites = step.names, step.sites
    coming = [(change.category, change.owner) for change in step.operations[index].during]
    found = [
        Resident(category=category, name=owner_name(owner, names, sites), nbytes=nbytes)
        for (category, owner), nbytes in _without_debts(held_at(step, index), coming).items()
    ]
    return tuple(sorted(found, key=lambda r: (-r.nbytes, r.category, r.name)))


def _without_debts(held: dict[tuple[str, str], int], coming: Sequence[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Subtracts negative amounts from the owners that were counted too early.

    A backward's gradients count from its beginning on, and a negative change corrects that where
    they are made only while its activations are freed. No owner may be shown with negative bytes.

    Args:
        held: bytes by (category, owner).
        coming: keys that the operation changes: what is counted too early is among them.
    """
    left = dict(held)
    for debtor in [key for key, nbytes in held.items() if nbytes < 0]:
        debt = -left.pop(debtor)
        largest = sorted(left, key=lambda key: (key not in coming, key[0] != debtor[0], -left[key]))
        for key in largest:
            paid = min(debt, max(0, left[key]))
            left[key] -= paid
            debt -= paid
    return {key: nbytes for key, nbytes in left.items() if nbytes}


def peak_report(step: Step, *, rows: int = 12) -> str:
    """Returns a table of the largest residents at the predicted peak of the device."""
    peaks = [b.peak_bytes for b in follow_tier(step)]
    index = max(range(len(peaks)), key=peaks.__getitem__)
    found = residents_at(step, index)
    action = step.operations[index].action
    lines = [f"predicted device peak {format_bytes(peaks[index])} at action {index}, {action}"]
    lines += [f"  {format_bytes(r.nbytes):>12}  {r.category:<10}  {r.name}" for r in found[:rows]]
    if rest := found[rows:]:
        lines.append(f"  {format_bytes(sum(r.nbytes for r in rest)):>12}  {len(rest)} smaller ones")
    return "\n".join(lines)
