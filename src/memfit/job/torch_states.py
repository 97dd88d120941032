"""Optimizer states as a file of `torch.save`, written and read without ever holding them all.

In: a job's optimizer and its states at home. Out: a file that `torch.load` reads as
`optimizer.state_dict()`; or such a file's states at home.

[Note: a file with holes]
`torch.save` writes fake tensors as ordinary ones whose bytes are missing, and `torch.load` under
fake tensors tells where in the file each storage lies. So the state dict is saved with fake states
first, then each parameter's states are read from home and written into their places. The sums of
the archive are those of the empty file: `torch.load` does not look at them, `unzip` warns. A file
is read in the same way. Mapped into memory its pages would count, and stay as long as one number of
it is used.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.core.errors import StoreError
from memfit.files.positioned import read_at, write_at
from memfit.job.assembly import Assembly
from memfit.store.os_errors import explain


def write_states(path: Path, assembly: Assembly) -> None:
    """Writes the states of a job's optimizer. See [Note: a file with holes].

    Memory: the states of one parameter.

    Args:
        path: replaced when all is written.
        assembly: between two steps.

    Raises:
        StoreError: the disk.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        with assembly.shapes_only(), torch.serialization.skip_data(materialize_fake_tensors=True):
            saved = assembly.setup.optimizer.state_dict()
            torch.save(saved, new)
        with FakeTensorMode():
            placed = torch.load(new, weights_only=True)
        with new.open("r+b") as file:
            for name, states in _states(assembly, placed):
                _fill(file.fileno(), states, assembly.gather_state(name))
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise explain(error, doing="write the optimizer's states", path=path) from error
    finally:
        new.unlink(missing_ok=True)


def read_states(path: Path, assembly: Assembly) -> None:
    """Gives a job's optimizer the settings and states of a file. See [Note: a file with holes].

    Memory: the states of one parameter.

    Args:
        path: of `torch.save(optimizer.state_dict())`.
        assembly: between two steps.

    Raises:
        StoreError: the file cannot be read, or is not one.
        UsageError: its states do not fit the optimizer; nothing was changed.
    """
    try:
        with FakeTensorMode():
            placed = torch.load(path, map_location="cpu", weights_only=True)
        with path.open("rb") as file:
            for group in placed["param_groups"]:
                group.update(
                    {key: _value(file.fileno(), key, value) for key, value in group.items() if key != "params"}
                )
            own = dict(_states(assembly, placed))

            def read(name: str, state: dict[str, Any]) -> dict[str, Any]:
                places = own.get(name, {})
                return {
                    # In the dtype and on the device that loading gave it.
                    key: _value(file.fileno(), key, places[key]).to(value.dtype)
                    if isinstance(value, torch.Tensor)
                    else value
                    for key, value in state.items()
                }

            with assembly.reading_states(read):
                assembly.setup.optimizer.load_state_dict(placed)
    except OSError as error:
        raise explain(error, doing="read the optimizer's states", path=path) from error
    except (KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise StoreError(
            f"{path} is not what torch.save(optimizer.state_dict()) writes, or is damaged ({type(error).__name__}: {str(error)[:120]}): name another checkpoint"
        ) from error


def _states(assembly: Assembly, placed: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of each parameter with its states in the file, in the order of the groups."""
    names = {id(slot.parameter): name for name, (_, slot) in assembly.place.items()}
    parameters = [p for group in assembly.setup.optimizer.param_groups for p in group["params"]]
    indices = [index for group in placed["param_groups"] for index in group["params"]]
    for parameter, index in zip(parameters, indices, strict=True):
        if index in placed["state"]:
            yield names[id(parameter)], placed["state"][index]


def _fill(file: int, places: dict[str, Any], values: dict[str, Any]) -> None:
    """Writes a parameter's tensors to where the file has room for them."""
    for key, place in places.items():
        if not isinstance(place, torch.Tensor):
            continue
        value = values[key]
        own = torch.empty_strided(place.shape, place.stride(), dtype=place.dtype).copy_(value)
        content: Any = own.as_strided((own.numel(),), (1,)).view(torch.uint8).numpy()
        if own.numel():
            write_at(file, content, _offset(place, key))


def _value(file: int, key: str, place: Any) -> Any:
    """Returns the values of a tensor of the file, in memory of its own; others as they are."""
    if not isinstance(place, torch.Tensor):
        return place
    found = torch.empty_strided(place.shape, place.stride(), dtype=place.dtype)
    content: Any = found.as_strided((found.numel(),), (1,)).view(torch.uint8).numpy()
    if found.numel():
        first = _offset(place, key) + int(place.storage_offset()) * place.element_size()
        if not read_at(file, content, first):
            raise StoreError(
                f"the file of optimizer states ends in the middle of {key!r}: it is damaged; name another checkpoint"
            )
    return found


def _offset(place: torch.Tensor, key: str) -> int:
    offset: Any = place.untyped_storage()._checkpoint_offset  # type: ignore[attr-defined]  # noqa: SLF001, where torch says it
    if offset is None:
        raise StoreError(
            f"torch.load does not tell where {key!r} lies in the file: this version of torch is not supported"
        )
    return offset
