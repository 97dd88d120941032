"""What is told of moves is what the same code does to real numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from memfit.engine.conversions import MixedError, row_major_range, watch

Step = tuple[str, int, int]


def play(tensors: list[Tensor], steps: Sequence[Step]) -> list[Tensor]:
    """A chain of the operations that conversions are made of; a step that does not apply is left out."""
    for what, one, other in steps:
        first = tensors[0]
        dim, second = one % first.dim() if first.dim() else 0, other % first.dim() if first.dim() else 0
        if what == "stack":
            tensors = [torch.stack([t for t in tensors if t.shape == first.shape], one % (first.dim() + 1))]
        elif what == "unsqueeze":
            tensors = [t.unsqueeze(0) for t in tensors]
        elif first.dim() == 0:
            continue
        elif what == "cat":
            fitting = [
                t for t in tensors if t.dim() == first.dim() and t.select(dim, 0).shape == first.select(dim, 0).shape
            ]
            tensors = [torch.cat(fitting, dim)]
        elif what == "chunk":
            tensors = [part.contiguous() for part in torch.chunk(first, 1 + other % 3, dim)] + tensors[1:]
        elif what == "unbind":
            tensors = list(torch.unbind(first, dim)) + tensors[1:]
        elif what == "transpose":
            tensors = [first.transpose(dim, second), *tensors[1:]]
        elif what == "slice" and first.shape[dim] > 1:
            tensors = [first.narrow(dim, 1, first.shape[dim] - 1), *tensors[1:]]
        elif what == "turn":
            tensors = tensors[1:] + tensors[:1]
    return tensors


steps = st.lists(
    st.tuples(
        st.sampled_from(["stack", "cat", "chunk", "unbind", "transpose", "slice", "turn", "unsqueeze"]),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=7,
)


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), count=st.integers(1, 4), chain=steps)
def test_pieces_put_every_element_where_the_code_puts_it(shape: list[int], count: int, chain: list[Step]) -> None:
    size = math.prod(shape)
    inputs = {f"t{i}": torch.arange(i * size, (i + 1) * size).view(shape) for i in range(count)}
    expected = play(list(inputs.values()), chain)
    made = watch(
        lambda given: dict(enumerate(play(list(given.values()), chain))), {n: t.shape for n, t in inputs.items()}
    )
    assert len(made) == len(expected)
    for index, tensor in enumerate(expected):
        assert made[index].shape == tuple(tensor.shape)
        built = torch.full(tensor.shape, -1)
        for piece in made[index].pieces:
            box = piece.source(inputs[piece.name])
            target = piece.place(built)
            assert (target == -1).all()  # no element is made twice
            target.copy_(box)
        assert torch.equal(built, tensor)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4))
def test_a_box_is_a_range_exactly_if_its_elements_follow_one_another(axes: list[tuple[int, int, int]]) -> None:
    shape = [n for n, _, _ in axes]
    start = [s % n for n, s, _ in axes]
    sizes = [min(k, n - s) for (n, _, k), s in zip(axes, start, strict=True)]
    numbers = torch.arange(math.prod(shape)).view(shape)
    box = numbers[tuple(slice(s, s + k) for s, k in zip(start, sizes, strict=True))].flatten().tolist()
    is_range = box == list(range(box[0], box[0] + len(box)))
    assert row_major_range(shape, start, sizes) == ((box[0], len(box)) if is_range else None)


@pytest.mark.parametrize("code", [lambda t: t + 1, lambda t: t.view(-1), lambda t: t[::2]])
def test_code_that_does_more_than_move_boxes_is_told_apart(code: object) -> None:
    with pytest.raises(MixedError):
        watch(lambda given: {0: code(given["a"])}, {"a": (4, 3)})  # type: ignore[operator]
