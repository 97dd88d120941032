"""Whole schedules as text, so that a change of any pass is read before it is taken.

Run this file as a script to write the texts anew; then read the difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memfit.core.plan import BlockPlan, CallPlan, Order, Plan
from memfit.core.saved_policies import Saved
from memfit.core.schedule import Schedule
from memfit.core.tiers import Tier
from memfit.step.build import build_forward, build_step
from unit.checking import check_schedule
from unit.profiles import gpt_profile

HERE = Path(__file__).parent
PROFILE = gpt_profile(layers=3)
LAYERS = ("h.0", "h.1", "h.2")
BIG = ("wte", *LAYERS, "lm_head")
AWAY = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DEVICE, state_home=Tier.DISK)
ALL_AWAY = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)


def layers(saved: Saved, home: Tier = Tier.DEVICE) -> tuple[CallPlan, ...]:
    fate = CallPlan(saved=saved, boundary_home=home) if saved is Saved.RECOMPUTE else CallPlan(saved=saved)
    return (CallPlan(), fate, fate, fate)


PLANS: dict[str, tuple[Plan, bool]] = {
    "plain": (Plan(), False),
    "accumulation_clipped": (Plan(microbatches=2, order=Order.MICROBATCH_MAJOR), True),
    "layer_major_from_disk": (
        Plan(microbatches=2, tail=4, blocks=dict.fromkeys(BIG, AWAY), calls=layers(Saved.RECOMPUTE, Tier.DISK)),
        False,
    ),
    "one_buffer_clipped": (Plan(blocks=dict.fromkeys(BIG, ALL_AWAY), prefetch=0), True),
    "accumulation_with_gradients_on_disk": (
        Plan(microbatches=2, order=Order.MICROBATCH_MAJOR, blocks=dict.fromkeys(LAYERS, ALL_AWAY)),
        False,
    ),
    "offload": (Plan(calls=layers(Saved.OFFLOAD)), False),
}


def build(name: str) -> Schedule:
    if name == "evaluation":
        return build_forward(PLANS["layer_major_from_disk"][0], PROFILE, 2)
    plan, clips_norm = PLANS[name]
    return build_step(plan, PROFILE, clips_norm=clips_norm)


NAMES = [*PLANS, "evaluation"]


@pytest.mark.parametrize("name", NAMES)
def test_schedule_is_the_one_on_file(name: str) -> None:
    assert build(name).text() == (HERE / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", PLANS)
def test_schedule_on_file_is_legal(name: str) -> None:
    plan, clips_norm = PLANS[name]
    check_schedule(Schedule.parse((HERE / f"{name}.txt").read_text()), plan, PROFILE, clips_norm=clips_norm)


if __name__ == "__main__":
    for each in NAMES:
        (HERE / f"{each}.txt").write_text(build(each).text())
    sys.stdout.write(f"wrote {len(NAMES)} schedules to {HERE}\n")
