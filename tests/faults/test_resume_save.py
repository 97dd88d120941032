"""A run goes on from a save in a new process, by the word that goes on with a store: losses and weights bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from faults.small_run import PLANS, WIDTH, adamw, build, draw, loss, profile
from memfit.core.errors import MemfitError, StoreError, UsageError

pytestmark = pytest.mark.usefixtures("generators_as_before")


def _fit(**options: Any) -> tuple[memfit.Job, nn.Module, torch.optim.Optimizer, torch.Generator]:
    model = build("tied-and-frozen")
    optimizer = adamw(model)
    plan, _ = PLANS["layer-major"](profile("tied-and-frozen"))
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(5)
    sample = {"tokens": torch.zeros(8, 7, dtype=torch.int64)}
    job = memfit.fit(model, optimizer, loss, sample, **{"plan": plan, **options})
    return job, model, optimizer, generator


def _train(job: memfit.Job, optimizer: torch.optim.Optimizer, generator: torch.Generator, until: int) -> list[float]:
    losses: list[float] = []
    for step in range(job.steps, until):
        tokens = torch.randint(29, (8, 7), generator=generator)
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        losses.append(job.step({"tokens": tokens}).loss)
    return losses


def test_a_run_goes_on_from_its_save(tmp_path: Path) -> None:
    job, model, optimizer, generator = _fit()
    _train(job, optimizer, generator, 2)
    job.save(tmp_path / "out", extra={"data": generator.get_state().tolist()})
    expected = _train(job, optimizer, generator, 4)
    job.close()
    again, other, optimizer, generator = _fit(resume=tmp_path / "out")
    assert again.steps == 2
    assert again.commits is None
    generator.set_state(torch.tensor(again.extra["data"], dtype=torch.uint8))
    assert _train(again, optimizer, generator, 4) == expected
    again.close()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "model.safetensors", "optimizer.safetensors", "trainer_state.json",
    ]  # fmt: skip


def test_a_save_that_does_not_fit_is_refused_and_the_model_is_an_ordinary_one(tmp_path: Path) -> None:
    job, model, _, _ = _fit()
    job.save(tmp_path / "out")
    job.close()
    path = tmp_path / "out" / "trainer_state.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "steps": -1}))
    with pytest.raises(StoreError, match="trainer_state"):
        _fit(resume=tmp_path / "out")
    path.write_text(json.dumps(document))
    sample = {"tokens": torch.zeros(8, 7, dtype=torch.int64)}
    with pytest.raises(UsageError, match="SGD"):
        memfit.fit(model, torch.optim.SGD(model.parameters()), loss, sample, resume=tmp_path / "out")
    assert loss(model, draw(torch.Generator())).isfinite()
    for options in ({"durability": 2}, {"scheme": "journal"}, {"on_breach": "replan"}, {"store": tmp_path / "run"}):
        with pytest.raises(MemfitError, match="store="):
            _fit(resume=tmp_path / "out", **options)
    wide = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(UsageError, match="has no"):
        memfit.fit(wide, adamw(wide), lambda m, x: m(x).mean(), torch.ones(2, WIDTH), resume=tmp_path / "out")
    assert wide(torch.ones(2, WIDTH)).isfinite().all()
