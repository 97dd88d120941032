"""How the tensors of a model's files become its weights, and the other way round, where a library
lays them out differently.

In: a model, and the names and shapes of tensors in its files (or of its own). Out: `Conversion`s:
which tensors make which.

transformers keeps the files of many models as they were first published (Mixtral's experts one by
one, ViT's layers under their old names) and renames, packs or cuts them while it loads, and back
while it saves. The rules are its own, in the version that is installed; memfit asks for them and
runs them on tensors without bytes ([Note: watched moves]), so that what only moves is moved a piece
at a time, straight from the files to its place.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.core.errors import UsageError
from memfit.homes.weights import BlockWeights

# Which part of which tensor goes where, found by watching code that only moves elements.
#
# In: code that stacks, cuts and joins tensors. Out: for each of its results, the regions of the
# inputs that it is made of; nothing is read.
#
# [Note: watched moves]
# A library that packs many tensors of its files into one weight, or one of them into several, does
# it with a few tensor operations. Run on tensors of the `meta` device these cost nothing, and a
# dispatch mode sees each of them. Every tensor under way is a list of *pieces*: a box of one input
# and where it lies in the result. Stacking, joining, cutting and permuting turn lists of pieces
# into lists of pieces; any other operation (a reshape that mixes axes, arithmetic) cannot be said
# this way, and whoever asked must run the code on real tensors instead.

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


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Some tensors of the files that together make some of the model's.

    Attributes:
        inputs: names in the files.
        targets: by name in the model, the shape, and the pieces it is made of; pieces are None
            where elements are more than moved.
        run: makes the targets from the inputs on real tensors.
    """

    inputs: tuple[str, ...]
    targets: Mapping[str, tuple[tuple[int, ...], tuple[MovedPiece, ...] | None]]
    run: Callable[[Tensors], Tensors]


def loading_conversions(
    model: nn.Module, names: Iterable[str], shapes: Mapping[str, Sequence[int]]
) -> tuple[list[Conversion], list[str]]:
    """Rules by which tensors of files become those of a model.

    Args:
        model: its weights may be away.
        names: of its state dict, all names of tied tensors included.
        shapes: of the tensors in the files.

    Returns:
        (conversions, names in the files that the model has no use for).

    Raises:
        UsageError: tensors that cannot be put together as the library's rules say.
    """
    known = set(names)
    library = _library(model)
    if library is None:
        return [_as_it_is(n, n, shapes[n]) for n in shapes if n in known], [n for n in shapes if n not in known]
    rules = sys.modules["transformers.conversion_mapping"].get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, library.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, library.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix: Any = model.base_model_prefix
    present = dict.fromkeys(known, True)
    found: list[Conversion] = []
    unused: list[str] = []
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    # The library's own order: an expert's place in its stack is its place in this order.
    for name in sorted(shapes, key=library.dot_natural_key):
        target, pattern = library.rename_source_key(name, renamings, converters, prefix, present)
        if target not in known and name in known:
            target, pattern = library.rename_source_key(name, [], [], prefix, present)
        if target not in known:
            unused.append(name)
        elif pattern is None:
            found.append(_as_it_is(name, target, shapes[name]))
        else:
            groups.setdefault(target, (by_pattern[pattern], []))[1].append((name, pattern))
    found += [_converted(model, rule, target, members, shapes) for target, (rule, members) in groups.items()]
    return found, unused


@dataclass(frozen=True, kw_only=True)
class Range:
    """Elements [first, first + count) of a tensor of the model, row-major."""

    name: str
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A tensor of a file: its shape, and the ranges that follow one another in it."""

    shape: tuple[int, ...]
    parts: tuple[Range, ...]


def file_tensors(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> dict[str, FileTensor]:
    """Returns the contents of a model's files, by name, as `save_pretrained` lays them out.

    Where the library's own layout takes more than moving ranges of elements (turned axes,
    interleaved rows), files hold the model's tensors under the model's names; the library loads
    those as well.

    Args:
        model: its weights may be away.
        shapes: of the tensors of its state dict, each tied one once.
    """
    library = _library(model)
    if library is not None:
        try:
            made = watch(lambda tensors: library.revert_weight_conversion(model, tensors), shapes)
            return {name: FileTensor(shape=m.shape, parts=_ranges(m, shapes)) for name, m in made.items()}
        except MixedError:
            pass
    return {
        name: FileTensor(shape=tuple(shape), parts=(Range(name=name, first=0, count=math.prod(shape)),))
        for name, shape in shapes.items()
    }


def _ranges(made: Made, shapes: Mapping[str, Sequence[int]]) -> tuple[Range, ...]:
    """The pieces of a tensor as ranges, in its own order.

    Raises:
        MixedError: a piece is no range, in it or in its source.
    """
    found: list[tuple[int, Range]] = []
    for piece in made.pieces:
        sizes = [piece.length(axis) for axis in range(len(made.shape))]
        here = row_major_range(made.shape, piece.at, sizes)
        there = row_major_range(shapes[piece.name], piece.start, piece.sizes)
        axes = [axis for axis in piece.axes if axis is not None]
        if here is None or there is None or axes != sorted(axes):
            raise MixedError("a piece is no range of elements")
        found.append((here[0], Range(name=piece.name, first=there[0], count=there[1])))
    return tuple(part for _, part in sorted(found, key=lambda item: item[0]))


def _library(model: nn.Module) -> Any:
    """Transformers' loading module where the model is one of its own, else None."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    return sys.modules["transformers.core_model_loading"]


def _as_it_is(name: str, target: str, shape: Sequence[int]) -> Conversion:
    made = watch(lambda tensors: {target: tensors[name]}, {name: shape})[target]
    return Conversion(
        inputs=(name,), targets={target: (made.shape, made.pieces)}, run=lambda tensors: {target: tensors[name]}
    )


def _converted(
    model: Any, rule: Any, target: str, members: Sequence[tuple[str, str]], shapes: Mapping[str, Sequence[int]]
) -> Conversion:
    def run(tensors: Tensors) -> Tensors:
        own = copy.deepcopy(rule)  # it collects tensors
        for name, pattern in members:
            own.add_tensor(target, name, pattern, tensors[name])
        results = own.convert(target, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in results.items()}

    wanted = {name: shapes[name] for name, _ in members}
    names = tuple(wanted)
    try:
        try:
            made = watch(run, wanted)
            targets: dict[str, Any] = {key: (m.shape, m.pieces) for key, m in made.items()}
        except MixedError:
            meta = run({name: torch.empty(tuple(shape), device="meta") for name, shape in wanted.items()})
            targets = {key: (tuple(t.shape), None) for key, t in meta.items()}
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
        raise UsageError(
            f"{names[0]!r} and {len(names) - 1} more tensors of the files do not make {target!r} as transformers has it ({type(error).__name__}: {error}): "
            "build the model from the configuration it was saved with; if files are missing, get them all"
        ) from error
    return Conversion(inputs=names, targets=targets, run=run)


# Configuration of a model, as `from_pretrained` wants it.
#
# In: a model, of transformers or not. Out: copies of its configuration; nothing of the model is
# changed.


def described(model: Any, blocks: Sequence[BlockWeights]) -> tuple[Any, Any]:
    """Returns a model's configuration and that of its generation; None for one that it does not
    have.
    """
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return None, None
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return config, None
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    saved = {id(slot.parameter): slot.master_dtype for block in blocks for slot in block.slots}
    first = next(p for p in model.parameters() if p.is_floating_point())
    config.dtype = str(saved.get(id(first), first.dtype)).removeprefix("torch.")
    return config, model.generation_config if model.can_generate() else None
