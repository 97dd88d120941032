"""Caches that a forward fills outside of its modules: the trace leaves nothing there, and does the same work each time."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from torch import Tensor, nn

from memfit.trace.blocks import find_blocks
from memfit.trace.storage_log import StorageRecord
from memfit.trace.trace import profile_step

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


@functools.lru_cache(maxsize=4)
def sometimes(*, gives_tensor: bool) -> Any:
    return torch.ones(6) if gives_tensor else 1.0


@functools.cache
def shelf(name: str) -> list[Tensor]:
    """An empty list, for its caller to fill."""
    return []


class Late(nn.Module):
    """Keeps tensors in cached functions from its second trace on."""

    gives_tensor = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        kept = shelf("mine")
        if self.gives_tensor and not kept:
            kept.append(torch.ones(6))
        return self.inner(x) + sometimes(gives_tensor=self.gives_tensor) + sum(kept)


def test_functions_that_held_no_tensors_are_looked_at_again_when_they_may() -> None:
    model, x = nn.Sequential(Late(), Late()), torch.randn(3, 6)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    first = profile_step(model, loss, x, find_blocks(model))
    assert sometimes.cache_info().currsize == shelf.cache_info().currsize == 1
    Late.gives_tensor = True
    try:
        assert profile_step(model, loss, x, find_blocks(model)).source == first.source == "fake"
        assert sometimes.cache_info().currsize == shelf.cache_info().currsize == 0
        assert type(loss(model, x)) is Tensor
    finally:
        Late.gives_tensor = False
        sometimes.cache_clear()
        shelf.cache_clear()


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


def test_the_first_collection_behind_a_trace_finds_none_of_its_records() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(256, 64)
    found: list[int] = []

    def count(phase: str, told: dict[str, int]) -> None:
        del told
        if phase == "start":
            found.append(sum(type(one) is StorageRecord for one in gc.get_objects()))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    block_map = find_blocks(model)
    gc.collect()
    threshold = gc.get_threshold()
    gc.callbacks.append(count)
    gc.set_threshold(50, 1000, 1000)
    try:
        profile_step(model, loss, x, block_map)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(count)
    assert found
    assert not any(found)
