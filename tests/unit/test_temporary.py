"""Temporary homes: removed by their owner, and by the next owner where a run was killed; a live one's are never touched."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import memfit
from memfit.core.errors import StoreError
from memfit.store.directory import PREFIX, TemporaryDirectory, sweep

OWNER = """
import sys
from pathlib import Path
from memfit.store.directory import TemporaryDirectory
held = TemporaryDirectory(sys.argv[1])
(held.path / "homes").mkdir()
(held.path / "homes" / "homes-0.bin").write_bytes(bytes(1000))
print(held.path, flush=True)
if sys.stdin.readline() == "end\\n":
    sys.exit()
held.remove()
"""


def owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    environment = {**os.environ, "PYTHONPATH": str(Path(memfit.__file__).parents[1])}
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_what_a_killed_run_left_is_swept_by_the_next_and_what_a_live_one_holds_is_not(tmp_path: Path) -> None:
    (living, held), (dead, left) = owner(tmp_path), owner(tmp_path)
    with living, dead:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert (left / "homes" / "homes-0.bin").exists()
        mine = TemporaryDirectory(tmp_path)
        assert not left.exists()
        assert (held / "homes" / "homes-0.bin").exists()
        mine.remove()
        living.communicate("end\n")  # it ends without removing: the end of the process does
    assert living.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_removing_is_repeatable_and_dropping_removes(tmp_path: Path) -> None:
    first, second = TemporaryDirectory(tmp_path), TemporaryDirectory(tmp_path)
    assert first.path.is_dir()
    assert first.path != second.path
    first.remove()
    first.remove()
    path = second.path
    assert not first.path.exists()
    assert path.is_dir()
    del second
    assert not path.exists()


def test_a_fork_that_ends_leaves_its_parents_directory(tmp_path: Path) -> None:
    held = TemporaryDirectory(tmp_path)
    child = os.fork()
    if child == 0:
        held.remove()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held.path.is_dir()
    held.remove()
    assert not held.path.exists()


def test_only_marked_directories_of_that_name_are_swept(tmp_path: Path) -> None:
    foreign = tmp_path / f"{PREFIX}of-another"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("kept")
    file = tmp_path / f"{PREFIX}file"
    file.write_text("kept")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "made-by-memfit").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    unmarked = tmp_path / f"{PREFIX}empty"  # its maker died before it could mark it
    unmarked.mkdir()
    sweep(tmp_path)
    assert (foreign / "thesis.txt").exists()
    assert file.exists()
    assert (elsewhere / "made-by-memfit").exists()
    assert not unmarked.exists()


def test_a_directory_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []
    plain = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if not swept:
            swept.extend(tmp_path.iterdir())
            monkeypatch.setattr(fcntl, "flock", plain)
            sweep(tmp_path)
        plain(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    held = TemporaryDirectory(tmp_path)
    assert len(swept) == 1
    assert not swept[0].exists()
    assert held.path.is_dir()
    assert held.path != swept[0]
    held.remove()


def test_a_parent_that_is_missing_is_named_with_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"none.*No such file.*directory=\.\.\..*TMPDIR"):
        TemporaryDirectory(tmp_path / "none")
