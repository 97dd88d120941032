"""Real processes, really killed: the short version of `benchmarks/kill.py`, which says what is checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kill.py"


@pytest.mark.parametrize("kills", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_runs_that_are_killed_at_random_instants_go_on_bit_for_bit(kills: int, tmp_path: Path) -> None:
    models = ["tied-and-frozen"] if kills < 10 else ["tied-and-frozen", "gpt2"]
    plans = ["resident", "layer-major"] if kills < 10 else ["resident", "layer-major", "clipped", "bf16"]
    found = subprocess.run(
        [
            sys.executable,
            str(PROGRAM),
            "--kills",
            str(kills),
            "--directory",
            str(tmp_path),
            "--models",
            *models,
            "--plans",
            *plans,
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "bit for bit" in found.stdout
