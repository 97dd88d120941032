"""Subjects of reports over hand-made profiles. Import with `from unit.report.subjects import ...`."""

from __future__ import annotations

from typing import Any

from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.limits import MIB, Budget
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.step import Timeline
from memfit.core.tiers import Tier
from memfit.job.reporting import report_subject
from memfit.report.subject import ReportSubject
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from unit.profiles import gpt_profile

DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DEVICE, state_home=Tier.DISK)


def machine(*, bytes_per_s: float = 1e7) -> Hardware:
    link = Link(read_bytes_per_s=bytes_per_s, write_bytes_per_s=bytes_per_s)
    tiers = {Tier.DEVICE: TierSpec(nbytes=1 << 40), Tier.DISK: TierSpec(nbytes=1 << 40, link=link)}
    return Hardware(device="cpu", flops_per_s=1e9, tiers=tiers)


def streamed_plan(layers: int, microbatches: int = 2) -> Plan:
    """Weights and states of the layers on disk, each layer recomputed."""
    return Plan(
        microbatches=microbatches,
        tail=layers + 1,
        blocks={f"h.{i}": DISK for i in range(layers)},
        calls=(CallPlan(), *(CallPlan(saved=Saved.RECOMPUTE, boundary_home=Tier.DISK) for _ in range(layers))),
    )


def seconds_of_the_device(timeline: Timeline) -> float:
    """Returns how long the main thread computes or waits, or updates go on beside it."""
    total = until = 0.0
    for interval in sorted(timeline.intervals, key=lambda one: one.start_s):
        if interval.lane in ("compute", "updates"):
            total += max(0.0, interval.end_s - max(interval.start_s, until))
            until = max(until, interval.end_s)
    return total


def subject_of(
    plan: Plan | None = None,
    profile: Profile | None = None,
    *,
    layers: int = 4,
    title: str = "a model",
    measured: Timeline | None = None,
    **facts: Any,
) -> ReportSubject:
    profile = gpt_profile(layers=layers) if profile is None else profile
    plan = streamed_plan(layers) if plan is None else plan
    hardware = machine()
    schedule = build_step(plan, profile, clips_norm=False)
    return report_subject(
        title=title,
        reason="for a test",
        plan=plan,
        profile=profile,
        schedule=schedule,
        predicted=predict(lower(schedule, plan, profile), hardware),
        budget=Budget(limit_bytes=64 * MIB, base_bytes=MIB, reserve_bytes=MIB),
        hardware=hardware,
        clips_norm=False,
        measured=measured,
        **facts,
    )
