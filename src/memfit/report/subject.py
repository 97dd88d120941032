"""Subject of a report: a plan's step with its prediction, and its measurement after a run.

In: data of `core`, put together by `job.reporting`. Out: `ReportSubject`, which the page and the
Perfetto trace read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memfit.core.hardware import Hardware
from memfit.core.limits import Budget
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.schedule import Schedule
from memfit.core.step import Timeline
from memfit.core.step_report import PhaseProof
from memfit.core.tiers import Tier


@dataclass(frozen=True, kw_only=True)
class PeakHolder:
    """A holder of device memory at the predicted peak: category, owner's name, bytes."""

    category: str
    name: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class PlanPoint:
    """Predicted cost of a plan: one of a front, or one between plain training and the plan.

    Attributes:
        name: the decisions in words.
        peak_bytes: device bytes of tensors.
        seconds: of a step; 0: not predicted.
        note: "chosen", "fits", "does not fit", or "" where there is nothing to say.
    """

    name: str
    peak_bytes: int
    seconds: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ReportSubject:
    """A step to report on.

    Attributes:
        title: name of the model or the run.
        reason: why this plan.
        plan, profile, schedule: of the step. The profile has a trace of its microbatch's rows.
        predicted: the step's timeline, with one moment an action.
        measured: a run of the same schedule; None: there was none.
        budget: the limit, and what is taken off it before tensors.
        hardware: that seconds were predicted for; None: they were not.
        holders: of the device at the predicted peak, largest first.
        tiers: bytes of tiers beside the device, by action.
        recompute_s: for each call of the trace, seconds that recomputing it takes more than keeping
            what it saves; empty: not known.
        from_plain: plain training, then one decision of the plan more at a time.
        front: plans beside the chosen one, from the fastest to the leanest.
        phases: of a run so far, predicted and measured; empty: nothing has run.
        facts: further lines for the head of the page, as (name, text).
    """

    title: str
    reason: str
    plan: Plan
    profile: Profile
    schedule: Schedule
    predicted: Timeline
    measured: Timeline | None = None
    budget: Budget
    hardware: Hardware | None = None
    holders: tuple[PeakHolder, ...] = ()
    tiers: Mapping[Tier, tuple[int, ...]] = field(default_factory=dict[Tier, tuple[int, ...]])
    recompute_s: tuple[float, ...] = ()
    from_plain: tuple[PlanPoint, ...] = ()
    front: tuple[PlanPoint, ...] = ()
    phases: tuple[PhaseProof, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
