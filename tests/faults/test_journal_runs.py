"""Whole runs whose store keeps a journal: bit for bit the runs of two generations, whenever the process ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faults import small_run
from faults.small_run import profile, train
from faults.test_resume import assert_same
from memfit.core.plan import Plan, UpdateTime
from memfit.runtime.store import verify


@pytest.fixture(autouse=True)
def generators_as_before() -> Iterator[None]:
    state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    np.random.set_state(state)


def plan_of(model: str, name: str) -> tuple[Plan, dict[str, Any]]:
    """One of the plans of the small runs, with updates after backward."""
    plan, options = small_run.PLANS[name](profile(model))
    return replace(plan, update=UpdateTime.AFTER_BACKWARD), options


@pytest.mark.parametrize(
    ("model", "plan"),
    [("gpt2", "layer-major"), ("gpt2", "clipped"), ("tied-and-frozen", "clipped"), ("tied-and-frozen", "bf16")],
)
def test_a_run_with_a_journal_is_the_run_of_two_generations(model: str, plan: str, tmp_path: Path) -> None:
    decided, options = plan_of(model, plan)
    whole = train(model, decided, tmp_path / "whole", total=4, **options)
    train(model, decided, tmp_path / "parts", total=4, stop=2, scheme="journal", **options)
    assert_same(train(model, decided, tmp_path / "parts", total=4, **options), whole)
    assert verify(tmp_path / "parts").is_whole
