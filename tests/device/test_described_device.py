"""A plan for an accelerator that is described is the one that `fit` takes where the accelerator is, and what it predicts is held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.core.hardware import read_hardware
from memfit.core.limits import DEVICE_RESERVE_BYTES, MIB
from memfit.core.tiers import Tier
from memfit.planner.advise import advise


def build(where: torch.device | str) -> tuple[nn.Module, torch.optim.Optimizer, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6))).to(where)
    return model, torch.optim.AdamW(model.parameters()), loss_of, torch.randn(8, 512).to(where)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


@pytest.mark.parametrize("limit_bytes", [512 * MIB, DEVICE_RESERVE_BYTES + 20 * MIB, DEVICE_RESERVE_BYTES + 12 * MIB])
def test_what_is_planned_from_afar_is_what_runs_there(device: torch.device, limit_bytes: int, tmp_path: Path) -> None:
    # Not of a Hopper, whose libraries keep more than a device has that computes on the processor.
    found = read_hardware("rtx-4090")
    assert found is not None
    hardware = found.with_capacities({Tier.DEVICE: limit_bytes, Tier.HOST: 64 * MIB})
    afar = advise(*build("cpu"), hardware=hardware)
    model, optimizer, loss, rows = build(device)
    with memfit.fit(
        model, optimizer, loss, rows, hardware=hardware, limit=limit_bytes, directory=tmp_path / "homes"
    ) as job:
        assert job.plan == afar.plan
        for _ in range(2):
            job.step(rows)
        proof = job.proof()
    assert proof.measured_peak_bytes <= afar.predicted_peak_bytes
