"""Where parcels rest: host memory, or a scratch file.

In: storages of a device. Out: `TierStore`s for the offloader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from memfit import devices
from memfit.core.tiers import Tier
from memfit.homes.home import TransferHandle
from memfit.homes.memory import MemoryHome
from memfit.homes.staging import FileTicket, Staged, Staging
from memfit.store import Extent, Memory, ScratchFile, memory_of_storage


@dataclass(frozen=True, eq=False, slots=True)
class _HostRest:
    home: MemoryHome
    written: TransferHandle


class HostStore:
    """Host memory beside the device: pinned beside an accelerator, plain for an emulated device on the CPU.

    Memory: the largest sum of parcels that ever rested here at once, in buffers of their exact sizes. Buffers are used again for
    parcels of the same size (steps repeat their sizes, and pinning is slow); spare ones go where another size needs the room.

    Args:
        device: whose storages come.
        stream: copy stream of an accelerator; copies to and from the host are in order on it.
        ledger: a context in which buffers are allocated (counts them apart on an emulated device).

    Attributes:
        live_bytes, peak_bytes: held by parcels now, and at most so far.
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

    def put(self, storage: torch.UntypedStorage) -> _HostRest:
        """See `TierStore`."""
        nbytes = storage.nbytes()
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
        return _HostRest(home, home.write(0, nbytes, storage))

    def wait(self, rest: _HostRest) -> None:
        """See `TierStore`.

        On an accelerator the current stream is ordered behind the copy and the host does not block: the caching allocator hands
            the storage's memory out to later work of that stream only.
        """
        rest.written.wait()

    def get(self, rest: _HostRest, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `TierStore`. Reads come after the write: both are on the copy stream. `into_offset`: the first byte to fill."""
        return rest.home.read(0, rest.home.nbytes, into, into_offset)

    def free(self, rest: _HostRest) -> None:
        """See `TierStore`. The buffer may be filled again at once: that copy comes later on the same stream."""
        # Reentrant, because a finalizer may run while this thread holds the lock.
        with self._lock:
            self._spare.setdefault(rest.home.nbytes, []).append(rest.home)
            self.live_bytes -= rest.home.nbytes

    def close(self) -> None:
        """Gives back all buffers that no parcel holds."""
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


class ScratchStore:
    """A scratch file, for storages that the processor can address.

    Args:
        scratch: the file; whoever made it closes it.
    """

    def __init__(self, scratch: ScratchFile) -> None:
        self._scratch = scratch

    def put(self, storage: torch.UntypedStorage) -> Extent:
        """See `TierStore`."""
        return self._scratch.put(memory_of_storage(storage), label="saved tensor")

    def wait(self, rest: Extent) -> None:
        """See `TierStore`."""
        rest.written.wait()

    def get(self, rest: Extent, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `TierStore`. `into_offset`: the first byte to fill."""
        return self._scratch.get(rest, memory_of_storage(into, into_offset, rest.nbytes), label="saved tensor")

    def free(self, rest: Extent) -> None:
        """See `TierStore`. The file takes the room back when the transfers have ended."""
        rest.give_back()


@dataclass(frozen=True, eq=False, slots=True)
class _StagedRest:
    nbytes: int
    extents: dict[int, Extent]
    """By the first byte in the parcel of each piece."""
    written: Staged


class StagedScratchStore:
    """A scratch file for storages of a device that the disk cannot reach: by way of the staging, piece by piece.

    Args:
        scratch: the file; whoever made it closes it, after the staging.
        staging: shared with homes on disk; whoever made it closes it.
    """

    def __init__(self, scratch: ScratchFile, staging: Staging) -> None:
        self._scratch = scratch
        self._staging = staging

    def put(self, storage: torch.UntypedStorage) -> _StagedRest:
        """See `TierStore`."""
        extents: dict[int, Extent] = {}
        scratch = self._scratch

        def write(offset: int, _count: int, memory: Memory) -> FileTicket:
            extents[offset] = scratch.put(memory, label="saved tensor")
            return extents[offset].written

        return _StagedRest(storage.nbytes(), extents, self._staging.take(write, storage.nbytes(), storage))

    def wait(self, rest: _StagedRest) -> None:
        """See `TierStore`: until the bytes are in host memory; whether they reach the disk is seen by `get`."""
        rest.written.wait_until_left()

    def get(self, rest: _StagedRest, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        """See `TierStore`. `into_offset`: the first byte to fill."""
        scratch = self._scratch

        def read(offset: int, _count: int, memory: Memory) -> FileTicket:
            rest.written.wait()  # it has ended; this tells if it failed
            return scratch.get(rest.extents[offset], memory, label="saved tensor")

        return self._staging.bring(read, rest.nbytes, into, into_offset, after=[rest.written])

    def free(self, rest: _StagedRest) -> None:
        """See `TierStore`. The file takes the room back when the transfers have ended."""
        extents = rest.extents
        rest.written.call_when_settled(lambda: [extent.give_back() for extent in extents.values()])
