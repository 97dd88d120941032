"""The directory of a run on several ranks: a store for each, committed together.

In: a directory that all ranks reach. Out: after any crash, the last step that every rank has, for
the same number of ranks or another.

[Note: stores of ranks]
    RUN/ranks.json             {"format": "memfit-ranks", "version": 1, "ranks": 2, "set": 3}
    RUN/set-3/rank-0/          a store (`store`), of what rank 0 has at home
    RUN/set-3/rank-1/

A step is committed when every rank has it (`store.publish`, [Note: commit of several stores]). What
a rank has depends on the plan and on the number of ranks. Where either has changed, the job reads
the elements that it needs out of the old set, whoever had them, and writes a new set; the first
commit of all ranks and then one renaming of `ranks.json` make that the run, and the old one goes.
Sets that `ranks.json` does not name are what a crash left. Random numbers, registered objects and
buffers are a rank's own: of n ranks' states, rank r goes on with number r modulo n.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from memfit.checkpoints.rank_layout import Shares, TensorShare, read_shares, write_shares
from memfit.checkpoints.run_state import part
from memfit.checkpoints.run_store import COPY_BYTES, RANKS_NAME, Commits, ResumedCommit, RunStore
from memfit.core.documents import parse_json
from memfit.core.errors import MemfitError, StoreError, UsageError
from memfit.core.layout import Scheme
from memfit.distributed.agreement import agree, optional_texts
from memfit.distributed.rank_group import RankGroup
from memfit.homes import ByteHome
from memfit.store import CommittedStore, DiskStore, Durability, FileOperations, RegionSpec
from memfit.store.committed import State, check_durability
from memfit.store.directory import is_there
from memfit.store.disk_store import check_same
from memfit.store.file_operations import sync_directory, write_small_file
from memfit.store.lock import DirectoryLock
from memfit.store.manifest import MANIFEST_NAME
from memfit.store.memory_ranges import memory_of_storage
from memfit.store.os_errors import explain, store_error
from memfit.store.publish import finish_commits
from memfit.tensors.trees import new_storage

RANKS_IDENTITY = {"memfit run of ranks": "1"}
_STATE_BYTES = 256 << 10
_FORMAT = "memfit-ranks"
_MOST_RANKS = 1 << 16
_CALL = "a commit"


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
        self.set_number = 0
        self.step_before: int | None = None
        self.shares: Shares = {}
        self.shapes: Mapping[str, tuple[int, ...]] = {}
        try:
            record = self._begin(must_exist=must_exist) if ranks.rank == 0 else None
            text = next((text for text in optional_texts(ranks, record) if text is not None), "")
            if text:
                self.set_number, count = read_record(text, self.directory / RANKS_NAME)
                self.state = self._resumed.open([self.path(self.set_number, rank) for rank in range(count)])
        except BaseException:
            self.close()
            raise
        self.is_resumed = bool(text)

    # --- opening

    def _begin(self, *, must_exist: bool) -> str:
        """Takes the directory on rank 0. Returns what says which set is the run; empty if none."""
        path, operations = self.directory, self._operations
        if is_there(path / MANIFEST_NAME):
            raise store_error(
                f"the run in {path} is one of a single process: choose another directory, or give files that job.save wrote to resume="
            )
        if not path.parent.is_dir():
            raise store_error(
                f"the directory {str(path)!r} cannot be made: its parent {str(path.parent)!r} does not exist; make it, or name another"
            )
        if must_exist and not is_there(path / RANKS_NAME):
            raise store_error(f"there is no run of several ranks at {path}: it has no {RANKS_NAME}; check the path")
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise explain(error, doing="make the directory of the run", path=path) from error
        self._lock = DirectoryLock(path, operations=operations)
        try:
            text = (path / RANKS_NAME).read_text(encoding="utf-8") if is_there(path / RANKS_NAME) else ""
            number, count = read_record(text, path / RANKS_NAME) if text else (0, 0)
            for old in path.glob("set-*"):
                if old.name != f"set-{number}":
                    shutil.rmtree(old)  # a crash left it: it was never the run
        except OSError as error:
            raise explain(error, doing="open the run of several ranks", path=path) from error
        if text:
            finish_commits([self.path(number, rank) for rank in range(count)], operations=operations)
        return text

    def path(self, number: int, rank: int) -> Path:
        """Returns the directory of a rank's store in a set."""
        return rank_store_path(self.directory, number, rank)

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
        ranks, whose = self._ranks, RANKS_IDENTITY | dict(identity)
        is_same = self._resumed.has_same(regions, whose)
        if all(same for (same, *_) in agree(ranks, "the stores of the run", values=[float(is_same)])):
            self._resumed.close()
            # All have closed them: a store that somebody reads cannot be opened to be written.
            agree(ranks, "the run's own stores")
            self._committed = CommittedStore.open(
                self.path(self.set_number, ranks.rank), durability=self.durability, verify=False, io=self.io
            )
            return
        self.set_number += 1
        self._resumed.index()
        if ranks.rank == 0:
            (self.directory / f"set-{self.set_number}").mkdir()
        agree(ranks, "a new set of stores")
        self._committed = CommittedStore.create(
            self.path(self.set_number, ranks.rank),
            regions,
            identity=whose,
            durability=self.durability,
            state_bytes=_STATE_BYTES,
            io=self.io,
        )

    def go_back(self) -> None:
        """See `RunStore.go_back`: all ranks, whose next plan may cut the homes elsewhere."""
        self.step_before = self.commits.last_step
        self.committed.close()
        self._committed = None
        # A store that is open to be written can be read by nobody else.
        agree(self._ranks, "the run's last commit")
        stores = [self.path(self.set_number, rank) for rank in range(self._ranks.size)]
        self.state = self._resumed.open(stores)
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

    def open(self, directories: Sequence[Path]) -> dict[str, Any]:
        """Opens the stores, to be read. Returns the small state that this rank goes on with.

        Raises:
            StoreError: one is missing, damaged, or of another step.
        """
        self._states.clear()
        for rank, directory in enumerate(directories):
            store = CommittedStore.open(
                directory,
                identity=RANKS_IDENTITY,
                durability=self.run.durability,
                # Each store is read through once, by one of the ranks.
                verify=rank % self._ranks.size == self._ranks.rank,
                reads_only=True,
                io=self.run.io,
            )
            self._stores.append(store)
            self._states.append(store.read_state())
        steps = {part(state, "step", int) for state in self._states}
        if len(steps) > 1:
            raise store_error(
                f"the ranks of the run in {self.run.directory} are at different steps, {sorted(steps)}: restore all of them from one copy"
            )
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
        return len(self._stores) == self._ranks.size and self._stores[self._ranks.rank].disk.regions == regions

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

    @property
    def last_step(self) -> int | None:
        """See `Commits.last_step`: while a new set is filled, that of the one before."""
        return self._own.step_before if self._own.is_new else self.run.committed.committed_step

    def any(self, flag: bool) -> bool:  # noqa: FBT001, a vote
        """See `Commits.any`."""
        return any(said for (said, *_) in agree(self._ranks, _CALL, values=[float(flag)]))

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
        ranks, directory, number = self._ranks, self.run.directory, self._own.set_number
        # All are committed: from here on the name alone decides.
        agree(ranks, "the first commit of the run's stores")
        self._own.resumed.close()
        if ranks.rank == 0:
            _write_record(directory, number, ranks.size)
        agree(ranks, "the run's name")
        if ranks.rank == 0:
            shutil.rmtree(directory / f"set-{number - 1}", ignore_errors=True)

    def state(self) -> dict[str, Any]:
        """See `Commits.state`."""
        shapes = {name: list(shape) for name, shape in self._own.shapes.items()}
        return {"shares": write_shares(self._own.shares), "shapes": shapes}


