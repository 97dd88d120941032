"""One writer a directory: a lock file that the kernel frees when its owner dies.

In: a directory. Out: a held lock, or `StoreInUseError` that names the owner.

[Note: whose lock]
`flock` decides; what is written in the file only explains. The kernel frees the lock at the end of
the owner, however it ended, so a dead owner's lock is taken over without a guess. Who only reads
shares the lock with others who read, by a descriptor that only reads: a store on read-only media,
or of somebody else, can be looked at. Forked children have no part in it ([Note: locks and forks]
in `store.lock`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import stat
from dataclasses import dataclass
from pathlib import Path

from memfit.core.errors import StoreInUseError
from memfit.store.files import FileOperations, explain, store_error

# Descriptors that forked children give up, so that what they lock belongs to the parent alone.
#
# In: a descriptor that holds a lock of `flock`. Out: in a child that is forked from here on it is
# closed.
#
# [Note: locks and forks]
# A lock of `flock` belongs to the open file, which a forked child shares: it is free when the last
# copy of the descriptor is closed. The workers of a data loader are such children. They live on
# after the job is closed, and, when their parent was killed, until they notice (torch's look every
# five seconds): as long the directory would be taken. So children close their copies as they begin;
# that frees nothing under the parent. An explicit unlock would.

_kept: set[int] = set()
_hooked: list[bool] = []


def keep_from_children(descriptor: int) -> None:
    """Children that are forked from here on do not have this descriptor.

    `let_go` before it is closed.
    """
    if not _hooked:
        os.register_at_fork(after_in_child=_close_kept)
        _hooked.append(True)
    _kept.add(descriptor)


def let_go(descriptor: int) -> None:
    """Undoes `keep_from_children`."""
    _kept.discard(descriptor)


def _close_kept() -> None:
    # By number: one that was closed without `let_go` could be another file's by now.
    while _kept:
        with contextlib.suppress(OSError):
            os.close(_kept.pop())


LOCK_NAME = "lock"
_LIMIT_BYTES = 4096
_MOST_PID = 1 << 32
_CANNOT_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class LockOwner:
    """Who wrote the lock file."""

    pid: int
    start_time: int
    """Clock ticks from boot to the start of the process: tells it from a later process with the
    same number.
    """
    host: str
    boot: str
    """Identifier of the boot: after another one, the number of the process means nothing."""

    def is_here(self) -> bool:
        """True if it ran, or runs, on this machine."""
        return self.host == platform.node()

    def is_alive(self) -> bool:
        """True if the process runs; an owner on another host counts as alive, because it cannot be
        seen from here.
        """
        if not self.is_here():
            return True
        return self.boot == boot_id() and process_start_time(self.pid) == self.start_time

    def __str__(self) -> str:
        return f"pid {self.pid}{'' if self.is_here() else f' on {self.host}'}, boot {self.boot[:8]}"


def boot_id() -> str:
    """Identifier that the kernel drew when it started; empty without one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def process_start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process (field 22 of /proc/PID/stat); None if there
    is no such process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The program's name, in parentheses, may hold anything; the fields are counted from its end.
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None


