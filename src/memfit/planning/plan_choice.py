"""The answer of the planner: a plan, its prediction, and the plans that stood beside it.

In: candidates that were built (`pricing`). Out: `PlanChoice`, its Pareto front and its reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memfit.core.limits import Budget
from memfit.core.numerics import weighed_seconds
from memfit.core.plan import Plan
from memfit.core.schedule import Schedule
from memfit.core.timeline import Timeline
from memfit.core.units import format_bytes, format_seconds
from memfit.planning.pricing import BuiltCandidate

_LEANER = 0.01


@dataclass(frozen=True, kw_only=True)
class ParetoPoint:
    """One step of a front: what a plan would take and give.

    Attributes:
        name: the decisions in words.
        peak_bytes: predicted device bytes of tensors.
        seconds: predicted for a step.
        fits: it is within every budget.
    """

    name: str
    peak_bytes: int
    seconds: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class ClassicPoint:
    """A technique of the field, as it is predicted on the same question.

    Attributes:
        name: by which `plan=` takes it.
        says: it in one line.
        source: where it comes from.
        microbatches: with which it fits and is fastest, or else is leanest.
        peak_bytes: predicted device bytes of tensors.
        seconds: predicted for a step.
        fits: it is within every budget.
    """

    name: str
    says: str
    source: str
    microbatches: int
    peak_bytes: int
    seconds: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """A plan, what it is predicted to cost, and what stood beside it.

    Attributes:
        name: the decisions in words.
        plan: them.
        schedule: the step built from it.
        timeline: its prediction.
        front: from the fastest to the leanest, plans that no other beats in both; the chosen one is
            among them.
        reason: why this one, in a sentence or two.
        built: number of candidates that were built and predicted.
        regroups: it regroups sums (`core.numerics`).
        unchanged_s: what a plan that regroups none, and may fit, takes at least; None: none is
            predicted to fit.
        least_s: what every uniform candidate takes at least, whatever it holds.
        bound_s: where mixed plans were looked for: seconds of the best mixture of shares of layers
            by the chain program (`planning.widening.MixedPlans`); None: they were not. No proof,
            but how much at most a better search of the same frames would gain.
        roomier_s: likewise of the mixture program with more bytes on the device; None: not asked.
        classics: techniques of the field on the same question, where they were asked for.
    """

    name: str
    plan: Plan
    schedule: Schedule
    timeline: Timeline
    front: tuple[ParetoPoint, ...]
    reason: str
    built: int
    regroups: bool
    unchanged_s: float | None
    least_s: float
    bound_s: float | None = None
    roomier_s: float | None = None
    classics: tuple[ClassicPoint, ...] = ()

    @property
    def weighed_s(self) -> float:
        """Its seconds as plans are compared by."""
        return weighed_seconds(self.timeline.seconds, regroups=self.regroups)


def pareto_front(built: list[BuiltCandidate], best: BuiltCandidate) -> tuple[ParetoPoint, ...]:
    """Returns the built candidates that no other beats in seconds and bytes, and the chosen one. Of
    those that are hardly leaner than the one before, none.
    """
    points: list[ParetoPoint] = []
    least = math.inf
    for b in sorted(built, key=lambda b: (b.cost.seconds, b.cost.peak_bytes, b.priced.index)):
        if b.cost.peak_bytes < least * (1 - _LEANER) or b is best:
            least = min(least, b.cost.peak_bytes)
            points.append(_point(b))
    return tuple(points)


def _point(built: BuiltCandidate) -> ParetoPoint:
    return ParetoPoint(
        name=built.priced.candidate.name,
        peak_bytes=built.cost.peak_bytes,
        seconds=built.cost.seconds,
        fits=built.fits,
    )


def give_reason(
    built: list[BuiltCandidate], best: BuiltCandidate, budget: Budget, bound_s: float | None = None, others: int = 0
) -> str:
    """Says why the chosen one was taken, and what more memory would give. `others` were built
    besides.
    """
    peak, seconds = best.cost.peak_bytes, best.cost.seconds
    room = "no limit" if budget.tensor_bytes is None else f"{format_bytes(budget.tensor_bytes)} for tensors"
    text = (
        f"{best.priced.candidate.name}: predicted {format_bytes(peak)} of {room}, {format_seconds(seconds)} a step; "
        f"the fastest of the plans that fit ({len(built) + others} built)."
    )
    if any(b.fits and b.cost.seconds < seconds for b in built):
        text = text.replace("the fastest of the plans that fit", "the fastest of the plans that fit and add up alike")
    if bound_s is not None and 0 < bound_s < seconds:
        text += f" No mixture of layers is expected to take less than {format_seconds(bound_s)}."
    faster = [b for b in built if not b.fits and b.cost.seconds < seconds]
    if faster:
        next_up = min(faster, key=lambda b: (b.cost.peak_bytes, b.priced.index))
        more = next_up.cost.peak_bytes - (budget.tensor_bytes or 0)
        if more > 0:
            text += (
                f" With {format_bytes(more)} more it would be {next_up.priced.candidate.name}, "
                f"{format_seconds(next_up.cost.seconds)}."
            )
    return text
