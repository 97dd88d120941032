"""A temporary directory that outlives its owner only until the next one is made.

In: a parent directory. Out: a fresh directory in it, held by a lock until it is removed.

[Note: whose directory]
The owner holds `flock` on the directory itself. The kernel frees it when the owner ends, however it
ended (`kill -9`), and children have no part in it ([Note: locks and forks] in `store.forked`), so a
directory whose lock can be taken has no owner: whoever makes the next one there removes it. Between
its making and its locking a directory looks ownerless too; its maker therefore looks, once it has
the lock, whether the directory is still there, and makes another if not. A mark tells memfit's
directories from others of that name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from memfit.core.errors import StoreError
from memfit.store.forked import keep_from_children, let_go

PREFIX = "memfit-homes-"
_MARK = "made-by-memfit"


class TemporaryDirectory:
    """A directory that is removed by `remove`, when the object is dropped, at the end of the
    process, or, after a kill, by the next one.

    Args:
        parent: where; the system's directory for temporary files if None.

    Raises:
        StoreError: it cannot be made there.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        where = Path(tempfile.gettempdir() if parent is None else parent).absolute()
        sweep(where)
        try:
            self.path, descriptor = _make(where)
        except OSError as error:
            failure = StoreError(
                f"could not make a temporary directory in {where}: {error.strerror}; name another with fit(directory=...), or set TMPDIR"
            )
            failure.errno = error.errno
            raise failure from error
        keep_from_children(descriptor)
        self._finalizer = weakref.finalize(self, _remove, self.path, descriptor, os.getpid())

    def remove(self) -> None:
        """Removes it with all that is in it. Repeating it does nothing.

        Raises:
            OSError: something in it cannot be removed; the lock is given back even so.
        """
        self._finalizer()


def sweep(parent: Path) -> None:
    """Removes directories of owners that have died.

    What belongs to other users, or cannot be removed, stays.
    """
    for path in parent.glob(f"{PREFIX}*"):
        # Another process may remove it at the same time, and what a dead run left is no reason to
        # fail a live one.
        with contextlib.suppress(OSError):
            descriptor = _open(path)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid() and _lock(descriptor):
                    _clear(path)
            finally:
                os.close(descriptor)


def _make(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked
            descriptor = _open(path)
            try:
                if _lock(descriptor) and os.path.samestat(os.fstat(descriptor), path.lstat()):
                    (path / _MARK).touch()
                    return path, descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _lock(descriptor: int) -> bool:
    """Takes the lock; False if another holds it.

    A file system without locks has no owners to tell apart: nothing is swept there.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _clear(path: Path) -> None:
    if (path / _MARK).exists():
        shutil.rmtree(path)
    else:
        path.rmdir()  # only an empty one: its maker died before it could mark it


def _remove(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork that ends: the directory is its parent's
    let_go(descriptor)
    try:
        # it was taken away, with the directory that it lies in
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
    finally:
        os.close(descriptor)
