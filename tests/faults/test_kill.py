"""Real processes, really killed, interrupted and cut off: short versions of `kill.py`, `interrupting.py` and `power_cuts.py` in `benchmarks/`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kill.py"


INTERRUPTING, CUTTING = PROGRAM.with_name("interrupting.py"), PROGRAM.with_name("power_cuts.py")


def run(program: Path, *arguments: str, succeeds: bool = True) -> str:
    found = subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (found.returncode == 0) is succeeds, found.stdout + found.stderr
    return found.stdout + found.stderr


def test_runs_that_are_killed_at_random_instants_go_on_bit_for_bit(tmp_path: Path) -> None:
    only = ("--models", "tied-and-frozen", "--plans", "layer-major")
    assert "bit for bit" in run(PROGRAM, "--kills", "2", "--directory", str(tmp_path), *only)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_kinds_of_runs_are_killed_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    told = run(PROGRAM, "--kills", "60", "--directory", str(tmp_path))
    assert "bit for bit" in told
    assert "committing" in told


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plan", ["replanned", "reshaped"])
def test_a_run_that_is_planned_anew_is_killed_meanwhile_and_goes_on_bit_for_bit(tmp_path: Path, plan: str) -> None:
    only = ("--models", "tied-and-frozen", "--plans", plan)
    told = run(PROGRAM, "--kills", "16", "--seed", "1", "--directory", str(tmp_path), *only)
    assert "replanning" in told
    assert "bit for bit" in told


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ctrl_c_in_a_terminal_leaves_a_whole_commit_and_the_same_command_goes_on(tmp_path: Path) -> None:
    assert "the same command went on" in run(INTERRUPTING, "--interrupts", "4", "--directory", str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_disk_whose_power_is_cut_has_the_last_commit_and_without_syncs_it_has_not(tmp_path: Path) -> None:
    if os.geteuid() != 0 or any(shutil.which(f"mkfs.{kind}") is None for kind in ("ext4", "xfs", "btrfs")):
        pytest.skip("mounting a file system needs root and mkfs.ext4, mkfs.xfs, mkfs.btrfs")
    assert "ended bit for bit" in run(CUTTING, "--cuts", "18", "--directory", str(tmp_path))
    told = run(CUTTING, "--cuts", "36", "--without-syncs", "--directory", str(tmp_path), succeeds=False)
    assert ", cut in " in told
