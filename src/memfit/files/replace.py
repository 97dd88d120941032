"""A directory that takes its target's place all at once.

In: a target and what it will hold. Out: a new directory beside it to write into; at the end the
target is the new one, whole, or the old one as it was.

[Note: how a directory is replaced]
Everything is written and synced under a hidden sibling's name. Where the target exists, Linux
exchanges the two names in one step (renameat2), so that at no instant there is none or a mixture;
file systems that cannot do that get two renames, between which the old directory stands, whole,
under the sibling name `.NAME.previous-*`. Files of others in the old directory are carried over as
hard links before the exchange. A process that stands in the target stands in the new one
afterwards. A sibling that a killed process left behind is unlocked (locks die with their process):
the next save of that target removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from memfit.core.errors import StoreError, UsageError
from memfit.core.limits import MIB
from memfit.store import FileOperations
from memfit.store.files import explain, sync_directory
from memfit.store.manifest import MANIFEST_NAME

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV)

# JSON files, directories and rounding.
_ROOM_BYTES = MIB


def check_target(target: Path, *, needed_bytes: int, operations: FileOperations) -> None:
    """Refuses a save that cannot succeed, before anything is written.

    Args:
        target: the directory to be; parents may be missing.
        needed_bytes: of the large files.
        operations: the system calls.

    Raises:
        UsageError: the target is a store of disk homes, is the root of a file system, or holds
            directories, which cannot be carried over.
        StoreError: the target is no directory, or the disk has too little room (the old save is
            kept until the new one is whole).
    """
    if target.exists():
        if not target.is_dir():
            raise StoreError(f"{target} is a file; name a directory to save into")
        if target.is_mount():
            raise UsageError(
                f"{target} is the root of a file system, and a save replaces its directory in one step: name a directory inside of it, such as {target / 'model'}"
            )
        if (target / MANIFEST_NAME).exists():
            raise UsageError(f"{target} holds the disk homes of a job; save into another directory")
        for entry in sorted(target.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                raise UsageError(
                    f"{target} holds the directory {entry.name!r}: a save replaces its directory in one step and carries over "
                    "files only; save into a directory of its own"
                )
    existing = next(parent for parent in (target, *target.parents) if parent.exists())
    try:
        free_bytes = operations.free_bytes(existing)
    except OSError as error:
        raise explain(error, doing="ask for free space", path=existing) from error
    if free_bytes < needed_bytes + _ROOM_BYTES:
        cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise explain(cause, doing="save", path=target, needed_bytes=needed_bytes + _ROOM_BYTES, free_bytes=free_bytes)


@contextlib.contextmanager
def replacing(target: Path, *, stale: Callable[[Path], bool], operations: FileOperations) -> Iterator[Path]:
    """Gives a new directory; when the `with` ends without an error, it is the target.

    Args:
        target: absolute, links resolved.
        stale: tells which files of the old directory are not carried over.
        operations: the system calls.

    Raises:
        StoreError: the disk. The target is as it was.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        new, lock = _make_locked(target, operations)
    except OSError as error:
        raise explain(error, doing="make a directory beside", path=target) from error
    try:
        yield new
        try:
            _put_in_place(new, target, stale, operations)
        except StoreError:
            raise
        except OSError as error:
            raise explain(error, doing="put the save in place", path=target) from error
    finally:
        os.close(lock)
        # After an exchange this is the old directory; after a failure the new one. Gone already if
        # there was no old one.
        shutil.rmtree(new, ignore_errors=True)


def _make_locked(target: Path, operations: FileOperations) -> tuple[Path, int]:
    """Makes a directory beside the target and locks it; returns it with the lock's descriptor.

    Between its making and its locking it looks like the leftover of a killed save: another save of
    the same target, just then, locks and removes it. So whoever has the lock looks whether it is
    still there, and makes another if not.
    """
    while True:
        new = target.parent / f".{target.name}.saving-{secrets.token_hex(6)}"
        operations.mkdir(new)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), new.lstat()):
                    return new, lock
            except BlockingIOError:
                pass  # it is being removed
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)


def _put_in_place(new: Path, target: Path, stale: Callable[[Path], bool], operations: FileOperations) -> None:
    if target.exists():
        new.chmod(stat.S_IMODE(target.stat().st_mode))
        for entry in target.iterdir():
            if not stale(entry) and not (new / entry.name).exists():
                _carry_over(entry, new / entry.name)
    for entry in new.iterdir():
        if not entry.is_symlink():
            _sync(entry, operations)
    sync_directory(new, operations=operations)
    stands_in_it = _stands_in(target)
    if not target.exists():
        operations.rename(new, target)
    elif not _exchange(new, target):
        previous = target.parent / f".{target.name}.previous-{secrets.token_hex(6)}"
        operations.rename(target, previous)
        try:
            operations.rename(new, target)
        except OSError:
            operations.rename(previous, target)
            raise
        sync_directory(target.parent, operations=operations)
        shutil.rmtree(previous, ignore_errors=True)
    if stands_in_it:
        os.chdir(target)
    sync_directory(target.parent, operations=operations)


def _stands_in(target: Path) -> bool:
    """It is the process's working directory: by name it stays so, or the process would stand in one
    that is gone.
    """
    try:
        return target.samefile(".")
    except OSError:
        return False


def _carry_over(entry: Path, to: Path) -> None:
    if entry.is_symlink():
        to.symlink_to(entry.readlink())
        return
    try:
        to.hardlink_to(entry)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES):
            raise
        # the file system, or its rules for others' files, has no hard links
        shutil.copy2(entry, to)


def _sync(path: Path, operations: FileOperations) -> None:
    descriptor = operations.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        operations.fsync(descriptor)
    finally:
        operations.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _remove_leftovers(target: Path) -> None:
    """Removes what killed saves of the same target left; those of live ones are locked."""
    for leftover in target.parent.glob(f".{_escaped(target.name)}.saving-*"):
        try:
            descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another save has removed it, or is through
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Under the lock: a save that has just made it must not take it for its own.
            shutil.rmtree(leftover, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