class DirectoryLock:
    """The lock of a directory, held from construction to `release` or to the end of the process.

    Args:
        directory: an existing directory.
        operations: the system calls.
        reads_only: shared with others that read; nothing is written. Where there is no lock file
            and none can be made, nobody can have written here: then nothing is held.

    Raises:
        StoreInUseError: another live process, or another store of this one, holds it.
        StoreError: the lock file cannot be made, or the file system has no locks.
    """

    def __init__(self, directory: Path, *, operations: FileOperations, reads_only: bool = False) -> None:
        self.path = directory / LOCK_NAME
        self._operations = operations
        self._reads_only = reads_only
        self._descriptor: int | None = None
        self._pid = os.getpid()
        self.dead_owner: LockOwner | None = None
        """The owner before, if it ended without releasing."""
        descriptor = self._lock_file()
        if descriptor is None:
            return
        self._descriptor = descriptor
        keep_from_children(descriptor)
        try:
            self.dead_owner = _read_owner(descriptor)
            if not reads_only:
                self._write_owner(descriptor)
        except OSError as error:
            self.release(remove=True)
            raise explain(error, doing="write the lock file", path=self.path) from error

    def _open_file(self) -> int | None:
        flags = os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            if not self._reads_only:
                return self._operations.open(self.path, flags | os.O_RDWR | os.O_CREAT)
            with contextlib.suppress(FileNotFoundError):
                return self._operations.open(self.path, flags | os.O_RDONLY)
            return self._operations.open(self.path, flags | os.O_RDONLY | os.O_CREAT)
        except OSError as error:
            if self._reads_only and error.errno in _CANNOT_WRITE and not os.path.lexists(self.path):
                return None
            raise explain(error, doing="open the lock file", path=self.path) from error

    def _lock_file(self) -> int | None:
        while True:
            descriptor = self._open_file()
            if descriptor is None:
                return None
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or (found.st_nlink > 1 and not self._reads_only):
                self._operations.close(descriptor)
                raise store_error(f"the lock file {self.path} is a hard link, or not a plain file: remove it")
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if self._reads_only else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                # The owner before may have removed the file between our opening and our locking:
                # then we hold nothing.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), self.path.lstat()):
                        return descriptor
                self._operations.close(descriptor)
            except OSError as error:
                owner = _read_owner(descriptor)
                self._operations.close(descriptor)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise StoreInUseError(_in_use(self.path, owner)) from error
                raise explain(error, doing="lock the directory", path=self.path) from error

    def _write_owner(self, descriptor: int) -> None:
        owner = {
            "pid": os.getpid(),
            "start_time": process_start_time(os.getpid()) or 0,
            "host": platform.node(),
            "boot": boot_id(),
        }
        os.ftruncate(descriptor, 0)
        self._operations.pwrite(descriptor, memoryview(json.dumps(owner).encode()), 0)

    def check_held(self) -> None:
        """Asks whether the directory still is the one that was locked.

        Raises:
            StoreError: it was removed, moved or replaced under its owner.
        """
        assert self._descriptor is not None
        try:
            is_ours = os.path.samestat(os.fstat(self._descriptor), self.path.lstat())
        except FileNotFoundError:
            is_ours = False
        except OSError as error:
            raise explain(error, doing="look at the lock file", path=self.path) from error
        if not is_ours:
            raise store_error(
                f"the directory {self.path.parent} was removed or replaced while a job used it: what this job writes can "
                "not be found again; put the directory back, or start anew in another",
                errno.ENOENT,
            )

    def release(self, *, remove: bool = False) -> None:
        """Gives the lock back. Repeating it does nothing.

        Args:
            remove: also remove the lock file.

        Raises:
            StoreError: it could not be removed. The lock is given back even so.
        """
        if self._descriptor is None:
            return
        if os.getpid() != self._pid:
            self._close()
            return
        if not self._reads_only:
            with contextlib.suppress(OSError):
                # An empty file says that the owner left in order. Failing to say so does no harm:
                # the lock itself is free.
                os.ftruncate(self._descriptor, 0)
        try:
            if remove:
                self._operations.unlink(self.path)
        except FileNotFoundError:
            pass  # Somebody else cleaned up.
        except OSError as error:
            raise explain(error, doing="remove the lock file", path=self.path) from error
        finally:
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and os.getpid() == self._pid:  # a forked child has it no more
            let_go(descriptor)
            self._operations.close(descriptor)

    def __del__(self) -> None:
        # Also runs when `__init__` failed early; a descriptor left open would hold the lock as long
        # as the process lives.
        if getattr(self, "_descriptor", None) is not None:
            self._close()


def _read_owner(descriptor: int) -> LockOwner | None:
    """Returns the content of the lock file, for messages; None if it is empty or not ours."""
    try:
        found = json.loads(os.pread(descriptor, _LIMIT_BYTES, 0))
        pid, start_time, host, boot = found["pid"], found["start_time"], found["host"], found["boot"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if type(pid) is not int or type(start_time) is not int or not isinstance(host, str) or not isinstance(boot, str):
        return None
    # It is shown to people: no number of a thousand digits, and no characters that move the
    # terminal.
    if not 0 < pid < _MOST_PID or not 0 <= start_time < 1 << 64 or not (host + boot).isprintable():
        return None
    return LockOwner(pid=pid, start_time=start_time, host=host[:80], boot=boot[:40])


def _in_use(path: Path, owner: LockOwner | None) -> str:
    directory = path.parent
    if owner is None:
        return f"{directory} is in use by another process: wait for it to end, or choose another directory"
    if owner.pid == os.getpid() and owner.is_alive() and owner.is_here():
        return f"{directory} is in use by this process ({owner}): close the job that has it first"
    if not owner.is_alive():
        return (
            f"{directory} is still locked: its owner ({owner}) has ended, but a process that it started "
            "lives; end that one (`fuser` on the lock file finds it), or choose another directory"
        )
    return f"{directory} is in use by a live job ({owner}): wait for it, end it, or choose another one"
