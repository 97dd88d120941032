"""Homes of storages that leave the device within a step: reused host memory, or a scratch file.

In: storages of a device. Out: `HomePool`s, which make their homes, and `OffloadedStorage`, one
storage at home: for saved tensors and for caches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from memfit import devices
from memfit.core.tiers import Tier
from memfit.homes.home import ByteHome, TransferHandle
from memfit.homes.memory import LinkMeter, MemoryHome
from memfit.homes.staging import Staged, Staging
from memfit.store import Extent, Memory, ScratchFile, memory_of_storage


class HomePool(Protocol):
    """Pool that makes homes for whole storages; abstract. Calls may come from any thread."""

    def home(self, nbytes: int) -> ByteHome:
        """Makes a home of that size, which is written once, whole, and read whole.

        `ByteHome.close` returns its room. It is called once, perhaps from a finalizer and before a
        transfer has ended: it must not raise or block.
        """
        ...


class OffloadedStorage:
    """Offloaded storage: on its way to a home, or there.

    Args:
        pool: makes the home.
        storage: lives and stays unchanged until `wait` has returned.
    """

    __slots__ = ("_home", "_written")

    def __init__(self, pool: HomePool, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        # Room first: where there is none, nothing has begun that would still read the storage.
        self._home = pool.home(nbytes)
        try:
            # The storage is freed as soon as this was waited for, and not before: the copy reads
            # it.
            self._written = self._home.write(0, nbytes, storage)
        except BaseException:
            self._home.close()
            raise

    def wait(self) -> None:
        """Waits until the given storage may be freed. May be repeated."""
        self._written.wait()

    def begin_read(self, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """Begins to read into a storage at an offset; the storage must live until the transfer was
        waited for. Ordered after the write.
        """
        return self._home.visit(into, into_offset)

    def free(self) -> None:
        """Returns the room. Called once, perhaps from a finalizer: neither raises nor blocks."""
        self._home.close()


class HostPool:
    """Host memory beside the device: pinned beside an accelerator, plain for an emulated device on
    the CPU.

    Memory: the largest sum of storages that were here at once, in buffers of their exact sizes.
    Buffers are reused for storages of the same size (steps repeat their sizes, and pinning is
    slow); spare ones are freed if another size needs the room.

    Args:
        device: device of the storages.
        stream: copy stream of an accelerator; copies to and from the host are in order on it.
        writes: the stream of writes; None: that of reads too.
        meter: measures the copies; None: they are not measured.
        ledger: a context in which buffers are allocated (counts them apart on an emulated device).

    Attributes:
        live_bytes, peak_bytes: bytes of storages that are here now, and at most so far.
        reserved_bytes: in buffers, spare ones included; never more than `peak_bytes`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        stream: torch.Stream | None = None,
        writes: torch.Stream | None = None,
        meter: LinkMeter | None = None,
        ledger: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        assert (stream is not None) == devices.is_accelerator(device)
        self._device = device
        self._stream = stream
        self._writes = writes
        self._meter = meter
        self._ledger = ledger
        self._spare: dict[int, list[MemoryHome]] = {}
        self._lock = threading.RLock()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.reserved_bytes = 0

    def home(self, nbytes: int) -> ByteHome:
        """See `HomePool`.

        On an accelerator the wait for a write orders the current stream behind the copy, and the
        host does not block: the caching allocator hands the storage's memory out to later work of
        that stream only. Reads are ordered after the write by the home itself.
        """
        with self._lock:
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            # A spare buffer may still be read for the storage before; its home orders this one's
            # write behind that.
            home = self._take_spare(nbytes)
            if home is None:
                while self._spare and self.reserved_bytes + nbytes > self.peak_bytes:
                    self._close_one()
                with self._ledger():
                    home = MemoryHome(
                        nbytes,
                        tier=Tier.HOST,
                        device=self._device,
                        stream=self._stream,
                        writes=self._writes,
                        meter=self._meter,
                    )
                # After the allocation: one that fails must not be counted.
                self.reserved_bytes += nbytes
        return _PooledHome(home, self._take_back)

    def _take_back(self, home: MemoryHome) -> None:
        """Takes a home back, which may be filled again at once: it orders that copy behind those
        from it.
        """
        # Reentrant, because a finalizer may run while this thread holds the lock.
        with self._lock:
            self._spare.setdefault(home.nbytes, []).append(home)
            self.live_bytes -= home.nbytes

    def close(self) -> None:
        """Frees all buffers that no storage uses."""
        with self._lock:
            while self._spare:
                self._close_one()

    def _take_spare(self, nbytes: int) -> MemoryHome | None:
        homes = self._spare.get(nbytes)
        if not homes:
            return None
        home = homes.pop()
        if not homes:
            del self._spare[nbytes]
        return home

    def _close_one(self) -> None:
        home = self._take_spare(next(iter(self._spare)))
        assert home is not None
        self.reserved_bytes -= home.nbytes
        home.close()


