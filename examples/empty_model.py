"""A model that is never whole in memory: built empty, trained in bf16 with fp32 masters on disk, saved, and run from the files.

Run: python examples/empty_model.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import memfit
from memfit.core.plan import BlockPlan, Plan
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier

WIDTH = 512
DISK = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)


def build() -> nn.Module:
    """Eight layers of 1 MiB."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """How far the model is from the identity."""
    return (model(batch).float() - batch).square().mean()


def main() -> None:
    """Ten steps, then a forward pass from the saved files."""
    torch.manual_seed(0)
    model = memfit.empty(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(16, WIDTH)
    names = [block.name for block in memfit.profile(model, optimizer, loss, batch).blocks]
    plan = Plan(blocks=dict.fromkeys(names, DISK), compute_dtype=ComputeDtype.BFLOAT16)
    with tempfile.TemporaryDirectory() as directory:
        saved = Path(directory) / "saved"
        with memfit.fit(model, optimizer, loss, batch, plan=plan, allow={"bf16"}) as job:
            for _ in range(10):
                print(f"loss {job.step(batch).loss:.4f}")
            job.save(saved)
            job.close(restore=False)
        with memfit.infer(memfit.empty(build), weights=saved, limit="1GiB") as session:
            print(f"loss from the files, in fp32: {loss(session.model, batch):.4f}")


if __name__ == "__main__":
    main()
