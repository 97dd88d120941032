"""The files of a store's directory: made, found, checked and removed.

In: a directory and file lengths. Out: open files and a held lock, or a `StoreError` and nothing
left behind.

[Note: data without a manifest]
Data files without a manifest are what a crash left while they were made or removed, or a committed
step whose manifest was lost. A mark tells the two apart: the first manifest is written under the
name `PARTIAL_MANIFEST_NAME` before there are data, and gets its own name last; a removal renames
the manifest to that name first, and removes it last. Files beside a mark may go. Data beside
neither a manifest nor a mark are somebody's only copy, and are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

from memfit.core.errors import StoreError
from memfit.core.limits import format_bytes
from memfit.store.files import (
    FileHandle,
    FileOperations,
    explain,
    open_file,
    store_error,
    sync_directory,
    write_small_file,
)
from memfit.store.lock import DirectoryLock, keep_from_children, let_go
from memfit.store.manifest import (
    LIMIT_BYTES,
    MANIFEST_NAME,
    NEW_MANIFEST_NAME,
    PARTIAL_MANIFEST_NAME,
    PREPARED_MANIFEST_NAME,
    Manifest,
    file_name,
    read_manifest,
    state_file_name,
)

_DATA_FILE = re.compile(r"homes-[0-9]{1,5}\.bin")
_STATE_FILES = (state_file_name(0), state_file_name(1))


def create_files(
    directory: Path, files: Mapping[str, int], manifest: bytes, *, durable: bool, operations: FileOperations
) -> tuple[bool, DirectoryLock, tuple[FileHandle, ...]]:
    """Makes the directory, the lock, the mark, the files (name to bytes) with their blocks claimed,
    and last the manifest. See [Note: data without a manifest].

    Returns:
        Whether the directory was made, the lock, the open files.

    Raises:
        StoreInUseError: a live job owns the directory.
        StoreError: no parent, no permission, no room, or a store is there, or data of one that lost
            its manifest. What was made is removed again.
    """
    made_directory = _make_directory(directory, operations)
    lock: DirectoryLock | None = None
    handles: list[FileHandle] = []
    try:
        lock = DirectoryLock(directory, operations=operations)
        _refuse_store(directory)
        # The mark beside them stays until it is written anew.
        _unlink(directory, data_names(directory), operations)
        _write_mark(directory, manifest, durable=durable, operations=operations)
        _claim(directory, files, handles, operations)
        _name_manifest(directory, handles, durable=durable, operations=operations)
    except BaseException:
        for handle in handles:
            handle.close()
            with contextlib.suppress(OSError):
                operations.unlink(handle.path)
        if lock is not None and is_unfinished(directory) and not data_names(directory):
            with contextlib.suppress(OSError):
                operations.unlink(directory / PARTIAL_MANIFEST_NAME)
        if lock is not None:
            # What went wrong first is what the user must hear.
            with contextlib.suppress(StoreError):
                lock.release(remove=True)
        if made_directory:
            with contextlib.suppress(OSError):
                operations.rmdir(directory)
        raise
    return made_directory, lock, tuple(handles)


def is_there(path: Path) -> bool:
    """True if the name exists, be it as a link that leads nowhere."""
    return path.is_symlink() or path.exists()


def _refuse_store(directory: Path) -> None:
    if is_there(directory / MANIFEST_NAME):
        raise store_error(
            f"{directory} holds a store already: open it, choose another directory, or remove it", errno.EEXIST
        )
    refuse_lost(directory)


def refuse_lost(directory: Path) -> None:
    """Refuses a directory that holds the data of a store that lost its manifest. Raises
    `StoreError`.
    """
    names = data_names(directory)
    if names and not is_unfinished(directory) and not is_there(directory / MANIFEST_NAME):
        raise store_error(
            f"{directory} holds data of a store ({names[0]}) and no {MANIFEST_NAME}, without which nobody can read them: "
            f"restore {MANIFEST_NAME} from a copy, choose another directory, or remove {', '.join(names[:3])} if they are not needed",
            errno.ENOENT,
        )


def data_names(directory: Path) -> list[str]:
    """Returns the names in a directory that are those of a store's data and small state."""
    names = (path.name for path in directory.iterdir()) if directory.is_dir() else ()
    return sorted(name for name in names if _DATA_FILE.fullmatch(name) or name in _STATE_FILES)


