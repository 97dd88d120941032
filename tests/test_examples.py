"""Every example runs and stays short: those with a limit of the whole process as a person would start them, the others here, where libraries are loaded."""

from __future__ import annotations

import ast
import difflib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "examples").glob("*.py"))}
STARTED = ("empty_model", "one_process", "three_lines")
# More than one process is needed.
ON_RANKS = ("parameter_server", "sharded")


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


def test_at_most_three_lines_tell_the_sharded_example_from_that_of_one_process() -> None:
    found = [_behind_the_docstring(name) for name in ("one_process", "sharded")]
    edits = [edit for edit in difflib.SequenceMatcher(None, *found, autojunk=False).get_opcodes() if edit[0] != "equal"]
    assert 1 <= sum(max(left - first, right - begin) for _, first, left, begin, right in edits) <= 3


def _behind_the_docstring(name: str) -> list[str]:
    text = EXAMPLES[name].read_text(encoding="utf-8")
    end = ast.parse(text).body[0].end_lineno
    return text.splitlines()[end:]


@pytest.mark.slow
def test_the_sharded_example_trains_the_same_model_on_one_process_and_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES["one_process"])]
    alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    # Both ranks tell it; their lines may run into each other.
    assert "".join(on_ranks("sharded", 2, tmp_path)) == alone * 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [["memfit"], ["torch.distributed.run", "--nproc-per-node", "2", "-m", "memfit"]])
def test_the_command_line_trains_on_two_ranks_however_they_are_started(launcher: list[str], tmp_path: Path) -> None:
    more = ["--ranks", "2"] if launcher == ["memfit"] else []
    where = ["--store", str(tmp_path / "run"), "--save", str(tmp_path / "saved")]
    train = ["train", "--recipe", "gpt-tiny", "--limit", "3GiB", "--steps", "2", *where]
    command = [sys.executable, "-m", *launcher, *train, *more]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    # The first rank alone tells.
    assert child.stdout.count(f"committed: step 2 in {tmp_path / 'run'}") == 1
    assert "2 ranks" in child.stdout
    assert len(list((tmp_path / "run").glob("set-*/rank-*"))) == 2
    assert (tmp_path / "saved" / "model.safetensors").is_file()
