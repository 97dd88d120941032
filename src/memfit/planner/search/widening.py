"""Looks for mixed plans that beat the best uniform one.

In: a question, uniform plans. Out: mixed plans that were built.

[Note: how mixed plans are looked for] For each frame (microbatches, order, fetching ahead) prices
of options are probed, and the mixture program (`planner.search.mixing`) gives shares. They are
rounded to whole units, spread evenly, and judged as any other plan: by the timeline of the lowered
schedule. Where the judge finds more bytes at a slot than there is room, the slot's room is taken to
be so much smaller, and the program is solved again. It is solved with the disk and without, so that
there are several mixtures to begin from. Around each, units are moved from one option to another,
one group or two at a time, as long as the judge says that it gains; the best is polished unit by
unit (`planner.search.polish`), also to what is as fast in fewer bytes, with other numbers of
buffers and a longer backlog of updates (`planner.search.polish`), and what is looked for at the
next limit goes as far ahead as the best. The numbers of frames, rounds and judged plans are
bounded, and nothing depends on the clock: the same question has the same answer.

[Note: a larger limit is never slower]
What is looked for does not depend on the limit that is asked about, but for how far it goes. There
is one series of limits for all questions about a model, each 9 % above the one before (12 % and
more where a model has very many layers, 1.5 % where it has few; `frame_search`). From the smallest
at which anything fits to the first that is not below the one asked about, plans are
looked for at each in turn, beginning from what the ones before have found. Of all plans that were
judged on the way the fastest is taken that fits the limit asked about. A larger limit goes through
the same series, and further: it has the same plans to choose from, and more.

[Note: when it is looked for them]
Where weights are small, a plan's schedule takes about as long to price as a step that it could
shorten, and moving them gains little: only models of at least `LEAST_WEIGHT_BYTES` are looked at,
and only where the best uniform plan takes longer than computing alone. Only for accelerators: where
the processor is the device, the solver's libraries would stay in the process (some 30 MiB), beside
a job that may have no room for them, and a fast disk beside slow cores leaves little to gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from memfit.core.limits import MIB
from memfit.core.numerics import weighed_seconds
from memfit.core.plan import Plan
from memfit.core.tiers import is_processor
from memfit.planner.search.frame_search import FrameSearch, limits_a_solution, series_of_limits
from memfit.planner.search.mixed_units import find_units
from memfit.planner.search.polish import AHEAD
from memfit.planner.search.pricing import BuiltCandidate, PlanQuestion
from memfit.planner.search.slot_prices import Judge
from memfit.planner.search.uniform_search import UniformSearch

LEAST_WEIGHT_BYTES = 64 * MIB
# At one limit of the series: frames that are looked at; uniform plans that these come from, and
# that are built in vain for them.
_FRAMES = 2
_MOST_UNIFORM, _PATIENCE = 15, 4
# Blocks whose weights and gradients buffers of a frame hold, at most.
_BUFFERS = 2
# A frame that was so many times slower than another one is not looked at again.
_TOO_SLOW = 1.2
# Where the series is not finer, it is polished at every so-manieth limit of the series.
_POLISHED_EVERY = 3


def mixes(question: PlanQuestion) -> bool:
    """Tells whether mixed plans are looked for. See [Note: when it is looked for them]."""
    is_large = question.profile.weight_bytes >= LEAST_WEIGHT_BYTES
    # On a processor, the solver would be counted against the limit of the job that is planned.
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
        built: plans that were judged and fit, and the next one that does not.
        count: number of all that were judged.
        bound_s: least seconds that the chain program gives in any frame that is not far behind,
            with shares of units; None: no mixture fits in any, or others are known to be faster. No
            proof: prices of shares are not exactly those of whole units, and other frames were not
            looked at.
        roomier_s: likewise by the mixture program, with more bytes on the device; 0: not known;
            None: not asked.
    """

    built: tuple[BuiltCandidate, ...]
    count: int = 0
    bound_s: float | None = None
    roomier_s: float | None = None


