"""Pinned host memory for updates on the host of weights that live on the device.

In: sizes of pieces. Out: storages, each reused when its last copy is done.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from memfit import devices
from memfit.core.layout import MOVED_PIECES
from memfit.homes.memory import StreamCopy
from memfit.tensors.trees import new_storage


@dataclass
class RingPiece:
    """A storage, and the copy that used it last."""

    storage: torch.UntypedStorage
    busy: StreamCopy | None = None


class PinnedRing:
    """A ring of `MOVED_PIECES` storages, for one thread: a new weight leaves from one, the update
    works in the next, and a third is filled.

    Memory: host, `MOVED_PIECES` times the largest piece so far, from the first `take` to `close`.

    Args:
        device: the accelerator that copies to and from them.
        ledger: a context in which they are allocated.
    """

    def __init__(
        self, device: torch.device, *, ledger: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._ring: list[RingPiece] = []
        self._pinned: set[int] = set()
        self._next = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(piece.storage.nbytes() for piece in self._ring)

    def take(self, nbytes: int) -> RingPiece:
        """Returns the next piece, of at least that many bytes; waits until the copy that used it
        last is done.
        """
        if len(self._ring) < MOVED_PIECES:
            self._ring.append(RingPiece(self._made(nbytes)))
            return self._ring[-1]
        piece = self._ring[self._next]
        self._next = (self._next + 1) % MOVED_PIECES
        if piece.busy is not None:
            # The stream may read these bytes for an older weight still, or fill them for an update
            # that was given up.
            piece.busy.join()
            piece.busy = None
        if piece.storage.nbytes() < nbytes:
            self._unpin(piece.storage)
            piece.storage = new_storage(0)  # the old one goes before the new one comes
            # Pinned anew: a copy from memory that is not pinned would stop the host.
            piece.storage = self._made(nbytes)
        return piece

    def _made(self, nbytes: int) -> torch.UntypedStorage:
        with self._ledger():
            storage = new_storage(nbytes)
        if devices.of(self._device).pin(storage):
            self._pinned.add(storage.data_ptr())
        return storage

    def _unpin(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() in self._pinned:
            self._pinned.discard(storage.data_ptr())
            devices.of(self._device).unpin(storage)

    def close(self) -> None:
        """Unpins and frees all, when their copies are done."""
        for piece in self._ring:
            if piece.busy is not None:
                # Unpinning memory that a copy still uses is undefined on a device.
                piece.busy.join()
            self._unpin(piece.storage)
        self._ring.clear()
