"""Prices of options by place of the step: what each unit's option adds to what lanes have to do,
and where.

In: a judge, options. Out: `ChainPrices`.

As in [Note: a price is shifted], one unit in the middle is probed with each option, and what its
schedule gives to lanes around its own forward and backward is taken to be given around another
unit's. The last unit is probed by itself, and so is each group of ends: between them and the turn
there is no room to shift.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memfit.core.plan import BlockPlan, CallPlan
from memfit.core.tiers import Tier
from memfit.planning.chain_flows import Flows, Queue, flows_of
from memfit.planning.mixed_units import Mixture
from memfit.planning.place_prices import PlacePrices, with_homes, with_policy
from memfit.planning.slot_prices import Judge, Judged, uniform
from memfit.prediction.bytes import Slot

# Differences of seconds that rounding makes.
_LEAST_S = 1e-12


@dataclass(frozen=True, kw_only=True)
class PlacePrice:
    """Amounts that one option takes more than the reference.

    Attributes:
        work_s: by queue and place.
        chains_s: of `Flows`, where the reference has none such.
        slots: bytes by slot, in the order of the prices' slots.
        tiers: bytes by tier beside the device.
    """

    work_s: Mapping[tuple[Queue, int], float]
    chains_s: Mapping[tuple[int, float], float]
    slots: Any
    tiers: Mapping[Tier, float]


class ChainPrices:
    """Prices of all options of one frame.

    Args:
        judge: of its mixtures.
        policies, homes: options of units; homes are those of ends too.

    Attributes:
        flows: of the reference: everything kept on the device.
        reference: judged.
        windows: the longest of each queue in any probe.
        agrees: all probes compute in the same order; if not, there is no program.
        slots: of the byte prices, in order.
        of_units: by unit and option, policies first.
        of_ends: by group of ends and option.
    """

    def __init__(self, judge: Judge, policies: Sequence[CallPlan], homes: Sequence[BlockPlan]) -> None:
        self.policies, self.homes = tuple(policies), tuple(homes)
        self.units = judge.units
        self.agrees = True
        self._judge = judge
        self.windows: dict[Queue, float] = {}
        none = uniform(judge.units, CallPlan(), BlockPlan())
        self.reference: Judged
        self.flows: Flows
        self.reference, self.flows = self._lowered(none)
        self.slots: tuple[Slot, ...] = tuple(self.reference.slots)
        calls = judge.units.calls
        middle, last = len(calls) // 2, len(calls) - 1
        self.of_units: list[list[PlacePrice]] = [[] for _ in calls]
        probes = [[with_policy(none, place, p) for place in (middle, last)] for p in policies]
        probes += [[with_homes(none, place, h) for place in (middle, last)] for h in homes]
        priced = [(self._price(in_middle), self._price(at_last)) for in_middle, at_last in probes]
        # Asks for the same probes, which are judged by now.
        bytes_ = PlacePrices(judge, policies, homes)
        for option, (middle_price, last_price) in enumerate(priced):
            for unit, call in enumerate(calls):
                price = last_price if unit == last else self._shifted(middle_price, calls[middle], call)
                self.of_units[unit].append(replace(price, slots=bytes_.by_slot[unit, option]))
        self.of_ends: list[list[PlacePrice]] = [
            [self._price(replace(none, ends=(*none.ends[:g], h, *none.ends[g + 1 :]))) for h in homes]
            for g in range(len(none.ends))
        ]
        # A crowd of moves may be waited for later than one alone.
        crowds = [uniform(judge.units, p, BlockPlan()) for p in policies]
        crowds += [uniform(judge.units, CallPlan(), h) for h in homes]
        for mixture in crowds:
            self._probe(mixture)

    def _lowered(self, mixture: Mixture) -> tuple[Judged, Flows]:
        judged, step = self._judge.with_step(mixture)
        found = flows_of(step, self._judge.question.pace)
        for queue, window in found.windows.items():
            self.windows[queue] = max(self.windows.get(queue, 0.0), window)
        return judged, found

    def _probe(self, mixture: Mixture) -> tuple[Judged, Flows]:
        judged, found = self._lowered(mixture)
        self.agrees = self.agrees and found.places == self.flows.places
        return judged, found

    def _price(self, mixture: Mixture) -> PlacePrice:
        import numpy as np

        (judged, flows), reference = self._probe(mixture), self.reference
        work: dict[tuple[Queue, int], float] = defaultdict(float)
        for source, sign in ((flows, 1.0), (self.flows, -1.0)):
            for queue, values in source.work_s.items():
                for place, seconds in values.items():
                    work[queue, place] += sign * seconds
        peaks, before = judged.built.cost.peaks, reference.built.cost.peaks
        return PlacePrice(
            work_s={key: seconds for key, seconds in work.items() if abs(seconds) > _LEAST_S},
            chains_s={key: s for key, s in flows.chains_s.items() if self.flows.chains_s.get(key) != s},
            slots=np.array([judged.slots.get(s, 0) - reference.slots[s] for s in self.slots], dtype=float),
            tiers={t: peaks[t] - before.get(t, 0) for t in peaks if not t.traits.is_device},
        )

    def _own(self, call: int) -> dict[tuple[bool, int], int]:
        """Numbers of a call's own places."""
        return {(place.is_backward, place.turn): i for i, place in enumerate(self.flows.places) if place.call == call}

    def _shifted(self, price: PlacePrice, probed: int, call: int) -> PlacePrice:
        """Returns a probed price at another call."""
        there, own = self._own(probed), self._own(call)
        count = len(self.flows.places)

        def moved_by(place: int) -> int | None:
            nearest = min(there, key=lambda key: (abs(place - there[key]), there[key]))
            return own[nearest] - there[nearest] if nearest in own else None

        work: dict[tuple[Queue, int], float] = defaultdict(float)
        for (queue, place), seconds in price.work_s.items():
            if (by := moved_by(place)) is not None:
                work[queue, min(count, max(0, place + by))] += seconds
        chains: dict[tuple[int, float], float] = {}
        for (place, end), seconds in price.chains_s.items():
            by = moved_by(place)
            if by is not None and 0 <= place + by <= count:
                chains[place + by, end + 2 * by] = seconds
        return replace(price, work_s=dict(work), chains_s=chains)

    def options_of(self, mixture: Mixture) -> tuple[list[tuple[int, int]], list[int]]:
        """Returns a mixture's options as numbers: of policies and homes by unit, of homes by group
        of ends.
        """
        first = len(self.policies)
        units = zip(mixture.policies, mixture.homes, strict=True)
        of_units = [(self.policies.index(policy), first + self.homes.index(homes)) for policy, homes in units]
        return of_units, [self.homes.index(homes) for homes in mixture.ends]