def search_mixed(
    uniform: UniformSearch,
    question: PlanQuestion,
    indices: Iterator[int],
    *,
    others_s: float = math.inf,
    more_bytes: int | None = None,
) -> MixedPlans:
    """Looks for mixed plans. See [Note: how mixed plans are looked for].

    Args:
        uniform: plans to begin from; their frames are looked at also where none of them fits.
        question: that is answered; it has a limit.
        indices: numbers plans behind the listed ones.
        others_s: seconds, as plans are compared by, of a plan of another way to compute: where no
            frame's bound is below, none is looked for.
        more_bytes: of the device, for `MixedPlans.roomier_s`.
    """
    if not find_units(question.profile).calls:
        return MixedPlans(built=())
    search = _Widening(uniform, question, indices)
    if math.isfinite(others_s) and search.least_s(question) >= others_s:
        return MixedPlans(built=())
    search.run()
    found = [judged.built for one in search.looked_at for judged in one.judged]
    best_s = min((one.weighed_s for one in (*uniform.built, *found) if one.fits), default=math.inf)
    is_beaten = others_s <= best_s and math.isfinite(others_s)
    bound_s = None if is_beaten else _bound_of(search.looked_at, question)
    return MixedPlans(
        built=_worth_telling(found, question),
        count=len(found),
        bound_s=bound_s,
        roomier_s=None if more_bytes is None else search.least_s(_with_more(question, more_bytes), is_weighed=False),
    )


def _with_more(question: PlanQuestion, more_bytes: int) -> PlanQuestion:
    """The same with so many bytes more on the device."""
    tensor_bytes = question.budget.tensor_bytes
    assert tensor_bytes is not None, "asked of a question with a limit"
    return question.within(tensor_bytes + more_bytes)


class _Widening:
    """The frames of one question, and what is looked for in them.

    Args:
        uniform: plans that frames come from.
        question: that is answered; it has a limit.
        indices: numbers plans behind the listed ones.
    """

    def __init__(self, uniform: UniformSearch, question: PlanQuestion, indices: Iterator[int]) -> None:
        self._uniform = uniform
        self._question = question
        self._indices = indices
        self._units = find_units(question.profile)
        # By the frame in words; a frame of a bound may not be looked at.
        self._known: dict[str, FrameSearch] = {}
        self._searches: dict[str, FrameSearch] = {}

    @property
    def looked_at(self) -> list[FrameSearch]:
        """Frames that mixtures were looked for in."""
        return list(self._searches.values())

    def least_s(self, question: PlanQuestion, *, is_weighed: bool = True) -> float:
        """Returns what the mixture program says that no plan takes less than, within the limits of
        a question; 0: it knows of none.

        A plan may hold fewer buffers than those of its frame that are priced: bytes of buffers do
        not count. Where a uniform plan that fits is faster than what the program says, byte prices
        do not add up, and nothing is known.

        Args:
            question: with these limits.
            is_weighed: seconds are those that plans are compared by.
        """
        frames = [self._known_of(frame, question)[1] for frame, _ in self._frames(question)[0]]
        searches = {id(one): one for one in (*self.looked_at, *frames)}.values()
        roomier = _with_more(question, _BUFFERS * max(sum(b.flat_bytes) for b in question.profile.blocks))
        bounds = [(one.bound_s(roomier), one.regroups) for one in searches]
        known = [judged.built for one in searches for judged in one.judged]
        fitting = [b.cost.seconds for b in (*self._uniform.built, *known) if b.fits]
        least = min((bound_s for bound_s, _ in bounds), default=math.inf)
        if math.isinf(least) or least > min(fitting, default=math.inf):
            return 0.0
        return min(weighed_seconds(s, regroups=regroups and is_weighed) for s, regroups in bounds)

    def run(self) -> None:
        """Looks for mixtures at each limit of the series."""
        asked, searches = self._question.budget.tensor_bytes, self._searches
        assert asked is not None, "asked of a question with a limit"
        looked_at: list[FrameSearch] = []
        count = len(self._units.calls)
        finer = limits_a_solution(count)
        for number, limit in series_of_limits(self._uniform.least_peak_bytes, asked, count):
            here = self._question.within(limit)
            if looked_at and number % finer:
                for search in looked_at:
                    search.begin(here)
                min(looked_at, key=lambda search: search.best_s).refine()
                continue
            looked_at = []
            frames, others_s = self._frames(here)
            for frame, seed in frames:
                key, search = self._known_of(frame, here)
                searches[key] = search
                least_s = min(search.best_s for search in searches.values())
                if math.isfinite(search.best_s) and search.best_s > _TOO_SLOW * least_s:
                    continue
                looked_at.append(search)
                search.begin(here)
                search.run(seed, min([*others_s, *(one.best_s for one in looked_at)], default=math.inf))
            best = min(looked_at, key=lambda search: search.best_s, default=None)
            if best is not None and (finer > 1 or number % _POLISHED_EVERY == 0):
                best.refine()
        for search in searches.values():
            search.begin(self._question)

    def _known_of(self, frame: Plan, question: PlanQuestion) -> tuple[str, FrameSearch]:
        key = repr(frame)
        if key not in self._known:
            self._known[key] = FrameSearch(Judge(question, frame, self._units, indices=self._indices))
        return key, self._known[key]

    def _frames(self, question: PlanQuestion) -> tuple[list[tuple[Plan, Plan]], list[float]]:
        """Returns the frames of the fastest uniform plans that fit, each with the fastest one of
        it, and the seconds of all those plans, as they are compared by.
        """
        fitting = self._uniform.within(question, most=_MOST_UNIFORM, patience=_PATIENCE)
        plans = [b.priced.candidate.plan for b in sorted(fitting, key=lambda b: (b.weighed_s, b.priced.index))]
        frames = _frames(plans or (candidate.candidate.plan for candidate in self._uniform.candidates))
        return frames, [b.weighed_s for b in fitting]


