"""Files as the store sees them: the system calls it makes, and open files that may be closed while
threads use them.

In: paths. Out: `FileHandle`, which knows whether the file system takes direct I/O. `FileOperations`
is the one door to the system; tests subclass it to make disks full, slow or broken.

[Note: room that is claimed]
Everything that a run needs of the disk is claimed when its files are made, so that a full disk is
known then. A file system that copies on write gives what is claimed to the first writing only: each
later one takes new room first, and finds the disk full in the middle of a run. btrfs leaves data
where they lie in files that say so while they are empty (`FS_NOCOW_FL`); it keeps no checksums of
such data, and takes direct I/O for them. The store has checksums of its own. A snapshot of the
directory has the first writing after it copied once more. ZFS and bcachefs have no such promise:
there the disk may be found full later, which is told as ever, with the last commit whole.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
import threading
import weakref
from pathlib import Path

from memfit.core.errors import StoreError
from memfit.core.limits import format_bytes
from memfit.store.checksums import ALIGNMENT_BYTES, aligned_memory, view_of

# Errors of the operating system in words that say what happened, where, and what to try.
#
# In: an `OSError` and the place. Out: a `StoreError` with the same `errno`.

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


# linux/fs.h: _IOR('f', 1, long), _IOW('f', 2, long), FS_NOCOW_FL; linux/magic.h: BTRFS_SUPER_MAGIC.
_GET_FLAGS, _SET_FLAGS, _NOT_COPIED, _BTRFS = 0x80086601, 0x40086602, 0x00800000, 0x9123683E
_NO_FLAGS = frozenset((errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES))
"""Answers of file systems without such flags."""


class FileOperations:
    """The system calls of the store, one method each, so that a test can make any of them fail.

    Methods raise plain `OSError`; the callers turn it into `StoreError` with the place and the
    cure.
    """

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        """Opens a file; the descriptor is not inherited by programs that are started."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, descriptor: int) -> None:
        """Closes a descriptor."""
        os.close(descriptor)

    def pread(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Reads at an offset into memory; returns the bytes read, 0 at the end of the file."""
        return os.preadv(descriptor, [into], offset)

    def pwrite(self, descriptor: int, source: memoryview, offset: int) -> int:
        """Writes memory at an offset; returns the bytes written."""
        return os.pwrite(descriptor, source, offset)

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Claims disk blocks for a range and extends the file over it."""
        os.posix_fallocate(descriptor, offset, nbytes)

    def write_in_place(self, descriptor: int) -> None:
        """Has what is written to an empty file stay where it lies when it is written again.

        See [Note: room that is claimed].
        """
        _write_in_place(descriptor)

    def fdatasync(self, descriptor: int) -> None:
        """Waits until the data of a file is on stable storage."""
        os.fdatasync(descriptor)

    def fsync(self, descriptor: int) -> None:
        """Waits until a file or directory and its metadata are on stable storage."""
        os.fsync(descriptor)

    def forget(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Asks the kernel to drop clean cached pages of a range."""
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def rename(self, source: Path, target: Path) -> None:
        """Replaces `target` by `source` in one step."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Removes a file."""
        path.unlink()

    def mkdir(self, path: Path) -> None:
        """Makes one directory, whose parent exists."""
        path.mkdir(mode=0o755)

    def rmdir(self, path: Path) -> None:
        """Removes an empty directory."""
        path.rmdir()

    def size_bytes(self, descriptor: int) -> int:
        """Length of an open file."""
        return os.fstat(descriptor).st_size

    def free_bytes(self, path: Path) -> int:
        """Bytes that an unprivileged process may still allocate on the file system of `path`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize


class FileHandle:
    """An open file that threads read and write at offsets.

    With `is_direct`, the page cache is bypassed and offsets, lengths and addresses must be
    multiples of `ALIGNMENT_BYTES` (`transfer.move` sees to that). Without it (tmpfs and some
    network file systems refuse direct I/O), the cache is used and emptied after each piece.

    `close` while transfers are under way is deferred to the last of them: a descriptor number that
    was closed early could be reused by another file, and a late write would land there. A handle
    that is dropped without `close` closes itself.
    """

    def __init__(self, *, path: Path, descriptor: int, is_direct: bool, operations: FileOperations) -> None:
        self.path = path
        self.is_direct = is_direct
        self.operations = operations
        # Two writers that share one 4 KiB block of the file each read it, change their part and
        # write it back: one at a time.
        self.edge_lock = threading.Lock()
        self._descriptor = descriptor
        self._lock = threading.RLock()
        self._users = 0
        self._is_closing = False
        self._closer = weakref.finalize(self, _close_quietly, operations, descriptor)
        # At interpreter exit worker threads may still use it; the system closes it after them.
        self._closer.atexit = False

    @property
    def descriptor(self) -> int:
        """The descriptor number; valid between `acquire` and `release`, and until `close`."""
        return self._descriptor

    @property
    def is_open(self) -> bool:
        """False from the moment `close` was asked for."""
        return not self._is_closing

    def acquire(self) -> None:
        """Announces a user of the descriptor.

        Raises:
            ValueError: the handle is closed.
        """
        with self._lock:
            if self._is_closing:
                raise ValueError(f"{self.path} is closed")
            self._users += 1

    def release(self) -> None:
        """Ends one use; the last one after `close` closes the file."""
        with self._lock:
            self._users -= 1
            is_last = self._is_closing and self._users == 0
        if is_last:
            self._closer()

    def close(self) -> None:
        """Closes the file now, or when the last transfer that uses it ends.

        Repeating it does nothing.
        """
        with self._lock:
            self._is_closing = True
            is_last = self._users == 0
        if is_last:
            self._closer()

    def allocate(self, offset: int, nbytes: int) -> None:
        """Claims disk blocks for a range (raises plain `OSError`)."""
        # Through a cached descriptor: where the file system cannot allocate, glibc writes single
        # bytes, which direct I/O refuses.
        descriptor = self.operations.open(_by_descriptor(self._descriptor), os.O_RDWR) if self.is_direct else None
        try:
            self.operations.allocate(self._descriptor if descriptor is None else descriptor, offset, nbytes)
        finally:
            if descriptor is not None:
                self.operations.close(descriptor)

    def sync_data(self) -> None:
        """Waits until what was written is on stable storage (raises plain `OSError`)."""
        self.operations.fdatasync(self._descriptor)

    def size_bytes(self) -> int:
        """Length of the file."""
        return self.operations.size_bytes(self._descriptor)


def _write_in_place(descriptor: int) -> None:
    found = array.array("L", [0])
    try:
        fcntl.ioctl(descriptor, _GET_FLAGS, found)
    except OSError as error:
        if error.errno in _NO_FLAGS:
            return
        raise
    if not found[0] & _NOT_COPIED and _kind_of(descriptor) == _BTRFS:
        found[0] |= _NOT_COPIED
        fcntl.ioctl(descriptor, _SET_FLAGS, found)


def _kind_of(descriptor: int) -> int:
    """The file system's magic number: the first word of `struct statfs`."""
    found = (ctypes.c_long * 64)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fstatfs(descriptor, found):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found[0]


def _by_descriptor(descriptor: int) -> Path:
    # By the open descriptor rather than by name: the name may be replaced, or removed, between two
    # openings.
    return Path(f"/proc/self/fd/{descriptor}")


def _close_quietly(operations: FileOperations, descriptor: int) -> None:
    # Data was synced (or not wanted) before: nothing that close could report would be acted on, and
    # it must not fail a finalizer.
    with contextlib.suppress(OSError):
        operations.close(descriptor)


def open_file(
    path: str | os.PathLike[str],
    *,
    operations: FileOperations | None = None,
    create: bool = False,
    direct: bool = True,
    reads_only: bool = False,
) -> FileHandle:
    """Opens a file for reading and writing at offsets, with direct I/O where the file system takes
    it.

    Args:
        path: the file. Symbolic links are not followed.
        operations: the system calls; the plain ones by default.
        create: make the file; it must not exist yet.
        direct: try direct I/O. The answer is in `FileHandle.is_direct`.
        reads_only: for reading alone, which read-only media and other people's files allow.

    Raises:
        StoreError: the file cannot be opened or made, or is no plain file.
    """
    name = Path(path)
    used = FileOperations() if operations is None else operations
    access = os.O_RDONLY if reads_only else os.O_RDWR
    flags = access | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT | os.O_EXCL if create else 0)
    try:
        descriptor = used.open(name, flags)
    except OSError as error:
        raise explain(error, doing="create the file" if create else "open the file", path=name) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        used.close(descriptor)
        raise store_error(f"{name} is not a plain file: give another path, or restore it from a copy")
    if create:
        try:
            used.write_in_place(descriptor)
        except OSError as error:
            used.close(descriptor)
            raise explain(error, doing="prepare the file", path=name) from error
    if direct:
        direct_descriptor = _open_direct(name, descriptor, access, used)
        if direct_descriptor is not None:
            used.close(descriptor)
            return FileHandle(path=name, descriptor=direct_descriptor, is_direct=True, operations=used)
    return FileHandle(path=name, descriptor=descriptor, is_direct=False, operations=used)


def _open_direct(name: Path, descriptor: int, access: int, operations: FileOperations) -> int | None:
    """A second, direct descriptor of the file; None where direct I/O is refused, at opening or at
    the first read.
    """
    refusals = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
    try:
        found = operations.open(_by_descriptor(descriptor), access | os.O_DIRECT)
    except OSError as error:
        if error.errno in refusals:
            return None
        operations.close(descriptor)
        raise explain(error, doing="open the file for direct I/O", path=name) from error
    page = aligned_memory(ALIGNMENT_BYTES)
    try:
        # Some file systems take the flag and refuse the transfer, for instance with logical blocks
        # above 4 KiB.
        operations.pread(found, view_of(page.address, page.nbytes), 0)
    except OSError as error:
        operations.close(found)
        if error.errno in refusals:
            return None
        operations.close(descriptor)
        raise explain(error, doing="read the file", path=name) from error
    return found


def open_unnamed(directory: Path, operations: FileOperations) -> FileHandle:
    """Makes a file in a directory and removes its name at once, so that even a killed process
    leaves nothing.

    Raises:
        StoreError: there is no such directory, or no file can be made in it.
    """
    if not directory.is_dir():
        raise store_error(
            f"could not create a scratch file in {directory}: no such directory; create it or choose another"
        )
    # 16 random bytes: a second file of that name is not going to happen, and opening would refuse
    # it.
    name = directory / f".memfit-scratch-{secrets.token_hex(16)}"
    handle = open_file(name, create=True, operations=operations)
    try:
        operations.unlink(name)
    except OSError as error:
        handle.close()
        raise explain(error, doing="remove the name of the scratch file", path=name) from error
    return handle


def write_all(operations: FileOperations, descriptor: int, content: bytes) -> None:
    """Writes bytes from the start of a file on, however short the system's writes are.

    Raises plain `OSError`.
    """
    left, offset = memoryview(content), 0
    while left.nbytes:
        written = operations.pwrite(descriptor, left, offset)
        if written <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        left, offset = left[written:], offset + written


def write_small_file(path: Path, content: bytes, *, operations: FileOperations, durable: bool) -> None:
    """Writes a whole new file through the cache and, if `durable`, waits for stable storage.

    Raises plain `OSError`.
    """
    if path.is_file() and path.lstat().st_nlink > 1:
        # Truncating would change the file under its other name.
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
    # Without waiting: a pipe in its place would hang the writer.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = operations.open(path, flags)
    try:
        write_all(operations, descriptor, content)
        if durable:
            operations.fsync(descriptor)
    finally:
        operations.close(descriptor)


def sync_directory(path: Path, *, operations: FileOperations) -> None:
    """Waits until the names in a directory are on stable storage. Raises plain `OSError`."""
    descriptor = operations.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        operations.fsync(descriptor)
    finally:
        operations.close(descriptor)