def is_unfinished(directory: Path) -> bool:
    """True where a store was being made or removed when its process ended: see [Note: data without
    a manifest].
    """
    return is_there(directory / PARTIAL_MANIFEST_NAME) and not is_there(directory / MANIFEST_NAME)


def _make_directory(directory: Path, operations: FileOperations) -> bool:
    parent = directory.parent
    if not directory.is_dir():
        if not is_there(parent):
            raise store_error(
                f"could not create the directory {directory}: its parent {parent} does not exist; "
                "create it or choose another",
                errno.ENOENT,
            )
        try:
            operations.mkdir(directory)
        except FileExistsError as error:
            if not directory.is_dir():
                raise explain(error, doing="create the directory", path=directory) from error
        except OSError as error:
            raise explain(error, doing="create the directory", path=directory) from error
        else:
            return True
    return False


def _claim(directory: Path, files: Mapping[str, int], handles: list[FileHandle], operations: FileOperations) -> None:
    """Makes the files and has all their blocks reserved.

    A full disk is found before the first byte is written.
    """
    needed_bytes = sum(files.values())
    try:
        free_bytes = operations.free_bytes(directory)
    except OSError as error:
        raise explain(error, doing="ask for the free space", path=directory) from error
    if needed_bytes > free_bytes:
        raise explain(
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            doing="claim the disk space of the store",
            path=directory,
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )
    for name, size_bytes in files.items():
        handle = open_file(directory / name, create=True, direct=_is_direct(name), operations=operations)
        handles.append(handle)
        if size_bytes:
            try:
                handle.allocate(0, size_bytes)
            except OSError as error:
                raise explain(
                    error,
                    doing="claim the disk space of the store",
                    path=directory,
                    needed_bytes=needed_bytes,
                    free_bytes=free_bytes,
                ) from error


def _write_mark(directory: Path, manifest: bytes, *, durable: bool, operations: FileOperations) -> None:
    mark = directory / PARTIAL_MANIFEST_NAME
    try:
        write_small_file(mark, manifest, operations=operations, durable=durable)
        if durable:
            # Before there are data, which without it are those of a store that lost its manifest.
            sync_directory(directory, operations=operations)
    except OSError as error:
        raise explain(error, doing="write the manifest", path=mark) from error


def _name_manifest(directory: Path, handles: list[FileHandle], *, durable: bool, operations: FileOperations) -> None:
    target = directory / MANIFEST_NAME
    try:
        if durable:
            for handle in handles:
                operations.fsync(handle.descriptor)
            # Before the manifest that speaks of them: a file system may make a later name durable
            # first.
            sync_directory(directory, operations=operations)
        operations.rename(directory / PARTIAL_MANIFEST_NAME, target)
        if durable:
            sync_directory(directory, operations=operations)
            # The directory's own name, for the case that it is new.
            sync_directory(directory.parent, operations=operations)
    except OSError as error:
        with contextlib.suppress(OSError):
            operations.rename(target, directory / PARTIAL_MANIFEST_NAME)
        raise explain(error, doing="write the manifest", path=target) from error


