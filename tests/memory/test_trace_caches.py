"""Caches that a forward fills outside of its modules: the trace leaves nothing there, and does the same work each time."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from torch import Tensor, nn

from memfit.profiling.blocks import find_blocks
from memfit.profiling.trace import profile_step

TABLES: dict[int, Tensor] = {}


@functools.lru_cache(maxsize=4)
def table(width: int) -> Tensor:
    return torch.arange(width) / width


def hidden(function: Any) -> Any:
    """A decorator that keeps its cached function in a closure, as transformers has one."""
    cached = functools.lru_cache(maxsize=4)(function)

    @functools.wraps(function)
    def call(*args: Any) -> Tensor:
        return cached(*args)

    return call


class Positioned(nn.Module):
    kept: dict[int, Tensor] = {}  # noqa: RUF012, what such models have

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    @hidden
    def positions(self, width: int) -> Tensor:
        return torch.ones(width) * 2

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        for cache in (TABLES, self.kept):
            if width not in cache:
                cache[width] = torch.arange(width) * 0.5
        return self.inner(x) + table(width) + self.positions(width) + TABLES[width] + self.kept[width]


def test_a_trace_leaves_no_tensors_without_data_in_caches_outside_of_modules() -> None:
    model = nn.Sequential(Positioned(), Positioned())
    x = torch.randn(3, 6)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    found = profile_step(model, loss, x, find_blocks(model))
    assert found.source == "fake"
    assert not TABLES and not Positioned.kept
    expected = loss(model, x)
    assert type(expected) is Tensor
    # What was there before is there afterwards, the very same.
    mine = TABLES[6]
    profile_step(model, loss, x, find_blocks(model))
    # Nor do the two forwards of a trace find one of them filled.
    assert list(TABLES) == [6]
    assert TABLES[6] is mine
    assert torch.equal(loss(model, x), expected)


class Circular(nn.Module):
    """Holds a large result in a cycle, until a collection; makes others by the thousand, so that one comes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        cycle: list[Any] = [torch.cat([x] * 8)]
        cycle.append(cycle)
        del cycle
        for _ in range(20_000):
            other: list[Any] = []
            other.append(other)
        return self.inner(x)


def test_what_only_a_collection_frees_counts_as_alive_whenever_one_comes() -> None:
    model, x = nn.Sequential(Circular(), Circular()), torch.randn(256, 64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    assert gc.isenabled()
    found = profile_step(model, loss, x, find_blocks(model))
    assert gc.isenabled()
    gc.disable()
    try:
        again = profile_step(model, loss, x, find_blocks(model))
    finally:
        gc.enable()
    assert found == again
    assert found.traces[256].whole_peak_bytes > 2 * 8 * x.nbytes
