"""Memory that memfit owns, with planned positions.

In: a capacity, and who comes and goes. Out: tensors and storages whose bytes lie at chosen places of one piece of
memory, so that addresses repeat from step to step, nothing faults after the first touch, and holes can be closed.

[Note: two kinds of arena]
`Arena` gives each tensor a storage of its own and lets torch's allocator serve that storage's bytes inside the arena.
Every view, of any depth, also one that only autograd knows, reads its address from the storage, so all of them follow
when the bytes move. `BufferArena` is the textbook form: one tensor, and the others are
`narrow` views of it. Views hold their own offsets, so moving a block means finding and changing each of them; it needs
nothing from the allocator. Addresses that left torch (numpy arrays, `data_ptr()`, DLPack) follow in neither.
"""

from __future__ import annotations

import ctypes
import gc
import math
import threading
import weakref
from collections.abc import Sequence

import torch

from memfit.allocator import Allocator, Ledger
from memfit.allocator.book import ArenaStatistics, Book, Fit
from memfit.core.errors import UsageError
from memfit.core.units import format_bytes, round_up


class Arena:
    """One piece of memory from the allocator; storages get their bytes inside it and keep their identity.

    Memory: the capacity is mapped (and counted against the limit) from the start, resident from the first touch on;
    blocks inside cost nothing more. A block whose last tensor dies is free again without a call. Thread-safe, except
    that nobody may use a storage while `leave`, `release` or `defragment` work on it.

    Args:
        capacity_bytes: at least one alignment; rounded up to it.
        allocator: the one that `memfit.allocator.install()` returns.
        ledger: where the capacity and the blocks are counted.
        alignment_bytes: a power of two, 64 or more; blocks start at multiples. 4096 lets direct I/O fill them.
        fit: where a block without an offset goes: the smallest hole that holds it ("best"), or the lowest ("first").

    Raises:
        UsageError: an argument out of range.
        torch.OutOfMemoryError: the limit or the system refuses the capacity.
    """

    def __init__(
        self,
        capacity_bytes: int,
        allocator: Allocator,
        *,
        ledger: Ledger = "device",
        alignment_bytes: int = 4096,
        fit: Fit = "best",
    ) -> None:
        if alignment_bytes < 64 or alignment_bytes & (alignment_bytes - 1):
            raise UsageError(f"an arena's alignment is a power of two of at least 64 bytes, not {alignment_bytes}")
        if capacity_bytes <= 0:
            raise UsageError(f"an arena needs a capacity above 0 bytes, not {capacity_bytes}")
        self._allocator = allocator
        self._fit: Fit = fit
        self._book = Book(round_up(capacity_bytes, alignment_bytes), alignment_bytes)
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._lock = threading.RLock()
        self._region, self._base = allocator.create_region(self._book.capacity_bytes, ledger)
        # An arena that is dropped without close() must not pull the memory from under live tensors: the region waits
        # for the last one.
        self._finalizer = weakref.finalize(self, allocator.abandon_region, self._region)

    @property
    def address(self) -> int:
        """Where the arena starts; the byte at offset o of a block planned at p lies at `address + p + o`."""
        return self._base

    def allocate(
        self,
        nbytes: int,
        *,
        offset: int | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.uint8,
    ) -> torch.Tensor:
        """Makes a tensor, not initialised, with a storage of its own inside the arena.

        Args:
            nbytes: its bytes; with `shape` they must agree.
            offset: the planned position, or None for the arena's fit.
            shape: its shape; None makes it one-dimensional.
            dtype: its type.

        Raises:
            UsageError: sizes that do not agree, or a position that is taken, outside or not aligned.
            torch.OutOfMemoryError: no hole is large enough.
        """
        wanted = (nbytes // dtype.itemsize,) if shape is None else tuple(shape)
        if nbytes <= 0 or math.prod(wanted) * dtype.itemsize != nbytes:
            raise UsageError(f"{nbytes} bytes do not hold a tensor of shape {wanted} and type {dtype}")
        # Not UntypedStorage(0): that one asks c10's default allocator, whoever is installed.
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        storage = tensor.untyped_storage()
        self.visit(storage, nbytes, offset)
        # set_ with an UntypedStorage and sizes is what torch itself calls; its type stub lacks this overload.
        return tensor.set_(storage, 0, wanted)  # pyright: ignore[reportCallIssue]

    def visit(self, storage: torch.UntypedStorage, nbytes: int, offset: int | None = None) -> int:
        """Gives a storage that has no bytes `nbytes` of them inside the arena; what they contain is undefined.

        All tensors that share the storage see them. No version counter moves.

        Returns:
            The offset.

        Raises:
            UsageError: the storage has bytes already or is older than the allocator, or the position is taken, outside
                or not aligned.
            torch.OutOfMemoryError: no offset was given and no hole is large enough.
        """
        with self._lock:
            self._collect()
            if storage.nbytes() != 0:
                raise UsageError(
                    f"a storage that visits must be empty; this one has {storage.nbytes()} bytes: resize_(0) it first"
                )
            if nbytes <= 0:
                raise UsageError(f"a visit needs bytes, not {nbytes}")
            position = self._book.find(nbytes, self._fit) if offset is None else offset
            self._settle(storage, nbytes, position)
            return position

    def leave(self, storage: torch.UntypedStorage) -> None:
        """Takes a storage's bytes away; its tensors keep shape and identity and must not be read until the next visit.

        Raises:
            UsageError: the storage's bytes are not a block of this arena.
        """
        with self._lock:
            self._collect()
            offset = storage.data_ptr() - self._base
            if storage.nbytes() == 0 or offset not in self._book.sizes:
                raise UsageError(
                    "this storage has no bytes in this arena: it left before, or its bytes come from elsewhere"
                )
            storage.resize_(0)
            self._collect()

    def release(self, tensor: torch.Tensor) -> None:
        """Takes away the bytes of the storage behind `tensor`, whoever views them; their death does the same."""
        self.leave(tensor.untyped_storage())

    def defragment(self) -> int:
        """Moves live blocks down, in order of offset, so that all free bytes are one hole at the end.

        Contents, storages, tensors and all their views stay bitwise as they were; only addresses change. Costs one copy
        of the bytes that move and no memory. Planned offsets are no longer where the plan put them.

        Returns:
            The bytes moved.
        """
        moved_bytes = 0
        with self._lock:
            self._collect()
            low = 0
            for offset in self._book.offsets():
                if offset not in self._book.sizes:
                    continue  # it died meanwhile
                nbytes, reference = self._book.sizes[offset], self._storages.get(offset)
                storage = reference() if reference is not None else None
                if storage is None or offset == low:
                    low = self._book.end(offset)
                    continue
                # The bytes stay as they are when the storage lets go: the region is ours and we hold the lock.
                storage.resize_(0)
                self._collect()
                ctypes.memmove(self._base + low, self._base + offset, nbytes)
                self._settle(storage, nbytes, low)
                low = self._book.end(low)
                moved_bytes += nbytes
        return moved_bytes

    def statistics(self) -> ArenaStatistics:
        """How full and how broken up the arena is."""
        with self._lock:
            self._collect()
            return self._book.statistics()

    def close(self) -> None:
        """Gives the memory back to the system. A second call does nothing.

        Raises:
            UsageError: tensors are still live in it.
        """
        with self._lock:
            if not self._finalizer.alive:
                return
            now = self.statistics()
            if now.live_blocks:
                raise UsageError(
                    f"{now.live_blocks} blocks ({format_bytes(now.live_bytes)}) are live in the arena: release them"
                )
            self._finalizer()

    def _settle(self, storage: torch.UntypedStorage, nbytes: int, offset: int) -> None:
        if not self._finalizer.alive:
            raise UsageError("the arena is closed")
        self._book.take(offset, nbytes)
        address = self._base + offset
        try:
            self._allocator.place(address, nbytes)
            storage.resize_(nbytes)
        finally:
            is_unused = self._allocator.unplace()
            if is_unused:
                self._book.give(offset)
        if storage.data_ptr() != address:
            storage.resize_(0)
            cause = (
                "it is older than install(), made by torch.UntypedStorage(n), or on another device"
                if is_unused
                else "another allocation took its place"
            )
            raise UsageError(f"the storage did not get its {nbytes} bytes at offset {offset} of the arena: {cause}")
        self._storages[offset] = weakref.ref(storage)

    def _collect(self) -> None:
        """Takes note of blocks that were freed, by us or because their last tensor died."""
        for address in self._allocator.freed_in_region(self._region):
            self._book.give(address - self._base)
            self._storages.pop(address - self._base, None)


class BufferArena:
    """The textbook arena: tensors are `narrow` views of one buffer.

    Memory: the buffer, and nothing per tensor. A block lives until `release`; letting its tensors die does not free it.
    All tensors share the buffer's version counter, so an in-place operation on one counts as a change of all for
    autograd.

    Args:
        buffer: one-dimensional, contiguous, on the CPU, not requiring a gradient: `torch.zeros(n)`.
        fit: "best" or "first", as in `Arena`.

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
        self._start = int(buffer.storage_offset()) * self._item  # where the buffer begins in its storage
        self._book = Book(buffer.numel() * self._item, self._item)

    def allocate(self, *shape: int) -> torch.Tensor:
        """A contiguous view of the buffer that nobody else has, with whatever bytes are there.

        Raises:
            UsageError: an empty or negative shape.
            torch.OutOfMemoryError: no hole is large enough; the message says whether `defragment()` would help.
        """
        elements = int(math.prod(shape))
        if elements <= 0 or min(shape, default=0) < 0:
            raise UsageError(f"an arena tensor needs at least one element, not shape {shape}")
        offset = self._book.find(elements * self._item, self._fit)
        self._book.take(offset, elements * self._item)
        return self._buffer.narrow(0, offset // self._item, elements).view(shape)

    def release(self, tensor: torch.Tensor) -> None:
        """Frees the block that `tensor`, as handed out, begins. It and its views must not be used any more.

        Raises:
            UsageError: the tensor is not of this arena, or its block was released before.
        """
        offset = int(tensor.storage_offset()) * tensor.element_size() - self._start
        is_here = tensor.untyped_storage().data_ptr() == self._buffer.untyped_storage().data_ptr()
        if not is_here or self._book.sizes.get(offset) != tensor.numel() * tensor.element_size():
            raise UsageError(
                "this tensor is not a live block of this arena: released before, a part of a block, or made elsewhere"
            )
        self._book.give(offset)

    def defragment(self) -> int:
        """Moves live blocks down so that all free bytes are one hole at the end; all live views follow, bitwise.

        Each Python tensor inside a live block gets the new offset; its identity, shape, strides and version counter
        stay. Costs one copy of what moves, no memory, and one pass over the garbage collector's objects (some 10 ms in
        a large process).

        Returns:
            The bytes moved.

        Raises:
            UsageError: somebody holds a view that cannot be found (autograd's saved tensors, objects under
                `gc.freeze()`), or that cannot be moved (a wider type that the new offset does not suit, a lazy
                conjugate). Nothing has moved then.
        """
        sizes = dict(self._book.sizes)
        targets: dict[int, int] = {}
        low = 0
        for offset in self._book.offsets():
            targets[offset] = low
            low += sizes[offset]
        views = [(tensor, self._shift_bytes(tensor, targets)) for tensor in self._find_views()]
        base = self._buffer.data_ptr()
        moved_bytes = 0
        for offset, target in targets.items():
            if offset != target:
                ctypes.memmove(base + target, base + offset, sizes[offset])
                self._book.give(offset)
                self._book.take(target, sizes[offset])
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
        """How full and how broken up the buffer is."""
        return self._book.statistics()

    def _find_views(self) -> list[torch.Tensor]:
        """All Python tensors on the buffer's storage but the buffer; refuses where the storage has other users."""
        storage = self._buffer.untyped_storage()
        identity = storage._cdata  # torch has no public name for "the same storage"
        found: list[torch.Tensor] = []
        for thing in gc.get_objects():
            # type(), not isinstance(): asking lazy proxies for their class can run their code.
            is_near = (
                issubclass(type(thing), torch.Tensor)
                and thing.device.type == "cpu"
                and torch._C._has_storage(thing)  # sparse and wrapper tensors have none
            )
            if is_near and thing.untyped_storage()._cdata == identity:
                found.append(thing)
        # Every tensor holds the storage once, and so does the Python object `storage`.
        hidden = torch._C._storage_Use_Count(identity) - len(found) - 1
        if hidden:
            raise UsageError(
                f"{hidden} views of the arena's buffer cannot be found from Python, so its blocks cannot move; "
                "finish or drop the graphs that saved them (and gc.unfreeze()), or use memfit.allocator.arena.Arena, "
                "whose views need not be found"
            )
        return [tensor for tensor in found if tensor is not self._buffer]

    def _shift_bytes(self, tensor: torch.Tensor, targets: dict[int, int]) -> int:
        """How far down `tensor` moves: as far as the live block that holds it; 0 outside of live blocks."""
        item = tensor.element_size()
        first = tensor.storage_offset() * item - self._start
        length = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        for offset, target in targets.items():
            if tensor.numel() and offset <= first and first + length * item <= offset + self._book.sizes[offset]:
                if (offset - target) % item or (offset != target and (tensor.is_conj() or tensor.is_neg())):
                    raise UsageError(
                        f"a view of type {tensor.dtype} cannot move from byte {offset} to {target}: drop it first"
                    )
                return offset - target
        return 0
