"""Weights put aside while a plan is made, where the model alone nearly fills the limit.

In: a model that is whole in memory. Out: the same parameters without their bytes, until they are
brought back, block by block, on their way home.

[Note: why aside]
Tracing and probing take 20 to 50 MiB of code pages, Python objects and staging. They need no
weights (see `profiling.standins`). So where there is no room for them beside the model, the model's
bytes leave for a scratch file first: the peak of loading stays what building the model had made it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from memfit.core.closing import ClosesAtExit
from memfit.store import DiskIO, Extent, ScratchFile, memory_of_storage
from memfit.tensors.guard import is_away

_LEAST_BYTES = 64 << 10


class WeightsAside(ClosesAtExit):
    """The bytes of parameters, in an unnamed file.

    A context manager: what is still aside at its end comes back.

    Parameters keep shape, strides and identity; a storage that several share goes once. Storages
    that cannot be resized (mapped files, borrowed memory) and small ones stay.

    Memory: one storage's staging.

    Args:
        parameters: of the model, on the CPU.
        directory: an existing directory on the disk to use.

    Raises:
        StoreError: the disk; nothing is aside then.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], directory: Path) -> None:
        self._io = DiskIO()
        self._away: dict[int, tuple[torch.UntypedStorage, Extent]] = {}
        try:
            self._file = ScratchFile(directory, self._io, tag="aside")
        except BaseException:
            self._io.close()
            raise
        try:
            for parameter in parameters:
                self._put(parameter.untyped_storage())
        except BaseException:
            self.close()
            raise

    def _put(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() < _LEAST_BYTES or not storage.resizable() or storage._cdata in self._away:
            return
        extent = self._file.put(memory_of_storage(storage), label="weight")
        # Before the storage is emptied: the disk's threads read its bytes.
        extent.written.wait()
        self._away[storage._cdata] = (storage, extent)
        storage.resize_(0)

    def bring(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Brings these back; those that are here stay as they are.

        Raises:
            StoreError: they cannot be read; may be repeated.
        """
        for parameter in parameters:
            if not is_away(parameter):  # one that was built empty: another source's
                self._bring(parameter.untyped_storage()._cdata)

    def _bring(self, key: int) -> None:
        entry = self._away.get(key)
        if entry is None:
            return
        storage, extent = entry
        storage.resize_(extent.nbytes)
        try:
            self._file.get(extent, memory_of_storage(storage), label="weight").wait()
        except BaseException:
            storage.resize_(0)
            raise
        del self._away[key]
        self._file.free(extent)

    def forget(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Gives up the bytes of these: they have others by now."""
        for parameter in parameters:
            entry = None if is_away(parameter) else self._away.pop(parameter.untyped_storage()._cdata, None)
            if entry is not None:
                self._file.free(entry[1])

    def take_back(self, name: str, parameter: torch.nn.Parameter) -> bool:
        """Takes none back, see `Origin.take_back`: what was whole in memory comes back whole."""
        del name, parameter
        return False

    def close(self) -> None:
        """Brings back what is still aside and gives the file up.

        Raises:
            StoreError: they cannot be read; the file stays, and this may be repeated.
        """
        for key in tuple(self._away):
            self._bring(key)
        self._file.close()
        self._io.close()