def _bound_of(searches: Iterable[FrameSearch], question: PlanQuestion) -> float | None:
    """Returns the least bound of frames; None: no mixture fits in any.

    Not of frames that are far behind with their best mixture: those are far behind with their
    bound, and many microbatches make a large program. The chain program is asked only of frames
    that the mixture program, which is quicker, leaves.
    """
    found = [(search.best_s, search) for search in searches]
    best_s = min((own_s for own_s, _ in found), default=math.inf)
    # Where no mixture was found, one may still be fast.
    near = [search for own_s, search in found if own_s <= _TOO_SLOW * best_s or math.isinf(own_s)]
    least_s = math.inf
    for bound_s, _, search in sorted((search.bound_s(question), i, search) for i, search in enumerate(near)):
        if bound_s < least_s:
            least_s = min(least_s, search.chain_bound_s(bound_s))
    return least_s if math.isfinite(least_s) else None


def _worth_telling(found: Sequence[BuiltCandidate], question: PlanQuestion) -> tuple[BuiltCandidate, ...]:
    """Returns plans that fit, and of faster ones the next with more of the device."""
    allowed = [built for built in found if question.allows(built.priced)]
    fitting = [built for built in allowed if built.fits]
    best_s = min((built.cost.seconds for built in fitting), default=math.inf)
    more = [built for built in allowed if built.fits_elsewhere and not built.fits and built.cost.seconds < best_s]
    return (*fitting, *sorted(more, key=lambda b: (b.cost.peak_bytes, b.priced.index))[:1])


def _frames(plans: Iterable[Plan]) -> list[tuple[Plan, Plan]]:
    """Returns the frames of the fastest plans, each with the fastest one of it.

    Args:
        plans: that fit, or all where none does; the fastest first.
    """
    frames: list[tuple[Plan, Plan]] = []
    for plan in plans:
        frame = AHEAD.of(replace(plan, blocks={}, calls=()))
        if len(frames) < _FRAMES and all(frame != known for known, _ in frames):
            frames.append((frame, plan))
    return frames
