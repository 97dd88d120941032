"""A model with frozen ones beside it: what it has itself is committed as it is without them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import memfit


class Counting(nn.Module):
    """Counts its passes, in a buffer of its own that `state_dict` has and in one that it has not."""

    passes: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.scratch += 1
        return self.layer(values)


def both() -> memfit.WithFrozen:
    return memfit.WithFrozen(Counting(), teacher=nn.Linear(4, 4).requires_grad_(requires_grad=False))


def distance(model: memfit.WithFrozen, values: Tensor) -> Tensor:
    return (model(values) - model.get_submodule("teacher")(values)).square().mean()


def test_buffers_of_the_model_itself_go_on_in_a_resumed_run(tmp_path: Path) -> None:
    values = torch.ones(2, 4)
    for steps in (2, 3):
        model = both()
        optimizer = torch.optim.SGD(model.trained.parameters(), lr=0.1)
        with memfit.fit(model, optimizer, distance, values, store=tmp_path) as job:
            while job.steps < steps:
                job.step(values)
    assert model.trained.passes == 3 and model.trained.scratch == 1
    assert "scratch" not in model.state_dict()
