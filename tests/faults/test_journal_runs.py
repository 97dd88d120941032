"""Whole runs whose store keeps a journal: bit for bit the runs of two generations, whenever the process ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faults import small_run
from faults.small_run import profile, train
from faults.test_resume import assert_same
from memfit.core.errors import MemfitWarning
from memfit.core.plan import Plan, UpdateTime
from memfit.runtime.store import DiskStore, verify


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


class Killed(BaseException):
    """The process ends here."""


def killed_at(
    number: int, monkeypatch: pytest.MonkeyPatch, directory: Path, plan: Plan, options: dict[str, Any]
) -> list[str]:
    """Trains in this process until its store's commit of this number is made, and gives the job up there; what each commit was."""
    made: list[str] = []
    commit = DiskStore.commit

    def counted(store: DiskStore, step: int, flips: Any = (), **settings: Any) -> None:
        if store.scheme != "journal":  # gradients and activations of other plans have working homes
            return commit(store, step, flips, **settings)
        if len(made) > number:
            raise Killed
        commit(store, step, flips, **settings)
        journal = settings.get("journal")
        made.append("sealed" if journal is None else "decided" if journal.fills else "moved")
        if len(made) > number:
            raise Killed
        return None

    with monkeypatch.context() as patched:
        patched.setattr(DiskStore, "commit", counted)
        with pytest.raises(Killed):
            train("tied-and-frozen", plan, directory, total=4, scheme="journal", **options)
    gc.collect()  # the lock goes with the job
    return made


def test_a_run_goes_on_bit_for_bit_after_every_commit_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, options = plan_of("tied-and-frozen", "clipped")
    whole = train("tied-and-frozen", plan, tmp_path / "whole", total=4, **options)
    first, seen = 1, list[str]()
    while seen.count("sealed") < 3:
        directory = tmp_path / f"killed-{first}"
        seen = killed_at(first, monkeypatch, directory, plan, options)
        is_under_way = seen[-1] != "sealed"
        with pytest.warns(MemfitWarning, match="had been decided") if is_under_way else nullcontext():
            found = train("tied-and-frozen", plan, directory, total=4, **options)
        assert found.first == seen.count("sealed") - 1
        assert_same(found, whole)
        assert verify(directory).is_whole
        first += 1
    assert seen.count("moved") >= 4, "a step moves its blocks in several commits"
