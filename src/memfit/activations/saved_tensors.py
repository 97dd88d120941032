"""Small things that all of saving needs to know about a tensor.

In: a tensor. Out: its storage if it is an ordinary one, its version, a view of given geometry over
a storage.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.tensors.write_marks import address_of

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue] (not in torch's stubs)

TRY_ANOTHER_POLICY = "plan saved='keep' or 'offload' for this call"
"""How messages end that tell why a call cannot be run again."""


class AstrayError(BaseException):
    """The second run of a call does something else.

    No `Exception`, so that the user's code does not catch it.
    """


NO_VERSION = -1
"""Tensors made in inference mode have no version counter."""


Stays = Callable[[torch.UntypedStorage], bool]
"""True for storages that are there anyway (weights, buffers, the batch).

Holding them costs nothing, so they are never moved or remade.
"""


ORDINARY: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors whose bytes are one range of their storage."""


def plain_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of an ordinary dense tensor.

    None for subclasses, sparse and functorch tensors, whose bytes are not one range.
    """
    if type(tensor) not in ORDINARY or tensor.layout is not torch.strided:
        return None
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage()


def sample_of(tensor: torch.Tensor) -> bytes | None:
    """The bits of four elements: the first, the last, and two between.

    None where they are not in this process's memory.

    Time: some microseconds. Read by address, because an operation of torch would be seen by modes
    and autograd.
    """
    storage = plain_storage(tensor)
    if storage is None or tensor.device.type != "cpu" or not tensor.numel() or not storage.nbytes():
        return None
    width, begin = tensor.element_size(), address_of(tensor)
    dims = list(zip(tensor.shape, tensor.stride(), strict=True))
    places = (sum((size - 1) * part // 3 * stride for size, stride in dims) for part in range(4))
    return b"".join(ctypes.string_at(begin + place * width, width) for place in places)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor that has one; subclasses that only wear another type have it too."""
    if tensor.layout is not torch.strided or _functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage()


def version_of(tensor: torch.Tensor) -> int:
    """How often it (with all its views) was changed in place."""
    return NO_VERSION if tensor.is_inference() else tensor._version


def check_unchanged(tensor: torch.Tensor, version: int, place: str) -> None:
    """The check that autograd makes for tensors it saves itself, and leaves to the hooks where
    there are some.

    Raises:
        RuntimeError: as plain PyTorch would.
    """
    if version_of(tensor) != version:
        raise_changed(tuple(tensor.shape), tensor.dtype, version, version_of(tensor), place)


def raise_changed(shape: tuple[int, ...], dtype: torch.dtype, version: int, now: int, place: str) -> None:
    """Raises what autograd would raise for a saved tensor that was changed in place."""
    raise RuntimeError(
        f"a tensor saved for backward in {place} has been modified by an inplace operation: {dtype} {list(shape)} is "
        f"at version {now}, expected version {version}. Change a copy (tensor.clone()), as for plain PyTorch, which refuses it too; "
        "torch.autograd.set_detect_anomaly(True) finds the operation."
    )


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of a dense tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this geometry over a storage, without a graph."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]
