"""A loop of your own, unchanged, inside a limit: accumulation, clipping, a scheduler, figures for a tracker.

Run: python examples/own_loop.py
"""

from __future__ import annotations

import io

import torch
from torch import nn

import memfit


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Any function of model and batch that returns a scalar."""
    rows, labels = batch
    return nn.functional.cross_entropy(model(rows), labels)


def main() -> None:
    """Eight batches, two updates: as without memfit but for the two lines marked."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Dropout(0.1), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
    loader = [(torch.randn(16, 128), torch.randint(0, 10, (16,))) for _ in range(8)]

    job = memfit.fit(model, optimizer, loss, loader[0], limit="2GiB", lines=True)  # 1
    figures = io.StringIO()
    job.on_step(memfit.sinks.json_lines(figures))  # or tensorboard(writer), wandb(run), mlflow(mlflow)
    with job.lines():  # 2
        for step, batch in enumerate(loader):
            (loss(model, batch) / 4).backward()
            if step % 4 == 3:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    print(figures.getvalue(), end="")
    print(job.proof().table())
    job.close()  # the model and the optimizer are ordinary ones again


if __name__ == "__main__":
    main()
