"""A limit that is passed inside of a step by memory which is no tensor's is told in that step, once, with what took it."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memfit
import memfit.api
from memfit.core.errors import MemfitWarning
from memfit.core.limits import MIB
from memfit.machine.machine import prepare_process

_ROOM_BYTES = 160 * MIB


@pytest.mark.usefixtures("exact_counts")
def test_numpy_beyond_the_limit_in_the_middle_of_a_step_is_told_once(tmp_path: Path) -> None:
    gc.collect()
    model = nn.Linear(8, 8)
    limit = prepare_process().resident_bytes().whole_bytes + _ROOM_BYTES
    sizes: list[int] = []

    def loss(m: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        for nbytes in sizes:
            assert np.ones(nbytes, dtype=np.uint8).all()
        return m(rows).square().mean()

    job = memfit.fit(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, torch.ones(4, 8), limit=limit, directory=tmp_path
    )
    with job:
        job.step(torch.ones(4, 8))
        sizes.append(_ROOM_BYTES + 40 * MIB)
        with pytest.warns(MemfitWarning, match=r"step 2: the process took .*, above the limit of .*outside of tensors"):
            job.step(torch.ones(4, 8))
        sizes.clear()
        job.step(torch.ones(4, 8))  # any further warning would be an error
