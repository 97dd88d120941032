"""A parameter server: rank 0 keeps weights and optimizer states on disk, the others push gradients and pull weights.

Run: torchrun --nproc-per-node 3 examples/parameter_server.py
"""

from __future__ import annotations

import torch
from torch import nn

import memfit

WIDTH, ROWS, STEPS = 256, 8, 20


def main() -> None:
    """Trains; a worker may use weights that miss the last push of another one."""
    torch.manual_seed(0)  # servers begin with these weights
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parameters, losses = list(model.parameters()), []
    with memfit.parameter_server.create(model, optimizer, staleness=1, home="disk", limit="2GiB") as server:
        if server.is_worker:
            batches = torch.randn(STEPS, ROWS, WIDTH, generator=torch.Generator().manual_seed(server.rank))
            for batch in batches:
                for index, parameter in enumerate(parameters):
                    server.pull(index, into=parameter)
                loss = (model(batch) - batch).square().mean()
                losses.append(loss.item())
                loss.backward()
                for index, parameter in enumerate(parameters):
                    server.push(index, parameter.grad)
                model.zero_grad()
    # Out of the block a server's model and optimizer have their last values.
    if server.is_worker:
        print(
            f"rank {server.rank}: loss {losses[0]:.3f} to {losses[-1]:.3f}, at most {server.stalest_pull} pushes missed"
        )
    else:
        print(
            f"rank {server.rank}: {sum(p.numel() for p in parameters):,} weights, lost workers: {server.lost_workers}"
        )


if __name__ == "__main__":
    main()
