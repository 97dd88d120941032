"""A small run on a store with a journal, whose every update can be told again: new bytes follow from the old ones and a gradient."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from faults.crash_disk import Files, RecordedDisk, put_back
from faults.crash_story import IDENTITY, PIECE_BYTES, WithoutSyncs, filled
from memfit.store import CommittedStore, DiskIO, FileOperations, RegionSpec, aligned_memory
from memfit.store.journal import RECORD, Journal, record_region

RECORD_BYTES = 2048


@cache
def updated(old: bytes, gradient: bytes) -> bytes:
    """An update: nobody can make it without the old bytes, and making it twice shows."""
    return hashlib.shake_128(old + gradient).digest(len(old))


@dataclass(frozen=True)
class JournalStory:
    """Blocks, each with the bytes of its regions, and its gradient's. `apart` names blocks that have two rooms of their own."""

    sizes: Mapping[str, tuple[int, ...]]
    gradient_bytes: int = 600
    apart: tuple[str, ...] = ()

    def regions(self, block: str) -> dict[str, int]:
        return {f"{block}/{number}": nbytes for number, nbytes in enumerate(self.sizes[block])}

    @property
    def blocks(self) -> dict[str, list[str]]:
        return {block: list(self.regions(block)) for block in self.sizes}

    @property
    def specs(self) -> dict[str, RegionSpec]:
        specs = {
            name: RegionSpec(nbytes=nbytes, slots=2, tag="weight")
            for block in self.sizes
            for name, nbytes in self.regions(block).items()
        }
        specs |= {f"{block}/gradient": RegionSpec(nbytes=self.gradient_bytes, tag="gradient") for block in self.sizes}
        specs["frozen"] = RegionSpec(nbytes=900, tag="weight")
        specs["buffers"] = RegionSpec(nbytes=200, slots=2, tag="buffer")
        return {**specs, RECORD: record_region(RECORD_BYTES)}

    @property
    def gradients(self) -> list[str]:
        return [f"{block}/gradient" for block in self.sizes]

    def gradient(self, step: int, block: str) -> bytes:
        return random.Random(f"{step} {block}").randbytes(self.gradient_bytes)

    def content(self, step: int, block: str, region: str) -> bytes:
        """A region's bytes as they are after a step."""
        content = random.Random(region).randbytes(self.regions(block)[region])
        for number in range(1, step + 1):
            content = updated(content, self.gradient(number, block))
        return content

    def other(self, step: int, name: str) -> bytes:
        return random.Random(f"{name} {step if name == 'buffers' else ''}").randbytes(self.specs[name].nbytes)

    def record(self, step: int, done: int) -> dict[str, Any]:
        return {"step": step, "scale": 0.1 * step, "done": done}

    def state(self, step: int) -> dict[str, Any]:
        return {"step": step, "text": "x" * (10, 900, 0)[step % 3]}

    # ---- the run

    def begin(self, disk: RecordedDisk, io: DiskIO | None = None) -> CommittedStore:
        """Makes the store and commits step 0."""
        store = CommittedStore.create(
            disk.directory,
            self.specs,
            identity=IDENTITY,
            state_bytes=512,
            piece_bytes=PIECE_BYTES,
            units=[regions for block, regions in self.blocks.items() if block not in self.apart],
            io=io,
            operations=disk,
        )
        for block, regions in self.blocks.items():
            for name in regions:
                content = self.content(0, block, name)
                store.region(name).write(0, len(content), filled(content), slot="current").wait()
        for name in ("frozen", "buffers"):
            store.region(name).write(0, self.specs[name].nbytes, filled(self.other(0, name)), slot="current").wait()
        store.end_step(0)
        disk.attempt(0)
        store.commit(self.state(0))
        disk.promise(0)
        return store

    def stands_at(self, store: CommittedStore) -> int:
        """As `step_found` counts."""
        sealed, decided = store.step, self.journal(store).step
        assert sealed is not None
        return 2 * sealed if decided is None else 2 * decided - 1

    def journal(self, store: CommittedStore) -> Journal:
        return Journal(store.disk, self.blocks, self.gradients)

    def step(self, store: CommittedStore, step: int, disk: RecordedDisk | None = None) -> None:
        """A whole step: gradients, their commit, the updates, and the seal. One that is under way is finished."""
        journal, marks = self.journal(store), disk
        if journal.step is None:
            journal.begin_step()
            for block in self.blocks:
                content = self.gradient(step, block)
                region = store.region(f"{block}/gradient")
                middle = len(content) // 3
                for start, end in ((0, middle), (middle, len(content))) if middle else ((0, len(content)),):
                    region.write(start, end - start, filled(content[start:end]), slot="current").wait()
            buffers = self.other(step, "buffers")
            store.region("buffers").write(0, len(buffers), filled(buffers)).wait()
            _mark(marks, 2 * step - 1, lambda: journal.begin(step, self.record(step, 0), ["buffers"]))
        self.update(store, journal)
        store.end_step(step)
        _mark(marks, 2 * step, lambda: store.commit(self.state(step)))

    def update(self, store: CommittedStore, journal: Journal) -> int:
        """What a step that is decided still needs; how many blocks that were."""
        step, done = journal.step, len(self.sizes) - len(journal.pending)
        assert step is not None
        made = 0
        turns = journal.turns()
        while journal.pending:
            blocks = turns.pop(0)
            assert journal.turns()[0] == blocks, "the order that was told before anything moved"
            for block in blocks:
                gradient = _read(store, f"{block}/gradient")
                assert gradient == self.gradient(step, block), "the gradients of a step under way are whole"
                for name in self.blocks[block]:
                    content = updated(_read(store, name), gradient)
                    store.region(name).write(0, len(content), filled(content)).wait()
                done, made = done + 1, made + 1
            journal.moved(blocks, self.record(step, done))
        assert turns == []
        return made

    # ---- what a crash left

    def step_found(self, files: Files, directory: Path, io: DiskIO) -> int:
        """Opens, replays and checks all; twice the step that is sealed, or one less than twice the one that was decided."""
        put_back(files, directory)
        with self.open(directory, io) as store:
            journal = self.journal(store)
            sealed, decided = store.step, journal.step
            assert sealed is not None
            assert store.read_state() == self.state(sealed)
            if decided is not None:
                done = len(self.sizes) - len(journal.pending)
                assert journal.read() == self.record(decided, done), "the record has the counters of what has moved"
                self.update(store, journal)
                assert not journal.pending
                assert journal.read() == self.record(decided, len(self.sizes))
            self.check(store, sealed if decided is None else decided)
            return self.stands_at(store)

    def open(
        self, directory: Path, io: DiskIO | None = None, operations: FileOperations | None = None
    ) -> CommittedStore:
        return CommittedStore.open(
            directory, regions=self.specs, identity=IDENTITY, io=io, operations=operations or WithoutSyncs()
        )

    def check(self, store: CommittedStore, step: int) -> None:
        """Every byte is that of the step."""
        for block, regions in self.blocks.items():
            for name in regions:
                assert _read(store, name) == self.content(step, block, name), f"{name} is not that of step {step}"
        for name in ("frozen", "buffers"):
            assert _read(store, name) == self.other(step, name), f"{name} is not that of step {step}"


def _read(store: CommittedStore, name: str) -> bytes:
    region = store.region(name)
    memory = aligned_memory(region.nbytes)
    region.read(0, region.nbytes, memory, verify=True).wait()
    return bytes(memory.view())


def _mark(disk: RecordedDisk | None, number: int, act: Callable[[], object]) -> None:
    if disk is not None:
        disk.attempt(number)
    act()
    if disk is not None:
        disk.promise(number)


SMALL = JournalStory(sizes={"a": (4096 + 700, 300), "b": (200,), "c": (5000,)}, apart=("b",))
"""Three blocks, of which one moves apart from the others; the spare room takes the largest only."""
EVEN = JournalStory(sizes={"a": (300,), "b": (4000,), "c": (200,), "d": (4096,)}, gradient_bytes=64)
"""Blocks of one page each, so that every one must wait for the one before."""
