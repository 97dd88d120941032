"""Limits of a container or a service manager: processor quota and memory, cgroup v1 and v2.

In: /proc/self/cgroup, /proc/self/mountinfo and the files of the groups. Out: `Cgroup`. A group is
bound by its parents too, so each figure is the least one on the way up. Source: cgroups(7); Linux,
Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from memfit.host.kernel_files import Mount, read_mounts, read_number, read_text

# v1 writes "no limit" as the largest whole number of pages below 2**63 bytes.
_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """A bound that somebody set, and the file that sets it."""

    value: float
    file: str


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """Bounds of this process's groups; None where there is none.

    Attributes:
        quota: processor seconds a second.
        memory: bytes; above it the kernel kills. Page cache counts, and is dropped first.
        memory_high: bytes; above it the kernel slows the process down (v2 only).
    """

    quota: Ceiling | None
    memory: Ceiling | None
    memory_high: Ceiling | None


def read_cgroup(root: Path) -> Cgroup:
    """Reads the bounds; some machines have v1 and v2 at once, and then both hold."""
    groups = _groups(root)
    quotas: list[Ceiling] = []
    limits: list[Ceiling] = []
    highs: list[Ceiling] = []
    for mount in read_mounts(root):
        if mount.file_system == "cgroup2" and "" in groups:
            for directory in _way_up(root, mount, groups[""]):
                quotas += _quota_v2(root, directory)
                limits += _bytes(root, directory / "memory.max")
                highs += _bytes(root, directory / "memory.high")
        elif mount.file_system == "cgroup":
            if "cpu" in mount.options & groups.keys():
                for directory in _way_up(root, mount, groups["cpu"]):
                    quotas += _quota_v1(root, directory)
            if "memory" in mount.options & groups.keys():
                for directory in _way_up(root, mount, groups["memory"]):
                    limits += _bytes(root, directory / "memory.limit_in_bytes")
    return Cgroup(quota=_least(quotas), memory=_least(limits), memory_high=_least(highs))


def _groups(root: Path) -> dict[str, str]:
    """Controller -> path of this process's group; "" for v2.

    Lines are "4:memory:/path", for v2 "0::/path".
    """
    found: dict[str, str] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _way_up(root: Path, mount: Mount, group: str) -> Iterator[Path]:
    """Directories of the group and its parents, as far as this process sees them."""
    try:
        below = PurePosixPath(group).relative_to(mount.root)
    except ValueError:
        # the group is told by its name outside of the container: the mount is all there is
        below = PurePosixPath()
    if ".." in below.parts:
        below = PurePosixPath()
    for part in (below, *below.parents):
        yield root / mount.point.lstrip("/") / part


def _quota_v2(root: Path, directory: Path) -> Iterable[Ceiling]:
    words = (read_text(directory / "cpu.max") or "max").split()
    if words[0] == "max":
        return []
    period = int(words[1]) if len(words) > 1 else 100_000  # microseconds, the kernel's default
    return [Ceiling(value=int(words[0]) / period, file=_name(root, directory / "cpu.max"))]


def _quota_v1(root: Path, directory: Path) -> Iterable[Ceiling]:
    quota, period = read_number(directory / "cpu.cfs_quota_us"), read_number(directory / "cpu.cfs_period_us")
    if quota is None or quota <= 0 or not period:  # -1: no quota
        return []
    return [Ceiling(value=quota / period, file=_name(root, directory / "cpu.cfs_quota_us"))]


def _bytes(root: Path, path: Path) -> Iterable[Ceiling]:
    nbytes = read_number(path)  # "max" is no number
    return [] if nbytes is None or nbytes >= _UNLIMITED_BYTES else [Ceiling(value=nbytes, file=_name(root, path))]


def _name(root: Path, path: Path) -> str:
    return f"/{path.relative_to(root)}"


def _least(found: list[Ceiling]) -> Ceiling | None:
    return min(found, key=lambda ceiling: ceiling.value, default=None)
