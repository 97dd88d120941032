"""Weights from safetensors files, a parameter at a time.

In: a directory as `save_pretrained` or `Job.save` writes it, a model whose weights may have no bytes. Out: each parameter's values when its block moves in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from memfit.core.errors import StoreError, UsageError
from memfit.runtime.birth.origin import Origin
from memfit.runtime.export.format import TensorEntry
from memfit.runtime.export.index import weight_file_names
from memfit.runtime.export.names import keep_names
from memfit.runtime.export.reader import TensorFile

_FILE_NAME = re.compile(r"[\w.-]+\.safetensors")


@dataclass(frozen=True)
class _Found:
    file: TensorFile
    entry: TensorEntry


class WeightFiles:
    """The files of a model's weights, open. A context manager.

    Names are matched as transformers' `from_pretrained` does in the plain case: as they are; with the prefix of the base model (`transformer.`, `model.`)
    where the files have none, and without it where the model has none; a tied weight under any of its names. Files in an older layout, whose tensors
    transformers renames or merges while it loads (experts of Mixtral, one by one), are refused: load those with transformers once and save with memfit.

    Memory: the headers; a piece of 8 MiB while a tensor is read, and the tensor once more where the file has another dtype than the parameter.

    Args:
        directory: holds `model.safetensors`, or an index and its shards.
        model: its parameters may be without bytes.
        origins: of the model; see `Origin`.

    Attributes:
        unused: names in the files that the model has no use for.

    Raises:
        StoreError: the files. UsageError: a tensor of the model is missing, or has another shape.
    """

    def __init__(self, directory: str | Path, model: nn.Module, origins: Sequence[Origin]) -> None:
        self._origins = tuple(origins)
        self._stack = ExitStack()
        source = Path(directory)
        if not source.is_dir():
            raise StoreError(f"{source} is not a directory: weights= takes one with model.safetensors or its shards")
        with ExitStack() as opening:
            files = [opening.enter_context(TensorFile(source / n)) for n in weight_file_names(source, _FILE_NAME)]
            by_name = _by_name(files)
            self._parameters: dict[int, _Found] = {}
            self._buffers: list[tuple[torch.Tensor, _Found]] = []
            used: set[str] = set()
            kept = keep_names(model)
            for name, tensor in kept.tensors.items():
                aliases = [name, *(other for other, one in kept.tied.items() if one == name)]
                found = _find(by_name, aliases, model)
                if found is None:
                    raise UsageError(_missing(name, source, by_name))
                _check_shape(name, tensor, found)
                used |= set(_candidates(aliases, model))
                if isinstance(tensor, nn.Parameter):
                    self._parameters[id(tensor)] = found
                else:
                    self._buffers.append((tensor, found))
            self.unused = tuple(name for name in by_name if name not in used)
            self._stack = opening.pop_all()

    def bring(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reads these from the files; the first time, all buffers that are saved as well.

        Raises:
            StoreError: a file cannot be read; may be repeated.
        """
        while self._buffers:
            tensor, found = self._buffers[-1]
            _read(found, tensor)
            self._buffers.pop()
        for parameter in parameters:
            found = self._parameters.get(id(parameter))
            if found is None:
                continue
            for origin in self._origins:
                origin.make_room(parameter)
            _read(found, parameter.data)
            del self._parameters[id(parameter)]

    def close(self) -> None:
        """Closes the files; may be repeated."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(found: _Found, tensor: torch.Tensor) -> None:
    if found.entry.dtype == tensor.dtype:
        found.file.read_into(found.entry, tensor)
        return
    read = torch.empty(found.entry.shape, dtype=found.entry.dtype)
    found.file.read_into(found.entry, read)
    with torch.no_grad():
        tensor.copy_(read)


def _by_name(files: Sequence[TensorFile]) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    for file in files:
        for entry in file.header.entries:
            if entry.name in found:
                raise StoreError(f"{entry.name!r} is in {found[entry.name].file.path} and in {file.path}: which is it?")
            found[entry.name] = _Found(file, entry)
    return found


def _candidates(aliases: Sequence[str], model: Any) -> Iterator[str]:
    """Names that a tensor may have in the files, the likeliest first."""
    yield from aliases
    prefix = getattr(model, "base_model_prefix", "")
    if not isinstance(prefix, str) or not prefix:
        return
    for name in aliases:
        if name.startswith(f"{prefix}."):
            yield name.removeprefix(f"{prefix}.")
        elif not hasattr(model, prefix):
            yield f"{prefix}.{name}"


def _find(by_name: dict[str, _Found], aliases: Sequence[str], model: nn.Module) -> _Found | None:
    return next((by_name[name] for name in _candidates(aliases, model) if name in by_name), None)


def _check_shape(name: str, tensor: torch.Tensor, found: _Found) -> None:
    entry = found.entry
    if entry.shape != tuple(tensor.shape):
        raise UsageError(
            f"{name!r} has shape {list(tensor.shape)}, in {found.file.path} it has {list(entry.shape)}: build the model from the configuration it was saved with"
        )
    if entry.dtype != tensor.dtype and not (entry.dtype.is_floating_point and tensor.dtype.is_floating_point):
        raise UsageError(f"{name!r} is {tensor.dtype}, in {found.file.path} it is {entry.dtype}: they do not convert")


def _missing(name: str, source: Path, by_name: dict[str, _Found]) -> str:
    some = ", ".join(repr(other) for other in list(by_name)[:3])
    return (
        f"{source} has no {name!r}; it has {len(by_name)} tensors ({some}, ...). Build the model from the configuration it was saved with. A layout that "
        "transformers renames or merges while it loads can be loaded with transformers once and saved again by memfit"
    )
