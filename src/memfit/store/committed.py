"""A store that a run can be continued from: one commit a step, whole, with all that belongs to it.

In: regions with named tensors, written by their spare slots, and a small state. Out: after any
crash, the last committed step: tensors, step number, random numbers, settings, all of the same
instant, checked by checksums.

The life of a step: its new versions are written to spare slots; `end_step` lets reads see them;
when control comes back to memfit, and what a user does after a step (a scheduler, an average) is
done too, `commit` commits them with the state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from memfit.core.errors import UsageError, shown
from memfit.core.limits import KIB, MOST_BYTES, round_up
from memfit.core.process_state import ClosesAtExit
from memfit.store.checksums import PIECE_BYTES, memory_of_tensor
from memfit.store.disk_store import DiskStore, Vote, check_regions, check_same
from memfit.store.files import FileOperations, store_error
from memfit.store.io import DiskIO
from memfit.store.manifest import RegionSpec, check_step
from memfit.store.region import Region
from memfit.store.state import decode_state, encode_state
from memfit.store.verify import StoreReport, check_store

Durability = Literal["step", "exit"] | int
"""How often a step is committed.

- "step": when `commit` returns, the step survives a kill and a power cut.
- a number N: every N-th step does; a crash goes back to the last of them, at most N steps. Between
  them steps write over each other in the spare slots, without syncs.
- "exit": only the first version and what `close` is given do; a crash goes back to where the store
  was opened.
