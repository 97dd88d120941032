"""Which part of which tensor goes where, found by watching code that only moves elements.

In: code that stacks, cuts and joins tensors. Out: for each of its results, the regions of the
inputs that it is made of; nothing is read.

[Note: watched moves]
A library that packs many tensors of its files into one weight, or one of them into several, does it
with a few tensor operations. Run on tensors of the `meta` device these cost nothing, and a dispatch
mode sees each of them. Every tensor under way is a list of *pieces*: a box of one input and where
it lies in the result. Stacking, joining, cutting and permuting turn lists of pieces into lists of
pieces; any other operation (a reshape that mixes axes, arithmetic) cannot be said this way, and
whoever asked must run the code on real tensors instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_Result = TypeVar("_Result")


class MixedError(Exception):
    """The code does more than move boxes."""


@dataclass(frozen=True, kw_only=True)
class MovedPiece:
    """A box of an input that is a box of a result.

    Attributes:
        name: of the input.
        start: first index in the input, an axis each.
        sizes: of the box, along the input's axes.
        axes: the result's axis for each axis of the input; None where that axis has size 1 in the
            box and is not the result's.
        at: first index in the result, an axis each.
    """

    name: str
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[int | None, ...]
    at: tuple[int, ...]

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box as a view of the input."""
        return tensor[tuple(slice(s, s + n) for s, n in zip(self.start, self.sizes, strict=True))]

    def place(self, result: torch.Tensor) -> torch.Tensor:
        """The box as a view of the result, with the axes of the input."""
        index = tuple(
            position if axis not in self.axes else slice(position, position + self.sizes[self.axes.index(axis)])
            for axis, position in enumerate(self.at)
        )
        kept = [axis for axis in range(len(self.at)) if axis in self.axes]
        view = result[index].permute([kept.index(axis) for axis in self.axes if axis is not None])
        for position, axis in enumerate(self.axes):
            view = view.unsqueeze(position) if axis is None else view
        return view

    def length(self, axis: int) -> int:
        """Index of the box along an axis of the result."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1


@dataclass(frozen=True, kw_only=True)
class Made:
    """A tensor that consists of boxes of inputs."""

    shape: tuple[int, ...]
    pieces: tuple[MovedPiece, ...]


def watch(
    run: Callable[[dict[str, torch.Tensor]], Mapping[_Result, torch.Tensor]], shapes: Mapping[str, Sequence[int]]
) -> dict[_Result, Made]:
    """Runs code on inputs without bytes and tells what its results are made of.

    Args:
        run: takes the inputs by name, gives results by key.
        shapes: of the inputs.

    Raises:
        MixedError: it did more than move boxes. Whatever `run` raises.
    """
    watcher = _Watcher()
    inputs = {name: watcher.add(name, tuple(shape)) for name, shape in shapes.items()}
    with watcher:
        results = run(inputs)
    return {key: watcher.made(tensor) for key, tensor in results.items()}


class _Watcher(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        # with the tensor, so that its `id` stays its own
        self._known: dict[int, tuple[torch.Tensor, Made]] = {}

    def add(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, device="meta")
        zeros = (0,) * len(shape)
        piece = MovedPiece(name=name, start=zeros, sizes=shape, axes=tuple(range(len(shape))), at=zeros)
        self._known[id(tensor)] = (tensor, Made(shape=shape, pieces=(piece,)))
        return tensor

    def made(self, tensor: torch.Tensor) -> Made:
        try:
            return self._known[id(tensor)][1]
        except KeyError:
            raise MixedError("a tensor of unknown origin") from None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func)
        if rule is None:
            raise MixedError(str(func))
        result = func(*args, **(kwargs or {}))
        tensors = list(result) if isinstance(result, list | tuple) else [result]
        for tensor, made in zip(tensors, rule(self.made, *args, **(kwargs or {})), strict=True):
            assert tuple(tensor.shape) == made.shape
            self._known[id(tensor)] = (tensor, made)
        return result


_Look = Callable[[torch.Tensor], Made]


def _same(look: _Look, tensor: torch.Tensor, **_: Any) -> Iterator[Made]:
    yield look(tensor)


def _cat(look: _Look, tensors: Sequence[torch.Tensor], dim: int = 0) -> Iterator[Made]:
    parts = [look(t) for t in tensors]
    dim %= len(parts[0].shape)
    pieces: list[MovedPiece] = []
    offset = 0
    for part in parts:
        pieces += [replace(p, at=_changed(p.at, dim, p.at[dim] + offset)) for p in part.pieces]
        offset += part.shape[dim]
    yield Made(shape=_changed(parts[0].shape, dim, offset), pieces=tuple(pieces))


def _stack(look: _Look, tensors: Sequence[torch.Tensor], dim: int = 0) -> Iterator[Made]:
    parts = [look(t) for t in tensors]
    dim %= len(parts[0].shape) + 1
    pieces = [_with_axis(p, dim, i) for i, part in enumerate(parts) for p in part.pieces]
    shape = parts[0].shape
    yield Made(shape=(*shape[:dim], len(parts), *shape[dim:]), pieces=tuple(pieces))


def _unsqueeze(look: _Look, tensor: torch.Tensor, dim: int) -> Iterator[Made]:
    made = look(tensor)
    dim %= len(made.shape) + 1
    shape = (*made.shape[:dim], 1, *made.shape[dim:])
    yield Made(shape=shape, pieces=tuple(_with_axis(p, dim, 0) for p in made.pieces))


def _slice(
    look: _Look, tensor: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Iterator[Made]:
    if step != 1:
        raise MixedError("a slice with steps")
    made = look(tensor)
    dim %= len(made.shape)
    first, last, _ = slice(start, end).indices(made.shape[dim])
    yield _cut(made, dim, first, max(first, last))


def _split(look: _Look, tensor: torch.Tensor, size: int, dim: int = 0) -> Iterator[Made]:
    made = look(tensor)
    dim %= len(made.shape)
    total = made.shape[dim]
    for first in range(0, max(total, 1), size):
        yield _cut(made, dim, first, min(first + size, total))


def _split_sizes(look: _Look, tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> Iterator[Made]:
    made = look(tensor)
    dim %= len(made.shape)
    first = 0
    for size in sizes:
        yield _cut(made, dim, first, first + size)
        first += size


def _select(look: _Look, tensor: torch.Tensor, dim: int, index: int) -> Iterator[Made]:
    made = look(tensor)
    dim %= len(made.shape)
    index %= made.shape[dim]
    yield _without_axis(_cut(made, dim, index, index + 1), dim)


def _unbind(look: _Look, tensor: torch.Tensor, dim: int = 0) -> Iterator[Made]:
    for index in range(look(tensor).shape[dim]):
        yield from _select(look, tensor, dim, index)


def _squeeze(look: _Look, tensor: torch.Tensor, dim: int) -> Iterator[Made]:
    made = look(tensor)
    dim %= len(made.shape)
    yield _without_axis(made, dim) if made.shape[dim] == 1 else made


def _permute(look: _Look, tensor: torch.Tensor, dims: Sequence[int]) -> Iterator[Made]:
    made = look(tensor)
    order = [d % len(made.shape) for d in dims]
    pieces = tuple(
        replace(
            p,
            axes=tuple(None if axis is None else order.index(axis) for axis in p.axes),
            at=tuple(p.at[d] for d in order),
        )
        for p in made.pieces
    )
    yield Made(shape=tuple(made.shape[d] for d in order), pieces=pieces)


def _transpose(look: _Look, tensor: torch.Tensor, one: int, other: int) -> Iterator[Made]:
    order = list(range(tensor.dim()))
    order[one], order[other] = order[other], order[one]
    yield from _permute(look, tensor, order)


def _t(look: _Look, tensor: torch.Tensor) -> Iterator[Made]:
    yield from _permute(look, tensor, list(reversed(range(tensor.dim()))))


_RULES: dict[Any, Callable[..., Iterator[Made]]] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_sizes,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    _aten.squeeze.dim: _squeeze,
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _t,
}


def _changed(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _with_axis(piece: MovedPiece, dim: int, index: int) -> MovedPiece:
    axes = tuple(None if axis is None else axis + (axis >= dim) for axis in piece.axes)
    return replace(piece, axes=axes, at=(*piece.at[:dim], index, *piece.at[dim:]))


def _without_axis(made: Made, dim: int) -> Made:
    pieces = tuple(
        replace(
            p,
            axes=tuple(None if axis is None or axis == dim else axis - (axis > dim) for axis in p.axes),
            at=(*p.at[:dim], *p.at[dim + 1 :]),
        )
        for p in made.pieces
    )
    return Made(shape=(*made.shape[:dim], *made.shape[dim + 1 :]), pieces=pieces)


def _cut(made: Made, dim: int, first: int, last: int) -> Made:
    pieces: list[MovedPiece] = []
    for p in made.pieces:
        begin, end = max(first, p.at[dim]), min(last, p.at[dim] + p.length(dim))
        if begin >= end:
            continue
        cut = replace(p, at=_changed(p.at, dim, begin - first))
        if dim in p.axes:
            axis = p.axes.index(dim)
            start = p.start[axis] + begin - p.at[dim]
            cut = replace(cut, start=_changed(p.start, axis, start), sizes=_changed(p.sizes, axis, end - begin))
        pieces.append(cut)
    return Made(shape=_changed(made.shape, dim, last - first), pieces=tuple(pieces))


def row_major_range(shape: Sequence[int], start: Sequence[int], sizes: Sequence[int]) -> tuple[int, int] | None:
    """(first element, count) of a box whose elements follow one another in a row-major tensor; None
    if they do not.
    """
    for axis in range(len(shape)):
        if sizes[axis] != 1:
            if any(
                s != 0 or n != m
                for s, n, m in zip(start[axis + 1 :], sizes[axis + 1 :], shape[axis + 1 :], strict=True)
            ):
                return None
            break
    first = sum(s * math.prod(shape[axis + 1 :]) for axis, s in enumerate(start))
    return first, math.prod(sizes)
