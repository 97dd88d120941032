"""Where the values of weights come from when their blocks move home.

In: a model, perhaps a directory of files, perhaps weights that were put aside. Out:
`WeightSources`, which brings parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from memfit.core.documents import user_path
from memfit.core.process_state import ClosesAtExit
from memfit.files.matching import Matched, match
from memfit.files.origin import Origin, find_origins
from memfit.files.reader import open_weight_files
from memfit.store import DiskIO, Extent, ScratchFile, memory_of_storage
from memfit.tensors.guard import is_away
from memfit.tensors.with_frozen import saved_model

# Weights from files, a parameter at a time.
#
# In: a directory as `save_pretrained` or `Job.save` writes it, or what `torch.save` wrote; a model
# whose weights may have no bytes. Out: each parameter's values when its block moves in. Shards are
# here the files that a save is cut into, not shares of processes.


class WeightFiles(ClosesAtExit):
    """The files of a model's weights, open. A context manager.

    Names and layout are matched as transformers' `from_pretrained` does, by its own rules: renamed,
    packed and cut tensors, the base model's prefix, tied weights under any of their names
    (`memfit.engine.conversions`).

    Memory: the headers; a piece of 2 MiB while a tensor is read; see `Matched.read` for the rare
    layouts that take more.

    Args:
        directory: of files, or one file; see `open_weight_files`.
        model: its parameters may be without bytes.
        origins: of the model; see `Origin`.

    Attributes:
        unused: names in the files that the model has no use for.

    Raises:
        StoreError: the files. UsageError: a tensor of the model is missing, or has another shape.
    """

    def __init__(self, directory: str | Path, model: nn.Module, origins: Sequence[Origin]) -> None:
        self._origins = tuple(origins)
        self._stack = ExitStack()
        source = user_path(directory)
        with ExitStack() as opening:
            files = open_weight_files(source, opening)
            matched, self.unused = match(files, model, source)
            self._parameters: dict[int, Matched] = {}
            self._brought: dict[int, Matched] = {}
            self._buffers: list[Matched] = []
            for found in matched.values():
                if isinstance(found.tensor, nn.Parameter):
                    self._parameters[id(found.tensor)] = found
                else:
                    self._buffers.append(found)
            self._stack = opening.pop_all()

    def bring(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reads these from the files; the first time, all buffers that are saved as well.

        Raises:
            StoreError: a file cannot be read; may be repeated.
        """
        while self._buffers:
            found = self._buffers[-1]
            found.fill()
            self._buffers.pop()
        for parameter in parameters:
            found = self._parameters.get(id(parameter))
            if found is None:
                continue
            for origin in self._origins:
                origin.make_room(parameter)
            found.read(parameter.data)
            self._brought[id(parameter)] = self._parameters.pop(id(parameter))

    def take_back(self, name: str, parameter: nn.Parameter) -> bool:
        """See `Origin.take_back`: such parameters will be read again."""
        if not any(origin.take_back(name, parameter) for origin in self._origins):
            return False
        found = self._brought.pop(id(parameter), None)
        if found is not None:
            self._parameters[id(parameter)] = found
        return True

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """These got their values elsewhere."""
        chosen = list(parameters)
        for parameter in chosen:
            self._parameters.pop(id(parameter), None)
        for origin in self._origins:
            origin.forget(chosen)

    def close(self) -> None:
        """Closes the files; may be repeated."""
        self._stack.close()


class WeightSource(Protocol):
    """Gives parameters that have no bytes here their values."""

    def bring(self, parameters: Iterable[nn.Parameter]) -> None:
        """Brings these, as far as they are its own; the others stay as they are."""
        ...

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """These got their values elsewhere, and their own are not asked for any more."""
        ...

    def take_back(self, name: str, parameter: nn.Parameter) -> bool:
        """Makes a parameter one without values again.

        Returns False if it did not come from here, or was whole before.
        """
        ...


class WeightSources:
    """Several sources, asked in order. Emptied once the weights are home.

    Args:
        sources: the first that takes a parameter back has it.
    """

    def __init__(self, sources: Sequence[WeightSource] = ()) -> None:
        self._sources = list(sources)

    def bring(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `WeightSource`."""
        wanted = list(parameters)
        for source in self._sources:
            source.bring(wanted)

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """See `WeightSource`."""
        chosen = list(parameters)
        for source in self._sources:
            source.forget(chosen)

    def take_back(self, name: str, parameter: nn.Parameter) -> bool:
        """See `WeightSource`."""
        return any(source.take_back(name, parameter) for source in self._sources)

    def drop(self) -> None:
        """Lets go of all: where weights came from is not asked for any more."""
        self._sources.clear()


def open_sources(model: nn.Module, weights: str | Path | None, stack: ExitStack) -> list[WeightSource]:
    """Opens the files, if a directory is given, or else the model's own initialization where it was
    built empty.

    Args:
        model: its parameters may be without bytes.
        weights: see `memfit.fit`.
        stack: closes the files.

    Raises:
        StoreError, UsageError: see `WeightFiles`.
    """
    origins = find_origins(model)
    if weights is None:
        return list(origins)
    # Files are of the model alone: frozen ones beside it are as they are, or were built empty.
    files = stack.enter_context(WeightFiles(weights, saved_model(model), origins))
    warn_of_unused(files.unused)
    return [files, *origins]


def warn_of_unused(names: Sequence[str]) -> None:
    """Warns of tensors in files that the model has no use for."""
    if names:
        some = ", ".join(f"{name!r:.200}" for name in names[:5]) + (", ..." if len(names) > 5 else "")
        warnings.warn(
            f"{len(names)} tensors of the weight files have no place in the model: {some}", UserWarning, stacklevel=4
        )


# Weights put aside while a plan is made, where the model alone nearly fills the limit.
#
# In: a model that is whole in memory. Out: the same parameters without their bytes, until they are
# brought back, block by block, on their way home.
#
# [Note: why aside]
# Tracing and probing take 20 to 50 MiB of code pages, Python objects and staging. They need no
# weights (see `trace.standins`). So where there is no room for them beside the model, the model's
# bytes leave for a scratch file first: the peak of loading stays what building the model had made
# it.

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
