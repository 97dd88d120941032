"""CRC-32C of memory, and the checksum of a whole from those of its parts.

In: bytes, in any order and any cut. Out: one checksum for each piece of a slot, equal to the one of
the piece read whole.

[Note: why a cyclic code]
Updates write a slot in parts of their own size, from several threads, in no order; a visit reads it
back in other parts. A cyclic code is linear, so that the checksum of two neighbours follows from
theirs and the second one's length, and nothing is read again to be summed. It finds every burst of
up to 32 bits and every damage of up to three bits in a piece (Koopman 2002, "32-bit cyclic
redundancy codes for internet applications": distance 4 up to 2^31 bits); other damage passes once
in 2^32. It is no defence against somebody who wants to deceive: readers check every length and
place on their own.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from array import array
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from crc32c import crc32c

from memfit.core.errors import UsageError
from memfit.core.limits import round_up

# Ranges of memory that the disk reads from and writes to, with whatever keeps them alive.
#
# In: torch storages and tensors, or a number of bytes. Out: `Memory`.
#
# [Note: memory under transfer]
# A transfer holds the `owner` of its memory until it is done, so the memory cannot be freed under
# it. It cannot hold against `UntypedStorage.resize_`: that frees the bytes while the storage object
# lives on. Resize only after `DiskTransfer.wait()`.

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


PIECE_BYTES = 1 << 20
"""Bytes of a slot that one checksum covers: 4 bytes of checksum (8 in the manifest's text) a MiB.
"""

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's polynomial, lowest power in the highest bit (RFC 3720, section 12.1)."""
_ONE = 1 << 31


def checksum(content: bytes | memoryview, before: int = 0) -> int:
    """CRC-32C of bytes, continued from `before`.

    Runs without the interpreter lock from 32 KiB on.
    """
    return crc32c(content, before)


def checksum_of_memory(address: int, nbytes: int, before: int = 0) -> int:
    """CRC-32C of raw memory, continued from `before`; the caller keeps it alive."""
    return crc32c(view_of(address, nbytes), before) if nbytes else before


def joined(first: int, second: int, second_nbytes: int) -> int:
    """The checksum of two neighbours from theirs; costs about 5 microseconds.

    The first one's polynomial moves up by the second one's length; what initial and final inversion
    add cancels out.
    """
    return _product(_power_of_x(8 * second_nbytes), first) ^ second


def _product(a: int, b: int) -> int:
    """The product modulo the polynomial, over GF(2)."""
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return result


@functools.lru_cache(maxsize=1024)
def _power_of_x(exponent: int) -> int:
    """The power of x modulo the polynomial, by squaring."""
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _product(square, result)
        square = _product(square, square)
        exponent >>= 1
    return result


@functools.lru_cache(maxsize=1024)
def _zeros(nbytes: int) -> int:
    """The checksum of zeros, without making them: of none it is 0, and twice as many follow from
    half.
    """
    if nbytes == 0:
        return 0
    half = _zeros(nbytes // 2)
    whole = joined(half, half, nbytes // 2)
    return joined(whole, crc32c(b"\0"), 1) if nbytes % 2 else whole


def cut(start: int, end: int, piece_bytes: int) -> Iterator[tuple[int, int, int]]:
    """The parts (piece, start, end) of a range, each inside one piece."""
    while start < end:
        piece = start // piece_bytes
        stop = min(end, (piece + 1) * piece_bytes)
        yield piece, start, stop
        start = stop


class PartsOfPieces:
    """Checksums of parts, joined as soon as they cover a piece.

    Args:
        nbytes: length of the whole, whose last piece may be shorter.
        piece_bytes: length of a piece.
    """

    def __init__(self, nbytes: int, piece_bytes: int) -> None:
        self._nbytes = nbytes
        self._piece_bytes = piece_bytes
        self._parts: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, piece: int, start: int, end: int, value: int) -> int | None:
        """Adds a part, in the place of those that it overlaps.

        The piece's checksum if that makes it whole.
        """
        parts = [part for part in self._parts.pop(piece, ()) if part[1] <= start or part[0] >= end]
        insort(parts, (start, end, value))
        first = piece * self._piece_bytes
        covered = sum(part_end - part_start for part_start, part_end, _ in parts)
        if covered < min(self._piece_bytes, self._nbytes - first):
            self._parts[piece] = parts
            return None
        whole = parts[0][2]
        for part_start, part_end, part_value in parts[1:]:
            whole = joined(whole, part_value, part_end - part_start)
        return whole


class SlotSums:
    """The checksums of one slot, as far as they are known. Threads may use it at once.

    Memory: 5 bytes a piece, and the parts of pieces that are not whole.

    Args:
        nbytes: length of the slot.
        piece_bytes: length of a piece.
    """

    def __init__(self, nbytes: int, piece_bytes: int) -> None:
        self.nbytes = nbytes
        self.piece_bytes = piece_bytes
        count = -(-nbytes // piece_bytes)
        self._values = array("I", bytes(4 * count))
        self._known = bytearray(count)
        self._parts = PartsOfPieces(nbytes, piece_bytes)
        self._lock = threading.Lock()

    def note(self, start: int, address: int, nbytes: int) -> None:
        """Sums bytes that now are in the slot at `start`.

        The caller keeps the memory as it is meanwhile.
        """
        for piece, low, high in cut(start, start + nbytes, self.piece_bytes):
            self._add(piece, low, high, checksum_of_memory(address + low - start, high - low))

    def note_zeros(self, start: int, nbytes: int) -> None:
        """As `note`, of zeros."""
        for piece, low, high in cut(start, start + nbytes, self.piece_bytes):
            self._add(piece, low, high, _zeros(high - low))

    def _add(self, piece: int, low: int, high: int, value: int) -> None:
        with self._lock:
            whole = self._parts.add(piece, low, high, value)
            # What was known of the piece is no longer what it holds.
            self._known[piece] = whole is not None
            if whole is not None:
                self._values[piece] = whole

    def know_zeros(self) -> None:
        """Knows that nothing was written yet: a new file's blocks are zero."""
        full, last = divmod(self.nbytes, self.piece_bytes)
        values = [_zeros(self.piece_bytes)] * full if full else []
        self.load([*values, _zeros(last)] if last else values)

    def get(self, piece: int) -> int | None:
        """The checksum of a piece; None if it is not known."""
        with self._lock:
            return self._values[piece] if self._known[piece] else None

    def unknown(self) -> list[tuple[int, int]]:
        """The ranges (start, end) of pieces whose checksums are not known."""
        with self._lock:
            return [
                (piece * self.piece_bytes, min(self.nbytes, (piece + 1) * self.piece_bytes))
                for piece, is_known in enumerate(self._known)
                if not is_known
            ]

    def values(self) -> tuple[int, ...]:
        """All checksums; all must be known."""
        with self._lock:
            assert all(self._known)
            return tuple(self._values)

    def load(self, values: Sequence[int]) -> None:
        """Takes checksums as known, one a piece."""
        with self._lock:
            assert len(values) == len(self._values)
            self._values[:] = array("I", values)
            self._known[:] = b"\x01" * len(values)


class ReadCheck:
    """Compares what a read brings with the checksums of its slot.

    Pieces that it covers in part are not checked.

    Args:
        sums: of the slot.
        start: first byte of the read in the slot.
        nbytes: its length.
    """

    def __init__(self, sums: SlotSums, start: int, nbytes: int) -> None:
        self._sums = sums
        self.piece_bytes = size = sums.piece_bytes
        self._first = -(-start // size)
        end = start + nbytes
        self._stop = -(-end // size) if end == sums.nbytes else end // size
        self._parts = PartsOfPieces(sums.nbytes, size)
        self._lock = threading.Lock()

    def note(self, start: int, address: int, nbytes: int) -> list[tuple[int, int, int]]:
        """Sums bytes that were read at `start` of the slot.

        The pieces (number, expected, found) that are damaged.
        """
        damaged: list[tuple[int, int, int]] = []
        for piece, low, high in cut(start, start + nbytes, self._sums.piece_bytes):
            if not self._first <= piece < self._stop:
                continue
            value = checksum_of_memory(address + low - start, high - low)
            with self._lock:
                found = self._parts.add(piece, low, high, value)
            expected = self._sums.get(piece) if found is not None else None
            if found is not None and expected is not None and found != expected:
                damaged.append((piece, expected, found))
        return damaged
