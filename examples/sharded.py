"""Training on several processes: each has rows of its own, and what does not fit one of them is cut over all.

Run: torchrun --nproc-per-node 2 examples/sharded.py (or: python examples/sharded.py, one process)
"""

from __future__ import annotations

import torch
from torch import nn

import memfit

WIDTH, ROWS, STEPS = 256, 8, 5


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """How far the model is from the identity."""
    return (model(batch) - batch).square().mean()


def main() -> None:
    """Trains under a limit."""
    ranks = memfit.communicator.create()  # 1: one process is a communicator of one
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randn(STEPS, ROWS, WIDTH)[:, ranks.rank :: ranks.size]  # 2: rows of this rank
    with memfit.fit(model, optimizer, loss, batches[0], limit="2GiB") as job:
        losses = [job.step(batch).loss for batch in batches]
    total = sum(p.detach().double().sum().item() for p in model.parameters())
    print(f"loss of all rows {losses[0]:.4f} to {losses[-1]:.4f}, weights add up to {total:.4f}")
    ranks.close()  # 3


if __name__ == "__main__":
    main()
