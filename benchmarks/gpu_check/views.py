"""The machine as others see it: versions, the driver's account of memory, the process.

In: a device. Out: plain values for the notes. No host name, user name or path is among them.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch


def device_bytes_by_driver(device: torch.device) -> int | None:
    """Bytes of the device that this process holds as the driver counts them: tensors, the allocator's pool, the context, libraries.

    nvidia-smi tells them by process; where it cannot (no such program, a container with numbers of its own), None.
    """
    if device.type != "cuda":
        return None
    told = _nvidia("--query-compute-apps=pid,used_memory")
    mine = [line.split(",")[1] for line in told if line.split(",")[0].strip() == str(os.getpid())]
    told_mib = [int(each) for each in mine if each.strip().isdigit()]  # "[N/A]" under some drivers
    return sum(told_mib) << 20 if told_mib else None


def _nvidia(query: str) -> list[str]:
    """Lines of nvidia-smi's answer; none where it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False, timeout=20
        )
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def host_peak_bytes() -> int:
    """The most that was resident of this process (VmHWM), pinned host homes included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def commit() -> str | None:
    """The version that is checked out; None where this is no clone."""
    return _said(["git", "-C", str(Path(__file__).parents[2]), "describe", "--always", "--dirty"])


def describe(device: torch.device, directory: Path) -> dict[str, Any]:
    """Versions and sizes of what the figures were measured on."""
    import transformers

    from memfit import __version__

    return {
        "memfit": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "driver": next(iter(_nvidia("--query-gpu=driver_version")), None),
        "gpus_beside": max(0, torch.accelerator.device_count() - 1),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} (emulated)",
        "capability": list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None,
        "used_before_bytes": _used_bytes(device),
        "total_bytes": torch.accelerator.get_memory_info(device)[1],
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "host_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "locked_memory_limit": _said(["sh", "-c", "ulimit -l"]),
        "file_system": _said(["stat", "-f", "-c", "%T", str(directory)]),
        "disk_free_bytes": shutil.disk_usage(directory).free,
    }


def _used_bytes(device: torch.device) -> int:
    """Bytes in use on the whole device, by everybody, this process's own context included."""
    free, total = torch.accelerator.get_memory_info(device)
    return total - free


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _said(command: list[str]) -> str | None:
    """The first line of a command's output; None where it cannot be had."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None
