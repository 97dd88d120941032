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
from memfit.planner.search.candidates import find_tail


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


@pytest.mark.parametrize("tail", [None, 0, 1])
def test_an_expanded_gradient_of_a_tail_is_added_to(tail: int | None, tmp_path: Path) -> None:
    """A sum gives each element the same memory: the next microbatch's gradient cannot be added to that in place."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.shifts = nn.Linear(8, 8), nn.Parameter(torch.randn(5))

        def forward(self, rows: Tensor) -> Tensor:
            return self.line(rows) + self.shifts.sum()

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Shifted())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    (plain, optimizer), (model, of_job) = parts(), parts()
    batch = torch.randn(4, 8)
    with memfit.fit(model, of_job, loss, batch, plan=Plan(microbatches=2, tail=tail), directory=tmp_path) as job:
        for _ in range(2):
            job.step(batch)
            optimizer.zero_grad()
            for half in batch.chunk(2):
                (loss(plain, half) / 2).backward()
            optimizer.step()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
