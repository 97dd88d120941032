"""A job that measures its links: where one became slow, another plan takes over between two steps, with the bits of plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.core.errors import MemfitWarning, UsageError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.limits import DEVICE_RESERVE_BYTES
from memfit.core.tiers import Tier

late = pytest.importorskip("accelerator.late", reason="the late device needs a C++ compiler")

MIB = 1 << 20
LIMIT = 20 * MIB + DEVICE_RESERVE_BYTES
ROWS, WIDTH, LAYERS = 512, 128, 6
FAST, SLOW = 4e9, 60e6


def build() -> nn.Module:
    torch.manual_seed(0)
    layer = lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))  # noqa: E731
    return nn.Sequential(*(layer() for _ in range(LAYERS))).to("late")


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to("late")


def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows) - rows).square().mean()


def hardware() -> Hardware:
    """A slow processor beside a fast link: what layers save leaves for the host."""
    link = Link(read_bytes_per_s=FAST, write_bytes_per_s=FAST)
    return Hardware(
        device="late device",
        flops_per_s=10e9,
        tiers={
            Tier.DEVICE: TierSpec(nbytes=1 << 30),
            Tier.HOST: TierSpec(nbytes=1 << 30, link=link),
            Tier.DISK: TierSpec(nbytes=1 << 30, link=Link(read_bytes_per_s=1e6, write_bytes_per_s=1e6)),
        },
    )


def plain(steps: int) -> tuple[list[float], nn.Module]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses: list[float] = []
    for step in range(steps):
        found = loss(model, batch(step))
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    return losses, model


def start(directory: Path, **more: Any) -> tuple[nn.Module, memfit.Job]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = memfit.fit(
        model, optimizer, loss, batch(0), limit=LIMIT, hardware=hardware(), store=directory / "run", adapt=True, numerics="exact", **more
    )  # fmt: skip
    torch.manual_seed(1)
    return model, job


@pytest.mark.latest
def test_a_link_that_becomes_slow_changes_the_plan_between_two_steps_and_no_bit(tmp_path: Path) -> None:
    losses, reference = plain(7)
    with late.links(FAST):
        model, job = start(tmp_path)
        before = job.plan
        assert any(call.saved.policy.offloads for call in before.calls), job.reason
        found = [job.step(batch(step)).loss for step in range(3)]
        assert job.plan == before and not job.breaches
        late.set_links(SLOW)
        with pytest.warns(MemfitWarning, match="another plan is taken, with the same bits. Cause: by what its steps"):
            found += [job.step(batch(step)).loss for step in range(3, 7)]
        (change,) = job.breaches
        assert change.is_measured and (change.before, change.after) == (before, job.plan)
        assert not any(call.saved.policy.offloads for call in job.plan.calls)
        late.set_links(FAST)
        job.close()
    assert found == losses
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_adapt_wants_a_store(device: torch.device) -> None:
    model = build()
    with pytest.raises(UsageError, match="adapt=True"):
        memfit.fit(model, torch.optim.AdamW(model.parameters()), loss, batch(0), adapt=True)
