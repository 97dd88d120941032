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

import ctypes
import gc
import math

import torch

from memfit.arena.occupancy import ArenaStatistics, Fit, Occupancy
from memfit.core.errors import UsageError


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
