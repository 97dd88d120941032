"""Schedule + Profile + Hardware -> Timeline.

In: `Schedule`, `Plan`, `Profile`, `Hardware`. Out: `Timeline`; `check_limits` holds it against budgets.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.errors import DoesNotFitError, PlanError
from memfit.core.hardware import Hardware
from memfit.core.layout import PINNED_STAGING_BYTES
from memfit.core.plan import Plan, Tier, is_processor
from memfit.core.profile import Profile
from memfit.core.schedule import Norm, Schedule
from memfit.core.timeline import Moment, Timeline
from memfit.core.units import format_bytes
from memfit.prediction.bytes import STAGING_BYTES, DeviceBytes, home_bytes, uses_disk
from memfit.prediction.seconds import Clock, commit_seconds


@dataclass(frozen=True, kw_only=True)
class Appraisal:
    """The sums of a `Timeline`: predicted peaks by tier and seconds."""

    peak_bytes: int
    seconds: float
    host_peak_bytes: int
    disk_peak_bytes: int


def predict(
    schedule: Schedule,
    plan: Plan,
    profile: Profile,
    hardware: Hardware | None = None,
    *,
    clips_norm: bool | None = None,
    staging_bytes: int = STAGING_BYTES,
    microbatches: int | None = None,
    adds_apart: bool | None = None,
    commits: float = 0.0,
    is_staged: bool | None = None,
) -> Timeline:
    """Adds up a legal schedule.

    Args:
        schedule: a step or a forward-only pass, legal (`scheduling.check`).
        plan: that it carries out.
        profile: with a trace of the rows that a microbatch has.
        hardware: None: bytes only, all seconds are 0.
        clips_norm: given, it is checked that the schedule does just that.
        staging_bytes: of the disk's threads, held all the time where something rests on disk or leaves to it.
        microbatches: into how many slices the batch was cut, if not `plan.microbatches` (a forward-only pass may run
            fewer than that at a time).
        adds_apart: `Plan.adds_apart` of the job, where its plan was cut for a smaller batch; None: as this plan says.
        commits: to a store, a step; see `seconds.commit_seconds`.
        is_staged: what travels between the device and the disk passes through pinned host memory; None: as it does on that hardware.

    Returns:
        One moment an action; peaks of host and disk; bytes moved by category; stalls by cause.

    Raises:
        PlanError: no trace of that many rows, a tier that the hardware does not have, or a schedule that was built for
            the other value of `clips_norm`.
    """
    if clips_norm is not None and clips_norm != any(isinstance(a, Norm) for a in schedule):
        raise PlanError(f"the schedule was not built for clips_norm={clips_norm}; build it again")
    memory = DeviceBytes(
        schedule,
        plan,
        profile,
        microbatches=microbatches or plan.microbatches,
        staging_bytes=staging_bytes,
        adds_apart=adds_apart,
    )
    clock = Clock(plan, profile, memory.facts, hardware)
    times = clock.run(schedule)
    moments = tuple(
        Moment(
            action=str(action),
            peak_bytes=b.peak_bytes,
            after_bytes=b.after_bytes,
            start_s=t.start_s,
            end_s=t.end_s,
            by_category=b.by_category,
        )
        for action, b, t in zip(schedule, memory.run(schedule), times, strict=True)
    )
    return Timeline(
        moments=moments,
        host_peak_bytes=_host_peak(
            plan, profile, memory, is_staged=_stages(hardware) if is_staged is None else is_staged
        ),
        disk_peak_bytes=home_bytes(plan, profile, Tier.DISK) + memory.away_peaks[Tier.DISK],
        bytes_read=dict(clock.bytes_read),
        bytes_written=dict(clock.bytes_written),
        stalls_s=dict(clock.stalls_s),
        commit_s=0.0 if hardware is None else commit_seconds(plan, profile, hardware, commits),
    )


def appraise(
    schedule: Schedule,
    plan: Plan,
    profile: Profile,
    hardware: Hardware,
    *,
    staging_bytes: int = STAGING_BYTES,
    commits: float = 0.0,
) -> Appraisal:
    """As `predict`, the sums only: for searches that look at many schedules."""
    memory = DeviceBytes(schedule, plan, profile, microbatches=plan.microbatches, staging_bytes=staging_bytes)
    device = max((b.peak_bytes for b in memory.run(schedule)), default=0)
    times = Clock(plan, profile, memory.facts, hardware).run(schedule)
    return Appraisal(
        peak_bytes=device,
        seconds=max((t.end_s for t in times), default=0.0) + commit_seconds(plan, profile, hardware, commits),
        host_peak_bytes=_host_peak(plan, profile, memory, is_staged=_stages(hardware)),
        disk_peak_bytes=home_bytes(plan, profile, Tier.DISK) + memory.away_peaks[Tier.DISK],
    )


def _stages(hardware: Hardware | None) -> bool:
    return hardware is not None and not is_processor(hardware.device)


def _host_peak(plan: Plan, profile: Profile, memory: DeviceBytes, *, is_staged: bool) -> int:
    """Homes and activations in host memory, and the pieces through which the disk is reached."""
    pinned = PINNED_STAGING_BYTES if is_staged and uses_disk(plan, memory.shape) else 0
    return home_bytes(plan, profile, Tier.HOST) + memory.away_peaks[Tier.HOST] + pinned


def check_limits(
    timeline: Timeline,
    *,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
) -> None:
    """Checks that no action passes a budget.

    Raises:
        DoesNotFitError: the first action whose predicted bytes are over, by category; or the tier that is too small.
    """
    for index, moment in enumerate(timeline.moments):
        if device_bytes is not None and moment.peak_bytes > device_bytes:
            parts = ", ".join(f"{c} {format_bytes(n)}" for c, n in moment.by_category.items() if n)
            raise DoesNotFitError(
                f"action {index}, {moment.action}, is predicted to hold {format_bytes(moment.peak_bytes)} on the "
                f"device, over the budget of {format_bytes(device_bytes)}: {parts}",
                smallest_limit_bytes=timeline.peak_bytes,
            )
    for tier, peak, limit in (
        ("host", timeline.host_peak_bytes, host_bytes),
        ("disk", timeline.disk_peak_bytes, disk_bytes),
    ):
        if limit is not None and peak > limit:
            raise DoesNotFitError(f"{format_bytes(peak)} are predicted on {tier}, over {format_bytes(limit)}")
