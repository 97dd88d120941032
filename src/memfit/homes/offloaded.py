"""Homes of storages that leave the device within a step: host memory that is used again, or a scratch file.

In: storages of a device. Out: `HomePool`s, which make their homes, and `OffloadedStorage`, one storage at home: for saved tensors and for caches.
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
from memfit.homes.memory import MemoryHome
from memfit.homes.staging import Staged, Staging
from memfit.store import Extent, Memory, ScratchFile, memory_of_storage


class HomePool(Protocol):
    """Makes homes for whole storages. Calls may come from any thread."""

    def home(self, nbytes: int) -> ByteHome:
        """Makes a home of that size, which is written whole, once, and read whole.

        `ByteHome.close` gives its room back; it is called once, perhaps from a finalizer and before a transfer has ended: it must not raise or block.
        """
        ...


class OffloadedStorage:
    """A whole storage on its way to a home, or there.

    Args:
        pool: makes the home.
        storage: lives and stays unchanged until `wait` has returned.
    """

    __slots__ = ("_home", "_written")

    def __init__(self, pool: HomePool, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        self._home = pool.home(nbytes)
        try:
            self._written = self._home.write(0, nbytes, storage)
        except BaseException:
            self._home.close()
            raise

    def wait(self) -> None:
        """Returns when the storage that was given may be given up. May be repeated."""
        self._written.wait()

    def begin_read(self, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """Begins to read into a storage from a byte on; it lives until the transfer was waited for. Comes after the write."""
        return self._home.visit(into, into_offset)

    def free(self) -> None:
        """Gives the room back. Called once, perhaps from a finalizer: neither raises nor blocks."""
        self._home.close()


class HostPool:
    """Host memory beside the device: pinned beside an accelerator, plain for an emulated device on the CPU.

    Memory: the largest sum of storages that ever rested here at once, in buffers of their exact sizes. Buffers are used again for
    storages of the same size (steps repeat their sizes, and pinning is slow); spare ones go where another size needs the room.

    Args:
        device: whose storages come.
        stream: copy stream of an accelerator; copies to and from the host are in order on it.
        ledger: a context in which buffers are allocated (counts them apart on an emulated device).

    Attributes:
        live_bytes, peak_bytes: held by storages now, and at most so far.
        reserved_bytes: in buffers, spare ones included; never more than `peak_bytes`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        stream: torch.Stream | None = None,
        ledger: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        assert (stream is not None) == devices.is_accelerator(device)
        self._device = device
        self._stream = stream
        self._ledger = ledger
        self._spare: dict[int, list[MemoryHome]] = {}
        self._lock = threading.RLock()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.reserved_bytes = 0

    def home(self, nbytes: int) -> ByteHome:
        """See `HomePool`.

        On an accelerator the wait for a write orders the current stream behind the copy and the host does not block: the caching allocator hands the
            storage's memory out to later work of that stream only. Reads come after the write: both are on the copy stream.
        """
        with self._lock:
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            home = self._take_spare(nbytes)
            if home is None:
                while self._spare and self.reserved_bytes + nbytes > self.peak_bytes:
                    self._close_one()
                with self._ledger():
                    home = MemoryHome(nbytes, tier=Tier.HOST, device=self._device, stream=self._stream)
                self.reserved_bytes += nbytes
        return _PooledHome(home, self._take_back)

    def _take_back(self, home: MemoryHome) -> None:
        """A home may be filled again at once: that copy comes later on the same stream."""
        # Reentrant, because a finalizer may run while this thread holds the lock.
        with self._lock:
            self._spare.setdefault(home.nbytes, []).append(home)
            self.live_bytes -= home.nbytes

    def close(self) -> None:
        """Gives back all buffers that no storage holds."""
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
    """A home that goes back to its pool."""

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
        self._give_back(self._home)


class ScratchPool:
    """A scratch file.

    Args:
        scratch: whoever made it closes it, after the staging.
        staging: the way from a device that the disk cannot reach, shared with homes on disk; None: the processor addresses the storages. Whoever made it
            closes it.
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
    """The same for a device that the disk cannot reach: by way of the staging, piece by piece."""

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
        """See `ByteHome.write`: the whole, once. It is waited for until the bytes are in host memory; `read` tells whether they reached the disk."""
        assert (offset, nbytes) == (0, self.nbytes) and self._written is None
        scratch, extents = self._scratch, self._extents

        def write(first: int, _count: int, memory: Memory) -> TransferHandle:
            extents[first] = scratch.put(memory, label="saved tensor")
            return extents[first].written

        self._written = self._staging.take(write, nbytes, source, source_offset)
        return _Left(self._written)

    def close(self) -> None:
        """See `HomePool.home`. Pieces that were not begun yet get their room first."""
        extents, written = self._extents, self._written
        if written is not None:
            written.call_when_settled(lambda: [extent.give_back() for extent in extents.values()])


class _Left:
    """A transfer that is waited for until its bytes have left the device."""

    __slots__ = ("_staged",)

    def __init__(self, staged: Staged) -> None:
        self._staged = staged

    def wait(self) -> None:
        """Returns when the storage may be given up."""
        self._staged.wait_until_left()
