"""Ranges of memory that the disk reads from and writes to, with whatever keeps them alive.

In: torch storages and tensors, or a number of bytes. Out: `Memory`.

[Note: memory under transfer]
A transfer holds the `owner` of its memory until it is done, so the memory cannot be freed under it.
It cannot hold against `UntypedStorage.resize_`: that frees the bytes while the storage object lives
on. Resize only after `DiskTransfer.wait()`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from memfit.core.errors import UsageError
from memfit.core.units import round_up

ALIGNMENT_BYTES = 4096
"""Direct I/O wants file offsets, lengths and addresses in multiples of this (the page and the
common logical block).
"""

_PYBUF_WRITE = 0x200  # From CPython's object.h: the view is writable.
# A prototype of our own: setting `restype` on `ctypes.pythonapi` would change it for everyone in
# the process.
_memoryview_from_memory = cast(
    "Callable[[int, int, int], memoryview]",
    ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
        ("PyMemoryView_FromMemory", ctypes.pythonapi)
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """A range of bytes in this process's memory."""

    address: int
    """First byte."""
    nbytes: int
    """Length."""
    owner: object
    """Kept alive as long as this object and any transfer of it lives."""

    def narrow(self, offset: int, nbytes: int) -> Memory:
        """The part of `nbytes` bytes from `offset`, with the same owner.

        Raises:
            UsageError: the part is not inside.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise UsageError(
                f"bytes {offset} to {offset + nbytes} are not inside a memory range of {self.nbytes} bytes"
            )
        return Memory(address=self.address + offset, nbytes=nbytes, owner=self.owner)

    def view(self) -> memoryview:
        """The bytes as a writable view. The view does not keep the owner alive."""
        return view_of(self.address, self.nbytes)


def view_of(address: int, nbytes: int) -> memoryview:
    """A writable view of raw memory; the caller keeps the memory alive."""
    if nbytes == 0:
        return memoryview(bytearray())
    return _memoryview_from_memory(address, nbytes, _PYBUF_WRITE)


def memory_of_storage(storage: torch.UntypedStorage, offset: int = 0, nbytes: int | None = None) -> Memory:
    """The bytes of a torch storage, whole or in part; see [Note: memory under transfer].

    Args:
        storage: on the CPU, with its bytes present.
        offset: first byte.
        nbytes: length; to the end by default.

    Raises:
        UsageError: not in CPU memory, or the part is not inside.
    """
    if storage.device.type != "cpu":
        raise UsageError(
            f"disk transfers need memory that the processor can address, not a storage on {storage.device}"
        )
    whole = Memory(address=storage.data_ptr(), nbytes=storage.nbytes(), owner=storage)
    return whole.narrow(offset, whole.nbytes - offset if nbytes is None else nbytes)


def memory_of_tensor(tensor: torch.Tensor) -> Memory:
    """The bytes of a contiguous CPU tensor.

    Raises:
        UsageError: not contiguous (its bytes are not one range), or not in CPU memory.
    """
    if not tensor.is_contiguous():
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not one range of bytes"
        )
    start = int(tensor.storage_offset()) * tensor.element_size()
    return memory_of_storage(tensor.untyped_storage(), start, tensor.numel() * tensor.element_size())


def aligned_memory(nbytes: int) -> Memory:
    """Fresh private memory that starts on a page, rounded up to whole pages by the system.

    Zero until written.

    Raises:
        UsageError: `nbytes` is negative.
    """
    if nbytes < 0:
        raise UsageError(f"memory of {nbytes} bytes cannot be had")
    reserved_bytes = round_up(max(nbytes, 1), ALIGNMENT_BYTES)
    pages = mmap.mmap(-1, reserved_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The ctypes array pins the mapping: the pages go when the array goes.
    array = (ctypes.c_char * reserved_bytes).from_buffer(pages)
    return Memory(address=ctypes.addressof(array), nbytes=nbytes, owner=array)
