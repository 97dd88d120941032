"""Building the late device: a machine without a compiler is told so, and its tests are skipped with these words, for this reason alone.

Builds are made by a "compiler" that notes each call and writes what it is told to.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from accelerator import build


def fork() -> int:
    """A process in a group of its own that builds; torch is not imported once more."""
    child = os.fork()
    if child == 0:
        os.setsid()
        code = 1
        try:
            build.built()
            code = 0
        finally:
            os._exit(code)
    return child


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes half a second; each call is a line of the file that is returned."""
    notes = tmp_path / "calls"
    notes.touch()
    write_compiler(tmp_path / "compiler", notes, "sleep 0.5; echo module > $out")
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(build.tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    return notes


def write_compiler(path: Path, notes: Path, does: str) -> None:
    path.write_text(
        f'#!/bin/sh\necho call >> {notes}\nwhile [ "$1" != -o ]; do shift; done\nout=$2\necho half > $out\n{does}\n'
    )
    path.chmod(0o700)


def count(notes: Path) -> int:
    return len(notes.read_text().splitlines())


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda _name: None)
    with pytest.raises(build.NoCompilerError, match=r"none was found: install g\+\+"):
        build.built()


def test_two_processes_that_build_at_once_build_once(calls: Path) -> None:
    children = [fork() for _ in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert count(calls) == 1
    assert build.built().read_text() == "module\n"


def test_a_build_that_was_killed_leaves_nothing_behind_the_next_one(calls: Path, tmp_path: Path) -> None:
    good = Path(os.environ["CXX"]).read_text()
    write_compiler(tmp_path / "compiler", calls, "sleep 1000")
    child = fork()
    while not list((tmp_path / "cache").glob("*/*/late-*.so")):  # half a module, in a directory of its own
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (tmp_path / "compiler").write_text(good)
    module = build.built()
    assert module.read_text() == "module\n"
    assert {path.name for path in module.parent.iterdir()} == {module.name, module.with_suffix(".lock").name}


def test_where_the_cache_cannot_be_written_the_module_is_kept_beside_temporary_files(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/fd")  # nobody makes a directory there
    module = build.built()
    assert module.is_relative_to(tmp_path / "temporary")
    assert build.built() == module and count(calls) == 1
    module.parent.chmod(0o777)  # others may have put code there
    with pytest.raises(build.BuildError, match="cannot be written"):
        build.built()


def test_a_cache_that_is_only_read_is_read(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = build.built()

    def refuse(_root: Path) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(build, "_prepare", refuse)
    assert build.built() == module and count(calls) == 1


def test_a_module_that_does_not_load_is_built_again_and_then_an_error_instead_of_a_skip(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "late_native", raising=False)
    build.built().write_text("cut off")
    with pytest.raises(build.BuildError, match="was built and does not load") as error:
        build.load()
    assert not isinstance(error.value, ImportError)
    assert count(calls) == 2


def test_what_the_compiler_refuses_is_an_error_with_its_words(calls: Path, tmp_path: Path) -> None:
    write_compiler(tmp_path / "compiler", calls, "echo 'no such header' >&2; exit 1")
    with pytest.raises(build.BuildError, match="does not compile:\nno such header"):
        build.built()
