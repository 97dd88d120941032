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
from memfit.job.loading import load

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
        "memfit_state.json", "model.safetensors", "optimizer.safetensors",
    ]  # fmt: skip


def test_a_save_that_does_not_fit_is_refused_and_the_model_is_an_ordinary_one(tmp_path: Path) -> None:
    job, model, _, _ = _fit()
    job.save(tmp_path / "out")
    job.close()
    path = tmp_path / "out" / "memfit_state.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "steps": -1}))
    with pytest.raises(StoreError, match="memfit_state"):
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


def test_a_save_under_the_old_name_of_its_state_is_read_and_replaced(tmp_path: Path) -> None:
    job, _, optimizer, generator = _fit()
    _train(job, optimizer, generator, 2)
    job.save(tmp_path / "out")
    job.close()
    (tmp_path / "out" / "memfit_state.json").rename(tmp_path / "out" / "trainer_state.json")
    again, *_ = _fit(resume=tmp_path / "out")
    assert again.steps == 2
    assert again.load(tmp_path / "out").steps == 2
    again.save(tmp_path / "out")
    again.close()
    assert not (tmp_path / "out" / "trainer_state.json").exists(), "its weights are gone"


def test_the_file_of_the_same_old_name_that_a_trainer_wrote_is_not_taken_for_ours(tmp_path: Path) -> None:
    # The entries that transformers.Trainer writes, sorted, as in its TrainerState.save_to_json.
    theirs = {"best_metric": None, "epoch": 1.0, "global_step": 7, "log_history": [{"step": 7}], "max_steps": 7}
    job, model, optimizer, generator = _fit()
    _train(job, optimizer, generator, 1)
    job.save(tmp_path / "out")
    (tmp_path / "out" / "memfit_state.json").unlink()
    path = tmp_path / "out" / "trainer_state.json"
    path.write_text(json.dumps(theirs, indent=2))
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.warns(UserWarning, match=r"Trainer.*optimizer\.pt"):
        job.load(tmp_path / "out")
    assert optimizer.param_groups[0]["lr"] == 0.5, "weights alone"
    with pytest.raises(StoreError, match="checkpoint of transformers' Trainer"):
        job.load_states(tmp_path / "out")
    job.save(tmp_path / "out")
    assert json.loads(path.read_text()) == theirs, "a save leaves the files of others"
    optimizer.param_groups[0]["lr"] = 0.25
    job.load(tmp_path / "out")
    assert optimizer.param_groups[0]["lr"] == 0.5, "that of the save"
    job.close()
    (tmp_path / "out" / "memfit_state.json").unlink()
    with pytest.raises(UsageError, match="checkpoint of transformers' Trainer"):
        _fit(resume=tmp_path / "out")
    with pytest.raises(StoreError, match="checkpoint of transformers' Trainer"):
        load(tmp_path / "out", model)
