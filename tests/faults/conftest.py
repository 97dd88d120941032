"""What tests of broken runs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from faults import small_run
from memfit.core.plan import Plan
from memfit.runs.exporting import export_run


@pytest.fixture
def generators_as_before() -> Iterator[None]:
    """A resumed run moves the generators of the process."""
    state = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    np.random.set_state(state)


@pytest.fixture(name="made", scope="module")
def a_run_and_its_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, and what `export_run` makes of it: `run` and `saved`. Not to be changed."""
    place = tmp_path_factory.mktemp("made")
    with torch.random.fork_rng(devices=[]):
        small_run.train("tied-and-frozen", Plan(), place / "run", total=1)
    export_run(place / "run", place / "saved")
    return place
