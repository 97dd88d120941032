"""A journal under every arithmetic: fp16 with its loss scale and the steps that it leaves out, bf16 with masters whole or split, states in few bits, weights
without masters. Each run is bit for bit the one of two generations, whenever its process ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults import small_run
from faults.small_run import in_format, profile, train
from faults.test_journal_runs import go_on, killed_at
from faults.test_resume import assert_same
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.storage_formats import ComputeDtype, StateFormat
from memfit.planner.search.candidates import journaled
from memfit.store import verify

pytestmark = [
    pytest.mark.usefixtures("generators_as_before"),
    # torch says so of a first step that an overflow skipped, with GradScaler as well.
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),
]

TOTAL = 6
STEEP = 25.0
"""Factor of the loss: in fp16 it overflows until the scale has fallen far enough."""


def _clipped_fp16(found: Profile) -> tuple[Plan, dict[str, Any]]:
    plan, options = small_run.FORMATS["fp16"](found)
    return plan, {**options, "max_grad_norm": 0.5}


FORMATS: dict[str, Callable[[Profile], tuple[Plan, dict[str, Any]]]] = {
    **small_run.FORMATS,
    "bf16": small_run.PLANS["bf16"],
    "fp16, clipped": _clipped_fp16,
    "fp16, int8-state": in_format(compute_dtype=ComputeDtype.FLOAT16, state_format=StateFormat.INT8),
    "bf16-weights-sr, int4-state": in_format(
        compute_dtype=ComputeDtype.BFLOAT16, drops_masters=True, state_format=StateFormat.INT4
    ),
}


@pytest.mark.parametrize(
    ("name", "last"),
    [
        pytest.param("fp16, clipped", "moved"),
        *(pytest.param(name, "sealed", marks=pytest.mark.slow) for name in FORMATS),
    ],
)
def test_a_journal_in_another_format_is_bit_for_bit_the_run_of_two_generations(
    name: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, options = FORMATS[name](profile("wide"))
    plan = journaled(given, profile("wide"))
    options = {**options, "total": TOTAL, "steepness": STEEP if plan.scales_losses else 1.0}
    whole = train("wide", plan, tmp_path / "whole", **options)
    train("wide", plan, tmp_path / "parts", scheme="journal", stop=3, **options)
    assert_same(train("wide", plan, tmp_path / "parts", **options), whole)
    assert verify(tmp_path / "parts").is_whole
    skipped = len(whole.skipped)
    assert 0 < skipped < TOTAL - 1 if plan.scales_losses else not skipped
    # Commit 0 is the first version; then there is a seal for each step that was left out; then one is decided, moved and sealed.
    seen: list[str] = []
    while "moved" not in seen or seen[-1] != last:
        number = 1 + skipped + len(seen)
        directory = tmp_path / str(number)
        made = killed_at(number, monkeypatch, directory, plan, options, model="wide")
        found = go_on(directory, plan, options, is_under_way=made[-1] != "sealed", model="wide")
        assert_same(found, whole)
        assert found.skipped == [step for step in whole.skipped if step >= found.first]
        seen.append(made[-1])
    assert seen[0] == "decided"
