"""Looks for mixed plans that beat the best uniform one.

In: a question, uniform plans that were built. Out: mixed plans that were built.

[Note: how mixed plans are looked for]
For each frame (microbatches, order, fetching ahead) prices of options are probed, and the mixture
program (`planning.mixing`) gives shares. They are rounded to whole units, spread evenly, and judged
as any other plan: by the timeline of the lowered schedule. Where the judge finds more bytes at a
slot than there is room, the slot's room is taken to be so much smaller, and the program is solved
again. It is solved for all of the room and for parts of it, with the disk and without, so that
there are several mixtures to begin from. Around each, units are moved from one option to another,
one group or two at a time, as long as the judge says that it gains; the best is polished unit by
unit (`planning.polish`). The numbers of frames, rounds and judged plans are bounded, and nothing
depends on the clock: the same question has the same answer.

[Note: when it is looked for them]
Where weights are small, a plan's schedule takes about as long to price as a step that it could
shorten, and moving them gains little: only models of at least `LEAST_WEIGHT_BYTES` are looked at,
and only where the best uniform plan takes longer than computing alone. Only for accelerators: where
the processor is the device, the solver's libraries would stay in the process (some 30 MiB), beside
a job that may have no room for them, and a fast disk beside slow cores leaves little to gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier, is_processor
from memfit.core.units import MIB
from memfit.planning.menus import HomeRules, home_rules, list_homes, list_policies
from memfit.planning.mixed_units import Mixture, find_units, spread, whole_counts
from memfit.planning.mixing import ByteRoom, Shares, best_shares
from memfit.planning.polish import polish
from memfit.planning.price_table import PriceTable
from memfit.planning.pricing import BuiltCandidate, PlanQuestion
from memfit.planning.slot_prices import Judge, Judged, OptionPrices, Row
from memfit.prediction.bytes import Slot

LEAST_WEIGHT_BYTES = 64 * MIB
_FRAMES = 3
# Frames that are refined: so many, if their best takes less than so many times the best of all.
_REFINED = 2
_NEAR_BEST = 1.1
_PREFETCH = 2
_BUFFERS_AHEAD = (2, 1, 3, 4)
_ROUNDS = 4
_STALL_WEIGHTS = (0.5, 1.0)
_ROOM_PARTS = (1.0, 0.8, 0.6)
_STARTS = 5
_MOST_MOVES = 40
# A plan of many layers takes longer to judge: of more than so many, fewer moves are made.
_FEW_UNITS = 16
_MOST_AROUND = 12
# A frame whose program says at least this multiple of the best is not rounded.
_HOPELESS = 1.0
_GAIN = 1e-4


def mixes(question: PlanQuestion) -> bool:
    """Tells whether mixed plans are looked for. See [Note: when it is looked for them]."""
    is_large = question.profile.weight_bytes >= LEAST_WEIGHT_BYTES
    # On a processor, scipy would be counted against the limit of the job that is planned.
    return (
        is_large
        and not is_processor(question.hardware.device)
        and question.scheme != "journal"
        and question.budget.tensor_bytes is not None
    )


@dataclass(frozen=True, kw_only=True)
class MixedPlans:
    """Result of the search for mixed plans.

    Attributes:
        built: plans that were judged.
        bound_s: least seconds that the mixture program gives in any frame, with shares of units and
            without stalls; None: there was no frame. No proof: prices of shares are not exactly
            those of whole units, and other frames were not looked at.
    """

    built: tuple[BuiltCandidate, ...]
    bound_s: float | None


def search_mixed(built: Sequence[BuiltCandidate], question: PlanQuestion, first_index: int) -> MixedPlans:
    """Looks for mixed plans. See [Note: how mixed plans are looked for].

    Args:
        built: uniform plans, some of which fit.
        question: that they answer.
        first_index: of the plans that are returned, behind all listed ones.
    """
    fitting = [b for b in built if b.fits]
    best_s: float = min(b.weighed_s for b in fitting)
    units = find_units(question.profile)
    found: list[BuiltCandidate] = []
    if not units.calls:
        return MixedPlans(built=(), bound_s=None)
    searches: list[_FrameSearch] = []
    for frame, seed in _frames(fitting):
        judge = Judge(question, frame, units, first_index=first_index + len(found))
        search = _FrameSearch(judge, best_s)
        search.run(seed)
        searches.append(search)
        found += [judged.built for judged in judge.judged.values()]
        seconds: list[float] = [b.weighed_s for b in found if b.fits and question.allows(b.priced)]
        best_s = min([best_s, *seconds])
    promising = sorted((search for search in searches if search.best_s is not None), key=lambda s: s.best_s or 0.0)
    for search in promising[:_REFINED]:
        if (search.best_s or 0.0) < best_s * _NEAR_BEST:
            found += search.refine(first_index + len(found))
    return MixedPlans(
        built=tuple(built for built in found if question.allows(built.priced)),
        bound_s=min((search.bound_s for search in searches), default=None),
    )


def _frames(fitting: Sequence[BuiltCandidate]) -> list[tuple[Plan, Plan]]:
    """Returns the frames of the fastest plans that fit, each with the fastest one of it."""
    frames: list[tuple[Plan, Plan]] = []
    for built in sorted(fitting, key=lambda b: (b.weighed_s, b.priced.index)):
        plan = built.priced.candidate.plan
        frame = replace(plan, blocks={}, calls=(), prefetch=_PREFETCH)
        if len(frames) < _FRAMES and all(frame != known for known, _ in frames):
            frames.append((frame, plan))
    return frames


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """How many units have each option, and which one each group of ends has."""

    policies: tuple[int, ...]
    homes: tuple[int, ...]
    ends: tuple[int, ...]


class _FrameSearch:
    """Search in one frame.

    Args:
        judge: of its mixtures.
        best_s: of plans that are known.
    """

    def __init__(self, judge: Judge, best_s: float) -> None:
        self._judge = judge
        self._question = question = judge.question
        self._best_s = best_s
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
        room = ByteRoom(device=question.budget.tensor_bytes, slack={}, tiers=question.limits)
        self._table = PriceTable(self._prices, room)
        self._best: tuple[float, _Counts] | None = None
        self._starts: dict[_Counts, float] = {}

    def run(self, seed: Plan) -> None:
        """Rounds the program's solutions, then moves units from option to option.

        Args:
            seed: the best uniform plan of the frame, which is tried as well.
        """
        if (counts := self._counts_of(seed)) is not None and (judged := self._try(counts)).built.fits:
            self._starts[counts] = judged.built.weighed_s
        # First without the disk: what is slow alone hides its waits in its own slowness.
        files = [tier for tier in self._question.tiers if tier.traits.is_files]
        near = {tier: self._prices.reference.amount(Row("tier", tier=tier)) for tier in files}
        for tiers in (near, {}) if files and len(self._question.tiers) > 1 else ({},):
            for weight, part in product(_STALL_WEIGHTS, _ROOM_PARTS):
                self._solve(weight, part, {**self._question.limits, **tiers})
        # Waits are what prices say least of: from each of several starts another end is reached.
        for start in sorted(self._starts, key=lambda counts: self._starts[counts])[: self._most_starts]:
            self._move(start)

    @property
    def _most_starts(self) -> int:
        return _STARTS if len(self._judge.units.calls) <= 2 * _FEW_UNITS else 2

    @property
    def best_s(self) -> float | None:
        """Seconds of the best mixture that was found, as they are compared by; None: none fits."""
        return None if self._best is None else self._best[0]

    @property
    def bound_s(self) -> float:
        """Seconds that no mixture of shares takes less than; infinite: none fits."""
        shares = self._shares({}, 0.0, None, self._question.limits)
        return math.inf if shares is None else shares.seconds

    def refine(self, first_index: int) -> list[BuiltCandidate]:
        """Tries other numbers of buffers for the best mixture, and polishes it.

        Args:
            first_index: of the plans that are returned.
        """
        assert self._best is not None, "asked of a search that found one"
        question, prices = self._question, self._prices
        mixture = self._mixture(self._best[1])
        judges = [
            Judge(question, replace(self._judge.frame, prefetch=prefetch), self._judge.units, first_index=first_index)
            for prefetch in _BUFFERS_AHEAD
        ]
        tried = [(judge, judge(mixture)) for judge in judges]
        fitting = [
            (judge, judged) for judge, judged in tried if judged.built.fits and question.allows(judged.built.priced)
        ]
        judge, start = min(fitting, key=lambda one: one[1].built.weighed_s)
        polish(judge, start, prices, self._table)
        others = [judged.built for other, judged in tried if other is not judge]
        return others + [judged.built for judged in judge.judged.values()]

    def _counts_of(self, plan: Plan) -> _Counts | None:
        """Returns a plan's options as counts; None where it has others than are listed."""
        units, prices = self._judge.units, self._prices
        policies = [plan.call(index) for index in units.calls]
        homes = [plan.block(names[0]) if names else BlockPlan() for names in units.blocks]
        ends = [plan.block(names[0]) for names in units.ends]
        known_policies = [option.value for option in prices.policies]
        known_homes = [option.value for option in prices.homes]
        if not ({*policies} <= {*known_policies} and {*homes, *ends} <= {*known_homes}):
            return None
        return _Counts(
            policies=tuple(policies.count(value) for value in known_policies),
            homes=tuple(homes.count(value) for value in known_homes),
            ends=tuple(known_homes.index(value) for value in ends),
        )

    def _solve(self, stall_weight: float, part: float, tiers: Mapping[Tier, float]) -> None:
        """Solves and rounds, with less room where it did not fit.

        Args:
            stall_weight: of the program.
            part: of the device's room that is looked at: a leaner mixture may wait less.
            tiers: bytes that may be taken beside the device.
        """
        limit = self._question.budget.tensor_bytes or 0
        slack: dict[Slot, float] = dict.fromkeys(self._prices.reference.slots, (1 - part) * limit)
        ends: tuple[int, ...] | None = None
        for _ in range(_ROUNDS):
            shares = self._shares(slack, stall_weight, ends, tiers)
            if shares is None or shares.seconds >= self._best_s * _HOPELESS:
                return
            if ends is None:
                # A group of ends is one: what has the most of it has all.
                ends = tuple(max(range(len(group)), key=group.__getitem__) for group in shares.ends)
                shares = self._shares(slack, stall_weight, ends, tiers) or shares
            count = len(self._judge.units.calls)
            counts = _Counts(
                policies=tuple(whole_counts(shares.policies, count)),
                homes=tuple(whole_counts(shares.homes, count)),
                ends=ends,
            )
            judged = self._try(counts)
            if judged.built.fits:
                self._starts[counts] = judged.built.weighed_s
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
        return best_shares(self._prices, room, stall_weight=stall_weight, ends=ends)

    def _try(self, counts: _Counts) -> Judged:
        """Judges a mixture, and keeps it if it is the best."""
        judged = self._judge(self._mixture(counts))
        built = judged.built
        if built.fits and self._question.allows(built.priced):
            best = math.inf if self._best is None else self._best[0]
            if built.weighed_s < best * (1 - _GAIN):
                self._best = built.weighed_s, counts
                self._best_s = min(self._best_s, built.weighed_s)
        return judged

    def _mixture(self, counts: _Counts) -> Mixture:
        prices = self._prices
        return Mixture(
            policies=tuple(prices.policies[i].value for i in spread(counts.policies)),
            homes=tuple(prices.homes[i].value for i in spread(counts.homes)),
            ends=tuple(group[i].value for group, i in zip(prices.ends, counts.ends, strict=True)),
        )

    def _move(self, start: _Counts) -> None:
        """Moves units between options while that gains: what promises most is judged first."""
        counts, known = start, self._judge(self._mixture(start))
        tried = 0
        improved = True
        most = max(_MOST_AROUND, _MOST_MOVES * _FEW_UNITS // max(_FEW_UNITS, len(self._judge.units.calls)))
        while improved and tried < most:
            improved = False
            for other in self._promising(counts, known):
                tried += 1
                found = self._try(other)
                is_better = found.built.weighed_s < known.built.weighed_s * (1 - _GAIN)
                if is_better and found.built.fits and self._question.allows(found.built.priced):
                    counts, known, improved = other, found, True
                    break

    def _promising(self, counts: _Counts, known: Judged) -> list[_Counts]:
        """Returns neighbours that fit and are faster by their prices, corrected by what the judge
        found beyond them for the mixture that they are neighbours of; the fastest first.
        """
        import numpy as np

        table, prices, total = self._table, self._prices, len(self._judge.units.calls)
        here, first = table.amounts_of(known), table.first_home
        policies = [counts.policies, *_all_shifted(counts.policies)]
        homes = [counts.homes, *_all_shifted(counts.homes)]
        ends = [counts.ends, *_other_ends(counts.ends, [len(group) for group in prices.ends])]
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
        listed: list[tuple[float, int, _Counts]] = []
        for seconds, others, is_policies in worth:
            for index in np.argsort(seconds, axis=None, kind="stable")[: 4 * _MOST_AROUND]:
                i, j = divmod(int(index), len(homes))
                if math.isfinite(seconds[i, j]):
                    changed = replace(counts, policies=others[i]) if is_policies else replace(counts, ends=others[i])
                    listed.append((float(seconds[i, j]), len(listed), replace(changed, homes=homes[j])))
        found = [other for _, _, other in sorted(listed) if self._mixture(other) not in self._judge.judged]
        return found[:_MOST_AROUND]


def _other_ends(ends: tuple[int, ...], options: Sequence[int]) -> list[tuple[int, ...]]:
    """Lists ends of which one group has another option."""
    return [
        (*ends[:group], other, *ends[group + 1 :])
        for group, count in enumerate(options)
        for other in range(count)
        if other != ends[group]
    ]


def _all_shifted(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    total = sum(counts)
    sizes = sorted({max(1, total // 4), max(1, total // 8), 1}, reverse=True)
    return list(dict.fromkeys(moved for size in sizes for moved in _shifted(counts, size)))


def _shifted(counts: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    for source, there in enumerate(counts):
        for target in range(len(counts)):
            if target != source and there:
                moved = min(size, there)
                yield tuple(c - moved if i == source else c + moved if i == target else c for i, c in enumerate(counts))
