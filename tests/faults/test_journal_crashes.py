"""A store with a journal: power cuts, kills and failing calls at every operation of a step and of its replay."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.crash_disk import PowerCutError, RecordedDisk, SyncFile, SyncNames
from faults.crash_story import WithoutSyncs, filled
from faults.journal_story import EVEN, SMALL, JournalStory
from faults.test_store_crashes import Finder, survive_every_crash
from memfit.core.errors import StoreError, UsageError
from memfit.runtime.store import DiskIO, verify
from memfit.runtime.store.journal import Journal

STORIES = {"small": SMALL, "even": EVEN}


@pytest.fixture(name="io", scope="module")
def make_io() -> Iterator[DiskIO]:
    with DiskIO(read_threads=1, write_threads=1, staging_bytes=64 << 10) as io:
        yield io


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_power_cut_after_any_operation_leaves_a_step_that_is_finished_bit_for_bit(
    tmp_path: Path, io: DiskIO, story: JournalStory
) -> None:
    recorded, finder = RecordedDisk(tmp_path / "s"), Finder(story, tmp_path, io)
    with story.begin(recorded, io) as store:
        for step in (1, 2):
            story.step(store, step, recorded)
        story.check(store, 2)
    assert survive_every_crash(recorded, finder) == {0, 1, 2, 3, 4}
    assert finder.states > 1000, "the enumeration has become small"
