"""The whole probe of this machine, as a call.

In: a device. Out: `Hardware`, and the file that keeps it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from memfit.api.probe_engine import measure_engine
from memfit.core.hardware import Hardware
from memfit.job.probing_whole import probe_whole
from memfit.job.saved_hardware import identity_of, save, saved_path


def probe(
    device: str | torch.device, *, directory: str | Path | None = None, out: Path | None = None
) -> tuple[Hardware, Path]:
    """Measures a device with memfit's allocator under torch, as jobs run, and keeps what it found.

    Args:
        device: "cpu", or an accelerator.
        directory: on the disk that homes would use.
        out: file to write; None: that of this device in the user's cache, which later runs read.

    Raises:
        UsageError: the file cannot be written. StoreError: the disk has no room or fails.
    """
    where = torch.device(device)
    found = probe_whole(where, directory)
    # The allocator is installed, so that jobs on the processor measure their steps.
    found = replace(found, rates={**found.rates, **measure_engine(found, directory)})
    path = saved_path(identity_of(where)) if out is None else out
    save(found, path)
    return found, path
