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
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

from memfit.core.errors import StoreError
from memfit.store.file_operations import FileHandle, FileOperations, sync_directory, write_small_file
from memfit.store.manifest import MANIFEST_NAME, NEW_MANIFEST_NAME, Manifest, write_manifest
from memfit.store.os_errors import explain

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


def publish(directory: Path, content: bytes, *, step: int | None, operations: FileOperations, durable: bool) -> None:
    """Puts a manifest in the place of the one before.

    Raises:
        DoubtError: it may or may not be the durable one.
        StoreError: the one before is whole and current, and this may be repeated.
    """
    target, fresh = directory / MANIFEST_NAME, directory / NEW_MANIFEST_NAME
    doing = f"write the manifest of step {step} (the step before is whole and current)"
    try:
        write_small_file(fresh, content, operations=operations, durable=durable)
    except OSError as error:
        raise explain(error, doing=doing, path=target) from error
    doubt = f"step {step} may or may not have become durable"
    unsure = f"make step {step} durable (both steps are whole; open again)"
    try:
        operations.rename(fresh, target)
    except OSError as error:
        if error.errno in _NOTHING_WAS_DONE:
            raise explain(error, doing=doing, path=target) from error
        raise _doubt(error, doing=unsure, path=target, doubt=doubt) from error
    if durable:
        try:
            sync_directory(directory, operations=operations)
        except OSError as error:
            raise _doubt(error, doing=unsure, path=directory, doubt=doubt) from error


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
