"""What tests of broken runs share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture
def generators_as_before() -> Iterator[None]:
    """A resumed run moves the generators of the process."""
    state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    np.random.set_state(state)
