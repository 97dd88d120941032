"""Probing: measures what plans are priced with on this machine.

In: a `Machine`, a directory on the disk that homes would use. Out: `Hardware`: rates of matrix
products, of links between tiers, of codecs; sizes of tiers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memfit import devices
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.rates import Rate
from memfit.core.tiers import Tier
from memfit.core.units import MIB
from memfit.core.work_kinds import WorkKind
from memfit.homes.master_probes import probe_rounding, probe_splitting
from memfit.homes.state_codecs import probe_codecs
from memfit.job.machine import Machine
from memfit.job.saved_hardware import disk_name, load_saved
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
_PROBE_EMULATED_LINK_BYTES = 4 * MIB


def probe(
    machine: Machine, directory: str | Path | None, *, probes_bf16: bool = False, probes_codecs: bool = False
) -> Hardware:
    """Measures what plans are priced with: matrix products and the disk, and what else is asked
    for.

    Where `memfit probe` has measured this device before, its rates are taken, and its links, but
    for a disk other than the one that it measured; capacities are always today's. Else half a
    second; rough on a busy machine. Then rates of updates are measured beside an accelerator only;
    where the processor is the device they are `Hardware`'s default.

    Args:
        machine: with its limits.
        directory: on the disk that homes would use; the temporary directory's if None.
        probes_bf16: matrix products in bf16 too, and what updates of such weights do beside the
            optimizer's class.
        probes_codecs: decoding and encoding of optimizer states.
    """
    # Host memory of an emulated device: its limit may leave no room beside the model as it was
    # built.
    with machine.host_ledger():
        return _probe(machine, directory, probes_bf16=probes_bf16, probes_codecs=probes_codecs)


def _probe(machine: Machine, directory: str | Path | None, *, probes_bf16: bool, probes_codecs: bool) -> Hardware:
    where = disk_directory(directory)
    saved = None if machine.is_emulated else load_saved(machine.device)
    # With the threads and pieces that homes have: what others would reach prices no plan.
    disk_saved = saved is not None and saved.origin.get("disk") == disk_name(where)
    disk = (
        saved.link(Tier.DISK)
        if saved is not None and disk_saved
        else probe_disk(where, seconds=_PROBE_DISK_S, file_bytes=_PROBE_FILE_BYTES)
    )
    free = shutil.disk_usage(where).free
    accelerator = devices.of(machine.device) if devices.is_accelerator(machine.device) else None
    disk_limit = machine.limits.of(Tier.DISK)
    tiers = {
        Tier.DEVICE: TierSpec(nbytes=memory_bytes() if accelerator is None else accelerator.total_bytes(machine.device))
    }
    if machine.has_host:
        link = _probe_host_link(machine) if saved is None else saved.link(Tier.HOST)
        tiers[Tier.HOST] = TierSpec(nbytes=machine.limits.of(Tier.HOST) or memory_bytes(), link=link)
    tiers[Tier.DISK] = TierSpec(nbytes=free if disk_limit is None else min(free, disk_limit), link=disk)
    if saved is not None:
        return replace(saved, tiers=tiers)
    codecs: dict[str, Any] = {"codec_elements_per_s": probe_codecs(machine.device)} if probes_codecs else {}
    if accelerator is not None:
        codecs |= {
            "update_elements_per_s": probe_updates(machine.device),
            "host_update_elements_per_s": probe_updates(_HOST),
        }
        if probes_codecs:
            codecs["host_codec_elements_per_s"] = probe_codecs(_HOST)
        if probes_bf16:
            codecs["host_split_elements_per_s"] = probe_splitting(_HOST)
            codecs["host_rounded_elements_per_s"] = probe_rounding(_HOST)
    if probes_bf16:
        codecs["rates"] = {
            WorkKind.SPLIT: Rate(probe_splitting(machine.device)),
            WorkKind.ROUNDED: Rate(probe_rounding(machine.device)),
        }
    flops_per_s = _probe_flops(machine.device, torch.float32)
    bf16_flops_per_s = _probe_flops(machine.device, torch.bfloat16) if probes_bf16 else None
    if isinstance(machine.meter, AcceleratorMeter):
        machine.meter.release()  # the probes' matrices
    return Hardware(
        device="cpu" if accelerator is None else accelerator.name(machine.device),
        flops_per_s=flops_per_s,
        tiers=tiers,
        bf16_flops_per_s=bf16_flops_per_s,
        **codecs,
    )


def disk_directory(directory: str | Path | None) -> Path:
    """An existing directory on the disk that homes would use: that for temporary files, or the
    parent of the given one.
    """
    return Path(tempfile.gettempdir()) if directory is None else Path(directory).absolute().parent


def _probe_host_link(machine: Machine) -> Link:
    if devices.is_accelerator(machine.device):
        return probe_copies(machine.device)
    return probe_copies(machine.device, torch.empty(_PROBE_EMULATED_LINK_BYTES, dtype=torch.uint8))


def probe_copies(device: torch.device, on_host: torch.Tensor | None = None) -> Link:
    """Measures copies between a device and host memory, each way.

    Args:
        device: an accelerator, or the emulated one.
        on_host: to copy from and to; None: pinned memory of 32 MiB is taken.
    """
    if on_host is None:
        on_host = torch.empty(_PROBE_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(on_host.nbytes, dtype=torch.uint8, device=device)
    rates: list[float] = []
    for source, to in ((on_host, on_device), (on_device, on_host)):
        best = float("inf")
        for _ in range(3):
            devices.finish(device)
            began = time.perf_counter()
            to.copy_(source, non_blocking=True)
            devices.finish(device)
            best = min(best, time.perf_counter() - began)
        rates.append(on_host.nbytes / best)
    return Link(read_bytes_per_s=rates[0], write_bytes_per_s=rates[1])


def memory_bytes() -> int:
    """Returns the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _probe_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Rate of square matrix products: best of several, since other work can only slow one down."""
    size = _PROBE_DEVICE_SIZE if devices.is_accelerator(device) else _PROBE_SIZE
    a = torch.ones(size, size, device=device, dtype=dtype)
    out = torch.empty_like(a)
    best = float("inf")
    for _ in range(5):
        devices.finish(device)
        began = time.perf_counter()
        torch.mm(a, a, out=out)
        devices.finish(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best
