"""A process's peak as another process sees it."""

from __future__ import annotations

from pathlib import Path


def peak_bytes(pid: int) -> int:
    """The largest resident size that the kernel has seen of a living process (VmHWM)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
