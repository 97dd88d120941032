"""Each tensor of a model, and where the files of a directory hold it.

In: open files, a model whose weights may be away. Out: `Matched` tensors that can be read into
memory; or an error that names what is missing or differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from memfit.core.errors import StoreError, UsageError
from memfit.engine.conversions import Conversion, MovedPiece, loading_conversions, row_major_range
from memfit.files.names import extra_states, keep_names
from memfit.files.reader import TensorFile
from memfit.tensors.container import TensorEntry
from memfit.tensors.write_marks import copy_shared, shares_elements


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor in an open file."""

    file: TensorFile
    entry: TensorEntry


@dataclass(frozen=True, kw_only=True)
class Matched:
    """A tensor of the model.

    Attributes:
        name: in the model's state dict.
        tensor: the model's own; its bytes may be away. Of an extra state, one to read it into.
        target: the name among its conversion's targets.
        conversion: makes it.
        held: the conversion's inputs.
        extra_of: the module whose extra state it is.
    """

    name: str
    tensor: torch.Tensor
    target: str
    conversion: Conversion
    held: Mapping[str, Held]
    extra_of: nn.Module | None = None

    @property
    def dtypes(self) -> set[torch.dtype]:
        """In the files."""
        return {self.held[name].entry.dtype for name in self.conversion.inputs}

    def read(self, into: torch.Tensor) -> None:
        """Reads the values into a tensor of its shape; floats convert to its dtype.

        Memory: one piece of 2 MiB. A tensor of the file that is cut across its rows comes whole for
        a moment; where transformers does more than move elements, all inputs of the conversion do,
        and what it makes of them.

        Raises:
            StoreError: a file cannot be read.
        """
        _, pieces = self.conversion.targets[self.target]
        if pieces is None:
            inputs = {name: _whole(self.held[name], into.dtype) for name in self.conversion.inputs}
            with torch.no_grad():
                into.copy_(self.conversion.run(inputs)[self.target])
            return
        for piece in pieces:
            _read_piece(self.held[piece.name], piece, piece.place(into))

    def fill(self) -> None:
        """Gives a tensor that is here its values: a buffer, or a module its extra state.

        Raises:
            StoreError: a file cannot be read. UsageError: values that elements of the buffer which
                share memory cannot have.
        """
        tensor = self.tensor.detach()
        if shares_elements(tensor):
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            self.read(values)
            try:
                copy_shared(tensor, values)
            except ValueError as error:
                raise UsageError(f"{self.name!r} is a buffer {error}: build the model as it was") from error
        else:
            self.read(tensor)
        if self.extra_of is not None:
            self.extra_of.set_extra_state(tensor)


def match(files: Sequence[TensorFile], model: nn.Module, source: Path) -> tuple[dict[str, Matched], tuple[str, ...]]:
    """All tensors that the model saves, by the name under which it does, and names in the files
    that it has no use for.

    A tied weight may be in the files under any of its names. Buffers that transformers declares as
    not needed may be missing. Nothing is read, save of a tied weight that is there twice.

    Raises:
        UsageError: a tensor is missing, has another shape, or is there twice with different values.
            StoreError: a name is in two files.
    """
    held = _by_name(files)
    kept = keep_names(model)
    names = [*kept.tensors, *kept.tied]
    conversions, unused = loading_conversions(model, names, {name: h.entry.shape for name, h in held.items()})
    made = {target: c for c in conversions for target in c.targets}
    extra = extra_states(model)
    matched: dict[str, Matched] = {}
    missing: list[str] = []
    for name, tensor in kept.tensors.items():
        aliases = [name, *(other for other, one in kept.tied.items() if one == name)]
        here = [alias for alias in aliases if alias in made]
        if not here:
            if isinstance(tensor, nn.Parameter) or not _may_be_missing(model, name):
                missing.append(name)
            continue
        if name in extra:  # of any shape and dtype: what it means is the module's
            entry = held[made[here[0]].inputs[0]].entry
            tensor = torch.empty(entry.shape, dtype=entry.dtype)  # noqa: PLW2901
        found = [
            Matched(name=name, tensor=tensor, target=alias, conversion=made[alias], held=held, extra_of=extra.get(name))
            for alias in here
        ]
        _check(found[0], source)
        for other in found[1:]:
            _check_same(found[0], other, source)
        matched[name] = found[0]
    if missing:
        raise UsageError(_missing(missing, len(kept.tensors), source, held))
    return matched, tuple(name for name in unused if not _may_be_unused(model, name))


def _by_name(files: Sequence[TensorFile]) -> dict[str, Held]:
    found: dict[str, Held] = {}
    for file in files:
        for entry in file.header.entries:
            if entry.name in found:
                raise StoreError(
                    f"{entry.name!r:.200} is in {found[entry.name].file.path} and in {file.path}: which is it?"
                )
            found[entry.name] = Held(file=file, entry=entry)
    return found


def _whole(held: Held, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(held.entry.shape, dtype=dtype)
    held.file.read_into(held.entry, tensor)
    return tensor


def _read_piece(held: Held, piece: MovedPiece, into: torch.Tensor) -> None:
    following = row_major_range(held.entry.shape, piece.start, piece.sizes)
    if following is None:
        with torch.no_grad():
            into.copy_(piece.source(_whole(held, held.entry.dtype)))
    else:
        held.file.read_into(held.entry, into, following[0])


def _check(found: Matched, source: Path) -> None:
    shape, _ = found.conversion.targets[found.target]
    tensor = found.tensor
    if shape != tuple(tensor.shape):
        raise UsageError(
            f"{found.name!r} has shape {list(tensor.shape)}, in {source} it has {list(shape)}{_from(found)}: build the model from the configuration "
            "it was saved with"
        )
    for dtype in found.dtypes - {tensor.dtype}:
        if not (dtype.is_floating_point and tensor.dtype.is_floating_point):
            raise UsageError(f"{found.name!r} is {tensor.dtype}, in {source} it is {dtype}: they do not convert")


def _from(found: Matched) -> str:
    inputs = found.conversion.inputs
    return "" if inputs == (found.name,) else f" (made of {inputs[0]!r}{', ...' if len(inputs) > 1 else ''})"


def _check_same(one: Matched, other: Matched, source: Path) -> None:
    first, second = ([m.held[name] for name in m.conversion.inputs] for m in (one, other))
    is_same = len(first) == len(second) and all(
        a.file.holds_same(a.entry, b.file, b.entry) for a, b in zip(first, second, strict=True)
    )
    if not is_same:
        raise UsageError(
            f"{one.target!r} and {other.target!r} are one weight in the model, and {source} holds different values for them: build the model untied "
            "(tie_word_embeddings=False in its configuration)"
        )


def _may_be_missing(model: nn.Module, name: str) -> bool:
    return _declared(model, "_keys_to_ignore_on_load_missing", name)


def _may_be_unused(model: nn.Module, name: str) -> bool:
    return _declared(model, "_keys_to_ignore_on_load_unexpected", name)


def _declared(model: nn.Module, attribute: str, name: str) -> bool:
    patterns = getattr(model, attribute, None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _missing(names: Sequence[str], wanted: int, source: Path, held: Mapping[str, Held]) -> str:
    some = ", ".join(f"{other!r:.200}" for other in list(held)[:3])
    return (
        f"{source} has no {names[0]!r} ({len(names)} of the model's {wanted} tensors are missing); it holds {len(held)} ({some}, ...). Build the model from the "
        "configuration it was saved with"
    )
