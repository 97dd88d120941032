"""A store: one directory that holds regions and always has the last committed step, whole.

In: a directory, regions with sizes. Out: regions to read and write, and commits that make new
versions current all at once.

Disk: each slot of each region, in whole blocks, claimed at creation, so that a full disk is known
then and not in the middle of a run.

The order of a commit, and what each of its failures means, is [Note: commit] below.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from memfit.core.errors import PeerError, StoreError, UsageError
from memfit.core.layout import Scheme
from memfit.core.process_state import ClosesAtExit
from memfit.store.directory import create_files, files_of, is_there, open_files, read_manifest_file, remove_files
from memfit.store.files import FileHandle, FileOperations, explain, store_error, sync_directory, write_small_file
from memfit.store.io import DiskIO
from memfit.store.lock import DirectoryLock
from memfit.store.manifest import (
    MANIFEST_NAME,
    NEW_MANIFEST_NAME,
    PREPARED_MANIFEST_NAME,
    Manifest,
    RegionEntry,
    RegionSpec,
    check_identity,
    check_piece_bytes,
    check_room_for_sums,
    check_step,
    differences,
    in_words,
    lay_out,
    lay_out_moving,
    write_manifest,
)
from memfit.store.region import Region
from memfit.store.region_table import JournalNote, RegionTable, check_in_place, complete_sums, next_manifest
from memfit.store.state import read_state, write_state

# The instants of a commit: what is made durable, in which order, and what is known when a call of
# it fails.
#
# In: files that were written, and a manifest. Out: a directory whose manifest is the new one,
# durable.
#
# [Note: commit]
# New versions are written into spare slots while the current ones stay. A commit
#
# 1. waits for the writes, and sums what of the spare slots has no checksum yet;
# 2. writes the small state to the one of its two files that is not current;
# 3. calls `fdatasync` on the data files and on that file of the state: only now may anything point
# at
#    what they hold;
# 4. writes the new manifest beside the old one and calls `fsync` on it;
# 5. renames it over the old one: the one instant at which all regions and the state change;
# 6. calls `fsync` on the directory: only now is the step promised, and only now may the old slots
# be
#    overwritten.
#
# A crash before (5) leaves the old step; between (5) and (6) either, both whole; after (6) the new
# one. A killed process loses nothing that it has handed to the system, so after a kill the new
# manifest may be seen that a later power cut would still take back: whoever opens a store repeats 3
# to 6 before the first write, with the manifest that was found. It is written again, not only
# synced, because the sync that failed may have been an earlier owner's: see below.
#
# When a call fails, what is true afterwards decides. Before (5) the old step is current and the
# commit may be repeated, unless a sync of data failed: the kernel then forgets what it could not
# write, and a second sync would succeed and prove nothing. If (5) fails with an error that leaves
# open whether it happened, or (6) fails, nobody can say which of the two manifests a power cut
# would leave; neither version may be overwritten. In both cases the store can only be read, and
# asks to be opened again.
#
# [Note: commit of several stores]
# Ranks that train together have a store each, and a step is committed when all of them have it. So
# between (4) and (5) the new manifest gets a name of its own, durably: the store is *prepared*.
# Then the ranks vote. If all are prepared, each does (5) and (6) by itself; if one could not, none
# does. A rank that is lost in the vote, or behind it, leaves others that may have done (5): whoever
# opens the set next does it for those that are prepared, if all others are, or have done it
# (`finish_commits`). A prepared version lies in the spare slots, which nobody writes before that.

Vote = Callable[[], str | None]
"""Tells the other ranks that this one's store is prepared. Returns None when all are, or why one
could not; raises where nobody knows."""

_NOTHING_WAS_DONE = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
)
"""Errors of a rename that say that it did not happen. Others, such as EIO, leave it open."""


class DoubtError(StoreError):
    """A commit failed so that the store must not be written before it is opened again.

    `doubt` says why, in a sentence.
    """

    def __init__(self, message: str, doubt: str = "") -> None:
        super().__init__(message)
        self.doubt = doubt


class PeerDoubtError(PeerError):
    """Another rank was lost while a commit was voted on: `doubt` says what that means for the
    store.
    """

    doubt = ""


def sync_files(handles: Iterable[FileHandle], *, step: int | None) -> None:
    """Waits until the data of files is durable.

    Args:
        handles: the files.
        step: the committed one, for the message.

    Raises:
        DoubtError: one could not be synced.
    """
    for handle in handles:
        try:
            handle.sync_data()
        except OSError as error:
            raise _doubt(
                error,
                doing=f"make data durable (step {step}, committed before, is whole; open again)",
                path=handle.path,
                doubt="the disk lost data that was written since the last commit",
            ) from error


def publish(
    directory: Path,
    content: bytes,
    *,
    step: int | None,
    operations: FileOperations,
    durable: bool,
    vote: Vote | None = None,
) -> None:
    """Puts a manifest in the place of the one before.

    Args:
        directory: of the store.
        content: the manifest.
        step: its step, for messages.
        operations: the system calls.
        durable: waits for stable storage.
        vote: of the ranks that commit together; see [Note: commit of several stores].

    Raises:
        DoubtError: it may or may not be the durable one.
        StoreError: the one before is whole and current, and this may be repeated.
        PeerError: the same, because another rank could not commit.
    """
    target, fresh = directory / MANIFEST_NAME, directory / NEW_MANIFEST_NAME
    doing = f"write the manifest of step {step} (the step before is whole and current)"
    try:
        write_small_file(fresh, content, operations=operations, durable=durable)
        if vote is not None:
            prepared = directory / PREPARED_MANIFEST_NAME
            operations.rename(fresh, prepared)
            fresh = prepared
            # Durable before the vote: others may do what cannot be taken back.
            sync_directory(directory, operations=operations)
    except OSError as error:
        raise explain(error, doing=doing, path=target) from error
    doubt = f"step {step} may or may not have become durable"
    if vote is not None:
        try:
            refusal = vote()
        except BaseException as error:
            raise _unknown(error, doubt) from error
        if refusal is not None:
            try:
                operations.unlink(fresh)
                sync_directory(directory, operations=operations)
            except OSError as error:
                raise explain(error, doing="take the prepared step back", path=fresh) from error
            raise PeerError(refusal)
    unsure = f"make step {step} durable (both steps are whole; open again)"
    try:
        operations.rename(fresh, target)
    except OSError as error:
        if error.errno in _NOTHING_WAS_DONE and vote is None:
            raise explain(error, doing=doing, path=target) from error
        raise _doubt(error, doing=unsure, path=target, doubt=doubt) from error
    if durable:
        try:
            sync_directory(directory, operations=operations)
        except OSError as error:
            raise _doubt(error, doing=unsure, path=directory, doubt=doubt) from error


CheckIdentity = Callable[[Mapping[str, str], int, Path], None]
"""Refuses a store whose identity is not that of a rank, by its number."""


def common_commit(
    directories: Sequence[Path], check: CheckIdentity, *, operations: FileOperations
) -> tuple[list[int], int]:
    """Returns the generation of each rank's manifest, and that of the last commit that all have, or
    are prepared for. Changes nothing.

    Args:
        directories: of the stores, by rank.
        check: of their identities.
        operations: the system calls.

    Raises:
        StoreError: one is missing, damaged or another's, or they are of different commits.
    """
    found: list[int] = []
    reached: list[int] = []
    for rank, directory in enumerate(directories):
        names = [MANIFEST_NAME]
        if is_there(directory / PREPARED_MANIFEST_NAME):
            names.append(PREPARED_MANIFEST_NAME)
        manifests = [read_manifest_file(directory, operations=operations, name=name) for name in names]
        for manifest in manifests:
            check(manifest.identity, rank, directory)
        found.append(manifests[0].generation)
        reached.append(max(manifest.generation for manifest in manifests))
    goal = min(reached)
    for directory, committed in zip(directories, found, strict=True):
        if committed > goal or committed < goal - 1:
            raise store_error(
                f"the stores of ranks beside {directory} are of different commits ({committed} and {goal}): one was replaced or restored alone; "
                "restore all of them from one copy"
            )
    return found, goal


def finish_commits(directories: Sequence[Path], check: CheckIdentity, *, operations: FileOperations) -> None:
    """Brings the stores of ranks to the last commit that all of them have, or are prepared for. See
    [Note: commit of several stores].

    Args:
        directories: of the stores, by rank.
        check: of their identities.
        operations: the system calls.

    Raises:
        StoreInUseError: a live job has one of them.
        StoreError: one is missing, damaged or another's.
    """
    with ExitStack() as stack:
        for directory in directories:
            stack.callback(DirectoryLock(directory, operations=operations).release)
        found, goal = common_commit(directories, check, operations=operations)
        for directory, committed in zip(directories, found, strict=True):
            fresh = directory / PREPARED_MANIFEST_NAME
            try:
                if committed < goal:
                    operations.rename(fresh, directory / MANIFEST_NAME)
                else:
                    with suppress(FileNotFoundError):
                        operations.unlink(fresh)
                sync_directory(directory, operations=operations)
            except OSError as error:
                raise explain(error, doing="finish the last commit of the ranks", path=fresh) from error


def _unknown(cause: BaseException, doubt: str) -> BaseException:
    """Returns an error of a vote whose outcome is not known here, as one of doubt."""
    if isinstance(cause, PeerError):
        error = PeerDoubtError(str(cause))
        error.doubt = doubt
        return error
    return DoubtError(f"the ranks' vote on a commit failed: {cause}", doubt)


def make_durable(
    directory: Path, handles: Iterable[FileHandle], manifest: Manifest, *, operations: FileOperations
) -> None:
    """Makes durable what an opened store was found to hold, before anything of it is overwritten.

    See [Note: commit].

    Args:
        directory: of the store.
        handles: its files, the small state's too.
        manifest: what was read; it is written again, unchanged.
        operations: the system calls.

    Raises:
        StoreError: the disk refuses; what was committed is whole, and opening may be tried again.
    """
    sync_files(handles, step=manifest.step)
    publish(directory, write_manifest(manifest), step=manifest.step, operations=operations, durable=True)


def _doubt(cause: OSError, *, doing: str, path: Path, doubt: str) -> DoubtError:
    said = explain(cause, doing=doing, path=path)
    error = DoubtError(str(said), doubt)
    error.errno = said.errno
    return error


class DiskStore(ClosesAtExit):
    """An open store. Made by `create` or `open`; one at a time for a directory, over all processes.

    Dropping it without `close` frees the lock and the files and loses what was not committed.

    Attributes:
        directory: where it lies.
        identity: whose it is, as given at creation.
        io: the threads that move its bytes.
        previous_owner_died: the lock file showed that the owner before did not close the store.
    """

    def __init__(
        self,
        *,
        directory: Path,
        manifest: Manifest,
        handles: tuple[FileHandle, ...],
        lock: DirectoryLock,
        io: DiskIO | None,
        durable: bool,
        made_directory: bool,
        operations: FileOperations,
        verifies: bool = False,
        is_new: bool = False,
        reads_only: bool = False,
    ) -> None:
        self.directory = directory
        self.identity = dict(manifest.identity)
        self.previous_owner_died = lock.dead_owner is not None
        self.io = DiskIO() if io is None else io
        self._owns_io = io is None
        self._manifest = manifest
        self._handles = handles[: len(manifest.file_bytes)]
        self._state_handles = handles[len(manifest.file_bytes) :]
        self._directory_lock = lock
        self._durable = durable
        self._made_directory = made_directory
        self._operations = operations
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._is_closed = False
        self._in_doubt: str | None = "it was opened to be looked at" if reads_only else None
        self._texts: dict[str, tuple[RegionEntry, str]] = {}
        self._verifies = verifies
        self._regions = RegionTable(manifest, is_new=is_new)

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        regions: Mapping[str, RegionSpec],
        *,
        identity: Mapping[str, str],
        durable: bool = True,
        piece_bytes: int | None = None,
        state_bytes: int | None = None,
        verifies: bool = False,
        units: Sequence[Sequence[str]] | None = None,
        io: DiskIO | None = None,
        operations: FileOperations | None = None,
    ) -> DiskStore:
        """Makes a store, with all its disk space claimed.

        Args:
            directory: made if it does not exist; its parent must. It may hold other files, but no
                store.
            regions: what it shall hold.
            identity: text to find again at `open`.
            durable: wait for stable storage at each commit. Without it a crash of the process is
                survived, a power cut is not: right for a temporary home.
            piece_bytes: keep a checksum for each so many bytes of regions with two slots, a
                multiple of 4096 (1 MiB is `PIECE_BYTES`); none by default. Costs 8 bytes of
                manifest a piece, and the summing of all that is written.
            state_bytes: claim two files of this length for a small state beside the regions; none
                by default.
            verifies: check each visit by default, see `Region.read`.
            units: makes a store with a journal: names of regions with two slots that move together,
                through one spare room for all of them, see [Note: journal]. None: every region has
                its rooms for itself.
            io: threads to share with others; else the store has its own and ends them.
            operations: the system calls.

        Raises:
            UsageError: a region or identity that cannot be.
            StoreInUseError: a live job owns the directory.
            StoreError: no parent, no permission, no room, or a store is there already.
        """
        used = FileOperations() if operations is None else operations
        where = Path(directory).absolute()
        check_identity(identity)
        check_piece_bytes(piece_bytes)
        layout = lay_out(regions) if units is None else lay_out_moving(regions, units)
        manifest = Manifest(
            identity=dict(identity),
            file_bytes=layout.file_bytes,
            regions={
                name: RegionEntry(spec=spec, places=layout.places[name], steps=(None,) * spec.slots, current=0)
                for name, spec in regions.items()
            },
            generation=0,
            step=None,
            piece_bytes=piece_bytes,
            has_state_files=state_bytes is not None,
            scheme="generations" if units is None else "journal",
        )
        content = write_manifest(manifest)
        check_room_for_sums(content, manifest)
        made_directory, lock, handles = create_files(
            where, files_of(manifest, state_bytes or 0), content, durable=durable, operations=used
        )
        return cls(
            directory=where,
            manifest=manifest,
            handles=handles,
            lock=lock,
            io=io,
            durable=durable,
            made_directory=made_directory,
            operations=used,
            verifies=verifies,
            is_new=True,
        )

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        identity: Mapping[str, str] | None = None,
        regions: Mapping[str, RegionSpec] | None = None,
        durable: bool = True,
        verifies: bool = False,
        reads_only: bool = False,
        io: DiskIO | None = None,
        operations: FileOperations | None = None,
    ) -> DiskStore:
        """Opens a store at its last commit.

        Arguments as `create`; what was written after that commit is gone.

        Args:
            directory: where it lies.
            identity: what must be found in it; keys that are not named are not compared.
            regions: the regions, with their tensors, that it must hold, no more and no fewer; any
                by default.
            durable: as in `create`. What is found is made durable first, see [Note: commit].
            verifies: as in `create`.
            reads_only: to be looked at, by others too: nothing is written, not even what makes
                durable what is found.
            io: as in `create`.
            operations: as in `create`.

        Raises:
            StoreInUseError: a live job owns it.
            StoreError: there is none, it is damaged, of another format version, another's, or holds
                something else.
        """
        used = FileOperations() if operations is None else operations
        where = Path(directory).absolute()
        if not where.is_dir():
            raise store_error(
                f"there is no store at {where}: no such directory; check the path, or create one", errno.ENOENT
            )
        lock = DirectoryLock(where, operations=used, reads_only=reads_only)
        try:
            manifest = read_manifest_file(where, operations=used)
            check_same(manifest.identity, identity or {}, where)
            if regions is not None:
                check_regions({name: entry.spec for name, entry in manifest.regions.items()}, regions, where)
            handles = open_files(where, manifest, operations=used, reads_only=reads_only)
            if durable and not reads_only:
                try:
                    make_durable(where, handles, manifest, operations=used)
                except StoreError:
                    for handle in handles:
                        handle.close()
                    raise
        except BaseException:
            lock.release()
            raise
        return cls(
            directory=where,
            manifest=manifest,
            handles=handles,
            lock=lock,
            io=io,
            durable=durable,
            made_directory=False,
            operations=used,
            verifies=verifies,
            reads_only=reads_only,
        )

    @property
    def step(self) -> int | None:
        """The committed step; None before the first commit."""
        return self._manifest.step

    @property
    def scheme(self) -> Scheme:
        """How it keeps a whole step at every instant."""
        return self._manifest.scheme

    def is_free(self, name: str, moved: Collection[str] = ()) -> bool:
        """The next version of a region with two slots may be written: no committed version lies
        there.

        Args:
            name: of the region.
            moved: asked as if the next versions of these were committed.
        """
        with self._lock:
            return self._regions.is_free(name, moved)

    def shares_room(self, name: str) -> bool:
        """Slots of other regions overlap those of this one."""
        with self._lock:
            return any(self._regions[name].under)

    @property
    def generation(self) -> int:
        """Number of commits since creation."""
        return self._manifest.generation

    @property
    def disk_bytes(self) -> int:
        """Disk that the data files take; the small state, a few KiB, aside."""
        return sum(self._manifest.file_bytes)

    @property
    def piece_bytes(self) -> int | None:
        """How many bytes a checksum covers; None without checksums."""
        return self._manifest.piece_bytes

    @property
    def regions(self) -> Mapping[str, RegionSpec]:
        """Specifications of the regions by name."""
        return {name: state.spec for name, state in self._regions.items()}

    def region(self, name: str) -> Region:
        """A region, to read and write.

        Raises:
            UsageError: there is none of that name.
        """
        return Region(
            name=name,
            state=self._regions[name],
            handles=self._handles,
            io=self.io,
            lock=self._lock,
            check_usable=self._check_usable,
            verifies=self._verifies,
        )

    def read_state(self) -> bytes | None:
        """The small state of the committed step; None if it has none.

        Raises:
            StoreError: it is damaged, or cannot be read.
        """
        with self._lock:
            self._check_usable(is_write=False)
            entry = self._manifest.state
            return None if entry is None else read_state(self._state_handles, entry)

    def advance(self, flips: Iterable[str]) -> None:
        """Lets reads see the spare slots of regions, which stay uncommitted: a crash goes back to
        the last commit.

        Further versions are written over them, in place, until `commit` makes them current or
        `roll_back` gives them up. Costs no transfer and no sync.

        Args:
            flips: regions whose next version is written.

        Raises:
            UsageError: as `commit`.
            StoreError: a write failed, or the store is closed or in doubt. Reads see what they saw.
        """
        with self._lock:
            self._check_usable(is_write=True)
            for state in self._regions.ready(flips).values():
                state.current = state.spare

    def roll_back(self) -> None:
        """Goes back to the last commit: reads see it, and what was written since is no version.

        Raises:
            StoreError: the store is closed or in doubt.
        """
        with self._lock:
            self._check_usable(is_write=True)
            self._regions.roll_back()

    def commit(
        self,
        step: int,
        flips: Iterable[str] = (),
        *,
        state: bytes | None = None,
        journal: JournalNote | None = None,
        vote: Vote | None = None,
    ) -> None:
        """Makes the spare slots of regions current, all at once, as a step. See [Note: commit].

        Waits for all writes under way. Regions that have advanced are among those that flip. Slots
        written in place belong to the step too, without protection.

        Args:
            step: number of the step; any, so that training can go back to an earlier one.
            flips: regions whose next version is written.
            state: the small state of the step, in a store that has files for it.
            journal: says about a step under way what belongs into the manifest; then the small
                state stays, and `step` must be the store's.
            vote: of the ranks whose stores commit together; see [Note: commit of several stores].

        Raises:
            UsageError: a bad step, an unknown or repeated region, one without a spare slot, one
                whose spare slot is not whole, or a state where there is no room for one.
            StoreError: a write failed, or the commit itself. Unless the message says otherwise the
                step before is whole and current, what was written is kept, and the commit can be
                repeated when the cause is gone.
        """
        check_step(step)
        if journal is not None and (self.scheme != "journal" or step != self.step or state is not None):
            raise UsageError("only a store with a journal notes a step under way, and its own step and state stay then")
        if state is not None and not self._manifest.has_state_files:
            raise UsageError("this store keeps no state beside its regions: create it with `state_bytes`")
        with self._lock:
            self._check_usable(is_write=True)
            flipped = self._regions.ready(flips, with_advanced=True)
            if self.scheme == "journal":
                # reads too: what lies under a version that moved may be written next
                self._regions.end_transfers()
            check_in_place(self._regions)
            self._directory_lock.check_held()
            filled = self._regions.filled(journal, is_first=self.step is None)
            try:
                entry = None if journal is None else self._manifest.state
                if state is not None:
                    entry = write_state(self._state_handles, state, current=self._manifest.state)
                complete_sums(self._regions, flipped, filled, self._handles, self.io)
                manifest = next_manifest(
                    self._manifest,
                    self._regions,
                    step=step,
                    flipped=flipped,
                    filled=filled,
                    state=entry,
                    journal=journal,
                )
                content = write_manifest(manifest, self._texts)
                if self._durable:
                    written = () if entry is None or state is None else (self._state_handles[entry.file],)
                    sync_files((*self._handles, *written), step=self._manifest.step)
                publish(
                    self.directory,
                    content,
                    step=step,
                    operations=self._operations,
                    durable=self._durable,
                    vote=vote,
                )
            except (DoubtError, PeerDoubtError) as error:
                self._in_doubt = error.doubt
                raise
            self._manifest = manifest
            self._regions.adopt(manifest, flipped)

    def forget_writes(self, names: Iterable[str]) -> None:
        """Drops what was written to uncommitted regions with one slot: writes that failed are not
        asked for any more.

        Raises:
            UsageError: there is none of that name, or it is committed.
        """
        with self._lock:
            self._regions.forget_writes(names)

    def close(self, *, delete: bool = False) -> None:
        """Ends the transfers under way, closes the files and gives the directory back.

        Repeating it does nothing.

        What was not committed is lost, as after a crash; failures stay in their transfers.

        Args:
            delete: also remove the store's files, and the directory if `create` made it and nothing
                else is in it.

        Raises:
            StoreError: something could not be removed. The store is closed even so.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if os.getpid() != self._pid:
                # A forked data loader that cleans up: its threads and files are copies, the store
                # is the parent's.
                self._let_go()
                return
            self._regions.end_transfers()
            if self._owns_io:
                self.io.close()
            try:
                if delete:
                    names = files_of(self._manifest)
                    remove_files(self.directory, names, durable=self._durable, operations=self._operations)
            except StoreError:
                self._let_go()
                raise
            self._let_go(remove_lock=delete)
            if delete and self._made_directory:
                try:
                    self._operations.rmdir(self.directory)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                        raise explain(error, doing="remove the directory", path=self.directory) from error

    def _let_go(self, *, remove_lock: bool = False) -> None:
        for handle in (*self._handles, *self._state_handles):
            handle.close()
        self._directory_lock.release(remove=remove_lock)

    def _check_usable(self, *, is_write: bool) -> None:
        if self._is_closed:
            raise store_error(f"the store at {self.directory} is closed: open it again")
        if is_write and self._in_doubt is not None:
            raise store_error(f"the store at {self.directory} can only be read: {self._in_doubt}; open it again")


def check_same(found: Mapping[str, str], wanted: Mapping[str, str], directory: Path) -> None:
    """Refuses an identity that differs in a wanted key. Raises `StoreError`."""
    lines = [
        f"its {key!r} is {found.get(key)!r:.200}, not {value!r:.200}"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if lines:
        raise store_error(f"the store at {directory} is another's: {in_words(lines)}; choose another directory")


def check_regions(found: Mapping[str, RegionSpec], wanted: Mapping[str, RegionSpec], directory: Path) -> None:
    """Refuses regions that are not those wanted. Raises `StoreError`, with the differences."""
    lines = differences(wanted, found)
    if lines:
        raise store_error(
            f"the store at {directory} holds another model, or another plan's blocks: {in_words(lines)}; "
            "choose another directory, or the model that it was made with"
        )
