"""An arena: tensors as `narrow` views of one buffer, which stay valid when the arena is
defragmented.

[Note: views that move]
A view keeps its own offset into the storage. Defragmenting copies the bytes of live blocks down and
then gives each Python tensor that lies in a moved block its new offset; shape, strides, identity
and version counter stay. A view that Python cannot see, such as one that only autograd saved, would
go on reading the old place, so the arena counts the users of the storage and refuses to move
anything while one of them is unknown. Addresses that left torch (`numpy()`, `data_ptr()`, DLPack)
do not follow.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from memfit.core.errors import UsageError
from memfit.core.limits import round_up

# Which parts of a buffer are taken: positions only, no memory.
#
# In: a capacity, and blocks that are taken and freed. Out: where the next one fits, and how
# fragmented the rest is.

Fit = Literal["best", "first"]


@dataclass(frozen=True, kw_only=True)
class ArenaStatistics:
    """An arena at one moment.

    Attributes:
        capacity_bytes: size of the buffer.
        live_bytes: bytes allocated and not released.
        live_blocks: number of blocks that `live_bytes` is made of.
        free_bytes: capacity minus live bytes.
        largest_free_bytes: the largest single hole.
        fragmentation: 1 - largest_free / free; 0.0 where nothing is free.
    """

    capacity_bytes: int
    live_bytes: int
    live_blocks: int
    free_bytes: int
    largest_free_bytes: int
    fragmentation: float


class Occupancy:
    """The live blocks of [0, capacity), by their offset in bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.sizes: dict[int, int] = {}  # offset -> bytes
        self._offsets: list[int] = []  # sorted

    def offsets(self) -> list[int]:
        """Returns where the live blocks begin, in ascending order."""
        return list(self._offsets)

    def holes(self) -> list[tuple[int, int]]:
        """Returns the free parts as (begin, end), in ascending order."""
        ends = [0, *(offset + self.sizes[offset] for offset in self._offsets)]
        starts = [*self._offsets, self.capacity_bytes]
        return [(low, high) for low, high in zip(ends, starts, strict=True) if low < high]

    def find(self, nbytes: int, fit: Fit) -> int:
        """Returns the offset of the smallest (best) or lowest (first) hole that holds `nbytes`.

        Raises:
            torch.OutOfMemoryError: there is none; the message says whether closing the holes would
                help.
        """
        holes = [(low, high) for low, high in self.holes() if high - low >= nbytes]
        if holes:
            low, _ = holes[0] if fit == "first" else min(holes, key=lambda hole: (hole[1] - hole[0], hole[0]))
            return low
        now = self.statistics()
        remedy = (
            "defragment() would make room" if now.free_bytes >= nbytes else "release tensors or make a larger arena"
        )
        raise torch.OutOfMemoryError(
            f"the arena has no hole of {nbytes} bytes: capacity {now.capacity_bytes} bytes, live {now.live_bytes} "
            f"bytes, free {now.free_bytes} bytes, largest hole {now.largest_free_bytes} bytes, fragmentation "
            f"{now.fragmentation:.2f}; {remedy}"
        )

    def take(self, offset: int, nbytes: int) -> None:
        """Marks a place as taken.

        Raises:
            UsageError: the place is outside, or overlaps a live block, which the message names.
        """
        if offset < 0 or offset + nbytes > self.capacity_bytes:
            raise UsageError(
                f"{nbytes} bytes at offset {offset} do not lie inside the arena of {self.capacity_bytes} bytes"
            )
        index = bisect.bisect_left(self._offsets, offset)
        for neighbour in self._offsets[max(0, index - 1) : index + 1]:
            if neighbour < offset + nbytes and offset < neighbour + self.sizes[neighbour]:
                raise UsageError(
                    f"{nbytes} bytes at offset {offset} would overlap the live block of {self.sizes[neighbour]} bytes "
                    f"at offset {neighbour}"
                )
        self._offsets.insert(index, offset)
        self.sizes[offset] = nbytes

    def free(self, offset: int) -> None:
        """Frees the block at `offset`."""
        del self.sizes[offset]
        del self._offsets[bisect.bisect_left(self._offsets, offset)]

    def statistics(self) -> ArenaStatistics:
        """Returns how full and how fragmented the buffer is."""
        holes = [high - low for low, high in self.holes()]
        free, largest = sum(holes), max(holes, default=0)
        return ArenaStatistics(
            capacity_bytes=self.capacity_bytes,
            live_bytes=sum(self.sizes.values()),
            live_blocks=len(self.sizes),
            free_bytes=free,
            largest_free_bytes=largest,
            fragmentation=1 - largest / free if free else 0.0,
        )


