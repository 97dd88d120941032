"""Subjects of reports: a step with all that is known about it.

In: a plan that was priced, or a job. Out: `ReportSubject`, for the rooms that draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.core.hardware import Hardware, in_dtype
from memfit.core.limits import Budget, format_bytes, format_seconds
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.schedule import Schedule
from memfit.core.step import Timeline
from memfit.core.step_report import PhasePrediction, PhaseProof
from memfit.core.tiers import is_processor
from memfit.core.work_kinds import WorkKind
from memfit.files.writer import PIECE_BYTES
from memfit.job.assembly import Assembly
from memfit.job.comparing import StepComparison
from memfit.job.step_watchers import MeasuredStep
from memfit.machine.proof import Proof
from memfit.planner.explaining import points_from_plain
from memfit.planner.setup import Planned
from memfit.report.memory_tables import trace_of
from memfit.report.subject import PeakHolder, PlanPoint, ReportSubject
from memfit.report.timeline_data import peak_index
from memfit.step.bytes import follow_tier, residents_at
from memfit.step.clock import work_seconds
from memfit.step.lower import lower
from memfit.step.predict import predict
from memfit.step.work_amounts import recomputing_work

_MOST_HOLDERS = 60


def report_subject(
    *,
    title: str,
    reason: str,
    plan: Plan,
    profile: Profile,
    schedule: Schedule,
    predicted: Timeline,
    budget: Budget,
    hardware: Hardware,
    clips_norm: bool,
    adds_apart: bool | None = None,
    measured: Timeline | None = None,
    step: int | None = None,
    front: Sequence[PlanPoint] = (),
    compared: str | None = None,
    phases: Sequence[PhaseProof] = (),
) -> ReportSubject:
    """Puts together what a report says of a step.

    Args:
        title: name of the model or the run.
        reason: why this plan.
        plan: the decisions.
        profile: of the batch.
        schedule: of the plan.
        predicted: bytes and seconds of the schedule.
        budget: of the device.
        hardware: that seconds were predicted for.
        clips_norm: gradients are clipped by their global norm.
        adds_apart: as in `step.lower`.
        measured: a run of the schedule.
        step: number of the measured step.
        front: plans beside this one.
        compared: says how far the job's first steps were from their prediction.
        phases: of a run so far.
    """
    # Named by the calls that made them, which is slower: for reports only.
    lowered = lower(schedule, plan, profile, adds_apart=adds_apart, device=hardware.device, is_itemized=True)
    holders = residents_at(lowered, peak_index(predicted))
    tiers = [tier for tier in predicted.peaks if not tier.traits.is_device]
    subject = ReportSubject(
        title=title,
        reason=reason,
        plan=plan,
        profile=profile,
        schedule=schedule,
        predicted=predicted,
        measured=measured,
        budget=budget,
        hardware=hardware,
        holders=tuple(PeakHolder(category=h.category, name=h.name, nbytes=h.nbytes) for h in holders[:_MOST_HOLDERS]),
        tiers={tier: tuple(each.peak_bytes for each in follow_tier(lowered, tier)) for tier in tiers},
        from_plain=points_from_plain(plan, profile, hardware, clips_norm=clips_norm),
        front=tuple(front),
        phases=tuple(phases),
        facts=(
            *_facts(predicted, budget, hardware, measured, step),
            *([] if compared is None else [("first steps", compared)]),
        ),
    )
    calls = trace_of(subject).calls
    return replace(subject, recompute_s=tuple(work_seconds(recomputing_work(call), hardware) for call in calls))


def subject_of_job(
    planned: Planned,
    measured: MeasuredStep | None,
    *,
    title: str,
    comparison: StepComparison | None = None,
    proof: Proof | None = None,
) -> ReportSubject:
    """Puts together what a report says of a job's step.

    Args:
        planned: the job's.
        measured: a step of it; its shapes are reported on. None: those of the sample are.
        title: of the report.
        comparison: of the job's first steps with their prediction.
        proof: of the job so far.
    """
    prepared = planned.prepared if measured is None else measured.prepared
    hardware = in_dtype(planned.setup.hardware(), prepared.plan.compute_dtype)
    return report_subject(
        title=title,
        reason=f"{planned.reason} {planned.numerics.sentence()}",
        plan=prepared.plan,
        profile=prepared.profile,
        schedule=prepared.step.schedule,
        predicted=predict(prepared.step, hardware),
        budget=planned.budget,
        hardware=replace(hardware, device=planned.setup.device),
        clips_norm=planned.setup.clips_norm,
        adds_apart=planned.adds_apart,
        measured=None if measured is None else measured.timeline,
        step=None if measured is None else measured.step,
        compared=None if comparison is None else comparison.sentence(),
        phases=() if proof is None else proof.by_phase(),
    )


def _facts(
    predicted: Timeline, budget: Budget, hardware: Hardware, measured: Timeline | None, step: int | None
) -> tuple[tuple[str, str], ...]:
    whole = predicted.peak_bytes + budget.base_bytes + budget.reserve_bytes
    facts = [
        ("device", hardware.device),
        ("limit", "none" if budget.limit_bytes is None else format_bytes(budget.limit_bytes)),
        ("predicted peak", f"{format_bytes(whole)}, of it tensors {format_bytes(predicted.peak_bytes)}"),
        ("predicted step", f"{format_seconds(predicted.seconds)}{_interval(predicted)}"),
        *_first_step(predicted, hardware),
    ]
    if measured is not None:
        facts += [
            *([] if step is None else [("measured in step", str(step))]),
            ("measured peak of tensors", format_bytes(measured.peak_bytes)),
            ("measured step", format_seconds(measured.seconds)),
        ]
    return tuple(facts)


def _first_step(predicted: Timeline, hardware: Hardware) -> list[tuple[str, str]]:
    """Tells what the first step takes besides on a processor, whose memory is fresh then: all that
    it holds at its peak above what was there before.
    """
    if not is_processor(hardware.device) or not predicted.moments:
        return []
    grown = max(0, predicted.peak_bytes - predicted.moments[0].after_bytes)
    more_s = work_seconds(((WorkKind.FRESH, float(grown)),), hardware)
    return [
        (
            "first step",
            f"{format_seconds(more_s, 2)} more, for {format_bytes(grown)} of memory that is touched for the first time",
        )
    ]


def _interval(predicted: Timeline) -> str:
    if predicted.interval_s is None:
        return ""
    least, most = predicted.interval_s
    return f" ({format_seconds(least).removesuffix(' s')} to {format_seconds(most).removesuffix(' s')})"


# Predictions of a job's phases, from its plan: loading or resuming, steps, evaluation, saves.
#
# In: an assembly. Out: `PhasePrediction`s by the names of phases.

_SAVE_PIECES = 2
"""A piece is written while the next one is read."""


def predicted_phases(assembly: Assembly) -> dict[str, PhasePrediction]:
    """Returns what each phase is predicted to take by itself, over all shapes of batches so far.

    Not predicted are commits, the check that a loss adds up, inference, and looking for another
    plan.
    """
    planned = assembly.planned
    shapes = assembly.shapes.known
    step = max(each.peak_bytes for each in shapes)
    evaluation = max(each.evaluation_peak_bytes for each in shapes)
    rest = planned.prepared.resting_bytes
    save = rest + _SAVE_PIECES * PIECE_BYTES
    own = {"first step": step, "steady": step, "evaluate": evaluation, "save": save}
    # Resuming also brings optimizer states home, which else come up in the first step.
    resume = max(planned.load_bytes, rest + PIECE_BYTES + planned.beside_bytes)
    return {
        "load": PhasePrediction(whole_bytes=planned.load_bytes),
        "resume": PhasePrediction(whole_bytes=resume),
        **{
            name: PhasePrediction(
                whole_bytes=nbytes + planned.beside_bytes, tensor_bytes=nbytes + planned.budget.others_bytes
            )
            for name, nbytes in own.items()
        },
    }
