"""Small files of /proc and /sys as text, numbers and mounts.

In: a path below a root ("/", or a tree that a test made). Out: text, or None where this kernel or
container has no such file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
