"""Prices of an option for one unit, wherever it stands in the chain.

In: a judge. Out: bytes by slot that one unit's option takes more than the reference's.

[Note: a price is shifted]
One unit in the middle is probed with each option. What it takes more is a constant while it rests
(between its forward and its backward, or all the time) and a few numbers near its own forward and
backward. A unit elsewhere takes the same around its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from memfit.core.plan import BlockPlan, CallPlan
from memfit.planning.mixed_units import Mixture
from memfit.planning.slot_prices import Judge, uniform
from memfit.prediction.bytes import Slot

# Slots around a unit's own forward and backward at which its price differs from the constant.
_NEAR = 5


class PlacePrices:
    """Prices of all options of single units. See [Note: a price is shifted].

    Args:
        judge: of mixtures.
        policies, homes: options.

    Attributes:
        slots: in the order of the step.
        by_slot: bytes more than the reference.  # (units, options, slots)
    """

    def __init__(self, judge: Judge, policies: Sequence[CallPlan], homes: Sequence[BlockPlan]) -> None:
        import numpy as np

        none = uniform(judge.units, CallPlan(), BlockPlan())
        reference = judge(none)
        self.slots: tuple[Slot, ...] = tuple(reference.slots)
        calls = judge.units.calls
        middle = len(calls) // 2
        probes = [with_policy(none, middle, policy) for policy in policies]
        probes += [with_homes(none, middle, homes_) for homes_ in homes]
        found: list[list[list[float]]] = []
        for probe in probes:
            slots = judge(probe).slots
            more = [float(slots.get(slot, 0) - reference.slots[slot]) for slot in self.slots]
            found.append([self._shifted(more, calls[middle], call) for call in calls])
        # (options, units, slots) -> (units, options, slots)
        self.by_slot: Any = np.array(found).swapaxes(0, 1)

    def _span(self, call: int) -> tuple[int, int]:
        """Positions of a call's forward and backward."""
        forward = self.slots.index((False, call))
        backward = self.slots.index((True, call)) if (True, call) in self.slots else forward
        return forward, backward

    def _shifted(self, more: Sequence[float], probed: int, call: int) -> list[float]:
        """Returns a probed price at another call."""
        if call == probed:
            return list(more)
        forward, backward = self._span(probed)
        inside = median(more[forward + 2 : backward - 1]) if backward - forward > 3 else 0.0
        far = [*more[: max(0, forward - _NEAR)], *more[backward + _NEAR + 1 :]]
        outside = median(far) if far else 0.0
        own_forward, own_backward = self._span(call)
        found = [inside if own_forward <= t <= own_backward else outside for t in range(len(more))]
        for t, value in enumerate(more):
            rests = inside if forward <= t <= backward else outside
            is_first = abs(t - forward) <= abs(t - backward)
            offset = t - forward if is_first else t - backward
            place = (own_forward if is_first else own_backward) + offset
            if abs(offset) <= _NEAR and 0 <= place < len(found):
                found[place] += value - rests
        return found


def with_policy(mixture: Mixture, place: int, policy: CallPlan) -> Mixture:
    """Gives one unit another policy."""
    policies = list(mixture.policies)
    policies[place] = policy
    return Mixture(policies=tuple(policies), homes=mixture.homes, ends=mixture.ends)


def with_homes(mixture: Mixture, place: int, homes: BlockPlan) -> Mixture:
    """Gives one unit other homes."""
    found = list(mixture.homes)
    found[place] = homes
    return Mixture(policies=mixture.policies, homes=tuple(found), ends=mixture.ends)
