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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UsageError
from memfit.huggingface.moves import Made, MixedError, MovedPiece, row_major_range, watch

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