def read_manifest_file(directory: Path, *, operations: FileOperations, name: str = MANIFEST_NAME) -> Manifest:
    """Reads and checks the manifest of a directory, or another of that form.

    Raises:
        StoreError: there is none, or it cannot be used.
    """
    path = directory / name
    try:
        # Without waiting: a pipe in the place of the manifest would hang the reader.
        descriptor = operations.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        refuse_lost(directory)
        raise store_error(
            f"there is no store at {directory}: it has no {name}; check the path, or create one", errno.ENOENT
        ) from error
    except OSError as error:
        raise explain(error, doing="open the manifest", path=path) from error
    try:
        size_bytes = operations.size_bytes(descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or size_bytes > LIMIT_BYTES:
            raise store_error(
                f"the manifest {path} is damaged: not a plain file of at most "
                f"{format_bytes(LIMIT_BYTES)}; restore it from a copy"
            )
        content = bytearray(size_bytes)
        read_bytes = 0
        while read_bytes < size_bytes:
            count = operations.pread(descriptor, memoryview(content)[read_bytes:], read_bytes)
            if count <= 0:
                break
            read_bytes += count
        return read_manifest(bytes(content[:read_bytes]), path=path, data_bytes=_data_bytes(directory))
    except StoreError:
        raise
    except OSError as error:
        raise explain(error, doing="read the manifest", path=path) from error
    finally:
        operations.close(descriptor)


def _data_bytes(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.iterdir() if _DATA_FILE.fullmatch(path.name))


def open_files(
    directory: Path, manifest: Manifest, *, operations: FileOperations, reads_only: bool = False
) -> tuple[FileHandle, ...]:
    """Opens the files that a manifest speaks of: the data, then the small state.

    Raises:
        StoreError: one is missing, not a plain file (of this directory alone, unless it is only
            read), or not as long as the manifest says.
    """
    handles: list[FileHandle] = []
    try:
        for name, size_bytes in files_of(manifest).items():
            handle = open_file(directory / name, direct=_is_direct(name), operations=operations, reads_only=reads_only)
            handles.append(handle)
            if not reads_only:
                _check_single(handle)
            if _is_direct(name):
                _check_length(handle, size_bytes)
    except BaseException:
        for handle in handles:
            handle.close()
        raise
    return tuple(handles)


def files_of(manifest: Manifest, state_bytes: int = 0) -> dict[str, int]:
    """Names and lengths of the files of a store: the data, then the small state (of any length,
    `state_bytes` at first).
    """
    files = {file_name(number): size for number, size in enumerate(manifest.file_bytes)}
    if manifest.has_state_files:
        files |= dict.fromkeys((state_file_name(0), state_file_name(1)), state_bytes)
    return files


def _is_direct(name: str) -> bool:
    # The small state is written and read whole, of any length, through the cache.
    return _DATA_FILE.fullmatch(name) is not None


def _check_single(handle: FileHandle) -> None:
    try:
        found = os.fstat(handle.descriptor)
    except OSError as error:
        raise explain(error, doing="look at the file", path=handle.path) from error
    if found.st_nlink > 1:
        # Writing here would change the file under its other name: a backup made of links, or worse.
        raise store_error(
            f"{handle.path} has another name too (a hard link), and what is behind that would change with it: "
            "make real copies"
        )


def _check_length(handle: FileHandle, size_bytes: int) -> None:
    try:
        found_bytes = handle.size_bytes()
    except OSError as error:
        raise explain(error, doing="ask for the length of the file", path=handle.path) from error
    if found_bytes != size_bytes:
        raise store_error(
            f"the data file {handle.path} has {found_bytes} bytes and its manifest says {size_bytes}: it was cut or "
            "replaced from outside; restore it from a copy, or remove the directory and start again"
        )


def remove_files(directory: Path, names: Iterable[str], *, durable: bool, operations: FileOperations) -> None:
    """Removes the files of a store, or of one that was being made or removed. The mark is first and
    last: see [Note: data without a manifest].

    Args:
        directory: of the store.
        names: of its data and small state.
        durable: a power cut finds the mark, or nothing.
        operations: the system calls.

    Raises:
        StoreError: something cannot be removed.
    """
    path, mark = directory / MANIFEST_NAME, directory / PARTIAL_MANIFEST_NAME
    try:
        if is_there(path):
            operations.rename(path, mark)
        _unlink(directory, (NEW_MANIFEST_NAME, PREPARED_MANIFEST_NAME, *names), operations)
        if durable:
            sync_directory(directory, operations=operations)
    except OSError as error:
        raise explain(error, doing="remove the file", path=path) from error
    _unlink(directory, (PARTIAL_MANIFEST_NAME,), operations)


def _unlink(directory: Path, names: Iterable[str], operations: FileOperations) -> None:
    for path in (directory / name for name in names):
        try:
            operations.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise explain(error, doing="remove the file", path=path) from error


# A temporary directory that outlives its owner only until the next one is made.
#
# In: a parent directory. Out: a fresh directory in it, held by a lock until it is removed.
#
# [Note: whose directory]
# The owner holds `flock` on the directory itself. The kernel frees it when the owner ends, however
# it ended (`kill -9`), and children have no part in it ([Note: locks and forks] in `store.lock`),
# so a directory whose lock can be taken has no owner: whoever makes the next one there removes it.
# Between its making and its locking a directory looks ownerless too; its maker therefore looks,
# once it has the lock, whether the directory is still there, and makes another if not. A mark tells
# memfit's directories from others of that name.

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