class Arena:
    """One buffer whose parts are handed out as tensors.

    Memory: the buffer, and nothing per tensor. A block lives until `release`; it is not freed when
    its tensors die. All tensors share the buffer's version counter, so for autograd an in-place
    operation on one is a change of all. Not thread-safe.

    Args:
        buffer: one-dimensional, contiguous, on the CPU, not requiring a gradient: `torch.zeros(n)`.
        fit: where a block without an offset goes: the smallest hole that holds it ("best"), or the
            lowest ("first").

    Raises:
        UsageError: another kind of buffer.
    """

    def __init__(self, buffer: torch.Tensor, *, fit: Fit = "best") -> None:
        if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device.type != "cpu" or buffer.requires_grad:
            raise UsageError(
                "an arena's buffer is a one-dimensional contiguous CPU tensor without gradient, such as torch.zeros(n)"
            )
        self._buffer = buffer
        self._fit: Fit = fit
        self._item = buffer.element_size()
        # where the buffer begins in its storage
        self._start = int(buffer.storage_offset()) * self._item
        self._blocks = Occupancy(buffer.numel() * self._item)

    def allocate(self, *shape: int, offset: int | None = None) -> torch.Tensor:
        """Returns a contiguous view of the buffer that no other block overlaps.

        Its contents are undefined.

        Args:
            shape: the sizes of the tensor.
            offset: where it begins, in elements of the buffer, as `plan_offsets` gives it; None for
                the arena's fit.

        Raises:
            UsageError: an empty or negative shape, or a place that is taken or outside.
            torch.OutOfMemoryError: no hole is large enough; the message says whether `defragment()`
                would help.
        """
        elements = int(math.prod(shape))
        if elements <= 0 or min(shape, default=0) < 0:
            raise UsageError(f"an arena tensor needs at least one element, not shape {shape}")
        nbytes = elements * self._item
        position = self._blocks.find(nbytes, self._fit) if offset is None else offset * self._item
        self._blocks.take(position, nbytes)
        return self._buffer.narrow(0, position // self._item, elements).view(shape)

    def release(self, tensor: torch.Tensor) -> None:
        """Frees the block of `tensor`, a tensor that `allocate` returned.

        It and its views must not be used any more.

        Raises:
            UsageError: the tensor is not of this arena, or its block was released before.
        """
        offset = int(tensor.storage_offset()) * tensor.element_size() - self._start
        is_here = tensor.untyped_storage().data_ptr() == self._buffer.untyped_storage().data_ptr()
        if not is_here or self._blocks.sizes.get(offset) != tensor.numel() * tensor.element_size():
            raise UsageError(
                "this tensor is not a live block of this arena: released before, a part of a block, or made elsewhere"
            )
        self._blocks.free(offset)

    def defragment(self) -> int:
        """Moves live blocks down so that the free bytes are one hole at the end.

        Live views follow, bitwise.

        Costs one copy of the bytes that move, no memory, and one pass over the garbage collector's
        objects (some 10 ms in a large process). See [Note: views that move].

        Returns:
            The bytes moved.

        Raises:
            UsageError: a view cannot be found (autograd's saved tensors, objects under
                `gc.freeze()`) or cannot be moved (a wider type that the new offset does not suit, a
                lazy conjugate). Nothing has moved then.
        """
        sizes = dict(self._blocks.sizes)
        targets: dict[int, int] = {}
        low = 0
        for offset in self._blocks.offsets():
            targets[offset] = low
            low += sizes[offset]
        # All refusals come from this line, before the first byte moves.
        views = [(tensor, self._shift_bytes(tensor, targets)) for tensor in self._find_views()]
        base = self._buffer.data_ptr()
        moved_bytes = 0
        # Ascending offsets: each block goes to where the blocks before it have left already. A
        # block may overlap its own target, which memmove allows.
        for offset, target in targets.items():
            if offset != target:
                ctypes.memmove(base + target, base + offset, sizes[offset])
                self._blocks.free(offset)
                self._blocks.take(target, sizes[offset])
                moved_bytes += sizes[offset]
        storage = self._buffer.untyped_storage()
        for tensor, shift in views:
            if shift:
                position = tensor.storage_offset() - shift // tensor.element_size()
                there = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
                    storage, position, tensor.shape, tensor.stride()
                )
                tensor.data = there  # unlike set_, this leaves the version counter alone
        return moved_bytes

    def statistics(self) -> ArenaStatistics:
        """Returns how full and how fragmented the buffer is."""
        return self._blocks.statistics()

    def _find_views(self) -> list[torch.Tensor]:
        """Finds all Python tensors on the buffer's storage except the buffer.

        Raises if there are other users.
        """
        storage = self._buffer.untyped_storage()
        identity = storage._cdata  # torch has no public name for "the same storage"
        found: list[torch.Tensor] = []
        # Others' tensors are asked as well: weights that are away, and classes that refuse.
        with torch._C.DisableTorchFunctionSubclass():
            for thing in gc.get_objects():
                # type(), not isinstance(): asking lazy proxies for their class can run their code.
                is_near = (
                    issubclass(type(thing), torch.Tensor)
                    and thing.device.type == "cpu"
                    and torch._C._has_storage(thing)  # sparse and wrapper tensors have none
                )
                if is_near and thing.untyped_storage()._cdata == identity:
                    found.append(thing)
        # Every tensor counts as one user of the storage, and so does the Python object `storage`.
        hidden = torch._C._storage_Use_Count(identity) - len(found) - 1
        if hidden:
            raise UsageError(
                f"{hidden} views of the arena's buffer cannot be found from Python, so its blocks cannot move; "
                "finish or drop the graphs that saved them, and call gc.unfreeze()"
            )
        return [tensor for tensor in found if tensor is not self._buffer]

    def _shift_bytes(self, tensor: torch.Tensor, targets: dict[int, int]) -> int:
        """Returns by how many bytes `tensor` moves down with the live block that contains it; 0
        outside of blocks.
        """
        item = tensor.element_size()
        first = tensor.storage_offset() * item - self._start
        length = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        for offset, target in targets.items():
            if tensor.numel() and offset <= first and first + length * item <= offset + self._blocks.sizes[offset]:
                if (offset - target) % item or (offset != target and (tensor.is_conj() or tensor.is_neg())):
                    raise UsageError(
                        f"a view of type {tensor.dtype} cannot move from byte {offset} to {target}: drop it first"
                    )
                return offset - target
        return 0


