"""A small run on a committed store, whose every step can be told again: what must be found after a crash is computed, not
remembered."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from faults.crash_disk import Files, RecordedDisk, put_back
from memfit.store import (
    CommittedStore,
    DiskIO,
    Durability,
    FileOperations,
    Memory,
    RegionSpec,
    TensorPlace,
    aligned_memory,
)

PIECE_BYTES = 4096
IDENTITY = {"model": "small", "dtype": "float32"}


class WithoutSyncs(FileOperations):
    """Through the cache and without syncs, which cost milliseconds: for looking at what a crash left."""

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        return super().open(path, flags & ~os.O_DIRECT, mode)

    def fdatasync(self, descriptor: int) -> None:
        pass

    def fsync(self, descriptor: int) -> None:
        pass


@dataclass(frozen=True)
class Story:
    """Which blocks there are, and which of them each step changes."""

    sizes: Mapping[str, int]
    """Bytes of each block."""
    changes: Callable[[int], list[str]]
    """Of a step, the blocks with a new version."""
    cuts: Callable[[int, int], list[int]] = lambda step, nbytes: [0, nbytes]
    """Of a step and a block's length, where its writes begin and end."""

    @property
    def specs(self) -> dict[str, RegionSpec]:
        return {
            name: RegionSpec(
                nbytes=nbytes,
                slots=2,
                tag="weight",
                tensors=(TensorPlace(name=f"{name}.w", dtype="uint8", shape=(nbytes,), offset=0),),
            )
            for name, nbytes in self.sizes.items()
        }

    def content(self, step: int, name: str) -> bytes:
        """A block's bytes as they are after a step."""
        while step and name not in self.changes(step):
            step -= 1
        return random.Random(f"{step} {name}").randbytes(self.sizes[name])

    def state(self, step: int) -> dict[str, Any]:
        # Of many lengths, so that files grow, and a longer state is followed by a shorter one.
        length = (10, 5000, 0, 900)[step % 4]
        return {"step": step, "rng": torch.full((length,), step % 251, dtype=torch.uint8), "lr": 0.1 / (step + 1)}

    def create(self, operations: FileOperations, directory: Path, **settings: Any) -> CommittedStore:
        return CommittedStore.create(
            directory,
            self.specs,
            identity=IDENTITY,
            state_bytes=512,
            piece_bytes=PIECE_BYTES,
            operations=operations,
            **settings,
        )

    def begin(self, disk: RecordedDisk, **settings: Any) -> CommittedStore:
        """Makes the store and commits step 0."""
        store = self.create(disk, disk.directory, **settings)
        for name, nbytes in self.sizes.items():
            store.region(name).write(0, nbytes, filled(self.content(0, name)), slot="current")
        store.end_step(0)
        disk.attempt(0)
        store.commit(self.state(0))
        disk.promise(0)
        return store

    def write(self, store: CommittedStore, step: int) -> None:
        """The new versions of a step, in parts, written to their end."""
        transfers = []
        for name in self.changes(step):
            content = self.content(step, name)
            cuts = self.cuts(step, len(content))
            for start, end in itertools.pairwise(cuts):
                transfers.append(store.region(name).write(start, end - start, filled(content[start:end])))
        for transfer in transfers:
            transfer.wait()

    def step(self, store: CommittedStore, step: int, disk: RecordedDisk | None = None) -> bool:
        """A whole step; True if it was committed."""
        self.write(store, step)
        store.end_step(step, self.changes(step))
        return self.commit(store, step, disk)

    def commit(self, store: CommittedStore, step: int, disk: RecordedDisk | None = None) -> bool:
        """Commits if it is due, and notes it."""

        def state() -> dict[str, Any]:
            if disk is not None:
                disk.attempt(step)
            return self.state(step)

        is_committed = store.commit(state)
        if is_committed and disk is not None:
            disk.promise(step)
        return is_committed

    def check(self, store: CommittedStore) -> int:
        """Compares all that a store holds with the truth of its step; the step."""
        step = store.step
        assert step is not None
        found = store.read_state()
        truth = self.state(step)
        assert (found["step"], found["lr"]) == (truth["step"], truth["lr"])
        assert torch.equal(found["rng"], truth["rng"])
        for name, nbytes in self.sizes.items():
            memory = aligned_memory(nbytes)
            store.region(name).read(0, nbytes, memory).wait()
            assert bytes(memory.view()) == self.content(step, name), f"block {name} is not that of step {step}"
        return step

    def open(self, directory: Path, io: DiskIO | None = None, durability: Durability = "step") -> CommittedStore:
        return CommittedStore.open(
            directory,
            regions=self.specs,
            identity=IDENTITY,
            durability=durability,
            io=io,
            operations=WithoutSyncs(),
        )

    def step_found(self, files: Files, directory: Path, io: DiskIO) -> int:
        """What a store of these files opens at, with all of it checked."""
        put_back(files, directory)
        with self.open(directory, io) as store:
            return self.check(store)


def filled(content: bytes) -> Memory:
    memory = aligned_memory(len(content))
    memory.view()[:] = content
    return memory


TWO_BLOCKS = Story(
    sizes={"h.0/weight": 4096 + 700, "h.0/state": 300},
    changes=lambda step: ["h.0/weight", "h.0/state"] if step % 2 else ["h.0/weight"],
)
"""Small enough for every subset of what a crash may lose."""

KILLED = Story(
    sizes={"h.0/weight": 3_000_001, "h.1/weight": 70_000, "h.1/state": 200_000},
    changes=lambda step: ["h.0/weight", "h.1/state"] if step % 3 else ["h.1/weight", "h.1/state"],
    cuts=lambda step, nbytes: [0, nbytes // 3 + step % 5, nbytes // 2, nbytes],
)
"""Large enough to be killed in the middle of a write."""
