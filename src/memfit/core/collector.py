"""Python's collector of cycles, while much is made that holds none."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


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