def rank_store_path(directory: Path, number: int, rank: int) -> Path:
    """Returns the directory of a rank's store in a set of a run."""
    return directory / f"set-{number}" / f"rank-{rank}"


def find_rank_stores(directory: Path) -> list[Path]:
    """Returns the directories of the stores that are the run on several ranks.

    Raises:
        StoreError: the record of the run cannot be read, or is damaged.
    """
    path = directory / RANKS_NAME
    try:
        number, count = read_record(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise explain(error, doing="open the run of several ranks", path=directory) from error
    return [rank_store_path(directory, number, rank) for rank in range(count)]


def remove_rank_stores(directory: Path) -> None:
    """Removes the stores of a run on several ranks, and what names them.

    Raises:
        StoreInUseError: a live job has it.
        StoreError: it is no such run, or cannot be removed.
    """
    operations = FileOperations()
    with ExitStack() as stack:
        lock = DirectoryLock(directory, operations=operations)
        stack.callback(lock.release, remove=True)
        for path in find_rank_stores(directory):
            stack.enter_context(DiskStore.open(path, identity=RANKS_IDENTITY, durable=False))
        try:
            # First of all: without it the sets are what a crash left.
            operations.unlink(directory / RANKS_NAME)
        except OSError as error:
            raise explain(error, doing="remove the run's name", path=directory) from error
        for old in directory.glob("set-*"):
            try:
                shutil.rmtree(old)
            except OSError as error:
                raise explain(error, doing="remove the stores of ranks", path=old) from error


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


def _write_record(directory: Path, number: int, ranks: int) -> None:
    """Names the set that is the run from now on, durably."""
    operations, fresh = FileOperations(), directory / f"{RANKS_NAME}.new"
    content = json.dumps({"format": _FORMAT, "version": 1, "ranks": ranks, "set": number}).encode()
    try:
        write_small_file(fresh, content, operations=operations, durable=True)
        operations.rename(fresh, directory / RANKS_NAME)
        sync_directory(directory, operations=operations)
    except OSError as error:
        raise explain(error, doing="name the run's stores", path=fresh) from error


def read_record(text: str, path: Path) -> tuple[int, int]:
    """Returns the number of the set that is the run, and the number of its ranks.

    Raises:
        StoreError: the record is damaged.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise store_error(f"{path} is damaged: it is not JSON ({str(error)[:200]})") from error
    record: dict[str, Any] = found if isinstance(found, dict) else {}
    number, count = record.get("set"), record.get("ranks")
    if record.get("format") != _FORMAT or record.get("version") != 1:
        raise store_error(f"{path} is not the record of a run on several ranks, or of another version of memfit")
    if type(number) is not int or type(count) is not int or number < 1 or not 1 <= count <= _MOST_RANKS:
        raise store_error(f"{path} is damaged: it names set {number!r:.40} of {count!r:.40} ranks")
    return number, count
