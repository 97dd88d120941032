"""What continues a run beside weights and states goes with every copy of it: the loss scale of fp16, and the noise of stochastic rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from faults import small_run
from faults.small_run import FORMATS, adamw, build, profile
from memfit.core.errors import StoreError
from memfit.files.trainer import FILE_NAME
from memfit.job.loading import load
from memfit.runs.exporting import export_run

pytestmark = pytest.mark.usefixtures("generators_as_before")

_STEEPNESS = 25.0
"""Of the loss: the first scales overflow."""


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return _STEEPNESS * small_run.loss(model, batch)


def _batch(step: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(29, (8, 7), generator=torch.Generator().manual_seed(step))}


def _job(name: str, seed: int, **options: Any) -> tuple[memfit.Job, nn.Module]:
    plan, allowed = FORMATS[name](profile("wide"))
    model = build("wide")
    torch.manual_seed(seed)
    return memfit.fit(model, adamw(model), _loss, _batch(0), plan=plan, **allowed, **options), model


def _trained(job: memfit.Job, model: nn.Module, steps: range) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [job.step(_batch(step)).loss for step in steps]
    job.close()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["fp16", pytest.param("bf16-weights-sr", marks=pytest.mark.slow)])
def test_a_saved_run_goes_on_with_its_loss_scale_and_its_noise(name: str, tmp_path: Path) -> None:
    job, model = _job(name, seed=5)
    for step in range(3):
        job.step(_batch(step))
    job.save(tmp_path)
    first = None if job.loss_scaler is None else job.loss_scaler.state_dict()
    assert first is None or first["scale"] < 2.0**16
    losses, weights = _trained(job, model, range(3, 6))
    job, model = _job(name, seed=6)
    found = job.load(tmp_path)
    assert found.loss_scale == first
    assert first is None or (job.loss_scaler is not None and job.loss_scaler.state_dict() == first)
    again, others = _trained(job, model, range(3, 6))
    assert again == losses
    assert all(torch.equal(value, weights[key]) for key, value in others.items())


def test_an_exported_run_brings_the_scale_that_plain_pytorch_goes_on_with(tmp_path: Path) -> None:
    job, _ = _job("fp16", seed=5, store=tmp_path / "run")
    for step in range(3):
        job.step(_batch(step))
    job.close()
    assert job.loss_scaler is not None
    export_run(tmp_path / "run", tmp_path / "out")
    model = build("wide")
    found = load(tmp_path / "out", model, adamw(model))
    plain = torch.amp.GradScaler("cpu")
    assert found.loss_scale is not None
    plain.load_state_dict(dict(found.loss_scale))
    assert plain.state_dict() == job.loss_scaler.state_dict()


def test_a_scale_that_is_none_changes_nothing_and_none_is_as_before(tmp_path: Path) -> None:
    job, model = _job("fp16", seed=5)
    job.save(tmp_path)
    path = tmp_path / FILE_NAME
    document = json.loads(path.read_text())
    whole = document["loss_scale"]
    job.step(_batch(0))
    assert job.loss_scaler is not None
    scale = job.loss_scaler.state_dict()
    with job.weights():
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for lie in (3, "none", {"scale": 1.0}, whole | {"scale": -1.0}, whole | {"_growth_tracker": 1.5}):
        path.write_text(json.dumps(document | {"loss_scale": lie}))
        with pytest.raises(StoreError, match="memfit_state"):
            job.load(tmp_path)
        assert job.loss_scaler.state_dict() == scale
    with job.weights():
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    del document["loss_scale"], document["random"]["noise"]  # as older versions wrote it
    path.write_text(json.dumps(document))
    assert job.load(tmp_path).loss_scale is None
    assert job.loss_scaler.state_dict() == scale
    job.close()
