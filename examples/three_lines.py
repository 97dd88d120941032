"""memfit in an existing loop: three lines change. Trains a small model inside a limit and prints the proof.

Run: python examples/three_lines.py
"""

from __future__ import annotations

import torch
from torch import nn

import memfit


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Any function of model and batch that returns a scalar."""
    rows, labels = batch
    return nn.functional.cross_entropy(model(rows), labels)


def main() -> None:
    """Four layers, ten steps, a learning-rate schedule: as without memfit but for the lines marked."""
    torch.manual_seed(0)
    width = 256
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    loader = [(torch.randn(32, width), torch.randint(0, 10, (32,))) for _ in range(10)]

    job = memfit.fit(model, optimizer, loss, loader[0], limit="1GiB")  # 1
    print(job.reason)
    for batch in loader:
        result = job.step(batch)  # 2: forward, backward, update
        schedule.step()
        print(f"loss {result.loss:.4f}")
    print(job.proof().line())
    job.close()  # 3: the model and the optimizer are ordinary ones again


if __name__ == "__main__":
    main()
