"""Where the values of weights come from when their blocks move home.

In: a model, perhaps a directory of files, perhaps weights that were put aside. Out: one function that brings parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from torch import nn

from memfit.deferred import WeightFiles, find_origins
from memfit.job.saving import warn_of_unused

Bring = Callable[[Iterable[nn.Parameter]], None]
Forget = Callable[[Iterable[nn.Parameter]], None]
TakeBack = Callable[[str, nn.Parameter], bool]


class WeightSource(Protocol):
    """Gives parameters that have no bytes here their values."""

    def bring(self, parameters: Iterable[nn.Parameter]) -> None:
        """These, as far as they are its own; the others stay as they are."""
        ...

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """These got their values elsewhere, and their own are not asked for any more."""
        ...

    def take_back(self, name: str, parameter: nn.Parameter) -> bool:
        """Makes a parameter one without values again, if it came from here and was never whole before: True then."""
        ...


def open_sources(model: nn.Module, weights: str | Path | None, stack: ExitStack) -> list[WeightSource]:
    """The files, if a directory is given, or else the model's own initialisation where it was built empty.

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
    files = stack.enter_context(WeightFiles(weights, model, origins))
    warn_of_unused(files.unused)
    return [files]


def forget_in(sources: Sequence[WeightSource]) -> Forget:
    """Tells all sources."""

    def forget(parameters: Iterable[nn.Parameter]) -> None:
        chosen = list(parameters)
        for source in sources:
            source.forget(chosen)

    return forget


def take_back_in(sources: Sequence[WeightSource]) -> TakeBack:
    """Asks all sources, in order, until one takes it."""

    def take_back(name: str, parameter: nn.Parameter) -> bool:
        return any(source.take_back(name, parameter) for source in sources)

    return take_back


def bring_from(sources: Sequence[WeightSource]) -> Bring | None:
    """Asks all sources, in order; None where there is none."""

    def bring(parameters: Iterable[nn.Parameter]) -> None:
        wanted = list(parameters)
        for source in sources:
            source.bring(wanted)

    return bring if sources else None
