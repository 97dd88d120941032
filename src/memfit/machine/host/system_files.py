"""Small files of /proc and /sys as text, numbers and mounts.

In: a path below a root ("/", or a tree that a test made). Out: text, or None where this kernel or
container has no such file.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from memfit.core.errors import UsageError

_ESCAPE = re.compile(r"\\([0-7]{3})")


def read_text(path: Path) -> str | None:
    """Returns a file's content, stripped; None where it cannot be read.

    Kernels and containers differ in which of these files they have and show, and reading one that
    is there may still be refused (ENODEV, EINVAL, EACCES): to every reader here that is the same as
    "not known".
    """
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """A file that holds one integer; None where it is not there or says something else, such as
    "max".
    """
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def read_fields(path: Path) -> dict[str, str]:
    """The lines `name: value` of a file such as /proc/meminfo; empty where it is not there."""
    lines = (read_text(path) or "").splitlines()
    return {name.strip(): value.strip() for name, found, value in (line.partition(":") for line in lines) if found}


def kilobytes(text: str | None) -> int | None:
    """Bytes of a value such as "8192 kB" (the kernel's kB is 1024 bytes)."""
    return None if text is None else int(text.split()[0]) * 1024


def chosen(text: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Reads "always [madvise] never": what stands in brackets, and every choice."""
    words = (text or "").split()
    marked = [word.strip("[]") for word in words if word.startswith("[")]
    return (marked[0] if marked else None), tuple(word.strip("[]") for word in words)


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of /proc/self/mountinfo. Source: proc_pid_mountinfo(5).

    Attributes:
        device: "major:minor".
        root: what of the file system is mounted here.
        point: where.
        file_system: its type, such as "ext4".
        source: such as "/dev/vda1".
        options: of the file system ("super options"); controllers, for cgroup v1.
    """

    device: str
    root: str
    point: str
    file_system: str
    source: str
    options: frozenset[str]


def read_mounts(root: Path) -> tuple[Mount, ...]:
    """All mounts that this process sees, in the order in which they were made."""
    mounts: list[Mount] = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 6 or len(right) < 3:
            continue  # not a mount: fields that the kernel always writes are missing
        mounts.append(
            Mount(
                device=left[2],
                root=_unescape(left[3]),
                point=_unescape(left[4]),
                file_system=right[0],
                source=_unescape(right[1]),
                options=frozenset(right[2].split(",")),
            )
        )
    return tuple(mounts)


def _unescape(text: str) -> str:
    r"""The kernel writes a space as \040, a tab, a line break and a backslash likewise."""
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), text)


# The disk under a directory: file system, devices, I/O scheduler, free room, direct I/O.
#
# In: a directory that can be written, /proc and /sys. Out: `Disk`.

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "beegfs", "fuse.sshfs"})
_DIRECT_BYTES = 4096  # alignment that every disk with 512- or 4096-byte sectors takes


@dataclass(frozen=True, kw_only=True)
class BlockDevice:
    """A disk, or what the machine takes for one.

    Attributes:
        name: as in /sys/block.
        scheduler: who orders its requests; None where the kernel does not say.
        schedulers: what it could be.
        is_rotational: has platters and arms, by its own word; None where it does not say.
    """

    name: str
    scheduler: str | None
    schedulers: tuple[str, ...]
    is_rotational: bool | None


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Describes the device under `directory`.

    Attributes:
        directory: absolute, links followed.
        mount_point: of its file system.
        file_system: such as "ext4".
        source: what is mounted, such as "/dev/nvme0n1p2".
        devices: below partitions, volumes and arrays; empty where there are none (memory, network)
            or none can be seen (overlay).
        total_bytes, free_bytes: of the file system; free for this user.
        direct_io_refusal: why direct I/O does not work here; None: it does.
    """

    directory: str
    mount_point: str
    file_system: str
    source: str
    devices: tuple[BlockDevice, ...]
    total_bytes: int
    free_bytes: int
    direct_io_refusal: str | None

    @property
    def is_memory(self) -> bool:
        """True if files here stay in memory, and count as such."""
        return self.file_system in _IN_MEMORY

    @property
    def is_remote(self) -> bool:
        """True if files here go over a network."""
        return self.file_system in _REMOTE


def read_disk(root: Path, directory: Path) -> Disk:
    """Looks at the disk under a directory.

    Writes and reads one page there, in a file without a name.

    Raises:
        UsageError: no such directory, or it cannot be written.
    """
    where = directory.resolve()
    if not where.is_dir():
        raise UsageError(f"{directory} is not a directory: name one on the disk that homes would use")
    usage = shutil.disk_usage(where)
    mounts = read_mounts(root)
    mount = _mount_of(where, mounts)
    return Disk(
        directory=str(where),
        mount_point=mount.point if mount else "",
        file_system=mount.file_system if mount else "",
        source=mount.source if mount else "",
        devices=_devices_of(root, mount) if mount else (),
        total_bytes=usage.total,
        free_bytes=usage.free,
        direct_io_refusal=_try_direct_io(where),
    )


def _mount_of(where: Path, mounts: tuple[Mount, ...]) -> Mount | None:
    """The mount with the longest point above the directory.

    Of several on one point the last lies on top.
    """
    above = [mount for mount in mounts if where.is_relative_to(mount.point)]
    return max(reversed(above), key=lambda mount: len(mount.point), default=None)


def _devices_of(root: Path, mount: Mount) -> tuple[BlockDevice, ...]:
    device = root / "sys/dev/block" / mount.device
    if not device.exists():
        # Some file systems (btrfs) have a number of their own; the source still names the device.
        device = root / "sys/class/block" / Path(mount.source).name
    if not mount.source.startswith("/dev/") and not device.exists():
        return ()
    return tuple(_read_device(path) for path in _leaves(device.resolve())) if device.exists() else ()


def _leaves(device: Path) -> list[Path]:
    """The disks below a partition, a volume or an array: those have schedulers that act."""
    if (device / "partition").exists():
        return _leaves(device.parent)
    slaves = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
    if not slaves:
        return [device]
    return list(dict.fromkeys(leaf for slave in slaves for leaf in _leaves(slave.resolve())))


def _read_device(device: Path) -> BlockDevice:
    scheduler, schedulers = chosen(read_text(device / "queue/scheduler"))
    rotational = read_number(device / "queue/rotational")
    # A kernel with only one choice writes it without brackets.
    only = schedulers[0] if len(schedulers) == 1 else None
    return BlockDevice(
        name=device.name,
        scheduler=scheduler or only,
        schedulers=schedulers,
        is_rotational=None if rotational is None else bool(rotational),
    )


def _try_direct_io(where: Path) -> str | None:
    """Why direct I/O does not work here; None: it does.

    An own function opens the file, so that only its errors mean "cannot be written".
    """
    with _open_unnamed(where) as file, mmap.mmap(-1, _DIRECT_BYTES) as page:
        page[:] = bytes(range(256)) * (_DIRECT_BYTES // 256)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
            os.pwrite(file.fileno(), page, 0)
            written, page[:] = page[:], bytes(_DIRECT_BYTES)
            os.preadv(file.fileno(), [page], 0)
        except OSError as error:
            return error.strerror or str(error)
        return None if page[:] == written else "what was read is not what was written"


def _open_unnamed(where: Path) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=where, buffering=0)
    except OSError as error:
        raise UsageError(f"{where} cannot be written: {error.strerror}; name a directory that can") from error
