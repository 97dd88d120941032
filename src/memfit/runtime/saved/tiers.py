"""Where parcels rest: host memory, or a scratch file.

In: storages of a device. Out: `TierStore`s for the offloader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from memfit import devices
from memfit.core.plan import Tier
from memfit.runtime.homes.base import Ticket
from memfit.runtime.homes.memory import MemoryHome
from memfit.runtime.store import Extent, ScratchFile, memory_of_storage
from memfit.runtime.trees import bytes_view, new_storage


@dataclass(frozen=True, eq=False, slots=True)
class _HostRest:
    home: MemoryHome
    written: Ticket


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

    def get(self, rest: _HostRest, into: torch.UntypedStorage, into_offset: int = 0) -> Ticket:
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

    def get(self, rest: Extent, into: torch.UntypedStorage, into_offset: int = 0) -> Ticket:
        """See `TierStore`. `into_offset`: the first byte to fill."""
        return self._scratch.get(rest, memory_of_storage(into, into_offset, rest.nbytes), label="saved tensor")

    def free(self, rest: Extent) -> None:
        """See `TierStore`. The file takes the room back when the transfers have ended."""
        rest.give_back()


@dataclass(frozen=True, eq=False, slots=True)
class _StagedRest:
    nbytes: int
    left: Future[None]
    extent: Future[Extent]


class _StagedRead:
    def __init__(self, read: Future[None]) -> None:
        self._read = read

    def wait(self) -> None:
        """Blocks until the bytes are on the device, where any stream may then use them."""
        self._read.result()


class _Staging:
    """One host buffer, as large as the largest parcel so far, pinned beside an accelerator. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_pinned = False
        self._storage: torch.UntypedStorage | None = None

    def at_least(self, nbytes: int) -> torch.UntypedStorage:
        """The buffer, made larger if it must be."""
        if self._storage is None or self._storage.nbytes() < nbytes:
            self.close()
            self._storage = new_storage(nbytes)
            if devices.is_accelerator(self._device):
                self._is_pinned = devices.of(self._device).pin(self._storage)
        return self._storage

    def close(self) -> None:
        """Unpins and frees it."""
        storage, self._storage = self._storage, None
        if storage is not None and self._is_pinned:
            devices.of(self._device).unpin(storage)
            self._is_pinned = False


class StagedScratchStore:
    """A scratch file for storages of a device that the disk cannot reach: by way of one host buffer in each direction.

    Two threads do it, one a direction, a parcel at a time: copy to the host, then write; read, then copy to the device.
        The disk is the slow part, so the copy that does not overlap costs little, and host memory is bounded.

    Memory: host, twice the largest parcel.

    Args:
        scratch: the file; whoever made it closes it, after `close`.
        device: whose storages come.
        stream: copy stream, for an accelerator.
    """

    def __init__(self, scratch: ScratchFile, device: torch.device, *, stream: torch.Stream | None = None) -> None:
        assert (stream is not None) == devices.is_accelerator(device)
        self._scratch = scratch
        self._device = device
        self._stream = stream
        self._outward, self._inward = _Staging(device), _Staging(device)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="memfit-saved-out")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="memfit-saved-in")

    def put(self, storage: torch.UntypedStorage) -> _StagedRest:
        """See `TierStore`."""
        left: Future[None] = Future()
        # In a list, so that the executor, which keeps its arguments until the write is through, does not keep the device's memory.
        extent = self._writer.submit(self._write, [storage], self._now(), left)
        return _StagedRest(storage.nbytes(), left, extent)

    def wait(self, rest: _StagedRest) -> None:
        """See `TierStore`: until the bytes are in the host buffer; whether they reach the disk is seen by `get`."""
        rest.left.result()

    def get(self, rest: _StagedRest, into: torch.UntypedStorage, into_offset: int = 0) -> Ticket:
        """See `TierStore`. `into_offset`: the first byte to fill."""
        return _StagedRead(self._reader.submit(self._read, rest, into, into_offset, self._now()))

    def free(self, rest: _StagedRest) -> None:
        """See `TierStore`."""
        rest.extent.add_done_callback(_give_back)

    def close(self) -> None:
        """Ends the threads when what they have been given is done, and frees the buffers."""
        for executor in (self._writer, self._reader):
            executor.shutdown(wait=True)
        self._outward.close()
        self._inward.close()

    def _now(self) -> torch.Event | None:
        """What was enqueued on the compute stream until now."""
        if self._stream is None:
            return None
        device = self._stream.device
        return devices.of(device).current_stream(device).record_event()

    def _write(self, given: list[torch.UntypedStorage], ready: torch.Event | None, left: Future[None]) -> Extent:
        storage = given.pop()
        nbytes = storage.nbytes()
        try:
            buffer = self._outward.at_least(nbytes)
            # The copy must see what compute wrote into the storage before `put`.
            self._copy(bytes_view(buffer, 0, nbytes), bytes_view(storage, 0, nbytes), ready)
        except BaseException as error:
            left.set_exception(error)
            raise
        del storage  # whoever waits for `left` lets the last reference go, and its memory with it
        left.set_result(None)
        extent = self._scratch.put(memory_of_storage(buffer, 0, nbytes), label="saved tensor")
        extent.written.wait()  # the buffer is used again
        return extent

    def _read(self, rest: _StagedRest, into: torch.UntypedStorage, into_offset: int, ready: torch.Event | None) -> None:
        buffer = self._inward.at_least(rest.nbytes)
        extent = rest.extent.result()
        self._scratch.get(extent, memory_of_storage(buffer, 0, rest.nbytes), label="saved tensor").wait()
        # The memory of `into` may still be read by kernels that were enqueued before it was freed and given out again.
        self._copy(bytes_view(into, into_offset, rest.nbytes), bytes_view(buffer, 0, rest.nbytes), ready)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, ready: torch.Event | None) -> None:
        """Copies and waits until it is done."""
        if self._stream is None or ready is None:
            target.copy_(source)
            return
        with devices.of(self._device).on(self._stream):
            self._stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        event.synchronize()


def _give_back(extent: Future[Extent]) -> None:
    if extent.exception() is None:
        extent.result().give_back()
