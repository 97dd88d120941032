"""A home in memory: of the device, or of the host beside it."""

from __future__ import annotations

from typing import Any

import torch

from memfit.core.plan import Tier
from memfit.runtime.homes.base import DONE, Ticket
from memfit.runtime.trees import bytes_view, new_storage


class CudaTicket:
    """A copy on a side stream. `wait` orders the current stream behind it; the host does not block."""

    def __init__(self, event: Any, *keep: torch.UntypedStorage) -> None:
        self._event = event
        self._keep: tuple[torch.UntypedStorage, ...] = keep

    def wait(self) -> None:
        """What is enqueued next on the current stream runs after the copy."""
        torch.cuda.current_stream().wait_event(self._event)
        self._keep = ()


class MemoryHome:
    """Bytes in a storage of their own.

    Memory: `nbytes`, of the device, or of the host (pinned in exact size where a CUDA device copies from it).

    Args:
        nbytes: size.
        tier: DEVICE or HOST.
        device: where compute runs; decides what DEVICE means and whether host bytes are pinned.
        stream: the copy stream, for host bytes beside a CUDA device.
    """

    def __init__(
        self, nbytes: int, *, tier: Tier, device: torch.device, stream: torch.cuda.Stream | None = None
    ) -> None:
        assert tier is not Tier.DISK
        self.tier = tier
        self.nbytes = nbytes
        self._stream = stream
        self._is_beside_cuda = tier is Tier.HOST and device.type == "cuda"
        self._registered = False
        if tier is Tier.DEVICE:
            self._storage = new_storage(nbytes, device)
        else:
            self._storage = new_storage(nbytes)
            if self._is_beside_cuda and nbytes:
                # Registering our own pages pins exactly nbytes; the caching pinned allocator would round up to a power of two.
                runtime: Any = torch.cuda.cudart()
                torch.cuda.check_error(runtime.cudaHostRegister(self._storage.data_ptr(), nbytes, 0))
                self._registered = True

    @property
    def memory(self) -> torch.UntypedStorage | None:
        """The storage where compute can use it in place."""
        return None if self._is_beside_cuda else self._storage

    @property
    def has_spare_slot(self) -> bool:
        """See `ByteHome`: there is one place."""
        return False

    @property
    def bytes(self) -> torch.UntypedStorage:
        """The storage, wherever it lies. Of a host home beside CUDA, copies may be under way: wait for the device first."""
        return self._storage

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> Ticket:
        """See `ByteHome.read`."""
        return self._copy(bytes_view(into, into_offset, nbytes), bytes_view(self._storage, offset, nbytes))

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> Ticket:
        """See `ByteHome.write`."""
        return self._copy(bytes_view(self._storage, offset, nbytes), bytes_view(source, source_offset, nbytes))

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> Ticket:
        if self._stream is None:
            to.copy_(source)
            return DONE
        # The copy must see what compute has written into `source`, and must not overwrite `to` while earlier kernels still use the
        # memory: both are enqueued on the current stream, so the copy stream first waits for it.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            event = self._stream.record_event()
        # The ticket keeps both storages alive until the compute stream is ordered behind the copy: the caching allocator, which knows only
        # the compute stream, cannot hand the memory out before.
        return CudaTicket(event, to.untyped_storage(), source.untyped_storage())

    def close(self) -> None:
        """Unpins; the bytes die with the object."""
        if self._registered:
            torch.cuda.synchronize()
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostUnregister(self._storage.data_ptr()))
            self._registered = False
