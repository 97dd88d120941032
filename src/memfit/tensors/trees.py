"""Tensors inside whatever a module takes and gives.

In: any nesting of lists, tuples, dictionaries and dataclasses. Out: its tensors, in order.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of a nested value, depth first.

    An object that is not one of the known containers is not looked into.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def spanned_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of a device that tensors span, as a trace counts inputs: of a view, the part of its
    storage from its first element to its last. What shares a storage spans at most all of it.

    Args:
        tensors: those elsewhere, and what is sparse, count nothing.
        device: where they are looked for.
    """
    storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if tensor.layout is not torch.strided or tensor.device != device or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        _, before = storages.get(storage.data_ptr(), (storage, 0))
        storages[storage.data_ptr()] = storage, before + (last + 1) * tensor.itemsize
    return sum(min(nbytes, storage.nbytes()) for storage, nbytes in storages.values())


def new_storage(nbytes: int, device: torch.device | str = "cpu") -> torch.UntypedStorage:
    """A storage of uninitialised bytes, whose pages are not touched.

    Through a tensor: `torch.UntypedStorage(n)` bypasses the allocator that is installed under
    torch. Modes of the user's (that count, log or fake operations) do not see it.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # pyright: ignore[reportAttributeAccessIssue]
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def bytes_view(storage: torch.UntypedStorage, offset_bytes: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over a part of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset_bytes, (nbytes,))  # type: ignore[call-overload]


def typed_view(
    storage: torch.UntypedStorage,
    offset_bytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """A tensor of `shape` over a part of a storage.

    The offset must be a multiple of the dtype's size.

    `set_` would enlarge a storage that is too small: the caller sees to it that it is not.
    """
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    offset = offset_bytes // dtype.itemsize
    return empty.set_(storage, offset, shape, stride) if stride is not None else empty.set_(storage, offset, shape)  # type: ignore[call-overload]


# Modules and buffers of a model, for what asks in every step.
#
# In: a model. Out: lists. torch's own walks are generators in generators, and take five times as
# long.


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Returns the model and all modules in it, each once."""
    found: list[nn.Module] = []
    pending, seen = [model], set[int]()
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append(module)
            pending += [child for child in vars(module)["_modules"].values() if child is not None]
    return found


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """Returns all buffers of the model; one that two modules hold comes twice."""
    return [
        buffer for module in modules_of(model) for buffer in vars(module)["_buffers"].values() if buffer is not None
    ]


# Attributes that a module's class, or other code, has put on it beside torch's own.
#
# In: a module. Out: names and values; parameters, buffers, submodules, hooks and the mode are
# torch's and are not among them. And objects of the program's own classes among the values, which
# may keep something from one forward to the next.

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
"""Types of numbers, flags and words: values that no forward changes in place."""

_TORCH_OWN = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of the attributes of this module, without its submodules'."""
    return ((name, value) for name, value in vars(module).items() if name not in _TORCH_OWN)


def held_objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, object) of the attributes that are objects with attributes of their own:
    configurations, caches, records.

    Torch's and the interpreter's are not.
    """
    for name, value in own_attributes(module):
        if isinstance(value, nn.Module | torch.Tensor | ModuleType | type) or not hasattr(value, "__dict__"):
            continue
        root = type(value).__module__.partition(".")[0]
        if root not in {"torch", "memfit", "builtins"} and root not in sys.stdlib_module_names:
            yield name, value
