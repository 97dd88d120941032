"""Ranks that all tests of a process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.processes import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes for Gloo groups."""
    made = Ranks()
    yield made
    made.close()
