"""The directory of a run on several ranks: a store for each, committed together.

In: a directory that all ranks reach. Out: after any crash, the last step that every rank has, for
the same number of ranks or another.

[Note: stores of ranks]
    RUN/ranks.json             names the run and its set, see `rank_record`, [Note: whose stores]
    RUN/set-3/rank-0/          a store (`store`), of what rank 0 has at home
    RUN/set-3/rank-1/

A step is committed when every rank has it (`store.disk_store`, [Note: commit of several stores]).
All ranks note the same drawn number in it, by which stores of two copies of a run are told apart.
What a rank has depends on the plan and on the number of ranks. Where either has changed, the job
reads the elements that it needs out of the old set, whoever had them, and writes a new set; the
first commit of all ranks and then one renaming of `ranks.json` make that the run, and the old one
goes. Look first, then remove: the named set was opened by all ranks before another one goes. Random
numbers, registered objects and buffers are a rank's own: of n ranks' states, rank r goes on with
number r modulo n.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from memfit.core.errors import MemfitError, StoreError, StoreInUseError, UsageError
from memfit.core.layout import Scheme
from memfit.homes import ByteHome
from memfit.mesh.agreement import agree, optional_texts
from memfit.mesh.rank_group import RankGroup
from memfit.runs.rank_record import (
    RANKS_IDENTITY,
    RANKS_NAME,
    RankRecord,
    Shares,
    TensorShare,
    find_record,
    next_number,
    parse_record,
    rank_store_path,
    read_shares,
    remove_set,
    sweep_sets,
    write_shares,
)
from memfit.runs.run_state import part
from memfit.runs.run_store import COPY_BYTES, Commits, ResumedCommit, RunStore
from memfit.store import CommittedStore, Durability, FileOperations, RegionSpec
from memfit.store.checksums import memory_of_storage
from memfit.store.committed import State, check_durability
from memfit.store.directory import is_there
from memfit.store.disk_store import check_same, finish_commits
from memfit.store.files import explain, store_error
from memfit.store.lock import DirectoryLock
from memfit.store.manifest import MANIFEST_NAME
from memfit.tensors.trees import new_storage

_STATE_BYTES = 256 << 10
_CALL = "a commit"
_DRAWN_BITS = 52
"""Bits of a drawn number that travels as a float."""


class RankRunStore(RunStore):
    """This rank's store in the directory of a run on several ranks. Collective: all ranks make it,
    and what it says is collective. See [Note: stores of ranks].

    Memory: as `RunStore`; while a new set is filled, two buffers of 4 MiB.

    Args:
        ranks: that train together.
        directory: the same one on all ranks; its parent exists.
        durability: see `RunStore`.
        must_exist: a directory without a run is refused.
        scheme: "generations", or None.

    Raises:
        StoreInUseError: a live job has it.
        StoreError: it is damaged, or has a run of one process.
        UsageError: not a durability, or a journal.
    """

    def __init__(
        self,
        ranks: RankGroup,
        directory: str | Path,
        *,
        durability: Durability,
        must_exist: bool,
        scheme: Scheme | None = None,
    ) -> None:
        check_durability(durability)
        if scheme == "journal":
            raise UsageError('scheme="journal" is for one process: ranks keep two slots ("generations")')
        self._set_up(directory, durability, None)
        self._ranks = ranks
        self._operations = FileOperations()
        self._lock: DirectoryLock | None = None
        self._resumed = RankResumed(self, ranks)
        self.resumed, self.commits = self._resumed, RankCommits(self, ranks)
        # Compared with each rank's store, and with the new set.
        self.record = self._next = RankRecord(number=0, ranks=ranks.size, run="")
        self.step_before: int | None = None
        self.shares: Shares = {}
        self.shapes: Mapping[str, tuple[int, ...]] = {}
        try:
            self.record = self._first_rank_says(lambda: self._begin(must_exist=must_exist))
            if self.record.number:
                self.state = self._resumed.open(self.record)
                agree(ranks, "the run's stores")
                if ranks.rank == 0:
                    sweep_sets(self.directory, self.record)
        except BaseException:
            self.close()
            raise
        self.is_resumed = bool(self.record.number)

    # --- opening

    def _first_rank_says(self, find: Callable[[], RankRecord]) -> RankRecord:
        """Returns the record that rank 0 finds, on all ranks."""
        text = optional_texts(self._ranks, find().text() if self._ranks.rank == 0 else None)[0]
        assert text is not None, "rank 0 tells its own"
        return parse_record(text)

    def _begin(self, *, must_exist: bool) -> RankRecord:
        """Takes the directory on rank 0. Returns the run's record, which may name no set yet."""
        path, operations = self.directory, self._operations
        if is_there(path / MANIFEST_NAME):
            raise store_error(
                f"the run in {path} is one of a single process: choose another directory, or give files that job.save wrote to resume="
            )
        if not path.parent.is_dir():
            raise store_error(
                f"the directory {str(path)!r} cannot be made: its parent {str(path.parent)!r} does not exist; make it, or name another"
            )
        record = find_record(path)
        if must_exist and (record is None or not record.number):
            raise store_error(f"there is no run of several ranks at {path}: {RANKS_NAME} names none; check the path")
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise explain(error, doing="make the directory of the run", path=path) from error
        self._lock = DirectoryLock(path, operations=operations)
        # Nobody else changes it from here on.
        record = find_record(path) or RankRecord(number=0, ranks=self._ranks.size, run=secrets.token_hex(16))
        if record.number:
            finish_commits(record.paths(path), record.check, operations=operations)
        else:
            sweep_sets(path, record)
        return record

    def take_shares(self, shares: Shares, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Takes what this rank's regions hold, before `prepare`.

        Args:
            shares: by region.
            shapes: of the weights, by name.
        """
        self.shares, self.shapes = shares, dict(shapes)

    def prepare(
        self, regions: Mapping[str, RegionSpec], identity: Mapping[str, str], units: Sequence[Sequence[str]] = ()
    ) -> None:
        """See `RunStore.prepare`. Where this rank has something else at home than before, a new set
        is made.
        """
        assert not units, "ranks keep no journal"
        self._regions = dict(regions)
        ranks, whose = self._ranks, {**RANKS_IDENTITY, **identity}
        is_same = self._resumed.has_same(regions, whose)
        if all(same for (same, *_) in agree(ranks, "the stores of the run", values=[float(is_same)])):
            self._resumed.close()
            # All have closed them: a store that somebody reads cannot be opened to be written.
            agree(ranks, "the run's own stores")
            self._committed = CommittedStore.open(
                rank_store_path(self.directory, self.record.number, ranks.rank),
                durability=self.durability,
                verify=False,
                io=self.io,
            )
            return
        self._resumed.index()
        self._next = self._first_rank_says(self._make_set)
        mine = {key: value for key, value in self._next.identity(ranks.rank).items() if value is not None}
        self._committed = CommittedStore.create(
            rank_store_path(self.directory, self._next.number, ranks.rank),
            regions,
            identity={**identity, **mine},
            durability=self.durability,
            state_bytes=_STATE_BYTES,
            io=self.io,
        )

    def _make_set(self) -> RankRecord:
        """Makes the folder of a new set on rank 0. Returns the record that will name it."""
        if not self.record.number:
            # Before there is a set: one that is committed and has no record is one that lost it.
            self.record.write(self.directory)
        number, run = next_number(self.directory), self.record.run or secrets.token_hex(16)
        path = self.directory / f"set-{number}"
        try:
            path.mkdir()
        except OSError as error:
            raise explain(error, doing="make the folder of a new set of stores", path=path) from error
        return RankRecord(number=number, ranks=self._ranks.size, run=run)

    def name_next(self) -> None:
        """Makes the new set the run, and removes the one before; collective."""
        ranks, before = self._ranks, self.record
        self.record = self._next
        # All are committed: from here on the name alone decides.
        agree(ranks, "the first commit of the run's stores")
        self._resumed.close()
        if ranks.rank == 0:
            self.record.write(self.directory)
        agree(ranks, "the run's name")
        if ranks.rank == 0 and before.number:
            with suppress(StoreInUseError):  # somebody reads it: the next opening removes it
                remove_set(self.directory / f"set-{before.number}")

    def go_back(self) -> None:
        """See `RunStore.go_back`: all ranks, whose next plan may cut the homes elsewhere."""
        self.step_before = self.commits.last_step
        self.committed.close()
        self._committed = None
        # A store that is open to be written can be read by nobody else.
        agree(self._ranks, "the run's last commit")
        self.state = self._resumed.open(self.record)
        self.is_resumed = True

    @property
    def is_new(self) -> bool:
        """See `RunStore.is_new`."""
        return self._committed is None or self._committed.committed_step is None

    def close(self) -> None:
        """See `RunStore.close`."""
        try:
            self._resumed.close()
            super().close()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None


class RankResumed(ResumedCommit):
    """The stores of all ranks that a run goes on from, which may be others than now.

    Args:
        run: this rank's store.
        ranks: that train together now.
    """

    def __init__(self, run: RankRunStore, ranks: RankGroup) -> None:
        super().__init__(run)
        self._own = run
        self._ranks = ranks
        self._stores: list[CommittedStore] = []
        self._states: list[dict[str, Any]] = []  # of the stores; they stay when these are closed
        self._found: Mapping[tuple[str, str], Sequence[tuple[int, TensorShare]]] = {}

    def open(self, record: RankRecord) -> dict[str, Any]:
        """Opens the stores of a set, to be read. Returns the small state that this rank goes on
        with.

        Raises:
            StoreError: one is missing, damaged, another's, or of another commit.
        """
        self._states.clear()
        for rank, directory in enumerate(record.paths(self.run.directory)):
            store = CommittedStore.open(
                directory,
                durability=self.run.durability,
                # Each store is read through once, by one of the ranks.
                verify=rank % self._ranks.size == self._ranks.rank,
                reads_only=True,
                io=self.run.io,
            )
            self._stores.append(store)
            record.check(store.disk.identity, rank, directory)
            self._states.append(store.read_state())
        check_one_commit(self._states, self.run.directory)
        return self._states[self._like]

    @property
    def _like(self) -> int:
        """The rank of then whose own things this rank goes on with."""
        return self._ranks.rank % len(self._states)

    def has_same(self, regions: Mapping[str, RegionSpec], whose: Mapping[str, str]) -> bool:
        """Tells whether this rank's store of then can be gone on with as it is.

        Raises:
            StoreError: the run is of another model or optimizer.
        """
        if not self._stores:
            return False
        check_same(self._stores[0].disk.identity, whose, self.run.directory)
        if len(self._stores) != self._ranks.size or not self._own.record.run:
            return False
        return self._stores[self._ranks.rank].disk.regions == regions

    def index(self) -> None:
        """Notes which elements lie where, before homes are filled."""
        found: dict[tuple[str, str], list[tuple[int, TensorShare]]] = defaultdict(list)
        # What several ranks have is read from the store whose state this rank goes on with.
        for rank in sorted(range(len(self._states)), key=lambda rank: (rank != self._like, rank)):
            for region, shares in read_shares(self._states[rank].get("shares")).items():
                for share in shares:
                    found[region, share.name].append((rank, share))
        self._found = found

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `ResumedCommit.weight_shapes`."""
        return {name: tuple(shape) for name, shape in part(self.run.state, "shapes", dict).items()}

    @property
    def numbers(self) -> Any:
        """See `ResumedCommit.numbers`: each parameter's from a rank that updated it."""
        return merged_numbers(self._states)

    def fill(self, region: str, home: ByteHome) -> None:
        """See `ResumedCommit.fill`. Into a new set exactly the elements are read that this rank has
        at home.
        """
        if not self.run.is_new:
            super().fill(region, home)
            return
        for share in self._own.shares.get(region, ()):
            at = share.first
            while at < share.last:
                rank, source = self._source(region, share.name, at)
                # In pieces of whole records of any format.
                last = min(share.last, source.last, at + COPY_BYTES // 4)
                begin, nbytes = source.span(at, last)
                staged = new_storage(nbytes)
                self._stores[rank].region(region).read(begin, nbytes, memory_of_storage(staged)).wait()
                home.write(share.span(at, last)[0], nbytes, staged).wait()
                at = last

    def _source(self, region: str, name: str, element: int) -> tuple[int, TensorShare]:
        for rank, share in self._found.get((region, name), ()):
            if share.first <= element < share.last:
                return rank, share
        raise store_error(
            f"the run in {self.run.directory} has no element {element} of {name!r:.200} in {region!r:.200}: it is damaged, or of other blocks"
        )

    def read_tensor(self, region: str, name: str) -> torch.Tensor:
        """See `ResumedCommit.read_tensor`."""
        if not self.run.is_new:
            return super().read_tensor(region, name)
        return self._stores[self._like].read_tensor(region, name)

    def close(self) -> None:
        """See `ResumedCommit.close`."""
        while self._stores:
            self._stores.pop().close()


class RankCommits(Commits):
    """Commits of all ranks together.

    Args:
        run: this rank's store.
        ranks: that train together.
    """

    def __init__(self, run: RankRunStore, ranks: RankGroup) -> None:
        super().__init__(run)
        self._own = run
        self._ranks = ranks
        self._has_voted = False
        self._drawn = 0

    @property
    def last_step(self) -> int | None:
        """See `Commits.last_step`: while a new set is filled, that of the one before."""
        return self._own.step_before if self._own.is_new else self.run.committed.committed_step

    def any(self, flag: bool) -> bool:  # noqa: FBT001, a vote
        """See `Commits.any`. Rank 0 draws the number of the commit that may come."""
        found = agree(self._ranks, _CALL, values=[float(flag), float(secrets.randbits(_DRAWN_BITS))])
        self._drawn = int(found[0][1])
        return any(said for said, *_ in found)

    @contextmanager
    def committing(self) -> Iterator[None]:
        """See `Commits.committing`: what fails on this rank before the vote is told in it."""
        self._has_voted = False
        try:
            yield
        except BaseException as error:
            if not self._has_voted and self._ranks.failure is None:
                agree(self._ranks, _CALL, problem=f"{type(error).__name__}: {error}")
            raise

    def commit(self, state: Callable[[], State], flips: Sequence[str]) -> None:
        """See `Commits.commit`: on all ranks or on none."""
        self.run.committed.commit(state, flips=flips, force=True, vote=self._vote)

    def _vote(self) -> str | None:
        self._has_voted = True
        try:
            agree(self._ranks, _CALL)
        except MemfitError as error:
            if self._ranks.failure is not None:
                raise  # whether the others have heard of all is not known
            return str(error)
        return None

    def note_first(self) -> None:
        """See `Commits.note_first`: the new set becomes the run, and the old one goes."""
        self._own.name_next()

    def state(self) -> dict[str, Any]:
        """See `Commits.state`."""
        shapes = {name: list(shape) for name, shape in self._own.shapes.items()}
        # A new set begins with the commit that it was made from.
        drawn = self._drawn or self.run.state.get("commit", 0)
        return {"shares": write_shares(self._own.shares), "shapes": shapes, "commit": drawn}


def check_one_commit(states: Sequence[Mapping[str, Any]], directory: Path) -> None:
    """Refuses stores of ranks that are not of one commit. Raises `StoreError`."""
    found = {(part(state, "step", int), state.get("commit")) for state in states}
    if len(found) > 1:
        raise store_error(
            f"the ranks of the run in {directory} are at different commits, of steps {sorted({step for step, _ in found})}: where a commit was interrupted, "
            "let the program go on with the run once, which finishes it; else restore all stores from one copy"
        )


def merged_numbers(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the counters of all parameters, each from the first rank that updated it.

    Raises:
        StoreError: a rank's state has none.
    """
    found: dict[str, Any] = {}
    for state in states:
        own = part(state, "optimizer", dict).get("numbers")
        if not isinstance(own, dict):
            raise StoreError("the state of the step has no counters of the optimizer: it is damaged")
        found = {**own, **found}
    return found
