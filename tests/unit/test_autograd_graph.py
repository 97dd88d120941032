"""Sums of a shared weight's gradients in place: the bits of plain PyTorch, and nobody's tensor is
written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memfit.tensors.autograd_graph import (
    parameters_of_earlier_calls,
    sequence_number,
    watch_gradients_of,
    without_bases,
)

ROWS, WIDTH = 6, 5


def _loss(weight: Tensor, uses: str, seen: list[Tensor] | None = None) -> Tensor:
    """Loss of a chain in which one square weight is used in several ways, one letter each."""
    value = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    for use in uses:
        began = sequence_number()
        match use:
            case "l":
                value = nn.functional.linear(value, weight).tanh()
            case "m":
                value = (value @ weight).sin()
            case "e":
                value = value + nn.functional.embedding(torch.arange(ROWS) % WIDTH, weight)
            case "s":
                value = value * weight.sum()  # its gradient is expanded
            case "p":
                value = value + weight[1:4].mean(0)
            case _:
                value = value + torch.cat([weight, weight.flip(0)])[:ROWS]
        if seen is not None:
            watch_gradients_of(lambda leaf: leaf is weight, [value], began, without_bases)
    return value.square().sum()


@pytest.mark.parametrize("uses", ["ll", "el", "le", "ml", "lsl", "pel", "clm", "cc", "slec", "lmeps", "eee", "l"])
def test_gradients_have_the_bits_of_plain_pytorch(uses: str) -> None:
    weight = nn.Parameter(torch.linspace(0.3, -0.7, WIDTH * WIDTH).view(WIDTH, WIDTH))
    _loss(weight, uses).backward()
    expected = weight.grad
    weight.grad = None
    _loss(weight, uses, []).backward()
    assert expected is not None and weight.grad is not None
    assert torch.equal(weight.grad, expected)
    assert weight.grad.stride() == expected.stride()


def test_a_gradient_that_somebody_holds_is_not_added_to() -> None:
    weight = nn.Parameter(torch.linspace(0.3, -0.7, WIDTH * WIDTH).view(WIDTH, WIDTH))
    held: list[tuple[Tensor, Tensor]] = []

    def hold(made: tuple[Tensor | None, ...], _: object) -> None:
        held.extend((g, g.clone()) for g in made if g is not None)

    value = torch.ones(ROWS, WIDTH)
    for hook in (without_bases, None):
        began = sequence_number()
        value = nn.functional.linear(value, weight).tanh()
        watch_gradients_of(lambda leaf: leaf is weight, [value], began, hold)
        if hook is not None:
            watch_gradients_of(lambda leaf: leaf is weight, [value], began, hook)
    value.sum().backward()
    assert len(held) == 2
    assert all(torch.equal(gradient, copy) for gradient, copy in held)


def test_only_nodes_of_the_call_that_reach_the_leaf_are_watched() -> None:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    ran: list[int] = []
    hidden = first(torch.ones(ROWS, WIDTH)).relu()
    began = sequence_number()
    out = second(hidden).relu()

    def note(made: tuple[Tensor | None, ...], _: object) -> None:
        ran.append(len(made))

    watch_gradients_of(lambda leaf: leaf is first.weight, [out], began, note)  # used before the call
    out.sum().backward(retain_graph=True)
    assert not ran
    watch_gradients_of(lambda leaf: leaf is second.weight, [out], began, note)
    out.sum().backward()
    assert len(ran) == 1


def test_a_calls_shared_parameters_are_those_that_an_earlier_call_reads() -> None:
    parameters = {"a": [1, 2], "b": [3], "c": []}
    calls = [["a"], ["b"], ["b", "c"], ["a", "c"], ["a", "b"]]
    found = parameters_of_earlier_calls(calls, lambda name: parameters[name])
    assert found == {2: frozenset({3}), 3: frozenset({1, 2}), 4: frozenset({1, 2, 3})}