"""

State = Mapping[str, Any]


class CommittedStore(ClosesAtExit):
    """An open store with commits.

    Made by `create` or `open`; one at a time for a directory, over all processes.

    Disk: twice its regions, in whole blocks, and twice `state_bytes`, claimed at creation. Moved: a
    step writes what it changes, once; a commit adds the state, the manifest and four or more syncs
    (docs/store.md).

    Regions with one slot are room to work in: they belong to no commit and hold anything after a
    crash. Only in a store with a journal do commits make them whole (gradients of a decided step,
    and what does not train): [Note: journal] in `journal`.

    Attributes:
        durability: see `Durability`.
        disk: the regions' store: counters, `previous_owner_died`, `directory`.
    """

    def __init__(self, disk: DiskStore, durability: Durability) -> None:
        self.disk = disk
        self.durability = durability
        self._ended: int | None = None
        self._steps_since = 0

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        regions: Mapping[str, RegionSpec],
        *,
        identity: Mapping[str, str],
        durability: Durability = "step",
        state_bytes: int = 64 * KIB,
        piece_bytes: int = PIECE_BYTES,
        verify_visits: bool = False,
        units: Sequence[Sequence[str]] | None = None,
        io: DiskIO | None = None,
        operations: FileOperations | None = None,
    ) -> CommittedStore:
        """Makes a store, with all its disk space claimed: a disk that is too full is known now, not
        in hour 7.

        Regions with two slots hold zeros until they are written. Fill them by `Region.write(...,
        slot="current")`, then `end_step` and `commit`: that is the first commit, under every
        durability.

        Args:
            directory: made if it does not exist; its parent must.
            regions: what it shall hold, with its tensors.
            identity: text that tells whose it is (model, dtype, plan), to be compared at `open`.
            durability: how often a step is committed.
            state_bytes: room claimed for the small state, twice. A state that outgrows it claims
                more when it is written.
            piece_bytes: how many bytes a checksum covers.
            verify_visits: compare each visit with the checksums, see `Region.read`.
            units: makes a store with a journal, see `DiskStore.create`; then durability must be
                "step".
            io: threads to share with others.
            operations: the system calls.

        Raises:
            UsageError: a region, identity or setting that cannot be.
            StoreInUseError: a live job owns the directory.
            StoreError: no parent, no permission, no room, or a store is there already.
        """
        check_durability(durability)
        if units is not None:
            check_journaled(durability)
        if type(state_bytes) is not int or state_bytes < 0:
            raise UsageError(f"the room for the state is a number of bytes, not {state_bytes!r:.40}")
        disk = DiskStore.create(
            directory,
            regions,
            identity=identity,
            piece_bytes=piece_bytes,
            state_bytes=round_up(state_bytes, 4 * KIB),
            verifies=verify_visits,
            units=units,
            io=io,
            operations=operations,
        )
        return cls(disk, durability)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        regions: Mapping[str, RegionSpec] | None = None,
        identity: Mapping[str, str] | None = None,
        durability: Durability = "step",
        verify: bool = True,
        verify_visits: bool = False,
        reads_only: bool = False,
        io: DiskIO | None = None,
        operations: FileOperations | None = None,
    ) -> CommittedStore:
        """Opens a store at its last commit; what was written after it is gone.

        Args:
            directory: where it lies.
            regions: blocks and tensors that it must hold, no more and no fewer; any by default.
            identity: what must be found in it; keys that are not named are not compared.
            durability: how often a step is committed from now on.
            verify: read all that is committed and compare it with its checksums first.
            verify_visits: compare each visit too.
            reads_only: see `DiskStore.open`.
            io: threads to share with others.
            operations: the system calls.

        Raises:
            UsageError: a setting that cannot be.
            StoreInUseError: a live job owns it.
            StoreError: there is none, it was never committed, it is damaged (the message names
                file, block and tensor), of another format version, or of another model (the message
                lists the differences).
        """
        check_durability(durability)
        disk = DiskStore.open(
            directory,
            identity=identity,
            regions=regions,
            verifies=verify_visits,
            reads_only=reads_only,
            io=io,
            operations=operations,
        )
        try:
            _refuse_working_home(disk)
            if disk.scheme == "journal":
                check_journaled(durability)
            if verify:
                _refuse_damage(check_store(disk))
        except BaseException:
            disk.close()
            raise
        return cls(disk, durability)

    @property
    def committed_step(self) -> int | None:
        """Step that a crash now goes back to; None before the first commit."""
        return self.disk.step

    @property
    def step(self) -> int | None:
        """The step whose versions reads see."""
        return self.disk.step if self._ended is None else self._ended

    def check(self, regions: Mapping[str, RegionSpec], identity: Mapping[str, str]) -> None:
        """Refuses a store that holds something else than what is wanted, as `open` does with the
        same arguments.

        Raises:
            StoreError: lists the differences.
        """
        check_same(self.disk.identity, identity, self.disk.directory)
        check_regions(self.disk.regions, regions, self.disk.directory)

    def region(self, name: str) -> Region:
        """A block's region, to read and write.

        Raises `UsageError` if there is none of that name.
        """
        return self.disk.region(name)

    def read_state(self) -> dict[str, Any]:
        """The state of the committed step; empty if none was given.

        Raises:
            StoreError: it is damaged, or cannot be read.
        """
        content = self.disk.read_state()
        return {} if content is None else decode_state(content)

    def read_tensor(self, block: str, name: str) -> torch.Tensor:
        """A tensor as reads see it, in fresh memory, checked.

        Takes twice its bytes and 2 MiB: for looking, not for steps.

        Raises:
            UsageError: there is none of that name.
            StoreError: it is damaged, or cannot be read.
        """
        region = self.region(block)
        tensor = next((found for found in region.tensors if found.name == name), None)
        if tensor is None:
            raise UsageError(f"block {block!r} has no tensor {name!r:.200}")
        piece_bytes = self.disk.piece_bytes or 1
        start = tensor.offset - tensor.offset % piece_bytes
        end = min(region.nbytes, round_up(tensor.offset + tensor.nbytes, piece_bytes))
        held = torch.empty(end - start, dtype=torch.uint8)
        region.read(start, end - start, memory_of_tensor(held), verify=True).wait()
        found = held[tensor.offset - start :][: tensor.nbytes].clone()
        return found.view(tensor.torch_dtype).view(tensor.shape)

    def end_step(self, step: int, flips: Iterable[str] = ()) -> None:
        """Lets reads see the new versions of a step. It is not committed before `commit`.

        Args:
            step: its number; any, so that training can go back to an earlier one.
            flips: blocks whose spare slot holds a new version, whole.

        Raises:
            UsageError: a bad step, an unknown block, or one whose next version is not whole.
            StoreError: a write failed; reads see what they saw, and the writes can be repeated.
        """
        check_step(step)
        self.disk.advance(flips)
        self._ended = step
        self._steps_since += 1

    def advance(self, flips: Iterable[str]) -> None:
        """Lets reads see versions that were written between two steps: they belong to the step that
        ended last.

        Args:
            flips: as `end_step`.

        Raises:
            UsageError: as `end_step`, or no step has ended yet.
            StoreError: as `end_step`.
        """
        if self.step is None:
            raise UsageError("nothing was committed yet: until then blocks are filled in place")
        self.disk.advance(flips)
        self._ended = self.step

    def commit(
        self,
        state: State | Callable[[], State],
        *,
        flips: Iterable[str] = (),
        force: bool = False,
        vote: Vote | None = None,
    ) -> bool:
        """Commits the ended step with its state, if the durability asks for it.

        See [Note: commit] in `disk_store`.

        Args:
            state: what belongs to the step beside tensors; see `encode_state`. A function is called
                only if it is needed.
            flips: further blocks of the step whose spare slot holds their new version, whole.
            force: commit in any case, and also the same step again with another state.
            vote: see `DiskStore.commit`.

        Returns:
            True if a commit was made.

        Raises:
            UnsupportedError: the state holds what cannot be kept.
            StoreError: the disk; unless the message says otherwise the step committed before is
                whole and current, what was written is kept, and committing can be repeated.
        """
        if not force and not self.is_due:
            return False
        step = self.step
        if step is None:
            raise UsageError("nothing was written yet: call `end_step` first")
        self.disk.commit(step, flips, state=encode_state(state() if callable(state) else state), vote=vote)
        self._ended = None
        self._steps_since = 0
        return True

    @property
    def has_uncommitted(self) -> bool:
        """A step has ended, or was written to since, that is not committed yet."""
        return self._ended is not None

    @property
    def is_due(self) -> bool:
        """The durability asks for a commit of the ended step."""
        if self._ended is None:
            return False
        if self.disk.step is None or self.durability == "step":
            return True
        return isinstance(self.durability, int) and self._steps_since >= self.durability

    def roll_back(self) -> int | None:
        """Goes back to the last commit, after a step that failed or is to be made again.

        Returns:
            The step that reads see now.

        Raises:
            StoreError: the store is closed or must be opened again.
        """
        self.disk.roll_back()
        self._ended = None
        self._steps_since = 0
        return self.disk.step

    def close(self, state: State | Callable[[], State] | None = None) -> None:
        """Ends the transfers under way, closes the files and gives the directory back.

        Repeating it does nothing.

        Args:
            state: commit the ended step with it first. Without it, steps since the last commit are
                gone, as after a crash.

        Raises:
            StoreError: the commit failed; the store is closed even so.
        """
        try:
            if state is not None and self._ended is not None:
                self.commit(state, force=True)
        finally:
            self._ended = None
            self.disk.close()


def check_durability(durability: object) -> None:
    """Raises `UsageError` if the durability is invalid."""
    is_number = type(durability) is int and 1 <= durability <= MOST_BYTES
    if durability not in ("step", "exit") and not is_number:
        raise UsageError(f'durability is "step", "exit" or a number of steps from 1, not {shown(durability)}')


def check_journaled(durability: object) -> None:
    """Refuses a durability that a store with a journal cannot have. Raises `UsageError`."""
    if durability != "step":
        raise UsageError(
            f'a store with a journal has durability="step", not {durability!r:.80}: each step overwrites the one before, so each must be durable before the next'
        )


def _refuse_working_home(disk: DiskStore) -> None:
    if disk.piece_bytes is None:
        raise store_error(
            f"the store at {disk.directory} keeps no checksums: it was a working home, not one to continue from"
        )
    if disk.step is None:
        raise store_error(
            f"the store at {disk.directory} was made and never committed, so there is nothing to continue from: "
            "remove the directory and start again"
        )


def _refuse_damage(report: StoreReport) -> None:
    if not report.is_whole:
        raise store_error(report.in_words())
