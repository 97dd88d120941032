"""A store: one directory that holds regions and always has the last committed step, whole.

In: a directory, regions with sizes. Out: regions to read and write, and commits that make new versions current all at
once.

Disk: each slot of each region, in whole blocks, claimed at creation, so that a full disk is known then and not in the
middle of a run.

[Note: commit]
New versions are written into spare slots while the current ones stay. A commit (1) waits for the writes, (2) has the
data files synced, (3) writes a new manifest beside the old one and syncs it, (4) renames it over the old one, which is
the one instant at which all regions change, and (5) syncs the directory. A crash before (4) leaves the old step, after
it the new one. If (5) fails, nobody can say which of the two manifests a power cut would leave; the old versions must
then not be overwritten, and the store asks to be opened again.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

from memfit.core.errors import StoreError, UsageError
from memfit.runtime.store.directory import create_files, open_files, read_manifest_file, remove_files
from memfit.runtime.store.explain import explain, store_error
from memfit.runtime.store.files import FileHandle, FileOperations, sync_directory, write_small_file
from memfit.runtime.store.io import DiskIO
from memfit.runtime.store.layout import RegionSpec, lay_out
from memfit.runtime.store.lock import DirectoryLock
from memfit.runtime.store.manifest import (
    MANIFEST_NAME,
    NEW_MANIFEST_NAME,
    Manifest,
    RegionEntry,
    check_identity,
    check_step,
    write_manifest,
)
from memfit.runtime.store.region import Region, RegionState, check_complete


class DiskStore:
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
    ) -> None:
        self.directory = directory
        self.identity = dict(manifest.identity)
        self.previous_owner_died = lock.dead_owner is not None
        self.io = DiskIO() if io is None else io
        self._owns_io = io is None
        self._manifest = manifest
        self._handles = handles
        self._directory_lock = lock
        self._durable = durable
        self._made_directory = made_directory
        self._operations = operations
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._is_closed = False
        self._in_doubt: str | None = None
        self._states = {
            name: RegionState(entry.spec, entry.places, list(entry.steps), entry.current)
            for name, entry in manifest.regions.items()
        }

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        regions: Mapping[str, RegionSpec],
        *,
        identity: Mapping[str, str],
        durable: bool = True,
        io: DiskIO | None = None,
        operations: FileOperations | None = None,
    ) -> DiskStore:
        """Makes a store, with all its disk space claimed.

        Args:
            directory: made if it does not exist; its parent must. It may hold other files, but no store.
            regions: what it shall hold.
            identity: text to find again at `open`.
            durable: wait for stable storage at each commit. Without it a crash of the process is survived, a power cut
                is not: right for a temporary home.
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
        layout = lay_out(regions)
        manifest = Manifest(
            identity=dict(identity),
            file_bytes=layout.file_bytes,
            regions={
                name: RegionEntry(spec=spec, places=layout.places[name], steps=(None,) * spec.slots, current=0)
                for name, spec in regions.items()
            },
            generation=0,
            step=None,
        )
        content = write_manifest(manifest)
        made_directory, lock, handles = create_files(
            where, layout.file_bytes, content, durable=durable, operations=used
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
        )

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        identity: Mapping[str, str] | None = None,
        durable: bool = True,
        io: DiskIO | None = None,
        operations: FileOperations | None = None,
    ) -> DiskStore:
        """Opens a store at its last commit. Arguments as `create`; what was written after that commit is gone.

        Args:
            directory: where it lies.
            identity: what must be found in it; keys that are not named are not compared.
            durable: as in `create`.
            io: as in `create`.
            operations: as in `create`.

        Raises:
            StoreInUseError: a live job owns it.
            StoreError: there is none, it is damaged, of another format version, or another's.
        """
        used = FileOperations() if operations is None else operations
        where = Path(directory).absolute()
        if not where.is_dir():
            raise store_error(
                f"there is no store at {where}: no such directory; check the path, or create one", errno.ENOENT
            )
        lock = DirectoryLock(where, operations=used)
        try:
            manifest = read_manifest_file(where, operations=used)
            _check_same(manifest.identity, identity or {}, where)
            handles = open_files(where, manifest.file_bytes, operations=used)
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
        )

    @property
    def step(self) -> int | None:
        """The committed step; None before the first commit."""
        return self._manifest.step

    @property
    def generation(self) -> int:
        """Number of commits since creation."""
        return self._manifest.generation

    @property
    def disk_bytes(self) -> int:
        """Disk that the data files take."""
        return sum(self._manifest.file_bytes)

    @property
    def is_direct(self) -> bool:
        """True if the file system takes direct I/O for all files."""
        return all(handle.is_direct for handle in self._handles)

    @property
    def regions(self) -> Mapping[str, RegionSpec]:
        """What the store holds."""
        return {name: state.spec for name, state in self._states.items()}

    def region(self, name: str) -> Region:
        """A region, to read and write.

        Raises:
            UsageError: there is none of that name.
        """
        return Region(
            name=name,
            state=self._state(name),
            handles=self._handles,
            io=self.io,
            lock=self._lock,
            check_usable=self._check_usable,
        )

    def commit(self, step: int, flips: Iterable[str] = ()) -> None:
        """Makes the spare slots of regions current, all at once, as a step. See [Note: commit].

        Waits for all writes under way. Slots written in place belong to the step too, without protection.

        Args:
            step: number of the step; any, so that training can go back to an earlier one.
            flips: regions whose next version is written.

        Raises:
            UsageError: a bad step, an unknown or repeated region, one without a spare slot, or one whose spare slot is
                not whole.
            StoreError: a write failed, or the commit itself. Unless the message says otherwise the step before is whole
                and current, what was written is kept, and the commit can be repeated when the cause is gone.
        """
        check_step(step)
        with self._lock:
            self._check_usable(is_write=True)
            names = list(flips)
            if len(set(names)) != len(names):
                raise UsageError("a region is named twice in `flips`")
            states = {name: self._state(name) for name in names}
            self._finish_writes()
            for name, state in states.items():
                check_complete(name, state)
            self._check_in_place()
            manifest = self._next_manifest(step, states)
            if self._durable:
                self._sync_data()
            self._publish(manifest)
            self._adopt(manifest, states)

    def close(self, *, delete: bool = False) -> None:
        """Ends the transfers under way, closes the files and gives the directory back. Repeating it does nothing.

        What was not committed is lost, as after a crash; failures stay in their tickets.

        Args:
            delete: also remove the store's files, and the directory if `create` made it and nothing else is in it.

        Raises:
            StoreError: something could not be removed. The store is closed even so.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if os.getpid() != self._pid:
                # A forked data loader that cleans up: its threads and files are copies, the store is the parent's.
                self._let_go()
                return
            for state in self._states.values():
                for log in state.logs:
                    for ticket in log.pending():
                        ticket.join()
            if self._owns_io:
                self.io.close()
            try:
                if delete:
                    remove_files(self.directory, len(self._handles), operations=self._operations)
            except StoreError:
                self._let_go()
                raise
            self._let_go(remove_lock=delete)
            if delete and self._made_directory:
                try:
                    self._operations.rmdir(self.directory)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise explain(error, doing="remove the directory", path=self.directory) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception_type: object, exception: object, traceback: object) -> None:
        self.close()

    def _let_go(self, *, remove_lock: bool = False) -> None:
        for handle in self._handles:
            handle.close()
        self._directory_lock.release(remove=remove_lock)

    # ---- parts of a commit

    def _state(self, name: str) -> RegionState:
        state = self._states.get(name)
        if state is None:
            known = ", ".join(sorted(self._states)[:5])
            raise UsageError(f"the store has no region {name!r:.200}; it has {len(self._states)}, such as {known}")
        return state

    def _check_usable(self, *, is_write: bool) -> None:
        if self._is_closed:
            raise store_error(f"the store at {self.directory} is closed: open it again")
        if is_write and self._in_doubt is not None:
            raise store_error(f"the store at {self.directory} can only be read: {self._in_doubt}; open it again")

    def _finish_writes(self) -> None:
        for state in self._states.values():
            for log in state.logs:
                for ticket in log.pending_writes():
                    ticket.join()

    def _check_in_place(self) -> None:
        for name, state in self._states.items():
            failure = state.logs[state.current].failure()
            if failure is not None:
                raise store_error(
                    f"{name!r} cannot be committed: {failure}; write it again first", failure.errno
                ) from failure

    def _next_manifest(self, step: int, flipped: Mapping[str, RegionState]) -> Manifest:
        entries: dict[str, RegionEntry] = {}
        for name, state in self._states.items():
            steps, current = list(state.steps), state.current
            if name in flipped:
                current = 1 - current
                steps[current] = step
            elif state.logs[current].written_bytes == state.spec.nbytes or (
                state.spec.slots == 1 and state.logs[current].written_bytes
            ):
                # Filled in place: from now on this is the committed version.
                steps[current] = step
            entries[name] = RegionEntry(spec=state.spec, places=state.places, steps=tuple(steps), current=current)
        return replace(self._manifest, regions=entries, generation=self._manifest.generation + 1, step=step)

    def _sync_data(self) -> None:
        for handle in self._handles:
            try:
                handle.sync_data()
            except OSError as error:
                # After a failed sync the kernel forgets what it could not write; a second sync would succeed and prove
                # nothing.
                self._in_doubt = "the disk lost data that was written since the last commit"
                raise explain(
                    error,
                    doing=f"make data durable (step {self._manifest.step}, committed before, is whole; open again)",
                    path=handle.path,
                ) from error

    def _publish(self, manifest: Manifest) -> None:
        target = self.directory / MANIFEST_NAME
        fresh = self.directory / NEW_MANIFEST_NAME
        try:
            write_small_file(fresh, write_manifest(manifest), operations=self._operations, durable=self._durable)
            self._operations.rename(fresh, target)
        except OSError as error:
            raise explain(
                error,
                doing=f"write the manifest of step {manifest.step} (the step before is whole and current)",
                path=target,
            ) from error
        if self._durable:
            try:
                sync_directory(self.directory, operations=self._operations)
            except OSError as error:
                self._in_doubt = f"step {manifest.step} may or may not have become durable"
                raise explain(
                    error,
                    doing=f"make step {manifest.step} durable (both steps are whole; open again)",
                    path=self.directory,
                ) from error

    def _adopt(self, manifest: Manifest, flipped: Mapping[str, RegionState]) -> None:
        self._manifest = manifest
        for name, state in self._states.items():
            entry = manifest.regions[name]
            state.steps, state.current = list(entry.steps), entry.current
            if name in flipped:
                # What was current is now the room for the next version, and none of that is written.
                state.logs[1 - state.current].forget_writes()
            if entry.steps[entry.current] == manifest.step:
                state.logs[state.current].forget_writes()


def _check_same(found: Mapping[str, str], wanted: Mapping[str, str], directory: Path) -> None:
    for key, value in wanted.items():
        if found.get(key) != value:
            raise store_error(
                f"the store at {directory} is another's: its {key!r} is {found.get(key)!r:.200}, not {value!r:.200}; "
                "choose another directory"
            )
