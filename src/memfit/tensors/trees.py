"""Tensors inside whatever a module takes and gives.

In: any nesting of lists, tuples, dictionaries and dataclasses. Out: its tensors, in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


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
