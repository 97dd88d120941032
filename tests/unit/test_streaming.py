"""Weights that stream through calls outside of a step: who is here when, right and wrong guesses, calls that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memfit.core.tiers import Tier
from memfit.engine.sites import Site
from memfit.engine.streaming import WeightStream
from memfit.homes import MemoryHome
from memfit.homes.weights import BlockWeights
from memfit.tensors.one_call import OneCall


class Chain(nn.Module):
    """Calls its layers in the order it is told; notes which blocks are here while each runs."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        self.blocks = [BlockWeights(i, str(i), list(layer.named_parameters())) for i, layer in enumerate(self.layers)]
        for block in self.blocks:
            block.move_in(MemoryHome(block.nbytes, tier=Tier.HOST, device=torch.device("cpu"), stream=None))
        self.sites = [Site(name=str(i), module=layer, blocks=(i,)) for i, layer in enumerate(self.layers)]
        self.seen: list[set[int]] = []

    def forward(self, x: Any, order: list[int]) -> Any:
        for i in order:
            hook = self.layers[i].register_forward_pre_hook(lambda *_: self.seen.append(self.here()))
            try:
                x = self.layers[i](x)
            finally:
                hook.remove()
        return x

    def here(self) -> set[int]:
        return {block.index for block in self.blocks if block.is_here}


@torch.no_grad()
def test_the_running_block_and_the_next_one_are_here_and_no_other() -> None:
    chain = Chain(4)
    with WeightStream(chain.sites, chain.blocks, calls=OneCall()):
        x = torch.ones(1, 4)
        first = chain(x, [0, 1, 2, 3])
        assert chain.seen == [{0}, {1}, {2}, {3}]  # nothing is known yet
        chain.seen.clear()
        assert torch.equal(chain(x, [0, 1, 2, 3]), first)
        assert chain.seen == [{0, 1}, {1, 2}, {2, 3}, {3, 0}]
    assert chain.here() == set()


@torch.no_grad()
def test_a_wrong_guess_goes_before_others_come() -> None:
    chain = Chain(4)
    with WeightStream(chain.sites, chain.blocks, calls=OneCall()):
        x = torch.ones(1, 4)
        chain(x, [0, 1, 0])
        chain.seen.clear()
        chain(x, [2, 0, 3, 0])
        # 0 was followed by 1, then by 2 (which came first here), then by 3.
        assert chain.seen == [{2}, {0, 2}, {3}, {0, 3}]
    assert chain.here() == set()


@torch.no_grad()
def test_a_call_that_fails_leaves_at_most_a_guess_and_the_next_one_works() -> None:
    chain = Chain(2)
    with WeightStream(chain.sites, chain.blocks, calls=OneCall()):
        with pytest.raises(RuntimeError):
            chain(torch.ones(1, 5), [0])
        assert chain.here() == set()
        assert chain(torch.ones(1, 4), [0, 1]).shape == (1, 4)
    assert all(not layer._forward_hooks and not layer._forward_pre_hooks for layer in chain.layers)


@torch.no_grad()
def test_an_interrupt_between_two_visits_comes_through_and_ends_all_visits() -> None:
    chain = Chain(3)
    calls: list[int] = []

    def observe() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), WeightStream(chain.sites, chain.blocks, calls=OneCall(), observe=observe):
        chain(torch.ones(1, 4), [0, 1, 2])
    assert chain.here() == set()
