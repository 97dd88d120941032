"""A language model on several processes: each has rows of its own, and what does not fit one of them is cut over all.

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
    """Trains under a limit for each process, and saves one set of files."""
    communicator = memfit.communicator.create()  # one process is a communicator of one
    torch.manual_seed(0)  # the same model on every rank
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randn(STEPS, ROWS, WIDTH)[:, communicator.rank :: communicator.size]  # rows of this rank
    with memfit.fit(model, optimizer, loss, batches[0], limit="2GiB") as job:
        losses = [job.step(batch).loss for batch in batches]
    weights = communicator.allgather(torch.cat([p.detach().flatten() for p in model.parameters()]))
    if communicator.rank == 0:
        print(f"{communicator.size} ranks, loss of all rows {losses[0]:.4f} to {losses[-1]:.4f}")
        print("every rank has the same model:", all(torch.equal(own, weights[0]) for own in weights))
    communicator.close()


if __name__ == "__main__":
    main()
