"""Search for mixed plans in one frame: of given microbatches, order and fetching ahead.

In: what judges mixtures of the frame, a limit. Out: mixtures that were judged. Which frames are
looked at, and at which limits, says `planner.search.widening`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from memfit.core.numerics import regroups_sums
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier, is_processor
from memfit.planner.search.chain import frame_bound_s
from memfit.planner.search.mixed_units import (
    HomeRules,
    Mixture,
    OptionCounts,
    all_shifted,
    home_rules,
    list_homes,
    list_policies,
    other_ends,
    spread,
    whole_counts,
)
from memfit.planner.search.mixing import ByteRoom, MixtureProgram, PlacePrices, PriceTable, Shares
from memfit.planner.search.polish import BACKLOGS, BUFFERS_AHEAD, GAIN, Ahead, JudgesAhead, polish
from memfit.planner.search.pricing import PlanQuestion
from memfit.planner.search.slot_prices import Judge, Judged, OptionPrices, Row
from memfit.step.bytes import Slot

# The series of limits at which mixed plans are looked for.
#
# In: the least bytes that are needed, the bytes that are asked about. Out: numbered limits, the
# same for every question about a model. See [Note: a larger limit is never slower] in
# `planner.search.widening`.

_LIMITS_AN_OCTAVE = 8
# Models of more units than so many are looked at with fewer limits: a half of these, and so on.
_MANY_UNITS, _OF_MANY_UNITS = 40, 12
# Of few units a plan is judged soon: then the series has so many limits an octave, and mixtures are
# solved for at every so-manieth of them. At the others the best is polished.
_UNITS_OF_MANY_LIMITS, _MANY_LIMITS, _SOLVED_EVERY = 8, 48, 4


def series_of_limits(least: int, asked: int, units: int) -> Iterator[tuple[int, int]]:
    """Yields the series' number and bytes of each limit, from the last that is not above the least
    to the first that is not below the one asked about.

    Args:
        least: bytes that are needed at least.
        asked: bytes that are asked about.
        units: of the model.
    """
    an_octave = _MANY_LIMITS if units <= _UNITS_OF_MANY_LIMITS else _LIMITS_AN_OCTAVE
    if units > _MANY_UNITS:
        an_octave = _OF_MANY_UNITS
    while units > _MANY_UNITS and an_octave > 1:
        an_octave, units = an_octave // 2, units // 2
    number = math.floor(an_octave * math.log2(max(1, least)))
    while True:
        limit = math.ceil(2 ** (number / an_octave))
        yield number, limit
        if limit >= asked:
            return
        number += 1


def limits_a_solution(units: int) -> int:
    """Returns how many limits of the series there are for each at which mixtures are solved for."""
    return _SOLVED_EVERY if units <= _UNITS_OF_MANY_LIMITS else 1


_ROUNDS = 4
_STALL_WEIGHTS = (0.5, 1.0)
_STARTS = 4
_MOST_MOVES = 8
# A plan of many layers takes longer to judge: of more than so many, fewer moves are made.
_FEW_UNITS = 32
_LEAST_MOVES = 3
# So many in turn that do not fit, though by their prices they do: others hardly will.
_UNFIT = 3
# Shares that solving leaves beside a whole one.
_WHOLE = 1e-9
# Polishing that gains less is done less often.
_WORTH = 1e-3


class FrameSearch:
    """Search in one frame, at one limit after the other.

    Attributes:
        regroups: its plans regroup sums, whatever their mixture is (`core.numerics`).

    Args:
        judge: of its mixtures.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._question = question = judge.question
        self._judges = JudgesAhead(judge)
        self.regroups = regroups_sums(judge.frame, question.profile)
        profile, frame = question.profile, judge.frame
        trace = next(iter(profile.traces.values()))
        may_update = not is_processor(question.hardware.device) and not profile.host_update_obstacle
        rules: HomeRules = home_rules(
            frame,
            profile,
            question.tiers,
            clips_norm=question.clips_norm,
            may_update_on_host=may_update and (question.numerics != "exact" or profile.agrees_on_host),
        )
        homes = list_homes(rules)
        policies = list_policies(trace, frozenset(judge.units.calls), question.tiers)
        self._prices: OptionPrices = judge.prices(policies, homes)
        self._program = MixtureProgram(self._prices)
        self._places: dict[Ahead, PlacePrices] = {}
        # By how far ahead: in the order in which they were tried.
        self._tried: dict[Ahead, dict[OptionCounts, None]] = {}
        self._mixtures: dict[OptionCounts, Mixture] = {}
        self._spreads: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._known_s = math.inf
        # Times in turn that moving, and polishing, gained nothing: then less of it is done.
        self._moved_in_vain = self._polished_in_vain = self._left_out = 0

    def begin(self, question: PlanQuestion) -> None:
        """Asks with another limit from now on."""
        self._question = question
        self._judges.within(question)
        room = ByteRoom(device=question.budget.tensor_bytes, slack={}, tiers=question.limits)
        self._table = PriceTable(self._prices, room)
        self._starts: list[OptionCounts] = []

    def run(self, seed: Plan, known_s: float) -> None:
        """Rounds the program's solutions, then moves units from option to option.

        Args:
            seed: the best uniform plan of the frame, which is tried as well.
            known_s: of plans that are known from elsewhere.
        """
        self._known_s = known_s
        self._go_as_far_as_the_best()
        if (counts := self._counts_of(seed)) is not None:
            self._begin_from(counts)
        # First without the disk: what is slow alone hides its waits in its own slowness.
        files = [tier for tier in self._question.tiers if tier.traits.is_files]
        near = {tier: self._prices.reference.amount(Row("tier", tier=tier)) for tier in files}
        for tiers in (near, {}) if files and len(self._question.tiers) > 1 else ({},):
            for weight in _STALL_WEIGHTS:
                self._solve(weight, {**self._question.limits, **tiers})
        # From the best of all that are known, those of smaller limits among them, and from what was
        # found here: waits are what prices say least of.
        best = self._best_tried()
        starts = [] if best is None else [best]
        before_s = self.best_s
        for start in dict.fromkeys([*starts, *sorted(self._starts, key=self._seconds_of)][:_STARTS]):
            self._move(start)
        self._moved_in_vain = 0 if self.best_s < before_s else self._moved_in_vain + 1

    def _go_as_far_as_the_best(self) -> None:
        """Judges from now on by mixtures that go as far ahead as the best that is known."""
        if math.isinf(self.best_s):
            return
        ahead, _ = self._judges.best
        if ahead != Ahead.said_by(self._judge.frame):
            before = self._best_tried()
            self._judge = self._judges.of(ahead)
            if before is not None:
                self._begin_from(before)

    def _best_tried(self) -> OptionCounts | None:
        """Returns the best counts that fit, going as far ahead as now; None: none do."""
        tried = tuple(self._tried.get(Ahead.said_by(self._judge.frame), ()))
        fitting = [counts for counts in tried if self._try(counts).built.fits]
        return min(fitting, key=self._seconds_of, default=None)

    def _seconds_of(self, counts: OptionCounts) -> float:
        return self._try(counts).built.weighed_s

    def _begin_from(self, counts: OptionCounts) -> None:
        if self._try(counts).built.fits:
            self._starts.append(counts)

    @property
    def judged(self) -> list[Judged]:
        """All plans that were judged."""
        return self._judges.judged

    @property
    def best_s(self) -> float:
        """Seconds of the best mixture that fits, as they are compared by; infinite: none does."""
        return self._judges.best_s

    def bound_s(self, question: PlanQuestion) -> float:
        """Seconds that no mixture of shares takes less than, without waits, within the limits of
        a question; infinite: none fits.
        """
        room = ByteRoom(device=question.budget.tensor_bytes, slack={}, tiers=question.limits)
        shares = self._program.best_shares(room, stall_weight=0.0, is_bound=True)
        return math.inf if shares is None else shares.seconds

    def chain_bound_s(self, bound_s: float) -> float:
        """Seconds that no mixture of the frame takes less than, by the chain program, at
        least `bound_s`.
        """
        policies = [option.value for option in self._prices.policies]
        homes = [option.value for option in self._prices.homes]
        return max(bound_s, frame_bound_s(self._judges.by_ahead, Ahead.said_by(self._judge.frame), policies, homes))

    def refine(self) -> None:
        """Tries other numbers of buffers for the best mixture, and polishes it; now and then only,
        where that gained nothing before.
        """
        before_s = self.best_s
        is_small = limits_a_solution(len(self._judge.units.calls)) > 1
        if math.isinf(before_s) or (self._left_out < self._polished_in_vain and not is_small):
            self._left_out += 1
            return
        self._left_out = 0
        ahead, start = self._judges.best
        for prefetch in BUFFERS_AHEAD:
            self._judges.of(replace(ahead, prefetch=prefetch))(start.mixture)
        ahead, start = self._judges.best
        for backlog in BACKLOGS:
            self._judges.of(replace(ahead, backlog=backlog))(start.mixture)
        ahead, start = self._judges.best
        judge, prices = self._judges.of(ahead), self._prices
        if ahead not in self._places:
            self._places[ahead] = PlacePrices(
                judge, [o.value for o in prices.policies], [o.value for o in prices.homes]
            )
        polish(judge, start, prices, self._table, self._places[ahead])
        self._polished_in_vain = 0 if self.best_s < before_s * (1 - _WORTH) else self._polished_in_vain + 1

    def _counts_of(self, plan: Plan) -> OptionCounts | None:
        """Returns a plan's options as counts; None where it has others than are listed."""
        units, prices = self._judge.units, self._prices
        policies = [plan.call(index) for index in units.calls]
        homes = [plan.block(names[0]) if names else BlockPlan() for names in units.blocks]
        ends = [plan.block(names[0]) for names in units.ends]
        known_policies = [option.value for option in prices.policies]
        known_homes = [option.value for option in prices.homes]
        if not ({*policies} <= {*known_policies} and {*homes, *ends} <= {*known_homes}):
            return None
        return OptionCounts(
            policies=tuple(policies.count(value) for value in known_policies),
            homes=tuple(homes.count(value) for value in known_homes),
            ends=tuple(known_homes.index(value) for value in ends),
        )

    def _solve(self, stall_weight: float, tiers: Mapping[Tier, float]) -> None:
        """Solves and rounds, with less room where it did not fit.

        Args:
            stall_weight: of the program.
            tiers: bytes that may be taken beside the device.
        """
        limit = self._question.budget.tensor_bytes or 0
        slack: dict[Slot, float] = {}
        ends: tuple[int, ...] | None = None
        for _ in range(_ROUNDS):
            shares = self._shares(slack, stall_weight, ends, tiers)
            # A frame whose program says no less than the best is not rounded.
            if shares is None or shares.seconds >= min(self._known_s, self.best_s):
                return
            if ends is None:
                # A group of ends is one: what has the most of it has all.
                ends = tuple(max(range(len(group)), key=group.__getitem__) for group in shares.ends)
                if any(max(group) < 1 - _WHOLE for group in shares.ends):
                    shares = self._shares(slack, stall_weight, ends, tiers) or shares
            count = len(self._judge.units.calls)
            counts = OptionCounts(
                policies=tuple(whole_counts(shares.policies, count)),
                homes=tuple(whole_counts(shares.homes, count)),
                ends=ends,
            )
            judged = self._try(counts)
            if judged.built.fits:
                self._starts.append(counts)
                return
            over = {slot: nbytes - limit for slot, nbytes in judged.slots.items() if nbytes > limit}
            if not over:
                return  # the room beside the device, which prices say exactly
            for slot, nbytes in over.items():
                slack[slot] = slack.get(slot, 0.0) + nbytes

    def _shares(
        self,
        slack: Mapping[Slot, float],
        stall_weight: float,
        ends: tuple[int, ...] | None,
        tiers: Mapping[Tier, float],
    ) -> Shares | None:
        room = ByteRoom(device=self._question.budget.tensor_bytes, slack=slack, tiers=tiers)
        return self._program.best_shares(room, stall_weight=stall_weight, ends=ends)

    def _try(self, counts: OptionCounts) -> Judged:
        """Judges a mixture."""
        self._tried.setdefault(Ahead.said_by(self._judge.frame), {})[counts] = None
        return self._judge(self._mixture(counts))

    def _mixture(self, counts: OptionCounts) -> Mixture:
        prices, found = self._prices, self._mixtures.get(counts)
        if found is None:
            found = self._mixtures[counts] = Mixture(
                policies=tuple(prices.policies[i].value for i in self._spread(counts.policies)),
                homes=tuple(prices.homes[i].value for i in self._spread(counts.homes)),
                ends=tuple(group[i].value for group, i in zip(prices.ends, counts.ends, strict=True)),
            )
        return found

    def _spread(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        if counts not in self._spreads:
            self._spreads[counts] = spread(counts)
        return self._spreads[counts]

    def _move(self, start: OptionCounts) -> None:
        """Moves units between options while that gains: what promises most is judged first."""
        counts, known = start, self._judge(self._mixture(start))
        tried = in_vain = 0
        improved = True
        most = _MOST_MOVES * _FEW_UNITS // max(_FEW_UNITS, len(self._judge.units.calls))
        most = max(_LEAST_MOVES, most >> self._moved_in_vain)
        while improved and tried < most:
            improved = False
            for other in self._promising(counts, known)[: most - tried]:
                tried += 1
                found = self._try(other)
                in_vain = 0 if found.built.fits else in_vain + 1
                if in_vain == _UNFIT:
                    return
                is_better = found.built.weighed_s < known.built.weighed_s * (1 - GAIN)
                if is_better and found.built.fits and self._question.allows(found.built.priced):
                    counts, known, improved = other, found, True
                    break

    def _promising(self, counts: OptionCounts, known: Judged) -> list[OptionCounts]:
        """Returns neighbours that fit and are faster by their prices, corrected by what the judge
        found beyond them for the mixture that they are neighbours of; the fastest first.
        """
        import numpy as np

        table, prices, total = self._table, self._prices, len(self._judge.units.calls)
        here, first = table.amounts_of(known), table.first_home
        policies = [counts.policies, *all_shifted(counts.policies)]
        homes = [counts.homes, *all_shifted(counts.homes)]
        ends = [counts.ends, *other_ends(counts.ends, [len(group) for group in prices.ends])]
        by_policies = (np.array(policies) - np.array(counts.policies)) @ table.more[:first] / total
        by_homes = (np.array(homes) - np.array(counts.homes)) @ table.more[first : table.first_ends[0]] / total
        # A model may have no ends.
        begins = np.array(table.first_ends[:-1], dtype=int)
        rows = np.array(ends, dtype=int).reshape(len(ends), len(begins)) + begins
        by_ends = table.more[rows].sum(1) - table.more[rows[0]].sum(0)
        # Policies with homes, and ends with homes; not all three: an array of all would be large.
        worth = [
            (table.worth(here + by_policies[:, None] + by_homes[None], known), policies, True),
            (table.worth(here + by_ends[:, None] + by_homes[None], known), ends, False),
        ]
        listed: list[tuple[float, int, OptionCounts]] = []
        for seconds, others, is_policies in worth:
            for index in np.argsort(seconds, axis=None, kind="stable")[: 4 * _MOST_MOVES]:
                i, j = divmod(int(index), len(homes))
                if seconds[i, j] < known.built.cost.seconds:
                    changed = replace(counts, policies=others[i]) if is_policies else replace(counts, ends=others[i])
                    listed.append((float(seconds[i, j]), len(listed), replace(changed, homes=homes[j])))
        found = [other for _, _, other in sorted(listed) if self._mixture(other) not in self._judge.judged]
        return found[:_MOST_MOVES]
