"""A model is in one hand at a time: a job's, or that of a session of `memfit.infer`.

In: who has which parameters. Out: a refusal for whoever wants them as well. Both would give them
memory of their own, and the first would be left with none.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from typing import Any, Protocol

from torch import nn

from memfit.core.errors import UsageError


class ModelOwner(Protocol):
    """Something that has parameters in hand."""

    def holds(self, parameters: Collection[int]) -> str | None:
        """Sentence that says what holds the model and how that is ended, if it has one of these
        parameters (by identity) now.
        """
        ...


_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def note_holder(holder: ModelOwner) -> None:
    """Registers a holder, which is asked from now on, as long as it lives."""
    _holders.add(holder)


def refuse_held(model: nn.Module) -> None:
    """Refuses a model that is in somebody's hand, with whatever optimizer. Raises `UsageError`."""
    if _holder_of(model) is None:
        return
    gc.collect()  # a job that nobody can reach any more holds nothing
    found = _holder_of(model)
    if found is not None:
        raise UsageError(
            f"this model is not free: {found}; then its parameters are ordinary ones again, and it can be fitted anew"
        )


def _holder_of(model: nn.Module) -> str | None:
    wanted = {id(p) for p in model.parameters()}
    found = (holder.holds(wanted) for holder in list(_holders))
    return next((words for words in found if words is not None), None)


class Session:
    """Parameters that are in hand until `end`."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {id(p) for p in model.parameters()}
        note_holder(self)

    def holds(self, parameters: Collection[int]) -> str | None:
        """See `ModelOwner`."""
        if self._parameters.isdisjoint(parameters):
            return None
        return "a session of memfit.infer has its parameters: leave its `with` first"

    def end(self) -> None:
        """Releases ownership of the parameters."""
        self._parameters.clear()
