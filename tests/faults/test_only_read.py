"""A run is looked at and copied out where nothing may be written: read-only media, other people's files, a copy made of links."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from faults.test_export import train
from memfit.core.errors import StoreError, StoreInUseError
from memfit.runs.exporting import export_run, verify_run
from memfit.store import DiskStore, FileOperations
from memfit.store.lock import LOCK_NAME

pytestmark = pytest.mark.usefixtures("generators_as_before")

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("only-read") / "run"
    train("tied-and-frozen", "resident", directory, until=1)
    return directory


def _forbid_writing(directory: Path, patched: pytest.MonkeyPatch) -> None:
    """As a file system does that is mounted read-only."""
    opened = FileOperations.open

    def refuse(path: Path, flags: int) -> None:
        named = path.readlink() if path.is_relative_to("/proc/self/fd") else path
        if named.is_relative_to(directory) and flags & _WRITES:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def open_to_read(self: FileOperations, path: Path, flags: int, mode: int = 0o644) -> int:
        refuse(path, flags)
        return opened(self, path, flags, mode)

    patched.setattr(FileOperations, "open", open_to_read)
    for name in ("rename", "unlink", "mkdir", "rmdir"):
        called = getattr(FileOperations, name)

        def change(self: FileOperations, path: Path, *more: Path, _called: object = called) -> None:
            refuse(path, os.O_WRONLY)
            _called(self, path, *more)  # type: ignore[operator]

        patched.setattr(FileOperations, name, change)


@pytest.mark.parametrize("has_lock", [True, False])
def test_a_run_on_read_only_media_is_verified_and_exported(
    has_lock: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "run"
    shutil.copytree(run, here)
    if not has_lock:
        (here / LOCK_NAME).unlink()
    _forbid_writing(here, monkeypatch)
    before = {file.name: file.read_bytes() for file in here.iterdir()}
    assert verify_run(here).is_whole
    assert "model.safetensors" in export_run(here, tmp_path / "out").files
    assert {file.name: file.read_bytes() for file in here.iterdir()} == before
    with pytest.raises(StoreError, match="read-only"):
        DiskStore.open(here)


def test_who_reads_shares_with_readers_and_keeps_a_writer_out(run: Path) -> None:
    with DiskStore.open(run, reads_only=True) as one, DiskStore.open(run, reads_only=True) as other:
        assert one.step == other.step == 1
        with pytest.raises(StoreInUseError):
            DiskStore.open(run)
        with pytest.raises(StoreError, match="can only be read"):
            one.commit(2, [])
    with DiskStore.open(run), pytest.raises(StoreInUseError, match="by this process"):
        verify_run(run)
    assert verify_run(run).is_whole


def test_a_copy_made_of_links_is_read_and_not_written(run: Path, tmp_path: Path) -> None:
    here = tmp_path / "run"
    shutil.copytree(run, here, copy_function=os.link)
    assert verify_run(here).is_whole
    export_run(here, tmp_path / "out")
    with pytest.raises(StoreError, match="hard link"):
        DiskStore.open(here)
