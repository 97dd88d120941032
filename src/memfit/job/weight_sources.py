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

from torch import nn

from memfit.deferred import WeightFiles, find_origins
from memfit.tensors.with_frozen import saved_model


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