class _PooledHome(ByteHome):
    """A home that returns to its pool."""

    def __init__(self, home: MemoryHome, give_back: Callable[[MemoryHome], None]) -> None:
        self.tier, self.nbytes = home.tier, home.nbytes
        self._home = home
        self._give_back = give_back

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`."""
        return self._home.read(offset, nbytes, into, into_offset)

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`."""
        return self._home.write(offset, nbytes, source, source_offset)

    def close(self) -> None:
        """See `HomePool.home`."""
        # The pool may hand it out at once: its next copy is enqueued behind those of this one.
        self._give_back(self._home)


class ScratchPool:
    """Pool in a scratch file.

    Args:
        scratch: the file; its maker closes it, after the staging.
        staging: pinned memory on the way from an accelerator, shared with homes on disk; None: the
            processor addresses the storages. Its maker closes it.
    """

    def __init__(self, scratch: ScratchFile, staging: Staging | None = None) -> None:
        self._scratch = scratch
        self._staging = staging

    def home(self, nbytes: int) -> ByteHome:
        """See `HomePool`."""
        if self._staging is None:
            return _ScratchHome(self._scratch, nbytes)
        return _StagedScratchHome(self._scratch, nbytes, self._staging)


class _ScratchHome(ByteHome):
    """Room in a scratch file, taken when it is written."""

    tier = Tier.DISK

    def __init__(self, scratch: ScratchFile, nbytes: int) -> None:
        self.nbytes = nbytes
        self._scratch = scratch
        # By the first byte in the storage of each piece.
        self._extents: dict[int, Extent] = {}

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`: the whole."""
        assert (offset, nbytes) == (0, self.nbytes)
        # May be asked for while the write is under way: the scratch file reads behind it.
        return self._scratch.get(self._extents[0], memory_of_storage(into, into_offset, nbytes), label="saved tensor")

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`: the whole, once."""
        assert (offset, nbytes) == (0, self.nbytes) and not self._extents
        self._extents[0] = self._scratch.put(memory_of_storage(source, source_offset, nbytes), label="saved tensor")
        return self._extents[0].written

    def close(self) -> None:
        """See `HomePool.home`. The file takes the room back when the transfers have ended."""
        for extent in self._extents.values():
            extent.give_back()


class _StagedScratchHome(_ScratchHome):
    """The same for an accelerator: through the staging, piece by piece."""

    def __init__(self, scratch: ScratchFile, nbytes: int, staging: Staging) -> None:
        super().__init__(scratch, nbytes)
        self._staging = staging
        self._written: Staged | None = None

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `ByteHome.read`: the whole, after the write; tells if that failed."""
        assert (offset, nbytes) == (0, self.nbytes) and self._written is not None
        scratch, extents, written = self._scratch, self._extents, self._written

        def read(first: int, _count: int, memory: Memory) -> TransferHandle:
            written.wait()  # it has ended; this tells if it failed
            return scratch.get(extents[first], memory, label="saved tensor")

        return self._staging.bring(read, nbytes, into, into_offset, after=[written])

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        """See `ByteHome.write`: the whole, once. It is waited for until the bytes are in host
        memory; `read` tells whether they reached the disk.
        """
        assert (offset, nbytes) == (0, self.nbytes) and self._written is None
        scratch, extents = self._scratch, self._extents

        def write(first: int, _count: int, memory: Memory) -> TransferHandle:
            # In the staging's thread; `close` and `read` look at `extents` only once this transfer
            # has ended.
            extents[first] = scratch.put(memory, label="saved tensor")
            return extents[first].written

        self._written = self._staging.take(write, nbytes, source, source_offset)
        # The device's memory is free when its bytes are in pinned memory; waiting for the file
        # would stop the forward for the disk.
        return _Left(self._written)

    def close(self) -> None:
        """See `HomePool.home`. Pieces that were not begun yet get their room first."""
        extents, written = self._extents, self._written
        if written is not None:
            # From the staging's thread, which may still be filling `extents`: freeing them here
            # would miss those to come.
            written.call_when_ended(lambda: [extent.give_back() for extent in extents.values()])


class _Left(TransferHandle):
    """Handle whose wait ends when the bytes have left the device."""

    __slots__ = ("_staged",)

    def __init__(self, staged: Staged) -> None:
        self._staged = staged

    def wait(self) -> None:
        """Waits until the storage may be freed."""
        self._staged.wait_until_left()
