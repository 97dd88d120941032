"""Real processes, really killed and interrupted: short versions of `benchmarks/kill.py` and `interrupting.py`, which say what is checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kill.py"


INTERRUPTING = PROGRAM.with_name("interrupting.py")


def run(program: Path, *arguments: str) -> str:
    found = subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_runs_that_are_killed_at_random_instants_go_on_bit_for_bit(tmp_path: Path) -> None:
    only = ("--models", "tied-and-frozen", "--plans", "layer-major")
    assert "bit for bit" in run(PROGRAM, "--kills", "4", "--directory", str(tmp_path), *only)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_kinds_of_runs_are_killed_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    told = run(PROGRAM, "--kills", "60", "--directory", str(tmp_path))
    assert "bit for bit" in told
    assert "committing" in told


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_meets_its_limit_is_killed_while_it_is_replanned_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    only = ("--models", "tied-and-frozen", "--plans", "replanned")
    told = run(PROGRAM, "--kills", "16", "--seed", "1", "--directory", str(tmp_path), *only)
    assert "replanning" in told
    assert "bit for bit" in told


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ctrl_c_in_a_terminal_leaves_a_whole_commit_and_the_same_command_goes_on(tmp_path: Path) -> None:
    assert "the same command went on" in run(INTERRUPTING, "--interrupts", "4", "--directory", str(tmp_path))
