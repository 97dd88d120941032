"""Every example runs and stays short: those with a limit of the whole process as a person would start them, the others here, where libraries are loaded."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "examples").glob("*.py"))}
STARTED = ("empty_model", "sharded", "three_lines")
# More than one process is needed.
ON_RANKS = ("parameter_server",)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short(name: str) -> None:
    assert len(EXAMPLES[name].read_text(encoding="utf-8").splitlines()) < 100


@pytest.mark.parametrize("name", STARTED)
def test_an_example_that_is_started_trains_and_complains_of_nothing(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES[name])]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip()
    assert not child.stderr.strip()


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {*STARTED, *ON_RANKS}))
def test_an_example_runs_here_without_arguments(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES[name])])
    runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
    told = capsys.readouterr()
    assert told.out.strip()
    assert not told.err.strip()


def on_ranks(name: str, ranks: int, where: Path) -> list[str]:
    """Returns what an example prints under `torchrun`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(EXAMPLES[name])]
    child = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


@pytest.mark.slow
def test_the_servers_example_trains_on_three_ranks(tmp_path: Path) -> None:
    server, *workers = sorted(on_ranks("parameter_server", 3, tmp_path))
    assert server == "rank 0: 394,752 weights, lost workers: ()"
    for told in workers:
        first, last = (float(word.strip(",")) for word in told.split()[3:6:2])
        assert last < first


@pytest.mark.slow
def test_the_sharded_example_trains_the_same_model_on_two_ranks(tmp_path: Path) -> None:
    told = [on_ranks("sharded", ranks, tmp_path) for ranks in (1, 2)]
    assert told[0][0].removeprefix("1 ranks") == told[1][0].removeprefix("2 ranks")
    assert told[1][1].endswith("True")
