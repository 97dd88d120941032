"""Errors of the operating system in words that say what happened, where, and what to try.

In: an `OSError` and the place. Out: a `StoreError` with the same `errno`.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from memfit.core.errors import StoreError
from memfit.core.units import format_bytes

_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space, choose another directory, or use less disk",
    errno.EDQUOT: "the disk quota is used up: free some space, have it raised, or choose another directory",
    errno.EIO: "the device reports an error: look at the system log (dmesg) and the disk, or use another one",
    errno.EFBIG: "the file would be larger than allowed: raise `ulimit -f`, or use a file system for larger files",
    errno.EROFS: "the file system is mounted read-only: choose a directory that can be written",
    errno.EACCES: "permission is denied: choose a directory that you may write, or have the rights changed",
    errno.EPERM: "the operation is not permitted: choose a directory that you may write, or have the rights changed",
    errno.ENOTDIR: "there is a file where a directory should be: choose another path",
    errno.EEXIST: "something of that name exists already: choose another path or remove it",
    errno.ENOENT: "it does not exist: check the path",
    errno.ELOOP: "it is a symbolic link, which the store does not follow: give the real path",
    errno.EMLINK: "it has another name too (a hard link), or its next version (.new) has, which would change with it: remove that name",
    errno.ENXIO: "a pipe or a socket stands in its place, or in that of its next version (.new): remove it",
    errno.EISDIR: "it is a directory where a file should be: choose another path",
    errno.EMFILE: "this process has too many open files: raise `ulimit -n`",
    errno.ENFILE: "the machine has too many open files",
    errno.ENODEV: "the device is gone: check that the disk is still attached",
    errno.ESTALE: "the network file system lost the file: mount it again",
    errno.ENOTSUP: "the file system does not support this: choose a directory on a local disk",
    errno.ENOLCK: "the file system has no file locks: choose a directory on a local disk",
    errno.EINVAL: "the system refuses this request on this file system: choose a directory on another one",
}


def store_error(message: str, number: int | None = None) -> StoreError:
    """A `StoreError` with a plain message and, in `errno`, the system's number."""
    error = StoreError(message)
    error.errno = number
    return error


def explain(
    cause: OSError,
    *,
    doing: str,
    path: Path,
    needed_bytes: int | None = None,
    free_bytes: int | None = None,
) -> StoreError:
    """Turns an `OSError` into a `StoreError`.

    Args:
        cause: what the system said.
        doing: the attempt, to follow "could not".
        path: file or directory.
        needed_bytes: how much room the attempt needs, if that matters.
        free_bytes: how much there is.
    """
    number = cause.errno
    said = os.strerror(number) if number is not None else str(cause)
    room = ""
    if needed_bytes is not None:
        room = f"; {format_bytes(needed_bytes)} ({needed_bytes} bytes) needed"
        if free_bytes is not None:
            room += f", {format_bytes(free_bytes)} ({free_bytes} bytes) free"
    advice = _ADVICE.get(number, "check the disk and the directory") if number is not None else "check the disk"
    return store_error(f"could not {doing} at {path}: {said}{room}; {advice}", number)