# Offsets for buffers whose lifetimes are known beforehand.
#
# In: lifetimes and sizes. Out: an offset for each, and the capacity that holds them all. Offline
# dynamic storage allocation is NP-hard, so this is a heuristic. Its usual result is the sum of what
# is live at the worst moment, or a few per cent more.

Lifetime = tuple[int, int, int]


def plan_offsets(lifetimes: Sequence[Lifetime], alignment: int = 1) -> tuple[tuple[int, ...], int]:
    """Packs buffers so that no two that are live at the same time overlap.

    Three orders are tried (largest first, size times lifetime first, earliest first). Each buffer
    goes to the smallest gap that holds it between the buffers it meets in time, at the gap's low
    end. The order with the least capacity wins. Deterministic. Quadratic in the number of buffers:
    1,000 take about 0.3 s.

    Args:
        lifetimes: (start, end, size) of each: live from `start` on and before `end`, in any integer
            clock. Sizes are in any unit, such as the elements of an `Arena`'s buffer; offsets and
            capacity are in the same unit.
        alignment: offsets are multiples of it.

    Returns:
        The offsets in the order of `lifetimes`, and the capacity: the largest offset + size. Empty
            buffers get offset 0.

    Raises:
        UsageError: a lifetime that ends before it begins, a negative size, or an alignment below 1.

    Source: Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference",
    section 5 (greedy by size).
    """
    if alignment < 1:
        raise UsageError(f"an alignment is at least 1, not {alignment}")
    for index, (start, end, size) in enumerate(lifetimes):
        if size < 0 or end < start or (end == start and size > 0):
            raise UsageError(f"buffer {index} has start {start}, end {end} and size {size}: it needs end > start")
    orders: tuple[Callable[[Lifetime], tuple[int, ...]], ...] = (
        lambda buffer: (-buffer[2], buffer[0]),
        lambda buffer: (-buffer[2] * (buffer[1] - buffer[0]), buffer[0]),
        lambda buffer: (buffer[0], -buffer[2]),
    )
    return min((_pack(lifetimes, alignment, order) for order in orders), key=lambda packed: packed[1])


def _pack(
    lifetimes: Sequence[Lifetime], alignment: int, order: Callable[[Lifetime], tuple[int, ...]]
) -> tuple[tuple[int, ...], int]:
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, int, int]] = []  # offset, end of its bytes rounded up, start, end
    capacity = 0
    for index in sorted(range(len(lifetimes)), key=lambda each: (*order(lifetimes[each]), each)):
        start, end, wanted = lifetimes[index]
        if wanted == 0:
            continue
        size = round_up(wanted, alignment)
        meets = sorted(
            (low, high) for low, high, other_start, other_end in placed if other_start < end and start < other_end
        )
        offset = _best_gap(meets, size)
        offsets[index] = offset
        placed.append((offset, offset + size, start, end))
        capacity = max(capacity, offset + wanted)
    return tuple(offsets), capacity


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Returns the low end of the smallest gap of `size` in `taken` (sorted, may overlap), else the
    end of them all.
    """
    low = 0
    best: tuple[int, int] | None = None
    for start, end in taken:
        gap = start - low
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, low)
        low = max(low, end)
    return low if best is None else best[1]
