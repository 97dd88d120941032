"""A run on a disk that fills up, breaks, or goes away: told clearly, the last commit whole, and on it goes when the cause is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from equivalence import plans
from faults.tower import Tower, adamw, loss
from memfit.core.errors import StoreError
from memfit.core.plan import CallPlan, Plan, Saved, Tier
from memfit.core.units import MIB
from memfit.runtime.store import FileOperations, verify

DISK_BYTES = 48 * MIB
TOWER = Tower(width=96)
build, batch, profile = TOWER.build, TOWER.batch, TOWER.profile


class Run:
    """A job on a store; `finish` trains to four steps and compares with plain PyTorch."""

    def __init__(self, store: Path, plan: Plan, **options: Any) -> None:
        self.model = build()
        self.optimizer = adamw(self.model)
        self.job = memfit.fit(self.model, self.optimizer, loss, batch(0), plan=plan, store=store, **options)

    def step(self) -> None:
        self.job.step(batch(self.job.steps))

    def two_steps(self) -> None:
        self.step()
        self.step()

    def finish(self) -> None:
        while self.job.steps < 4:
            self.step()
        self.job.close()
        for name, wanted in dict(TOWER.after_plain_steps(4)[0].named_parameters()).items():
            assert torch.equal(dict(self.model.named_parameters())[name], wanted), name


@pytest.fixture(name="small_disk")
def a_small_file_system(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of 48 MiB in a file."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a file system needs root and mkfs.ext4")
    image, place = tmp_path / "disk.img", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    mounted = subprocess.run(
        ["mount", "-o", "loop", str(image), str(place)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


class Filler:
    """A file that takes all the room there is."""

    def __init__(self, place: Path) -> None:
        self.path = place / "filler"

    def fill(self, *, leave_bytes: int = 0) -> None:
        with self.path.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        assert shutil.disk_usage(self.path).free < 4096
        os.truncate(self.path, self.path.stat().st_size - leave_bytes)

    def empty(self) -> None:
        self.path.unlink()


def plan_of(name: str) -> Plan:
    found = profile()
    on_disk = plans.on_disk(found)
    offload = CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK)
    return {
        "resident": Plan(),
        "on disk": Plan(blocks=on_disk),
        "activations on disk too": Plan(blocks=on_disk, calls=plans.fates(found, offload), is_atomic=True),
    }[name]


def test_a_disk_that_is_too_small_is_told_at_fit(small_disk: Path) -> None:
    filler = Filler(small_disk)
    filler.fill(leave_bytes=MIB)
    with pytest.raises(StoreError, match=r"claim the disk space.*needed.*free.*disk is full") as caught:
        Run(small_disk / "run", Plan())
    assert caught.value.errno == errno.ENOSPC
    assert not (small_disk / "run").exists()
    filler.empty()
    Run(small_disk / "run", Plan()).finish()


@pytest.mark.parametrize("name", ["resident", "on disk", "activations on disk too"])
def test_a_disk_that_fills_up_stops_the_run_and_it_goes_on_when_there_is_room(name: str, small_disk: Path) -> None:
    run = Run(small_disk / "run", plan_of(name))
    run.step()
    filler = Filler(small_disk)
    filler.fill()
    # All that a step writes was claimed before; what a commit still needs is a new manifest, and room for activations.
    with pytest.raises(StoreError, match="full") as caught:
        run.two_steps()
    assert caught.value.errno == errno.ENOSPC
    assert run.job.commits is not None
    committed = run.job.commits.step
    assert committed in (0, 1)
    assert run.job.steps - committed <= 1
    with pytest.raises(StoreError, match="full"):
        run.job.save(small_disk / "saved")
    assert not (small_disk / "saved").exists()
    filler.empty()
    run.finish()
    assert verify(small_disk / "run").is_whole


def test_a_run_that_is_left_on_a_full_disk_goes_on_at_its_last_commit(small_disk: Path) -> None:
    run = Run(small_disk / "run", plan_of("on disk"))
    run.step()
    filler = Filler(small_disk)
    filler.fill()
    with pytest.raises(StoreError, match="full"):
        run.step()
    with pytest.raises(StoreError, match="full"):
        run.job.close()
    run.job.close(restore=False, commit=False)
    filler.empty()
    again = Run(small_disk / "run", plan_of("on disk"))
    assert again.job.steps == 0
    again.finish()


# Calls that fail, one by one


class Broken:
    """Fails one kind of system call of every store, while it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
        self.is_on = False
        plain = getattr(FileOperations, call)

        def run(operations: FileOperations, *arguments: Any) -> Any:
            if self.is_on:
                raise OSError(number, os.strerror(number))
            return plain(operations, *arguments)

        monkeypatch.setattr(FileOperations, call, run)


@pytest.mark.parametrize("name", ["resident", "on disk"])
@pytest.mark.parametrize(
    ("call", "number", "may_repeat"),
    [
        ("pwrite", errno.ENOSPC, True),
        ("pwrite", errno.EIO, True),
        ("fsync", errno.EIO, True),
        ("rename", errno.ENOSPC, True),
        ("fdatasync", errno.EIO, False),
        ("rename", errno.EIO, False),
    ],
)
def test_a_commit_that_fails_is_repeated_or_the_run_is_taken_up(
    name: str, call: str, number: int, may_repeat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(monkeypatch, call, number)
    run = Run(tmp_path / "run", plan_of(name))
    run.step()
    broken.is_on = True
    with pytest.raises(StoreError) as caught:
        run.job.commit()
    assert caught.value.errno == number
    assert run.job.commits is not None
    assert run.job.commits.step == 0
    broken.is_on = False
    if may_repeat:
        run.finish()
        return
    # Nobody knows what the disk kept: the store is read only until it is opened again.
    with pytest.raises(StoreError, match="open it again"):
        run.step()
    run.job.close(restore=False, commit=False)
    again = Run(tmp_path / "run", plan_of(name))
    assert again.job.steps in (0, 1)
    again.finish()


def test_a_directory_that_is_taken_away_is_told_and_the_model_comes_back(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", plan_of("on disk"))
    run.step()
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        run.step()
    run.job.close(commit=False)
    for name, wanted in dict(TOWER.after_plain_steps(1)[0].named_parameters()).items():
        assert torch.equal(dict(run.model.named_parameters())[name], wanted), name
    again = Run(tmp_path / "elsewhere", plan_of("on disk"))
    assert again.job.steps == 0
    again.finish()
