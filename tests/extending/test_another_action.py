"""An action that memfit does not have: what it takes to add one that waits.

In `src` two files would change, and this test stands in for them: `core/schedule.py`, which says its text and what it waits for, and `step/build.py`, which
says where it stands. Checker, lowering, prediction, engine and the measured timeline know it by what it says of itself. One that does something new to
bytes or links is one more entry in `step/lower.py`, one that does something new to the model one more in `engine/run.py`: what is priced and what
is done are rooms apart, because the one may not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from equivalence import plans, zoo
from equivalence.compare import assert_equal_training
from equivalence.listed_order import FollowedJob
from equivalence.plain import adamw
from equivalence.with_memfit import fit_known, profile_by_name
from memfit.core import schedule as schedules
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.schedule import Commit, Schedule, Update
from memfit.core.step import Token
from memfit.core.tiers import Tier
from memfit.planner import preparing
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from unit.checking import check_schedule

FILES = ("core/schedule.py", "step/build.py")


@dataclass(frozen=True)
class Settle:
    """All updates that are under way are through. (In `core/schedule.py`.)"""

    waits_for: ClassVar[tuple[str, ...]] = ("update",)

    def __str__(self) -> str:
        return "settle"


def build_with_settles(plan: Plan, profile: Profile, *, clips_norm: bool) -> Schedule:
    """One behind each update. (In `step/build.py`.)"""
    built = build_step(plan, profile, clips_norm=clips_norm)
    actions = [a for action in built for a in ([action, Settle()] if isinstance(action, Update) else [action])]
    return replace(built, actions=tuple(actions))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = [*schedules._PATTERNS, (re.compile("settle"), lambda _: Settle())]
    monkeypatch.setattr(schedules, "_PATTERNS", patterns)
    monkeypatch.setattr(preparing, "build_step", build_with_settles)


def test_an_action_that_waits_is_known_to_everybody_by_what_it_says_of_itself(tmp_path: Path) -> None:
    plan, profile = plans.BY_NAME["disk"].plan(profile_by_name("gpt2")), profile_by_name("gpt2")
    built = build_with_settles(plan, profile, clips_norm=False)
    assert Schedule.parse(built.text()) == built
    check_schedule(built, plan, profile)
    step = lower(built, plan, profile)
    first = next(o for o in step if isinstance(o.action, Settle))
    assert len(first.waits) == 1 and isinstance(first.waits[0], Token) and first.waits[0].kind == "update"
    slow = Hardware(
        device="cpu",
        flops_per_s=1e12,
        tiers={
            Tier.DEVICE: TierSpec(nbytes=1 << 40),
            Tier.DISK: TierSpec(nbytes=1 << 40, link=Link(read_bytes_per_s=1e6, write_bytes_per_s=1e6)),
        },
    )
    plain = predict(lower(build_step(plan, profile, clips_norm=False), plan, profile), slow)
    told = predict(step, slow)
    assert told.seconds > plain.seconds, "what an update reads and writes is waited for at once"
    assert told.peak_in(Tier.DEVICE) <= plain.peak_in(Tier.DEVICE)


def test_the_engine_waits_where_the_new_action_stands_and_trains_the_same_bits(tmp_path: Path) -> None:
    variant = plans.BY_NAME["disk"]
    jobs: list[FollowedJob] = []

    def follow(case: zoo.Case, optimizer: Any) -> FollowedJob:
        jobs.append(FollowedJob(fit_known("gpt2", variant, tmp_path)(case, optimizer)))
        return jobs[-1]

    assert_equal_training(zoo.ZOO["gpt2"], adamw(), follow, has_gradients=False, steps=2)
    (job,) = jobs
    actions = [moment.action for moment in job.timelines[-1].moments]
    assert actions.count("settle") == sum(a.startswith("update") for a in actions) > 1
    assert job.timelines[-1].stalls_s["update"] > 0
    assert actions[-1] == str(Commit())
