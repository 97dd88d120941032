"""A store with a journal: power cuts, kills and failing calls at every operation of a step and of its replay.

Moments count as twice the step that is sealed, and one less than twice the step that is decided.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.crash_disk import RecordedDisk, SyncFile, SyncNames
from faults.crash_story import WithoutSyncs, filled
from faults.journal_story import EVEN, SMALL, JournalStory
from faults.test_store_crashes import Finder, error_of, files_of, kill_during_a_step, survive_every_crash
from memfit.core.errors import StoreError, UsageError
from memfit.store import CommittedStore, DiskIO, verify
from memfit.store.journal import RECORD
from memfit.store.region import RegionState

STRIDES = [pytest.param(7, id="every seventh"), pytest.param(1, id="every", marks=pytest.mark.slow)]
"""Of the calls of a step, which are the ones that fail."""


@pytest.fixture(name="io", scope="module")
def make_io() -> Iterator[DiskIO]:
    with DiskIO(read_threads=1, write_threads=1, staging_bytes=64 << 10) as io:
        yield io


# ---- power cuts


@pytest.mark.parametrize(
    ("story", "most_states"),
    [
        pytest.param(EVEN, 64, id="even"),
        pytest.param(EVEN, 4096, id="even, all states", marks=pytest.mark.slow),
        pytest.param(SMALL, 1024, id="small", marks=pytest.mark.slow),
    ],
)
def test_a_power_cut_after_any_operation_leaves_a_step_that_is_finished_bit_for_bit(
    tmp_path: Path, io: DiskIO, story: JournalStory, most_states: int
) -> None:
    recorded, finder = RecordedDisk(tmp_path / "s"), Finder(story, tmp_path, io)
    with story.begin(recorded, io) as store:
        for step in (1, 2):
            story.step(store, step, recorded)
        story.check(store, 2)
    assert survive_every_crash(recorded, finder, most_states=most_states) == {0, 1, 2, 3, 4}
    assert finder.states > 500, "the enumeration has become small"


def two_steps(directory: Path, io: DiskIO) -> tuple[RecordedDisk, int]:
    recorded = RecordedDisk(directory)
    with EVEN.begin(recorded, io) as store:
        first = len(recorded.notes)
        for step in (1, 2):
            EVEN.step(store, step, recorded)
    return recorded, first


@pytest.mark.slow
def test_the_enumeration_finds_a_journal_that_syncs_too_little(tmp_path: Path, io: DiskIO) -> None:
    whole, first = two_steps(tmp_path / "whole", io)
    syncs = [n for n, note in enumerate(whole.notes) if n >= first and isinstance(note, SyncFile | SyncNames)]
    # Of the decision: the data, the manifest, the directory.
    survived: list[int] = []
    for number in range(4):
        recorded, _ = two_steps(tmp_path / f"s{number}", io)
        del recorded.notes[syncs[number]]
        (tmp_path / str(number)).mkdir()
        try:
            survive_every_crash(recorded, Finder(EVEN, tmp_path / str(number), io), most_states=32)
        except (AssertionError, StoreError):
            continue
        survived.append(number)
    # The decision writes the file of gradients and record, the manifest and the directory, and nothing to the file of blocks.
    assert survived == [0], f"{[whole.notes[syncs[n]] for n in range(4)]}"


def test_the_enumeration_finds_blocks_that_do_not_wait_for_room(
    tmp_path: Path, io: DiskIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RegionState, "is_free", lambda self, number, moved=(): True)
    recorded, finder = RecordedDisk(tmp_path / "s"), Finder(EVEN, tmp_path, io)

    def step() -> None:
        with EVEN.begin(recorded, io) as store:
            EVEN.step(store, 1, recorded)
        survive_every_crash(recorded, finder, most_states=64)

    with pytest.raises((AssertionError, StoreError)):
        step()


# ---- kills, and replays that are killed


def open_again(recorded: RecordedDisk, io: DiskIO) -> CommittedStore:
    return CommittedStore.open(recorded.directory, io=io, operations=recorded)


@pytest.mark.parametrize("stride", STRIDES)
def test_a_power_cut_after_a_kill_at_any_call_and_a_replay(tmp_path: Path, io: DiskIO, stride: int) -> None:
    finder, call, starts, was_killed = Finder(EVEN, tmp_path, io), 0, set[int](), True
    while was_killed:
        recorded = RecordedDisk(tmp_path / f"s{call}")
        was_killed = kill_during_a_step(EVEN, recorded, EVEN.begin(recorded, io), 1, call)
        first = len(recorded.notes)
        with open_again(recorded, io) as store:
            start = EVEN.stands_at(store)
            starts.add(start)
            recorded.promise(start)
            EVEN.step(store, start // 2 + 1 if start % 2 == 0 else (start + 1) // 2, recorded)
        found = survive_every_crash(recorded, finder, from_note=first, most_states=32)
        # Zero and what follows: the power may fail again before the new start has made durable what it found.
        assert start in found and max(found) == start + (2 if start % 2 == 0 else 1)
        call += stride
    assert starts == {0, 1, 2} or stride > 1
    assert call >= 25, "gradients, a record, four moves and a seal"


def test_a_replay_may_be_killed_at_any_call_again_and_again(tmp_path: Path, io: DiskIO) -> None:
    finder, recorded = Finder(EVEN, tmp_path, io), RecordedDisk(tmp_path / "s")
    EVEN.begin(recorded, io).close()
    killed, stands = 0, 0
    while stands < 2:
        # Each start does one call more than the one before it did: at last one comes through.
        with open_again(recorded, io) as store:
            recorded.promise(EVEN.stands_at(store))
            killed += kill_during_a_step(EVEN, recorded, store, 1, killed)
        with EVEN.open(recorded.directory, io) as store:
            stands = EVEN.stands_at(store)
        assert finder.step(files_of(recorded.directory)) == stands
    assert killed > 10


# ---- calls that fail


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EINTR], ids=["ENOSPC", "EIO", "short"])
def test_any_call_of_a_step_may_fail_and_the_step_goes_on(tmp_path: Path, io: DiskIO, number: int, stride: int) -> None:
    finder, call, kinds, is_over = Finder(EVEN, tmp_path, io), 0, set[str](), False
    while not is_over:
        recorded = RecordedDisk(tmp_path / f"s{call}")
        store = EVEN.begin(recorded, io)
        first, failed = recorded.calls, list[str]()

        def fail(n: int, kind: str, at: int = first + call, failed: list[str] = failed) -> None:
            if n == at and (number != errno.EINTR or kind == "pwrite"):
                failed.append(kind)
                raise OSError(number, os.strerror(number))

        recorded.before = fail
        error = error_of(lambda store=store, recorded=recorded: EVEN.step(store, 1, recorded))
        is_over = first + call >= recorded.calls
        recorded.before = lambda n, kind: None
        if error is not None:
            assert failed and error.errno == number
            if "open again" not in str(error):
                EVEN.step(store, 1, recorded)
        store.close()
        with open_again(recorded, io) as store:
            stands = EVEN.stands_at(store)
            assert error is None or stands == 2 or "open again" in str(error)
            if stands < 2:
                EVEN.step(store, 1, recorded)
        assert finder.step(files_of(recorded.directory)) == 2
        kinds |= set(failed)
        call += stride
    wanted = {"pwrite"} if number == errno.EINTR else {"pwrite", "fsync", "open", "rename"}
    assert kinds == wanted if stride == 1 else kinds <= wanted and len(kinds) >= min(2, len(wanted))


# ---- what is refused, what is told


def test_what_a_step_under_way_needs_cannot_be_overwritten(tmp_path: Path, io: DiskIO) -> None:
    story = EVEN
    with story.begin(RecordedDisk(tmp_path / "s"), io) as store:
        journal = story.journal(store)
        assert journal.step is None and journal.pending == () and journal.turns() == []
        # With all blocks at one end, only the first can move, and what follows it lies under the first.
        for block in story.sizes:
            content = story.gradient(1, block)
            store.region(f"{block}/gradient").write(0, len(content), filled(content), slot="current").wait()
        journal.begin(1, {})
        assert journal.pending == tuple(story.sizes)
        assert journal.turns()[0] == ("a",)
        with pytest.raises(UsageError, match="cannot be written yet"):
            store.region("b/0").write(0, 512, filled(bytes(512)))
        with pytest.raises(UsageError, match="holds the committed step 1"):
            store.region("a/gradient").write(0, 64, filled(bytes(64)), slot="current")
        with pytest.raises(UsageError, match="holds the committed step 0"):
            store.region("frozen").write(0, 512, filled(bytes(512)), slot="current")
        with pytest.raises(UsageError, match="cannot be decided"):
            journal.begin(2, {})
        with pytest.raises(UsageError, match="are not to be updated"):
            journal.moved(["nobody"], {})
        with pytest.raises(UsageError, match="still needed"):
            journal.begin_step()
        with pytest.raises(StoreError, match="the record of a step takes"):
            journal.moved(["a"], {"text": "x" * 5000})
        assert "step 0, and step 1 is decided in the journal, 4 regions are still to be updated" in str(
            verified(store, tmp_path)
        )


def verified(store: CommittedStore, directory: Path) -> str:
    store.close()
    report = verify(directory / "s", operations=WithoutSyncs())
    assert report.is_whole
    return report.in_words()


def test_a_flipped_bit_of_a_gradient_or_the_record_is_found(tmp_path: Path, io: DiskIO) -> None:
    for name in ("c/gradient", RECORD):
        directory = tmp_path / name.replace("/", " ")
        store = EVEN.begin(RecordedDisk(directory), io)
        for block in EVEN.sizes:
            content = EVEN.gradient(1, block)
            store.region(f"{block}/gradient").write(0, len(content), filled(content), slot="current").wait()
        EVEN.journal(store).begin(1, EVEN.record(1, 0))
        state = store.disk._regions[name]
        place = state.places[state.committed]
        store.close()
        path = directory / f"homes-{place.file}.bin"
        content = bytearray(path.read_bytes())
        content[place.offset + 3] ^= 4
        path.write_bytes(content)
        with pytest.raises(StoreError, match=f"of block '{name}'"):
            EVEN.open(directory, io)


def test_a_manifest_whose_current_slots_overlap_is_refused(tmp_path: Path, io: DiskIO) -> None:
    from faults.test_committed_store import body_of, seal

    directory = tmp_path / "s"
    EVEN.begin(RecordedDisk(directory), io).close()
    body = body_of(directory)
    body["regions"]["b/0"]["current"] = 1  # where "a/0" is
    body["regions"]["b/0"]["slots"][1]["step"] = 0
    seal(directory, body, version=3)
    with pytest.raises(StoreError, match="two slots overlap"):
        EVEN.open(directory, io)
    body = body_of(directory)
    seal(directory, {key: value for key, value in body.items() if key != "scheme"}, version=2)
    with pytest.raises(StoreError, match="is damaged"):
        EVEN.open(directory, io)


def test_a_journal_takes_one_slot_and_the_room_of_the_largest_block(tmp_path: Path, io: DiskIO) -> None:
    with EVEN.begin(RecordedDisk(tmp_path / "s"), io) as store:
        blocks, gradients, record, others = 4 * 4096, 4 * 4096, 2 * 4096, 4096 + 2 * 4096
        assert store.disk.disk_bytes == blocks + 4096 + gradients + record + others
        with pytest.raises(UsageError, match='durability="step"'):
            CommittedStore.create(tmp_path / "t", EVEN.specs, identity={}, durability=2, units=[["a/0"]], io=io)
