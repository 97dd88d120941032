"""Power cuts, kills and failing calls at every operation of a step: the last commit, or the one before, is there and whole."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from faults.crash_disk import (
    Disk,
    Files,
    PowerCutError,
    RecordedDisk,
    SyncFile,
    SyncNames,
    all_crash_states,
    in_halves,
    put_back,
    some_crash_states,
)
from faults.crash_story import KILLED, TWO_BLOCKS, WithoutSyncs
from memfit.core.errors import StoreError
from memfit.store import CommittedStore, DiskIO, Durability


@pytest.fixture(name="io", scope="module")
def make_io() -> Iterator[DiskIO]:
    with DiskIO(read_threads=1, write_threads=1, staging_bytes=64 << 10) as io:
        yield io


class Told(Protocol):
    """A run whose every step can be told again."""

    def step_found(self, files: Files, directory: Path, io: DiskIO) -> int:
        """What a store of these files opens at, with all of it checked."""
        ...

    def step(self, store: CommittedStore, step: int, disk: RecordedDisk | None = None) -> object:
        """A whole step."""
        ...


class Finder:
    """Opens what crashes left, each different state once."""

    def __init__(self, story: Told, directory: Path, io: DiskIO) -> None:
        self._story = story
        self._directory = directory
        self._io = io
        self._known: dict[tuple[tuple[str, bytes], ...], int] = {}
        self.states = 0

    def step(self, files: Files) -> int:
        self.states += 1
        key = tuple(sorted(files.items()))
        if key not in self._known:
            where = self._directory / f"crash-{len(self._known)}"
            self._known[key] = self._story.step_found(files, where, self._io)
            shutil.rmtree(where)
        return self._known[key]

    @property
    def different(self) -> int:
        return len(self._known)


def survive_every_crash(
    recorded: RecordedDisk, finder: Finder, *, from_note: int = 0, most_states: int = 1024, seed: int = 0
) -> set[int]:
    """Crashes after every prefix of the notes, with every subset of what is not durable (above `most_states`, with random
    ones). The steps that were found."""
    disk, draw, found = Disk(), random.Random(seed), set[int]()
    for number, note in enumerate(recorded.notes):
        disk.take(note)
        if number < from_note or disk.promised is None:
            continue
        is_few = 1 << disk.uncertain(in_halves) <= most_states
        for files in all_crash_states(disk) if is_few else some_crash_states(disk, draw, most_states // 8):
            step = finder.step(files)
            assert step in disk.allowed, f"after note {number}, {note!r:.200}: step {step} and not {disk.allowed}"
            found.add(step)
    return found


# ---- power cuts


@pytest.mark.parametrize("durability", ["step", 2])
def test_a_power_cut_after_any_operation_leaves_the_last_commit_or_the_one_under_way(
    tmp_path: Path, io: DiskIO, durability: Durability
) -> None:
    recorded, finder = RecordedDisk(tmp_path / "s"), Finder(TWO_BLOCKS, tmp_path, io)
    with TWO_BLOCKS.begin(recorded, io=io, durability=durability) as store:
        for step in (1, 2, 3, 4):
            TWO_BLOCKS.step(store, step, recorded)
    found = survive_every_crash(recorded, finder)
    assert found == ({0, 1, 2, 3, 4} if durability == "step" else {0, 2, 4})
    assert finder.states > 1000, "the enumeration has become small"


def test_a_power_cut_while_a_store_is_made_leaves_a_store_or_room_for_one(tmp_path: Path, io: DiskIO) -> None:
    recorded = RecordedDisk(tmp_path / "s")
    TWO_BLOCKS.begin(recorded, io=io).close()
    disk, found = Disk(), set[str]()
    for note in recorded.notes:
        disk.take(note)
        for number, files in enumerate(all_crash_states(disk)):
            where = tmp_path / "crash"
            put_back(files, where)
            if disk.promised is not None:
                found.add(f"step {disk.promised}")
            error = error_of(lambda where=where: found_in(where, io))
            if error is not None:
                assert disk.promised is None, error
                kind = next(kind for kind in ("never committed", "no store") if kind in str(error))
                found.add(kind)
                if number == 0 and kind == "no store":
                    TWO_BLOCKS.create(WithoutSyncs(), where, io=io).close()
            shutil.rmtree(where)
    assert found == {"no store", "never committed", "step 0"}


def found_in(directory: Path, io: DiskIO) -> int:
    with TWO_BLOCKS.open(directory, io) as store:
        return TWO_BLOCKS.check(store)


def test_the_enumeration_finds_a_store_that_syncs_too_little(tmp_path: Path, io: DiskIO) -> None:
    def leave_out(*numbers: int) -> RecordedDisk:
        """A step whose n-th syncs never reach the disk."""
        recorded = RecordedDisk(tmp_path / f"s{numbers}")
        with TWO_BLOCKS.begin(recorded, io=io) as store:
            first = len(recorded.notes)
            for step in (1, 2):
                TWO_BLOCKS.step(store, step, recorded)
        syncs = [n for n, note in enumerate(recorded.notes) if n >= first and isinstance(note, SyncFile | SyncNames)]
        for n in sorted((syncs[k] for k in numbers), reverse=True):
            del recorded.notes[n]
        return recorded

    # Of a commit: the data, the state, the manifest, the directory.
    for number in range(4):
        recorded = leave_out(number)
        (tmp_path / str(number)).mkdir()
        finder = Finder(TWO_BLOCKS, tmp_path / str(number), io)
        with pytest.raises((AssertionError, StoreError)):
            survive_every_crash(recorded, finder, most_states=128)


# ---- kills: what was handed to the system stays, until a power cut takes what was not durable


def kill_during_a_step(story: Told, recorded: RecordedDisk, store: CommittedStore, step: int, call: int) -> bool:
    """A step whose process is killed at its n-th call; False if the step has fewer."""
    first = recorded.calls

    def cut(number: int, kind: str) -> None:
        if number >= first + call:
            raise PowerCutError(errno.EIO, "killed")

    recorded.before = cut
    try:
        story.step(store, step, recorded)
    except StoreError:
        return True
    finally:
        recorded.before = lambda number, kind: None
        store.close()
    return False


def test_a_power_cut_after_a_kill_at_any_call_and_a_new_start(tmp_path: Path, io: DiskIO) -> None:
    finder, call, starts = Finder(TWO_BLOCKS, tmp_path, io), 0, set[int]()
    while True:
        start, found, was_killed = start_again_after_a_kill(RecordedDisk(tmp_path / f"s{call}"), io, finder, call)
        # Zero: the power may fail again before the new start has made durable what it found.
        assert {start, start + 1} <= found <= {0, start, start + 1}
        starts.add(start)
        if not was_killed:
            break
        call += 1
    assert starts == {0, 1}
    assert call >= 8


def start_again_after_a_kill(
    recorded: RecordedDisk, io: DiskIO, finder: Finder, call: int
) -> tuple[int, set[int], bool]:
    """A kill, a new start, a step, and every crash since the kill: the step started from, those found, was it killed."""
    was_killed = kill_during_a_step(TWO_BLOCKS, recorded, TWO_BLOCKS.begin(recorded, io=io), 1, call)
    first = len(recorded.notes)
    with CommittedStore.open(recorded.directory, io=io, operations=recorded) as store:
        start = TWO_BLOCKS.check(store)
        recorded.promise(start)
        TWO_BLOCKS.step(store, start + 1, recorded)
    return start, survive_every_crash(recorded, finder, from_note=first, most_states=64), was_killed


def test_the_enumeration_finds_a_store_that_trusts_what_it_sees_after_a_kill(
    tmp_path: Path, io: DiskIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.store.disk_store.make_durable", lambda *arguments, **settings: None)
    finder, failures = Finder(TWO_BLOCKS, tmp_path, io), 0
    for call in range(8, 16):
        try:
            start_again_after_a_kill(RecordedDisk(tmp_path / f"s{call}"), io, finder, call)
        except (AssertionError, StoreError):
            failures += 1
    assert failures


# ---- calls that fail


@pytest.mark.parametrize("most_states", [8, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EINTR], ids=["ENOSPC", "EIO", "short"])
def test_any_call_of_a_step_may_fail(tmp_path: Path, io: DiskIO, number: int, most_states: int) -> None:
    finder, call, kinds = Finder(TWO_BLOCKS, tmp_path, io), 0, list[str]()
    while True:
        recorded = RecordedDisk(tmp_path / f"s{call}")
        store = TWO_BLOCKS.begin(recorded, io=io)
        first, first_note, failed = recorded.calls, len(recorded.notes), list[str]()

        def fail(n: int, kind: str, at: int = first + call, failed: list[str] = failed) -> None:
            if n == at and (number != errno.EINTR or kind == "pwrite"):
                failed.append(kind)
                raise OSError(number, os.strerror(number))

        recorded.before = fail
        error = error_of(lambda store=store, recorded=recorded: TWO_BLOCKS.step(store, 1, recorded))
        is_doubtful = "open again" in str(error)
        if error is not None:
            assert failed, "nothing was made to fail"
            assert error.errno == number
            assert ("disk is full" if number == errno.ENOSPC else "device reports an error") in str(error)
            assert store.committed_step == 0
            if is_doubtful:
                with pytest.raises(StoreError, match="can only be read"):
                    TWO_BLOCKS.write(store, 1)
            else:
                TWO_BLOCKS.step(store, 1, recorded)
                assert TWO_BLOCKS.check(store) == 1
        else:
            assert number == errno.EINTR or not failed, f"{failed} was swallowed"
        recorded.before = lambda n, kind: None
        store.close()
        assert finder.step(files_of(recorded.directory)) in ({0, 1} if is_doubtful else {1})
        # A new start trusts nothing that a failed sync has left; what it goes on from must outlive the next power cut.
        with CommittedStore.open(recorded.directory, io=io, operations=recorded) as store:
            start = TWO_BLOCKS.check(store)
            recorded.promise(start)
            TWO_BLOCKS.step(store, start + 1, recorded)
        survive_every_crash(recorded, finder, from_note=first_note, most_states=most_states, seed=call)
        kinds += failed
        call += 1
        if first + call > recorded.calls:
            break
    expected = {"pwrite"} if number == errno.EINTR else {"pwrite", "allocate", "fsync", "open", "rename"}
    assert set(kinds) == expected


def error_of(work: Callable[[], object]) -> StoreError | None:
    try:
        work()
    except StoreError as error:
        return error
    return None


def files_of(directory: Path) -> Files:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


def test_a_directory_that_is_removed_or_replaced_is_told_at_the_next_commit(tmp_path: Path, io: DiskIO) -> None:
    for change in ("removed", "replaced"):
        recorded = RecordedDisk(tmp_path / change)
        store = TWO_BLOCKS.begin(recorded, io=io)
        (tmp_path / change).rename(tmp_path / f"{change} away")
        if change == "replaced":
            TWO_BLOCKS.create(WithoutSyncs(), tmp_path / change, io=io).close()
        with pytest.raises(StoreError, match="was removed or replaced while a job used it"):
            TWO_BLOCKS.step(store, 1)
        assert store.committed_step == 0
        if change == "removed":
            (tmp_path / f"{change} away").rename(tmp_path / change)
            assert TWO_BLOCKS.commit(store, 1), "back in its place, the run goes on"
        store.close()


# ---- real kills


@pytest.fixture(name="memory_directory")
def make_memory_directory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: a kill takes nothing from a disk, and syncs would only take time."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


NURSERY = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from faults.crash_story import KILLED
from memfit.store import CommittedStore
where, durability = Path(sys.argv[2]), sys.argv[3]
for line in sys.stdin:  # One fork for each kill: importing torch takes longer than dying.
    child = os.fork()
    if child == 0:
        every = int(durability) if durability.isdigit() else durability
        store = CommittedStore.open(where, regions=KILLED.specs, durability=every, verify=False)
        step = store.step
        print(os.getpid(), flush=True)
        while True:
            step += 1
            KILLED.step(store, step)
            print("step", flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


@pytest.mark.parametrize(
    ("durability", "kills"),
    [
        ("step", 5),
        pytest.param("step", 150, marks=pytest.mark.slow),
        pytest.param("5", 100, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_killed_at_any_moment_leaves_a_step_that_is_bitwise_whole(
    memory_directory: Path, io: DiskIO, durability: str, kills: int
) -> None:
    where, draw = memory_directory / "s", random.Random(kills)
    KILLED.begin(RecordedDisk(where)).close()
    command = [sys.executable, "-c", NURSERY, str(Path(__file__).parents[1]), str(where), durability]
    nursery = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    step, steps = 0, list[int]()
    most = 4 if durability == "step" else 2 * int(durability) + 2
    with nursery.stdin, nursery.stdout:
        for _ in range(kills):
            nursery.stdin.write("go\n")
            child = int(nursery.stdout.readline())
            started_s = time.monotonic()
            for _ in range(draw.randrange(most)):
                started_s = time.monotonic()
                assert nursery.stdout.readline() == "step\n"
            # Somewhere in the next step, as far as the last one tells how long it takes.
            time.sleep(draw.uniform(0, min(0.2, time.monotonic() - started_s)))
            os.kill(child, signal.SIGKILL)
            while nursery.stdout.readline() != "dead\n":
                pass
            with KILLED.open(where, io) as store:
                assert store.disk.previous_owner_died
                found = KILLED.check(store)
            assert found >= step, "a committed step was lost"
            steps.append(found - step)
            step = found
    assert nursery.wait() == 0
    assert step > 0, "the child made no step to be killed in"
    if durability != "step":
        assert all(count % int(durability) == 0 for count in steps)
