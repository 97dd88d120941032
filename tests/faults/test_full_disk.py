"""A run on a disk that fills up, breaks, or goes away: told clearly, the last commit whole, and on it goes when the cause is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from equivalence import plans
from faults.tower import Tower, adamw, loss
from memfit.core.errors import StoreError
from memfit.core.limits import MIB
from memfit.core.plan import CallPlan, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.store import FileOperations, verify

FILE_SYSTEMS = {"ext4": (48 * MIB, ("-m", "0")), "xfs": (300 * MIB, ()), "btrfs": (128 * MIB, ())}
"""Bytes, and options of `mkfs`. btrfs writes beside what is there, unless a file says otherwise."""
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


@pytest.fixture(
    name="small_disk",
    params=["ext4", pytest.param("xfs", marks=pytest.mark.slow), pytest.param("btrfs", marks=pytest.mark.slow)],
)
def a_small_file_system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own in a file: as small as its kind allows."""
    kind: str = request.param
    if os.geteuid() != 0 or shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mounting a file system needs root and mkfs.{kind}")
    image, place = tmp_path / "disk.img", tmp_path / "disk"
    nbytes, options = FILE_SYSTEMS[kind]
    with image.open("wb") as file:
        file.truncate(nbytes)
    place.mkdir()
    subprocess.run([f"mkfs.{kind}", "-q", *options, str(image)], check=True, capture_output=True)
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
    """Files that take all the room there is, to the last page."""

    def __init__(self, place: Path) -> None:
        self._place = place / "filler"
        self._place.mkdir()

    def fill(self, *, leave_bytes: int = 0) -> None:
        # One file, and small ones after it: what is left to metadata is not given to a file that is large already.
        with contextlib.suppress(OSError):
            for number in range(10_000):
                with (self._place / f"{number}").open("wb", buffering=0) as file:
                    for size in (MIB, 1 << 12):
                        with contextlib.suppress(OSError):
                            while file.write(bytes(size)):
                                pass
                    os.fsync(file.fileno())
                    if number and not file.tell():
                        break
        if leave_bytes:
            first = self._place / "0"
            os.truncate(first, first.stat().st_size - leave_bytes)
            os.sync()

    def empty(self) -> None:
        shutil.rmtree(self._place)
        os.sync()


def plan_of(name: str) -> Plan:
    found = profile()
    on_disk = plans.on_disk(found)
    offload = CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK)
    return {
        "resident": Plan(),
        "on disk": Plan(blocks=on_disk),
        "on disk, late": Plan(
            blocks={n: replace(b, gradient_home=Tier.DISK) for n, b in on_disk.items()},
            update=UpdateTime.AFTER_BACKWARD,
        ),
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


@pytest.mark.parametrize("options", [{}, {"scheme": "journal"}], ids=["generations", "journal"])
def test_what_was_claimed_is_enough_for_all_steps(options: dict[str, Any], small_disk: Path) -> None:
    name = "on disk, late" if options else "on disk"
    run = Run(small_disk / "run", plan_of(name), **options)
    filler = Filler(small_disk)
    filler.fill(leave_bytes=MIB)  # for manifests
    run.finish()
    assert verify(small_disk / "run").is_whole


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


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["resident", pytest.param("on disk", marks=pytest.mark.slow)])
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
