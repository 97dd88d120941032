"""Gradients that are added to a sum on disk: the engine waits for the sum where the list says that it does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from equivalence import plans, zoo
from equivalence.compare import assert_equal_training
from equivalence.listed_order import FollowedJob
from equivalence.plain import adamw
from equivalence.with_memfit import fit_known, profile_by_name
from memfit.core.schedule import Accumulate
from memfit.homes import gradients
from memfit.homes.home import ByteHome

NAME, SLOWED_S = "sequential", 0.003


def test_a_sum_that_comes_late_is_a_stall_of_its_accumulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of a sum is held up for a while, which the measured timeline must show; the bits are plain's."""
    variant = plans.BY_NAME["microbatch-major-4"]
    jobs, read = list[FollowedJob](), list[str]()
    add, fit = gradients._add_home, fit_known(NAME, variant, tmp_path)

    def add_late(gradient: Any, home: ByteHome, slot: Any) -> None:
        time.sleep(SLOWED_S)
        read.append(slot.name)
        add(gradient, home, slot)

    monkeypatch.setattr(gradients, "_add_home", add_late)

    def follow(case: zoo.Case, optimizer: Any) -> FollowedJob:
        jobs.append(FollowedJob(fit(case, optimizer)))
        return jobs[-1]

    options = {"microbatches": variant.microbatches, "may_reorder": variant.reorders}
    assert_equal_training(zoo.ZOO[NAME], adamw(), follow, has_gradients=False, steps=1, **options)
    (job,) = jobs
    assert job.timelines[-1].stalls_s["accumulate"] >= SLOWED_S * len(read) > 0
    trained = {p.name for b in profile_by_name(NAME).blocks for p in b.parameters if p.requires_grad}
    assert sorted(read) == sorted(3 * list(trained)), "each sum is read for every microbatch but the first"
    step = job._job._assembly.planned.prepared.step
    awaiting = [str(o.action) for o in step if o.awaited]
    assert awaiting == [str(o.action) for o in step if isinstance(o.action, Accumulate)][len(awaiting) // 3 :]
