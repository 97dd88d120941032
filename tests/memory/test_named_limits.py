"""Smallest limits that are named: the next process trains at exactly this limit, and 3 % below it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import memfit

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 4, 13])
def test_the_smallest_limit_of_a_drawn_model_holds(number: int, tmp_path: Path) -> None:
    """All of them: `python benchmarks/limit_sweep.py --seed 38 --smallest 100 --forks`."""
    environment = {**os.environ, "PYTHONPATH": str(Path(memfit.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/limit_sweep.py", "--seed", "38", "--smallest", "1", "--only", str(number)]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


_WEIGHTS_OF_ANOTHER_ALLOCATOR = """
import sys
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
batch = torch.randn(2048, 1024)
import memfit
optimizer = torch.optim.AdamW(model.parameters())
loss = lambda model, batch: model(batch).square().mean()
try:
    with memfit.fit(model, optimizer, loss, batch, limit=int(sys.argv[1])) as job:
        for _ in range(2):
            job.step(batch)
        job.close(restore=False)
    print(0)
except memfit.DoesNotFitError as error:
    print(error.smallest_limit_bytes)
"""


@pytest.mark.slow
def test_a_limit_that_is_named_to_weights_of_another_allocator_begins_its_steps() -> None:
    """They count as taken from the reserve by nobody: it is there when the first step begins."""
    environment = {**os.environ, "PYTHONPATH": str(Path(memfit.__file__).parents[1]), "OMP_NUM_THREADS": "1"}

    def fit(limit: int) -> int:
        command = [sys.executable, "-c", _WEIGHTS_OF_ANOTHER_ALLOCATOR, str(limit)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)

    assert fit(fit(2 << 20)) == 0
