"""Calibration: factors that were put in are found again, and a calibrated machine predicts what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.core.hardware import Hardware, Link, Rate, TierSpec
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.step import Step, Timeline, UpdatePlace
from memfit.core.tiers import Tier
from memfit.core.work_kinds import WorkKind
from memfit.step.build import build_step
from memfit.step.clock import work_seconds
from memfit.step.lower import lower
from memfit.step.predict import GROUPS, calibrated, fit_factors, largest_deviations, predict
from unit.profiles import gpt_profile

MACHINE = Hardware(
    device="cpu",
    flops_per_s=1e9,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 40),
        Tier.DISK: TierSpec(nbytes=1 << 40, link=Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)),
    },
    # Beside the actions, where no factor counts.
    rates={WorkKind.STEPS: Rate(1e24)},
)
TRUE = {"products": 1.3, "memory and functions": 0.8, "overhead": 1.0, "updates": 1.0}


def profile_of_layers() -> Profile:
    """Layers whose forward is products and functions in one proportion, and whose backward in another."""
    plain = gpt_profile(layers=4)
    traces = {}
    for rows, trace in plain.traces.items():
        calls = tuple(
            replace(
                call,
                forward_work=((WorkKind.PRODUCTS_64, 5e8 + 1e8 * call.index), (WorkKind.FUNCTIONS, 4e6)),
                backward_work=((WorkKind.PRODUCTS_64, 1e9), (WorkKind.STREAMED, 1e8 * (1 + call.index % 3))),
            )
            for call in trace.calls
        )
        traces[rows] = replace(trace, calls=calls)
    return replace(plain, traces=traces)


def step_of(plan: Plan) -> Step:
    profile = profile_of_layers()
    return lower(build_step(plan, profile, clips_norm=False), plan, profile)


def as_measured(step: Step, machine: Hardware) -> Timeline:
    return predict(step, machine)


def test_factors_that_were_put_in_are_found_and_predict_another_plan() -> None:
    step = step_of(Plan())
    true = calibrated(MACHINE, TRUE)
    found = fit_factors(step, as_measured(step, true), MACHINE)
    assert found["products"] == pytest.approx(1.3, rel=0.03)
    assert found["memory and functions"] == pytest.approx(0.8, rel=0.1)
    other = step_of(Plan(calls=tuple(CallPlan(saved=Saved.RECOMPUTE) for _ in range(7))))
    wanted = predict(other, true).seconds
    assert predict(other, calibrated(MACHINE, found)).seconds == pytest.approx(wanted, rel=0.01)
    assert abs(predict(other, MACHINE).seconds / wanted - 1) > 0.1


def test_the_sum_of_the_measured_step_is_met() -> None:
    step = step_of(Plan())
    measured = as_measured(step, calibrated(MACHINE, dict.fromkeys(GROUPS, 2.0)))
    factors = fit_factors(step, measured, MACHINE)
    again = predict(step, calibrated(MACHINE, factors))
    computed = [(a, b) for a, b, o in zip(again.moments, measured.moments, step, strict=True) if o.work]
    assert sum(a.end_s - a.start_s for a, _ in computed) == pytest.approx(sum(b.end_s - b.start_s for _, b in computed))


def test_a_step_without_seconds_changes_nothing() -> None:
    step = step_of(Plan())
    predicted = predict(step, MACHINE)
    nothing = replace(predicted, moments=tuple(replace(m, start_s=0.0, end_s=0.0) for m in predicted.moments))
    assert set(fit_factors(step, nothing, MACHINE).values()) == {1.0}


def test_updates_in_a_thread_of_their_own_have_its_seconds() -> None:
    on_disk = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
    step = step_of(Plan(blocks={block.name: on_disk for block in profile_of_layers().blocks[1:3]}))
    foretold = sum(work_seconds(o.work, MACHINE) for o in step if o.update_place is UpdatePlace.BESIDE)
    measured = as_measured(step, calibrated(MACHINE, TRUE))
    found = fit_factors(step, replace(measured, beside_s=3.0 * foretold), MACHINE)
    assert found["updates"] == pytest.approx(3.0)
    # The main thread's seconds say nothing of them, and they nothing of what it computes.
    without = fit_factors(step, measured, MACHINE)
    assert without == pytest.approx({**found, "updates": 1.0})


def test_groups_part_the_classes() -> None:
    every = [kind for kinds in GROUPS.values() for kind in kinds]
    assert sorted([*every, WorkKind.STEPS]) == sorted(WorkKind)


def test_the_largest_deviations_come_first_with_microbatches_in_one() -> None:
    step = step_of(Plan(microbatches=2))
    predicted = predict(step, MACHINE)
    moments = [replace(m, end_s=m.end_s + 5.0) if m.action.startswith("backward C2 ") else m for m in predicted.moments]
    found = largest_deviations(predicted, replace(predicted, moments=tuple(moments)), most=2)
    assert found[0].action == "backward C2" and found[0].count == 2
    assert found[0].measured_s - found[0].predicted_s == pytest.approx(10.0)
    assert abs(found[1].measured_s - found[1].predicted_s) < 1e-9
