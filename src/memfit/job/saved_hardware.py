"""The machine as `memfit probe` measured it, kept for later runs.

In: a device. Out: a file in the user's cache directory (`$MEMFIT_HARDWARE_CACHE`, or
`$XDG_CACHE_HOME/memfit/hardware`, or `~/.cache/memfit/hardware`), by the identity of what it
describes: another processor, another number of threads or another torch has rates of its own, and
finds no file. Beside it stands what runs have taught (`job.corrections`).
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from memfit import devices
from memfit.core.documents import read_document, write_document
from memfit.core.errors import MemfitWarning, UsageError
from memfit.core.hardware import FILE_LIMIT_BYTES, Hardware
from memfit.job.corrections import correction_path, corrections_are_on, load_correction

_PROBE_VERSION = "3"  # another way of measuring gives other figures


def identity_of(device: torch.device) -> Mapping[str, str]:
    """Returns what a device's rates depend on, by name."""
    is_accelerator = devices.is_accelerator(device)
    return {
        "probe": _PROBE_VERSION,
        "device": devices.of(device).name(device) if is_accelerator else "cpu",
        "processor": _processor_name(),
        "processors": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }


def saved_path(identity: Mapping[str, str]) -> Path:
    """Returns the place of the file of that identity."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = Path(os.environ.get("MEMFIT_HARDWARE_CACHE") or cache / "memfit" / "hardware")
    digest = hashlib.sha256(json.dumps(dict(sorted(identity.items()))).encode()).hexdigest()[:16]
    return directory / f"{digest}.json"


def load_saved(device: torch.device) -> Hardware | None:
    """Reads the file of this device, if there is one, with what runs have taught since; see
    `job.corrections`. A file that cannot be read is told by a warning and not used.
    """
    found = load_measured(device)
    if found is None or not corrections_are_on():
        return found
    return load_correction(found, correction_path(saved_path(identity_of(device)))).applied(found)


def load_measured(device: torch.device) -> Hardware | None:
    """Reads the file of this device as it was measured."""
    identity = identity_of(device)
    path = saved_path(identity)
    if not path.is_file():
        return None
    try:
        found = Hardware.from_json(read_document(path, limit_bytes=FILE_LIMIT_BYTES))
    except (OSError, ValueError, UsageError) as error:
        warnings.warn(
            f"what memfit probe measured cannot be read ({error}), so the machine is probed for half a second instead: "
            f"run memfit probe again, or remove {path}",
            MemfitWarning,
            stacklevel=2,
        )
        return None
    return found if all(found.origin.get(key) == value for key, value in identity.items()) else None


def save(hardware: Hardware, path: Path) -> None:
    """Writes a file whole or not at all.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write_document(path, hardware.to_json() + "\n")
    except OSError as error:
        raise UsageError(f"the hardware file cannot be written to {path}: {error.strerror}; name another") from error


def disk_name(directory: Path) -> str:
    """Returns a name of the file system that a directory is on, equal while it is mounted."""
    found = directory.stat()
    return f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"


def _processor_name() -> str:
    """The processor's name as the kernel gives it; its architecture where it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return os.uname().machine
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine
