"""Stores with a journal of any shape: blocks of many sizes, in one room or apart, and power cuts anywhere in their steps."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from faults.crash_disk import Disk, RecordedDisk, some_crash_states
from faults.journal_story import JournalStory
from memfit.store import DiskIO

LENGTHS = (1, 300, 4095, 4096, 4097, 9000)


def drawn_story(chance: random.Random) -> JournalStory:
    names = [f"h.{n}" for n in range(chance.randint(1, 6))]
    sizes = {name: tuple(chance.choice(LENGTHS) for _ in range(chance.randint(1, 3))) for name in names}
    apart = tuple(name for name in names if chance.random() < 0.25)
    return JournalStory(sizes=sizes, gradient_bytes=chance.choice((1, 700, 5000)), apart=apart)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, (1 << 63) - 1))
def test_any_store_with_a_journal_is_finished_after_a_power_cut_anywhere(seed: int) -> None:
    chance = random.Random(seed)
    story = drawn_story(chance)
    with (
        tempfile.TemporaryDirectory() as name,
        DiskIO(read_threads=1, write_threads=1, staging_bytes=64 << 10) as io,
    ):
        place = Path(name)
        recorded = RecordedDisk(place / "s")
        with story.begin(recorded, io) as store:
            for step in (1, 2, 3):
                story.step(store, step, recorded)
                story.check(store, step)
        chosen = set(chance.sample(range(len(recorded.notes)), 10))
        disk = Disk()
        for number, note in enumerate(recorded.notes):
            disk.take(note)
            if number not in chosen or disk.promised is None:
                continue
            for count, files in enumerate(some_crash_states(disk, chance, 1)):
                found = story.step_found(files, place / f"crash-{number}-{count}", io)
                assert found in disk.allowed, f"after note {number}, {note!r:.200}: {found} and not {disk.allowed}"
