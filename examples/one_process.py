"""Training in one process: `sharded.py` is the same script for several, with three other lines.

Run: python examples/one_process.py
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
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randn(STEPS, ROWS, WIDTH)
    with memfit.fit(model, optimizer, loss, batches[0], limit="2GiB") as job:
        losses = [job.step(batch).loss for batch in batches]
    total = sum(p.detach().double().sum().item() for p in model.parameters())
    print(f"loss of all rows {losses[0]:.4f} to {losses[-1]:.4f}, weights add up to {total:.4f}")


if __name__ == "__main__":
    main()
