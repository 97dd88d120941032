"""Weights and optimizer states as files of `torch.save`, written and read without ever holding all.

In: a job's weights and states at home. Out: files that `torch.load` reads as `model.state_dict()`
and `optimizer.state_dict()`; or such a file's states at home.

[Note: storages that come late]
`torch.save` pickles everything first, and asks for the bytes of one storage after another then: of
a storage that is not on the processor it asks for a copy there (torch/serialization.py, `_save`).
So what rests at home is pickled as a tensor of a storage that seems to lie elsewhere, and reads its
home when it is asked. `torch.load` under fake tensors tells where in a file each storage lies: so
states are read from it, too. Mapped into memory a file's pages would count, and stay as long as one
number of it is used.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.core.errors import StoreError, UsageError
from memfit.files.names import weight_source
from memfit.files.writer import read_at
from memfit.job.assembly import Assembly
from memfit.store.files import explain
from memfit.tensors.with_frozen import saved_model


class TensorAtHome:
    """A tensor that `torch.save` writes, and that is read from home when it does.

    See [Note: storages that come late].
    """

    def __init__(self, like: torch.Tensor, read: Callable[[], torch.Tensor]) -> None:
        self._like, self._storage = like, _LateStorage(like, read)

    def __reduce_ex__(self, protocol: Any) -> Any:
        no_hooks: Any = OrderedDict()
        place = (self._storage, 0, tuple(self._like.shape), self._like.stride(), False, no_hooks)
        return torch._utils._rebuild_tensor_v2, place  # pyright: ignore  # noqa: PGH003, SLF001, as a `torch.Tensor` is pickled


class _LateStorage(torch.storage.TypedStorage):
    """A storage as `torch.save` looks at it: typed and untyped at once."""

    device = torch.device("meta")  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    _fake_device = torch.device("cpu")

    def __new__(cls, like: torch.Tensor, read: Callable[[], torch.Tensor]) -> Self:
        return object.__new__(cls)

    def __init__(self, like: torch.Tensor, read: Callable[[], torch.Tensor]) -> None:
        self.dtype = like.dtype
        self._like, self._read = like, read
        self._untyped_storage: Any = self

    @property
    def _cdata(self) -> int:
        return id(self)

    def nbytes(self) -> int:
        """Returns the bytes in the file."""
        return self._like.untyped_storage().nbytes()

    def cpu(self) -> Any:
        """Reads the home."""
        like, values = self._like, self._read()
        is_alike = values.device.type == "cpu" and values.stride() == like.stride()
        if is_alike and values.untyped_storage().nbytes() == self.nbytes():
            return values.untyped_storage()
        return torch.empty_strided(like.shape, like.stride(), dtype=self.dtype).copy_(values).untyped_storage()


def weights_at_home(assembly: Assembly) -> dict[str, Any]:
    """Returns the model's state dict, for `torch.save`: parameters are read one at a time."""
    placed = {id(slot.parameter): (block, slot) for block, slot in assembly.place.values()}
    late: dict[int, Any] = {}
    state: dict[str, Any] = saved_model(assembly.model).state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) in placed:
            source = weight_source(*placed[id(tensor)])
            like = torch.empty(source.shape, dtype=source.dtype, device="meta")

            def read(source: Any = source, like: Any = like) -> torch.Tensor:
                found = torch.empty_like(like, device="cpu")
                source.read(0, found.numel(), found.untyped_storage(), 0).wait()
                return found

            state[name] = late.setdefault(id(tensor), TensorAtHome(like, read))
        elif isinstance(tensor, torch.Tensor):
            state[name] = tensor.detach()
    return state


def states_at_home(assembly: Assembly) -> dict[str, Any]:
    """Returns the optimizer's state dict, for `torch.save`: states are read one at a time."""
    with assembly.shapes_only():
        saved = assembly.setup.optimizer.state_dict()
    for name, states in _states(assembly, saved):
        for key, fake in states.items():
            if isinstance(fake, torch.Tensor):
                states[key] = TensorAtHome(fake, lambda name=name, key=key: assembly.gather_state(name)[key])
    return saved


def write_torch(path: Path, content: Any) -> None:
    """Writes a file of `torch.save`.

    Memory: the states of one parameter, or its weight.

    Args:
        path: replaced when all is written.
        content: with tensors at home.

    Raises:
        StoreError: the disk.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise explain(error, doing="write the file", path=path) from error
    finally:
        new.unlink(missing_ok=True)


def give_weights(state: Mapping[str, Any], assembly: Assembly) -> None:
    """Gives a job's model the weights and buffers of a state dict, a block at a time.

    Raises:
        UsageError: the state dict is not of this model; nothing was changed.
    """
    own: dict[str, Any] = saved_model(assembly.model).state_dict(keep_vars=True)
    other = [
        n for n in own.keys() | state.keys() if getattr(own.get(n), "shape", 0) != getattr(state.get(n), "shape", 0)
    ]
    if other:
        raise UsageError(f"the state dict and the model differ in {min(other)!r:.200}: build the model as it was")
    with assembly.loading(), torch.no_grad():
        values: Any = {id(p): _Values(state[name]) for name, p in own.items() if isinstance(p, torch.nn.Parameter)}
        assembly.fill(values)
        for name, buffer in own.items():
            if isinstance(buffer, torch.Tensor) and not isinstance(buffer, torch.nn.Parameter):
                buffer.copy_(state[name])


class _Values:
    """Values of a parameter, as loads take them."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def read(self, into: torch.Tensor) -> None:
        """Copies them."""
        into.copy_(self._values)


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
