"""Probing: measures what plans are priced with on this machine.

In: a `Machine`, a directory on the disk that homes would use. Out: `Hardware`: rates of matrix
products, of links between tiers, of codecs; sizes of tiers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from memfit import devices
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.tiers import Tier
from memfit.core.units import MIB
from memfit.homes.state_codecs import probe_codecs
from memfit.job.machine import Machine
from memfit.optimizers.elsewhere import probe_updates
from memfit.store import probe_disk
from memfit.verification.meters import AcceleratorMeter

_HOST = torch.device("cpu")
_PROBE_DISK_S = 0.2
_PROBE_FILE_BYTES = 64 * MIB
_PROBE_SIZE = 768
# On an accelerator two such matrices take 45 MiB: they are made under the armed limit, inside the
# reserve of every plan, so that no limit is refused and no proof is spoilt for the probe's sake.
_PROBE_DEVICE_SIZE = 2432
_PROBE_LINK_BYTES = 32 * MIB
# An emulated device may be limited to a few MiB more than the leanest plan takes, and probing
# happens inside that limit.
_PROBE_EMULATED_LINK_BYTES = 4 * MIB


def probe(
    machine: Machine, directory: str | Path | None, *, probes_bf16: bool = False, probes_codecs: bool = False
) -> Hardware:
    """Measures what plans are priced with: matrix products and the disk, and what else is asked
    for.

    Half a second; rough on a busy machine.

    The rates of updates are measured beside an accelerator only; where the processor is the device
    they are `Hardware`'s default.

    Args:
        machine: with its limits.
        directory: on the disk that homes would use; the temporary directory's if None.
        probes_bf16: matrix products in bf16 too.
        probes_codecs: decoding and encoding of optimizer states.
    """
    where = disk_directory(directory)
    # With the threads and pieces that homes have: what others would reach prices no plan.
    disk = probe_disk(where, seconds=_PROBE_DISK_S, file_bytes=_PROBE_FILE_BYTES)
    free = shutil.disk_usage(where).free
    accelerator = devices.of(machine.device) if devices.is_accelerator(machine.device) else None
    host: dict[Tier, TierSpec] = {}
    if machine.has_host:
        host_bytes = machine.limits.of(Tier.HOST) or _memory_bytes()
        host[Tier.HOST] = TierSpec(nbytes=host_bytes, link=_probe_host_link(machine))
    disk_limit = machine.limits.of(Tier.DISK)
    codecs: dict[str, Any] = {"codec_elements_per_s": probe_codecs(machine.device)} if probes_codecs else {}
    if accelerator is not None:
        codecs |= {
            "update_elements_per_s": probe_updates(machine.device),
            "host_update_elements_per_s": probe_updates(_HOST),
        }
        if probes_codecs:
            codecs["host_codec_elements_per_s"] = probe_codecs(_HOST)
    flops_per_s = _probe_flops(machine.device, torch.float32)
    bf16_flops_per_s = _probe_flops(machine.device, torch.bfloat16) if probes_bf16 else None
    if isinstance(machine.meter, AcceleratorMeter):
        machine.meter.release()  # the probes' matrices
    return Hardware(
        device="cpu" if accelerator is None else accelerator.name(machine.device),
        flops_per_s=flops_per_s,
        tiers={
            Tier.DEVICE: TierSpec(
                nbytes=_memory_bytes() if accelerator is None else accelerator.total_bytes(machine.device)
            ),
            **host,
            Tier.DISK: TierSpec(
                nbytes=free if disk_limit is None else min(free, disk_limit),
                link=disk,
            ),
        },
        bf16_flops_per_s=bf16_flops_per_s,
        **codecs,
    )


def disk_directory(directory: str | Path | None) -> Path:
    """An existing directory on the disk that homes would use: that for temporary files, or the
    parent of the given one.
    """
    return Path(tempfile.gettempdir()) if directory is None else Path(directory).absolute().parent


def _probe_host_link(machine: Machine) -> Link:
    """Copies between the device and (pinned) host memory, each way."""
    is_accelerator = devices.is_accelerator(machine.device)
    nbytes = _PROBE_LINK_BYTES if is_accelerator else _PROBE_EMULATED_LINK_BYTES
    with machine.host_ledger():
        on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_accelerator)
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=machine.device)
    rates: list[float] = []
    for source, to in ((on_host, on_device), (on_device, on_host)):
        best = float("inf")
        for _ in range(3):
            _synchronize(machine.device)
            began = time.perf_counter()
            to.copy_(source, non_blocking=True)
            _synchronize(machine.device)
            best = min(best, time.perf_counter() - began)
        rates.append(nbytes / best)
    return Link(read_bytes_per_s=rates[0], write_bytes_per_s=rates[1])


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _probe_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Rate of square matrix products: best of several, since other work can only slow one down."""
    size = _PROBE_DEVICE_SIZE if devices.is_accelerator(device) else _PROBE_SIZE
    a = torch.ones(size, size, device=device, dtype=dtype)
    out = torch.empty_like(a)
    best = float("inf")
    for _ in range(5):
        _synchronize(device)
        began = time.perf_counter()
        torch.mm(a, a, out=out)
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if devices.is_accelerator(device):
        devices.of(device).synchronize(device)
