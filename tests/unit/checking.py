"""Checks a schedule as the job does: lowered first, then proved legal."""

from __future__ import annotations

from dataclasses import replace

from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.schedule import Schedule
from memfit.step.check import check_step
from memfit.step.lower import lower


def check_schedule(
    schedule: Schedule, plan: Plan, profile: Profile, *, clips_norm: bool = False, is_training: bool = True
) -> None:
    """The trace that is at hand stands for one of as many rows as a microbatch has: legality knows no sizes."""
    rows = -(-profile.batch_rows // plan.microbatches)
    if rows not in profile.traces:
        profile = replace(profile, traces={rows: replace(next(iter(profile.traces.values())), rows=rows)})
    check_step(lower(schedule, plan, profile), clips_norm=clips_norm, is_training=is_training)
