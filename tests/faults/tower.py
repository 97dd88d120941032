"""A small residual tower, its batches, its loss, and what plain PyTorch makes of it: what jobs train whose disk fails."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import memfit
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.profile import Profile
from memfit.core.tiers import Tier

ROWS = 64
Batch = dict[str, Tensor]
_FAST = Link(read_bytes_per_s=1e10, write_bytes_per_s=1e10)
HARDWARE = Hardware(
    device="cpu",
    flops_per_s=1e11,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 40),
        Tier.HOST: TierSpec(nbytes=1 << 40, link=_FAST),
        Tier.DISK: TierSpec(nbytes=1 << 40, link=_FAST),
    },
)
"""A machine that nobody probes, so that plans for it are the same wherever they are made."""


class Layer(nn.Module):
    """Its hidden values take 512 bytes a unit of width (64 rows, fp32, twice the width)."""

    def __init__(self, width: int, times: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, times * width), nn.Linear(times * width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.dropout(torch.relu(self.wide(x)))) / 8


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss(model: nn.Module, data: Batch) -> Tensor:
    return (model(data["x"]) - data["y"]).square().mean()


@dataclass(frozen=True)
class Tower:
    """One size of it; the same bits at every call."""

    width: int
    layers: int = 3
    times: int = 2
    """Hidden values to inputs of a layer."""
    dropout: float = 0.0
    shape: tuple[int, ...] = (ROWS,)
    """Of a batch, without the width."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Layer(self.width, self.times, self.dropout) for _ in range(self.layers)))

    def batch(self, step: int, shape: tuple[int, ...] | None = None) -> Batch:
        generator = torch.Generator().manual_seed(step)
        return {name: torch.randn(*(shape or self.shape), self.width, generator=generator) for name in ("x", "y")}

    def profile(self) -> Profile:
        model = self.build()
        return memfit.profile(model, adamw(model), loss, self.batch(0))

    def after_plain_steps(self, count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.build()
        optimizer = adamw(model)
        for step in range(count):
            optimizer.zero_grad()
            loss(model, self.batch(step)).backward()
            optimizer.step()
        return model, optimizer
