"""Tensors as row-major bytes, wherever they are and however they lie.

In: a tensor in memory, or its place in a home. Out: any range of its row-major bytes, copied into a
buffer of the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from memfit.homes.home import DONE, ByteHome, TransferGroup, TransferHandle
from memfit.tensors.trees import new_storage, typed_view

# What is read at once of a tensor whose memory order is not row-major, where its slices are
# smaller.
_GROUP_BYTES = 4 << 20


class TensorSource(Protocol):
    """A tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, first: int, count: int, into: torch.UntypedStorage, into_offset: int) -> TransferHandle:
        """Begins to copy elements [first, first + count), row-major, to a byte offset of a host
        storage.

        Calls come in ascending order of `first`; the storage must live until the transfer has
        ended.
        """
        ...


class ResidentSource:
    """A tensor in memory, of any strides, on any device.

    Memory: none; on CUDA a strided part is made contiguous there before it is copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)

    def read(self, first: int, count: int, into: torch.UntypedStorage, into_offset: int) -> TransferHandle:
        """See `TensorSource`."""
        out = typed_view(into, into_offset, self.dtype, (count,))
        for part, start in row_major_parts(self._tensor, first, count):
            out[start : start + part.numel()].view(part.shape).copy_(part)
        return DONE


class HomeSource:
    """A tensor that rests in a home, dense, in memory order.

    Memory: none where memory order is row-major; else one group of slices (4 MiB, or the largest
    slice: the dimensions whose order differs).

    Args:
        home: where.
        offset_bytes: of its first byte there.
        dtype, shape, stride: of the tensor; `stride` is dense.
    """

    def __init__(
        self,
        home: ByteHome,
        offset_bytes: int,
        *,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...] | None = None,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self._home = home
        self._offset_bytes = offset_bytes
        leading = len(shape) if stride is None else _row_major_dimensions(shape, stride)
        self._slice_shape = shape[leading:]
        self._slice_stride = () if stride is None else stride[leading:]
        self._slice_numel = math.prod(self._slice_shape)
        self._group: tuple[int, int, torch.Tensor] | None = None

    def read(self, first: int, count: int, into: torch.UntypedStorage, into_offset: int) -> TransferHandle:
        """See `TensorSource`."""
        size = self.dtype.itemsize
        if not self._slice_shape:
            return self._home.gather(self._offset_bytes + first * size, count * size, into, into_offset)
        out = typed_view(into, into_offset, self.dtype, (count,))
        done = 0
        while done < count:
            begin, end, group = self._group_of(first + done)
            n = min(count - done, end - first - done)
            for part, start in row_major_parts(group, first + done - begin, n):
                out[done + start : done + start + part.numel()].view(part.shape).copy_(part)
            done += n
            if first + done == end:
                self._group = None
        return DONE

    def _group_of(self, element: int) -> tuple[int, int, torch.Tensor]:
        """(first, end, tensor) of the group of slices that holds a row-major element."""
        if self._group is not None and self._group[0] <= element < self._group[1]:
            return self._group
        self._group = None
        size = self.dtype.itemsize
        per_group = max(1, _GROUP_BYTES // (self._slice_numel * size))
        index = element // self._slice_numel // per_group
        begin = index * per_group * self._slice_numel
        end = min(math.prod(self.shape), begin + per_group * self._slice_numel)
        staged = new_storage((end - begin) * size)
        self._home.gather(self._offset_bytes + begin * size, (end - begin) * size, staged).wait()
        slices = (end - begin) // self._slice_numel
        tensor = typed_view(
            staged, 0, self.dtype, (slices, *self._slice_shape), (self._slice_numel, *self._slice_stride)
        )
        self._group = (begin, end, tensor)
        return self._group


class JoinedSource:
    """Ranges of elements of other tensors, one after the other, as one tensor.

    Memory: none but theirs.

    Args:
        parts: (tensor, first element, count), in order; all of one dtype.
        shape: of the tensor that they are together.
    """

    def __init__(self, parts: Sequence[tuple[TensorSource, int, int]], shape: tuple[int, ...]) -> None:
        self._parts = tuple(parts)
        self.dtype = parts[0][0].dtype
        self.shape = shape

    def read(self, first: int, count: int, into: torch.UntypedStorage, into_offset: int) -> TransferHandle:
        """See `TensorSource`."""
        transfers: list[TransferHandle] = []
        begin = 0
        try:
            for source, start, length in self._parts:
                low, high = max(first, begin), min(first + count, begin + length)
                if low < high:
                    offset = into_offset + (low - first) * self.dtype.itemsize
                    transfers.append(source.read(start + low - begin, high - low, into, offset))
                begin += length
        except BaseException:
            # nothing may be on its way into memory that the caller gives up
            TransferGroup(transfers).wait()
            raise
        return transfers[0] if len(transfers) == 1 else TransferGroup(transfers)


def row_major_parts(tensor: torch.Tensor, first: int, count: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Views of a tensor that together are its row-major elements [first, first + count), with each
    one's start in that range.

    At most two views a dimension, whatever the strides: nothing is copied.
    """
    if count == 0:
        return
    if count == tensor.numel():
        yield tensor, 0
        return
    inner = tensor.numel() // tensor.shape[0]
    row, skip = divmod(first, inner)
    done = 0
    if skip:
        done = min(inner - skip, count)
        yield from row_major_parts(tensor[row], skip, done)
        row += 1
    whole = (count - done) // inner
    if whole:
        yield tensor[row : row + whole], done
        done += whole * inner
        row += whole
    for part, start in row_major_parts(tensor[row], 0, count - done) if done < count else ():
        yield part, done + start


def _row_major_dimensions(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many leading dimensions lie in memory as in row-major order.

    All of them for a contiguous tensor.
    """
    for dimension, size in enumerate(shape):
        if size != 1 and stride[dimension] != math.prod(shape[dimension + 1 :]):
            return dimension
    return len(shape)
