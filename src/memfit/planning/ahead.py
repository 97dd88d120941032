"""How far ahead of the main thread a mixture's transfers and updates go, and judges for each way.

In: the judge of a frame's mixtures. Out: judges of the same frame that goes further ahead, or less
far, and the best mixture of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from memfit.core.plan import Plan
from memfit.planning.pricing import PlanQuestion
from memfit.planning.slot_prices import Judge, Judged


@dataclass(frozen=True, kw_only=True, order=True)
class Ahead:
    """How far transfers and updates of a frame go ahead of the main thread.

    Attributes:
        prefetch: blocks that are fetched ahead.
        backlog: compute actions beside which an update runs (`Plan.update_backlog`).
    """

    prefetch: int
    backlog: int

    @classmethod
    def said_by(cls, frame: Plan) -> Ahead:
        """Returns what a frame says."""
        return cls(prefetch=frame.prefetch, backlog=frame.update_backlog)

    def of(self, frame: Plan) -> Plan:
        """Returns a frame that goes so far ahead, and else is the given one."""
        return replace(frame, prefetch=self.prefetch, update_backlog=self.backlog)


AHEAD = Ahead(prefetch=2, backlog=1)
"""How far the frames of mixtures go ahead."""
BUFFERS_AHEAD = (2, 1, 3, 4)
"""Blocks fetched ahead as polishing tries them."""
BACKLOGS = (0, 1, 2, 3, 4)
"""The same of compute actions beside which updates run."""


GAIN = 1e-4
"""Share of its seconds by which a mixture must be faster than another: with less it is as fast."""


class JudgesAhead:
    """Judges of one frame's mixtures, one for each way to go ahead.

    Args:
        first: the judge to begin with.

    Attributes:
        by_ahead: all judges that were asked for.
    """

    def __init__(self, first: Judge) -> None:
        self._first = first
        self._question = first.question
        self.by_ahead = {Ahead.said_by(first.frame): first}
        # The least seconds of so many plans, under the question of now.
        self._known: tuple[int, float] = 0, math.inf

    def within(self, question: PlanQuestion) -> None:
        """Asks with another limit from now on."""
        self._question = question
        self._known = 0, math.inf
        for judge in self.by_ahead.values():
            judge.within(question)

    def of(self, ahead: Ahead) -> Judge:
        """Returns the judge of mixtures that go so far ahead."""
        first = self._first
        if ahead not in self.by_ahead:
            self.by_ahead[ahead] = Judge(self._question, ahead.of(first.frame), first.units, indices=first.indices)
        return self.by_ahead[ahead]

    @property
    def judged(self) -> list[Judged]:
        """All plans that were judged."""
        return [judged for judge in self.by_ahead.values() for judged in judge.judged.values()]

    @property
    def best_s(self) -> float:
        """Seconds of the best mixture that fits, as they are compared by; infinite: none does."""
        count = sum(len(judge.judged) for judge in self.by_ahead.values())
        if count != self._known[0]:
            taken = (judged.built.weighed_s for judged in self.judged if self._is_taken(judged))
            self._known = count, min(taken, default=math.inf)
        return self._known[1]

    @property
    def best(self) -> tuple[Ahead, Judged]:
        """The best mixture that fits, if any does, and how far it goes ahead; of those that are as
        fast (`GAIN`) the one with the fewest bytes.
        """
        taken = [
            (ahead, judged)
            for ahead, judge in self.by_ahead.items()
            for judged in judge.judged.values()
            if self._is_taken(judged)
        ]
        most_s = self.best_s * (1 + GAIN)
        as_fast = [one for one in taken if one[1].built.weighed_s <= most_s]
        return min(as_fast, key=lambda one: (one[1].built.cost.peak_bytes, one[1].built.weighed_s, one[0]))

    def _is_taken(self, judged: Judged) -> bool:
        return judged.built.fits and self._question.allows(judged.built.priced)
