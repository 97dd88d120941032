"""State that tells the user's code whether it runs for planning or for training.

In: `trial()`, around runs for planning. Out: `is_tracing()`, for callbacks, hooks and loss
functions that count, log or collect; `is_planning()` is its older name.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Self

# One for the process, not for the thread or the context: hooks in backward may run on a thread of
# autograd's.
_running: list[object] = []


def is_tracing() -> bool:
    """Tells whether memfit runs the model, its hooks and the loss for planning, not for training.

    `memfit.fit` runs them on tensors without values (or, where a program must see values, on a few
    rows of the sample), and `job.step` does when a batch of a new shape comes. Nothing of the model
    is changed by it, nor what the loss keeps in variables, containers and objects that its code
    names; what a hook counts, logs or collects would be, and what a loss writes to files or gives
    to other libraries.

        def log_activations(module, args, output):
            if not memfit.is_tracing():
                writer.add_scalar("mean", output.mean())

    Returns:
        True inside of such a run.
    """
    return bool(_running)


def is_planning() -> bool:
    """The older name of `is_tracing`."""
    return bool(_running)


@contextmanager
def trial() -> Generator[None]:
    """Context in which `is_tracing()` is true."""
    mark = object()
    _running.append(mark)
    try:
        yield
    finally:
        _running.remove(mark)


@contextmanager
def uncounted() -> Generator[None]:
    """Keeps what memfit itself does in the middle of a program from counting as the program's
    Python, where a trace counts that.
    """
    profiler = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profiler)


# Python's collector of cycles, while much is made that holds none.


@contextmanager
def without_collections() -> Generator[None]:
    """Keeps Python's collector of cycles from running meanwhile.

    Every so many objects it would go through all that torch has made (measured: 1 of 13 CPU seconds
    of a planner's, a sixth of a trace's). Judged plans hold no cycles; a trace's records go before
    it ends. What only a collection frees counts as alive in a trace, whenever one would have come:
    so it is the same each time. What another thread leaves in cycles meanwhile waits.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Base class for objects that are closed by a `with` statement.


class ClosesAtExit:
    """Base class of objects whose `with` block ends with `close()`, with or without an error."""

    def close(self) -> None:
        """Releases what the object holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Hashes of frozen dataclasses, found once: searches look thousands of plans up by their parts.
#
# In: a frozen dataclass whose fields are hashable. Out: its hash, kept beside its fields; its state
# without that, since strings hash otherwise in another process.

_KEPT = "_hash"


def hash_once(value: Any) -> int:
    """Returns the hash of a frozen dataclass by its fields; found the first time."""
    found = value.__dict__.get(_KEPT)
    if found is None:
        found = value.__dict__[_KEPT] = hash(tuple(getattr(value, field.name) for field in fields(value)))
    return found


def without_hash(value: Any) -> dict[str, object]:
    """Returns what is pickled and copied of it."""
    return {name: kept for name, kept in value.__dict__.items() if name != _KEPT}
