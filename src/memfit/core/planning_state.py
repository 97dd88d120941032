"""State that tells the user's code whether it runs for planning or for training.

In: `trial()`, around runs for planning. Out: `is_tracing()`, for callbacks, hooks and loss
functions that count, log or collect; `is_planning()` is its older name.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

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
