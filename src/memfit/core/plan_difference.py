"""Differences between two plans, for people: which blocks and calls are decided otherwise.

In: two `Plan`s. Out: `PlanDifference`s; none if the plans are equal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from memfit.core.numbered_names import joined_names
from memfit.core.plan import BlockPlan, CallPlan, Plan


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """One thing that two plans decide otherwise.

    Attributes:
        where: names of blocks, indices of calls, or the field's name.
        before, after: the decisions, as a plan's file has them.
    """

    where: str
    before: str
    after: str


def plan_differences(before: Plan, after: Plan) -> tuple[PlanDifference, ...]:
    """Returns what differs, fields of the step first; equal differences of several blocks or calls
    are one.
    """
    found = [
        PlanDifference(
            where=each.name, before=_word(getattr(before, each.name)), after=_word(getattr(after, each.name))
        )
        for each in fields(Plan)
        if each.name not in ("blocks", "calls") and getattr(before, each.name) != getattr(after, each.name)
    ]
    blocks: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys([*before.blocks, *after.blocks]):
        if before.block(name) != after.block(name):
            blocks.setdefault(_unlike(before.block(name), after.block(name)), []).append(name or "(model)")
    for (old, new), names in blocks.items():
        several = f"{len(names)} blocks: " if len(names) > 1 else "block "
        found.append(PlanDifference(where=f"{several}{joined_names(names)}", before=old, after=new))
    calls: dict[tuple[str, str], list[int]] = {}
    for index in range(max(len(before.calls), len(after.calls))):
        if before.call(index) != after.call(index):
            calls.setdefault(_unlike(before.call(index), after.call(index)), []).append(index)
    for (old, new), indices in calls.items():
        shown = joined_names(map(str, indices))
        several = f"{len(indices)} calls: " if len(indices) > 1 else "call "
        found.append(PlanDifference(where=f"{several}{shown}", before=old, after=new))
    return tuple(found)


def _unlike(before: BlockPlan | CallPlan, after: BlockPlan | CallPlan) -> tuple[str, str]:
    """Returns the decisions that differ, of both."""
    names = [each.name for each in fields(before) if getattr(before, each.name) != getattr(after, each.name)]
    old, new = (", ".join(f"{name}={_word(getattr(made, name))}" for name in names) for made in (before, after))
    return old, new


def _word(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
