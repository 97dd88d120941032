"""Residents: the holders of memory at the peak by name, as messages and reports show them.

In: `Step`. Out: `Resident`s, largest first, or a table of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.core.step import Step, owner_name
from memfit.core.units import format_bytes
from memfit.prediction.bytes import follow_tier, held_at


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
