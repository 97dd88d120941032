"""Builds uniform plans that could win, in the order of a lower bound of their seconds.

In: priced candidates, a question. Out: those that were built. See [Note: which candidates are
built] in `planning.planner`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from memfit.core.tiers import Tier
from memfit.planning.pricing import BuiltCandidate, PlanQuestion, PricedCandidate, is_within
from memfit.prediction.predict import Appraisal
from memfit.scheduling.sizes import home_bytes

UNIFORM_PATIENCE = 15
"""Uniform plans that are built in vain before mixed ones are looked for."""


class UniformSearch:
    """Builds what could win, in the order of its bound; can stop and go on.

    Args:
        priced: candidates.
        question: that they answer.

    Attributes:
        built: candidates that were built.
        waiting: candidates that were not, because their residents alone are too much.
        crowded: candidates that were not, because what rests beside the device alone is too much
            there.
    """

    def __init__(self, priced: Sequence[PricedCandidate], question: PlanQuestion) -> None:
        self._left = sorted(priced, key=lambda p: (p.weighed_bound, p.index), reverse=True)
        self._question = question
        self._best_s = math.inf
        self.built: list[BuiltCandidate] = []
        self.waiting: list[PricedCandidate] = []
        self.crowded: list[PricedCandidate] = []
        # Of all limits that are asked about: predictions, and lower bounds of peaks.
        self._costs: dict[int, Appraisal] = {}
        self._peaks: dict[int, int] = {}
        self._has_room: dict[int, bool] = {}
        self._all = tuple(reversed(self._left))

    @property
    def candidates(self) -> Sequence[PricedCandidate]:
        """All of them, in the order of their bounds."""
        return self._all

    def run(self, *, patience: float = math.inf, best_s: float = math.inf) -> None:
        """Goes on until nothing that is left can win.

        Args:
            patience: it stops when so many in turn, after the first that fits, were not the best.
            best_s: of a plan that was found elsewhere.
        """
        self._best_s = min(self._best_s, best_s)
        in_vain = 0
        while self._left and in_vain < patience:
            # A bound may be a rounding above what it bounds.
            if self._best_s <= self._left[-1].weighed_bound * (1 + 1e-9):
                return
            candidate = self._left.pop()
            # The fastest of all is built in any case: what it would need is asked first.
            if self.built and not is_within(candidate.bytes_bound, self._question.budget.tensor_bytes):
                self.waiting.append(candidate)
                continue
            if self.built and not self._has_room_beside(candidate):
                self.crowded.append(candidate)
                continue
            built = self._build(candidate, self._question)
            self.built.append(built)
            in_vain += math.isfinite(self._best_s)
            if built.fits and built.weighed_s < self._best_s:
                self._best_s, in_vain = built.weighed_s, 0

    def within(self, question: PlanQuestion, *, most: int, patience: int) -> list[BuiltCandidate]:
        """Returns plans that fit another limit, some of the fastest; nothing of it depends on what
        was asked before.

        Args:
            question: with that limit.
            most: so many are looked at that fit beside the device.
            patience: as for `run`.
        """
        found: list[BuiltCandidate] = []
        best_s, in_vain, looked_at = math.inf, 0, 0
        for candidate in self._all:
            if looked_at >= most or in_vain >= patience or best_s <= candidate.weighed_bound * (1 + 1e-9):
                break
            if not is_within(self._least_peak(candidate), question.budget.tensor_bytes):
                continue
            if not self._has_room_beside(candidate):
                continue
            built = self._build(candidate, question)
            if not built.fits_elsewhere:
                continue  # at no limit of the device
            looked_at += 1
            in_vain += bool(found)
            if built.fits:
                found.append(built)
                if built.weighed_s < best_s:
                    best_s, in_vain = built.weighed_s, 0
        return found

    @property
    def least_peak_bytes(self) -> int:
        """Bytes that no candidate's peak is below."""
        return min(map(self._least_peak, self._all))

    def _least_peak(self, candidate: PricedCandidate) -> int:
        if candidate.index not in self._peaks:
            self._peaks[candidate.index] = self._question.peak_bounds.of(candidate.candidate.plan)
        return self._peaks[candidate.index]

    def _has_room_beside(self, candidate: PricedCandidate) -> bool:
        """Tells whether what rests beside the device is within the limits there."""
        question, plan = self._question, candidate.candidate.plan
        known = self._has_room.get(candidate.index)
        if known is None:
            # A store's room counts otherwise than what rests there.
            limits = {t: limit for t, limit in question.limits.items() if not (question.scheme and t is Tier.DISK)}
            homes = question.known.homes_of(plan)
            known = all(
                question.known.found(("home", homes, tier), lambda: home_bytes(plan, question.profile, tier)) <= limit  # noqa: B023, asked at once
                for tier, limit in limits.items()
            )
            self._has_room[candidate.index] = known
        return known

    def _build(self, candidate: PricedCandidate, question: PlanQuestion) -> BuiltCandidate:
        cost = self._costs.get(candidate.index)
        if cost is None:
            built = question.build(candidate)
            self._costs[candidate.index] = built.cost
            return built
        return question.fitted(candidate, cost)
