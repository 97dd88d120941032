"""Layers that are frozen, or trained again, where a run goes on: as plain PyTorch does it with the optimizer that it began with."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from equivalence import plans
from faults.tower import Tower, adamw, loss
from memfit.core.errors import MemfitWarning, StoreError
from memfit.core.plan import CallPlan, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier

TOWER = Tower(width=32)
BIG = Tower(width=384)
"""Blocks of 2.3 MiB: a journal moves them."""
PARTS = (
    frozenset[str](),
    {"1.wide.weight", "1.wide.bias", "1.narrow.weight", "1.narrow.bias", "2.wide.bias"},
    {"0.narrow.weight"},
    frozenset[str](),
)
"""What is frozen while the run is in its n-th process."""


def freeze(model: nn.Module, names: Collection[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)


def plain(
    tower: Tower, steps: int, max_norm: float | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    model = tower.build()
    optimizer = adamw(model)
    losses: list[float] = []
    for part, names in enumerate(PARTS):
        freeze(model, names)
        for step in range(part * steps, (part + 1) * steps):
            optimizer.zero_grad()
            found = loss(model, tower.batch(step))
            found.backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            losses.append(float(found.detach()))
    return model, optimizer, losses


def on_disk(tower: Tower, **changes: Any) -> Plan:
    return Plan(blocks=plans.on_disk(tower.profile()), **changes)


WAYS: dict[str, tuple[Tower, Any, dict[str, Any]]] = {
    "resident": (TOWER, Plan, {}),
    "disk": (TOWER, lambda: on_disk(TOWER), {}),
    "clipped": (TOWER, lambda: on_disk(TOWER, update=UpdateTime.AFTER_BACKWARD), {"max_grad_norm": 0.1}),
    "journal": (BIG, lambda: None, {"scheme": "journal", "limit": "4GiB"}),
    "journal, clipped": (BIG, lambda: None, {"scheme": "journal", "limit": "4GiB", "max_grad_norm": 0.1}),
}


def go_on(tower: Tower, part: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """The n-th process of the run, two steps of it."""
    names, before = PARTS[part], PARTS[max(part - 1, 0)]
    model = tower.build()
    freeze(model, names)
    optimizer = adamw(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job = memfit.fit(model, optimizer, loss, tower.batch(0), **options)
    said = " ".join(str(one.message) for one in told if one.category is MemfitWarning)
    for some, words in ((names - before, "frozen ("), (before - names, "trained again (")):
        assert (words in said) == bool(some)
        assert not some or f"{len(some)} parameter" in said
        assert not some or f"such as {min(some)!r}" in said
    losses = [job.step(tower.batch(step)).loss for step in range(2 * part, 2 * part + 2)]
    job.close()
    return model, optimizer, losses


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if "clipped" in way else []) for way in WAYS]
)
def test_what_is_frozen_keeps_weights_and_states_and_the_rest_trains_on(way: str, tmp_path: Path) -> None:
    tower, plan, options = WAYS[way]
    parts = [
        go_on(tower, part, plan=None if part else plan(), store=tmp_path / "run", **options)
        for part in range(len(PARTS))
    ]
    model, optimizer, _ = parts[-1]
    reference, other, wanted = plain(tower, 2, options.get("max_grad_norm"))
    assert [found for _, _, losses in parts for found in losses] == wanted
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), name
    ours, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(ours[index][key]), torch.as_tensor(value)), (index, key)


def test_an_optimizer_without_what_is_frozen_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model = TOWER.build()
    memfit.fit(model, adamw(model), loss, TOWER.batch(0), store=tmp_path / "run").close()
    model = TOWER.build()
    freeze(model, PARTS[1])
    fewer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with pytest.raises(StoreError, match=r"such as '1.narrow.bias'.* What is to be frozen since then may stay in it"):
        memfit.fit(model, fewer, loss, TOWER.batch(0), store=tmp_path / "run")


def test_what_is_frozen_stays_where_a_journal_moves_it_under_another_plan_too(tmp_path: Path) -> None:
    found = BIG.profile()
    away = plans.fates(found, CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.HOST))
    plan = Plan(blocks=plans.on_disk(found), calls=away, update=UpdateTime.AFTER_BACKWARD)
    model = BIG.build()
    job = memfit.fit(
        model,
        adamw(model),
        loss,
        BIG.batch(0),
        plan=plan,
        store=tmp_path / "run",
        scheme="journal",
        emulate_device=True,
    )
    job.step(BIG.batch(0))
    job.close()
    again = BIG.build()
    names = {name for name, _ in again.named_parameters() if name.startswith("1.")}
    freeze(again, names)
    with pytest.warns(MemfitWarning, match="4 parameters, such as '1.narrow.bias', are frozen"):
        job = memfit.fit(again, adamw(again), loss, BIG.batch(0), store=tmp_path / "run")
    assert job.plan.block("1").rests_on_disk
    job.step(BIG.batch(1))
    job.close()
    assert {
        name for (name, p), q in zip(again.named_parameters(), model.parameters(), strict=True) if torch.equal(p, q)
    } == names
