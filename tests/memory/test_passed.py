"""A limit that is passed by memory which is no tensor's is told in the step that it happens in, once, with what took it."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.api.machine import prepare_process
from memfit.core.errors import MemfitWarning
from memfit.core.units import MIB

_ROOM_BYTES = 160 * MIB


def test_numpy_beyond_the_limit_is_told_once(tmp_path: Path) -> None:
    gc.collect()
    model = nn.Linear(8, 8)
    limit = prepare_process().resident_bytes().whole_bytes + _ROOM_BYTES
    job = memfit.fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda m, rows: m(rows).square().mean(),
        torch.ones(4, 8),
        limit=limit,
        directory=tmp_path,
    )
    with job:
        job.step(torch.ones(4, 8))
        taken = np.ones(_ROOM_BYTES + 40 * MIB, dtype=np.uint8)
        with pytest.warns(MemfitWarning, match=r"step 2: the process took .*, above the limit of .*outside of tensors"):
            job.step(torch.ones(4, 8))
        job.step(torch.ones(4, 8))  # any further warning would be an error
        assert taken.all()
