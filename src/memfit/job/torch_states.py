"""Optimizer states as a file of `torch.save`, written without ever holding them all.

In: a job's optimizer and its states at home. Out: a file that `torch.load` reads as
`optimizer.state_dict()`.

[Note: a file with holes]
`torch.save` writes fake tensors as ordinary ones whose bytes are missing, and `torch.load` under
fake tensors tells where in the file each storage lies. So the state dict is saved with fake states
first, then each parameter's states are read from home and written into their places. The sums of
the archive are those of the empty file: `torch.load` does not look at them, `unzip` warns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.core.errors import StoreError
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
        offset: Any = place.untyped_storage()._checkpoint_offset  # type: ignore[attr-defined]  # noqa: SLF001, where torch says it
        if offset is None:
            raise StoreError(
                f"torch.load does not tell where {key!r} lies in the file: this version of torch is not supported"
            )
        written = os.pwrite(file, content, offset)
        assert written == content.nbytes, "files on a disk take all or raise"
