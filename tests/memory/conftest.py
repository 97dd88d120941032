"""These tests weigh the whole process: what earlier tests left in it must be gone first."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from memfit.core.errors import TierUnavailableError
from memfit.devices.binding import Allocator, install

_reachable_bytes = -1
"""Of tensors, after the last collection."""


@pytest.fixture(autouse=True, scope="module")
def short_collections(request: pytest.FixtureRequest) -> None:
    """In all files but those whose subject is found through the collector."""
    if request.path.stem not in ("test_census", "test_trace_caches"):
        request.getfixturevalue("older_objects_are_passed_over")


@pytest.fixture(autouse=True)
def nothing_left_by_others() -> Iterator[None]:
    """Collects what is unreachable and lifts a limit whose job a failed test's traceback still holds.

    Where no more tensors are alive than the last one left, there is nothing to collect.
    """
    global _reachable_bytes
    found = _allocator()
    if found is None:
        gc.collect()
    else:
        if found.stats().live_bytes != _reachable_bytes:
            gc.collect()
            _reachable_bytes = found.stats().live_bytes
        found.set_limit(None)
        found.trim()
    yield
    if found is not None:
        found.set_limit(None)


def _allocator() -> Allocator | None:
    try:
        return install()
    except TierUnavailableError:
        return None
