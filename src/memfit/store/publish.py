"""The instants of a commit: what is made durable, in which order, and what is known when a call of
it fails.

In: files that were written, and a manifest. Out: a directory whose manifest is the new one,
durable.

[Note: commit]
New versions are written into spare slots while the current ones stay. A commit

1. waits for the writes, and sums what of the spare slots has no checksum yet;
2. writes the small state to the one of its two files that is not current;
3. calls `fdatasync` on the data files and on that file of the state: only now may anything point at
   what they hold;
4. writes the new manifest beside the old one and calls `fsync` on it;
5. renames it over the old one: the one instant at which all regions and the state change;
6. calls `fsync` on the directory: only now is the step promised, and only now may the old slots be
   overwritten.

A crash before (5) leaves the old step; between (5) and (6) either, both whole; after (6) the new
one. A killed process loses nothing that it has handed to the system, so after a kill the new
manifest may be seen that a later power cut would still take back: whoever opens a store repeats 3
to 6 before the first write, with the manifest that was found. It is written again, not only synced,
because the sync that failed may have been an earlier owner's: see below.

When a call fails, what is true afterwards decides. Before (5) the old step is current and the
commit may be repeated, unless a sync of data failed: the kernel then forgets what it could not
write, and a second sync would succeed and prove nothing. If (5) fails with an error that leaves
open whether it happened, or (6) fails, nobody can say which of the two manifests a power cut would
leave; neither version may be overwritten. In both cases the store can only be read, and asks to be
opened again.

[Note: commit of several stores]
Ranks that train together have a store each, and a step is committed when all of them have it. So
between (4) and (5) the new manifest gets a name of its own, durably: the store is *prepared*. Then
the ranks vote. If all are prepared, each does (5) and (6) by itself; if one could not, none does.
A rank that is lost in the vote, or behind it, leaves others that may have done (5): whoever opens
the set next does it for those that are prepared, if all others are, or have done it
(`finish_commits`). A prepared version lies in the spare slots, which nobody writes before that.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from memfit.core.errors import PeerError, StoreError
from memfit.store.directory import is_there, read_manifest_file
from memfit.store.file_operations import FileHandle, FileOperations, sync_directory, write_small_file
from memfit.store.lock import DirectoryLock
from memfit.store.manifest import (
    MANIFEST_NAME,
    NEW_MANIFEST_NAME,
    PREPARED_MANIFEST_NAME,
    Manifest,
    write_manifest,
)
from memfit.store.os_errors import explain, store_error

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
