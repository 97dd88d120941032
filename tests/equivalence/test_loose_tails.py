"""A head by hand over the embedding's weight: no tail is planned, and one that is given is refused when it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.core.plan import Plan
from memfit.planning.candidates import find_tail


class HandTied(nn.Module):
    """Reads its embedding by a product with the weight, beside the modules, as Perceiver's decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.position = nn.Parameter(torch.zeros(16))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        for layer in self.layers:
            x = x + layer(x)
        return torch.matmul(self.norm(x), self.embedding.weight.transpose(0, 1))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def test_a_head_by_hand_over_the_embedding_has_no_tail(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = HandTied()
    batch = torch.randint(50, (4, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = memfit.profile(model, optimizer, loss_of, batch)
    trace = next(iter(found.traces.values()))
    last = len(trace.calls) - 1
    assert find_tail(trace) is None
    with pytest.raises(memfit.UnsupportedError, match=r"'embedding'.*tail=None"):
        memfit.fit(model, optimizer, loss_of, batch, plan=Plan(microbatches=2, tail=last), directory=tmp_path)
    with memfit.fit(model, optimizer, loss_of, batch, plan=Plan(microbatches=2), directory=tmp_path) as job:
        assert len(job.step(batch).losses) == 2


def test_weights_that_only_the_beginning_reads_by_hand_leave_the_tail(tmp_path: Path) -> None:
    class Headed(HandTied):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 50)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids) + self.position
            for layer in self.layers:
                x = x + layer(x)
            return self.head(self.norm(x))

    model = Headed()
    batch = torch.randint(50, (4, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = next(iter(memfit.profile(model, optimizer, loss_of, batch).traces.values()))
    tail = find_tail(trace)
    assert tail is not None
    with memfit.fit(model, optimizer, loss_of, batch, plan=Plan(microbatches=2, tail=tail), directory=tmp_path) as job:
        assert len(job.step(batch).losses) == 2
