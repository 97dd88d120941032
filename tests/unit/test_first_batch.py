"""First batches of loaders: the loop behind them sees the batches that it would have seen without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

import memfit
from memfit.core.errors import UsageError

DATA = TensorDataset(torch.arange(40.0).view(20, 2))
JITTER = random.Random(0)


class CountingSampler(Sampler[int]):
    """Has a generator and an epoch of its own, as those of ranks do."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(20, generator=self.generator).tolist()[: 10 + self.epoch])


class Augmented(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.drawn = np.random.default_rng(0)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.drawn.random() + random.random() + np.random.random() + JITTER.random()])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(2) for _ in range(9))


class Batches:
    """A loader of one's own."""

    batch_size = 4

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(3):
            self.given += 1
            yield torch.rand(4, 2) + self.given


def jittered(rows: list[Any]) -> torch.Tensor:
    return torch.stack([row[0] for row in rows]) + JITTER.random()


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "a generator of its own": lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(2)),
    "workers that stay": lambda: DataLoader(Augmented(), 4, shuffle=True, num_workers=1, persistent_workers=True),
    "a sampler of one's own": lambda: DataLoader(DATA, 4, sampler=CountingSampler()),
    "weighted": lambda: DataLoader(
        DATA, 4, sampler=WeightedRandomSampler([1.0] * 20, 20, generator=torch.Generator().manual_seed(5))
    ),
    "augmented": lambda: DataLoader(Augmented(), 4, shuffle=True),
    "collated": lambda: DataLoader(DATA, 4, shuffle=True, collate_fn=jittered),
    "a stream": lambda: DataLoader(Stream(), 4),
    "resumable": lambda: memfit.ResumableLoader(DATA, batch_size=4, seed=1),
    "one's own": Batches,
    "a list": lambda: [torch.rand(4, 2) for _ in range(3)],
}


def batches_of(make: Callable[[], Any], look: Callable[[Any], object]) -> list[str]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    JITTER.seed(7)
    loader = make()
    look(loader)
    return [str(batch) for _ in range(2) for batch in loader]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_loader_gives_the_batches_that_it_gives_without(make: Callable[[], Any]) -> None:
    expected = batches_of(make, lambda _: None)
    assert batches_of(make, memfit.first_batch) == expected
    # Drawn in vain, a batch is missing or another one: the check above sees it.
    if make not in (LOADERS["a list"], LOADERS["resumable"]):
        assert batches_of(make, lambda loader: next(iter(loader))) != expected


def test_the_batch_is_the_first_that_the_loop_will_see() -> None:
    loader = DataLoader(Augmented(), 4, shuffle=True)
    sample = memfit.first_batch(loader)
    assert torch.equal(sample, next(iter(loader)))


@pytest.mark.parametrize(
    "loader", [iter([torch.rand(2)]), DataLoader(DATA, 4, sampler=iter(range(20)))], ids=["iterator", "sampler"]
)
def test_what_can_be_drawn_once_is_refused(loader: Any) -> None:
    with pytest.raises(UsageError, match="gives its batches once"):
        memfit.first_batch(loader)


def test_fit_takes_a_loader_and_trains_on_the_batches_of_a_plain_loop() -> None:
    def weights(*, ours: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader: Any = DataLoader(DATA, 4, shuffle=True)

        def loss(model: Any, batch: Any) -> torch.Tensor:
            return model(batch[0]).square().mean()

        if not ours:
            for batch in loader:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
            return [p.detach() for p in model.parameters()]
        memfit.profile(model, optimizer, loss, loader)
        with memfit.fit(model, optimizer, loss, loader, plan=memfit.Plan()) as job:
            for batch in loader:
                job.step(batch)
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, weights(ours=True), weights(ours=False)))


class Keyed:
    """As graphs and dictionaries of tensors are: iterable, with a batch size, and with keys."""

    batch_size = 4

    def __init__(self) -> None:
        self.values = torch.randn(4, 2)

    def keys(self) -> list[str]:
        return ["values"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield self.values


def test_a_batch_with_keys_is_no_loader() -> None:
    batch, model = Keyed(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memfit.fit(model, optimizer, lambda m, b: m(b.values).square().mean(), batch, plan=memfit.Plan()) as job:
        assert job.step(batch).is_finite
