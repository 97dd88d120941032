"""Predicted peaks and seconds of plans, kept from one question about a profile to the next: the
same plans are asked about at another limit.

In: plans, and what predicts one. Out: `Appraisal`s of peaks and seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from memfit.core.plan import Plan
from memfit.prediction.predict import Appraisal


def decisions_apart_from(plan: Plan, *names: str) -> tuple[Any, ...]:
    """Returns the values of all fields of a plan but these."""
    return tuple(getattr(plan, field.name) for field in fields(plan) if field.name not in names)


class PlanCosts:
    """Costs of plans of one profile.

    Memory: about 1 KiB a plan.
    """

    def __init__(self) -> None:
        self._conditions: Any = None
        self._costs: dict[Any, Appraisal] = {}
        # Many plans share their decisions about blocks or about calls.
        self._numbers: dict[Any, int] = {}

    def under(self, conditions: Any) -> PlanCosts:
        """Returns itself, empty if costs were predicted under other conditions.

        Args:
            conditions: the machine and all else that costs depend on beside profile and plan.
        """
        if conditions != self._conditions:
            self._costs.clear()
            self._conditions = conditions
        return self

    def of(self, plan: Plan, find: Callable[[], Appraisal]) -> Appraisal:
        """Returns the peaks and seconds of a plan, or finds them."""
        shared = tuple(plan.blocks.items()), plan.calls
        numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in shared]
        key = *numbers, *decisions_apart_from(plan, "blocks", "calls")
        cost = self._costs.get(key)
        if cost is None:
            found = find()
            cost = self._costs[key] = Appraisal(peaks=found.peaks, seconds=found.seconds)
        return cost
