"""The whole probe: what a step of this machine costs, class by class and link by link, for a file.

In: a device and a directory. Out: `Hardware` with rates, spreads, contention and origin.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memfit import devices
from memfit.allocator import install
from memfit.core.errors import TierUnavailableError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.rates import Rate
from memfit.core.tiers import Tier
from memfit.core.units import MIB
from memfit.core.work_kinds import PRODUCT_KINDS, WorkKind
from memfit.homes.master_probes import probe_rounding, probe_splitting
from memfit.homes.state_codecs import probe_codecs
from memfit.host import OthersMeter, cache_bytes, read_host
from memfit.job.measuring_rates import measure_rates
from memfit.job.probing import disk_directory, memory_bytes, probe_copies
from memfit.job.saved_hardware import disk_name, identity_of
from memfit.optimizers.elsewhere import probe_updates
from memfit.optimizers.pieces_probe import probe_piece_updates
from memfit.store import probe_disk, probe_disk_beside

_HOST = torch.device("cpu")
_FILE_BYTES = 256 * MIB
_DISK_ROUNDS = 4
_DISK_S = 0.6
_BESIDE_S = 1.0
_UPDATE_ROUNDS = 5
_COMPUTED = 512


def probe_whole(device: torch.device, directory: str | Path | None = None) -> Hardware:
    """Measures a device, its links and its processor; some 20 seconds on a quiet machine.

    Memory: 200 MiB. Disk: two files of 256 MiB without names, or a quarter of what is free each.

    Args:
        device: "cpu", or an accelerator.
        directory: on the disk that homes would use; the temporary directory's if None.

    Raises:
        StoreError: the disk has no room or fails.
    """
    began, others = time.perf_counter(), OthersMeter()
    # Fresh memory comes from it in a job too, and its pool decides what that costs.
    with contextlib.suppress(TierUnavailableError):
        install()
    where = disk_directory(directory)
    is_accelerator = devices.is_accelerator(device)
    rates = dict(measure_rates(device))
    rates[WorkKind.UPDATED] = _repeated(lambda: probe_piece_updates(device), rounds=3)
    rates[WorkKind.ENCODED] = _repeated(lambda: probe_codecs(device), rounds=2)
    rates[WorkKind.SPLIT] = _repeated(lambda: probe_splitting(device), rounds=3)
    rates[WorkKind.ROUNDED] = _repeated(lambda: probe_rounding(device), rounds=3)
    tiers: dict[Tier, TierSpec] = {}
    if is_accelerator:
        tiers[Tier.HOST] = TierSpec(nbytes=_own_memory_bytes(), link=probe_copies(device))
    tiers[Tier.DISK] = TierSpec(nbytes=shutil.disk_usage(where).free, link=_probe_disk(where, device))
    capacity = devices.of(device).total_bytes(device) if is_accelerator else _own_memory_bytes()
    half = [rates[k].per_s for k in rates if k in PRODUCT_KINDS and k.startswith("bf16-products")]
    notes = _notes(rates, others)
    on_host: dict[str, Any] = {}
    if is_accelerator:
        on_host["host_update_elements_per_s"] = probe_updates(_HOST)
        on_host["host_codec_elements_per_s"] = probe_codecs(_HOST)
        on_host["host_split_elements_per_s"] = probe_splitting(_HOST)
        on_host["host_rounded_elements_per_s"] = probe_rounding(_HOST)
    return Hardware(
        device=identity_of(device)["device"],
        flops_per_s=rates[WorkKind.PRODUCTS_256].per_s,
        bf16_flops_per_s=max(half),
        update_elements_per_s=rates[WorkKind.UPDATED].per_s,
        codec_elements_per_s=rates[WorkKind.ENCODED].per_s,
        tiers={Tier.DEVICE: TierSpec(nbytes=capacity), **tiers},
        rates=rates,
        on_chip=devices.on_chip_bytes(device) if is_accelerator else cache_bytes(Path("/"), os.sched_getaffinity(0)),
        is_unified=devices.is_unified(device),
        architecture=devices.architecture(device),
        origin={
            **identity_of(device),
            "measured": f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC, in {time.perf_counter() - began:.0f} s",
            "disk": disk_name(where),
            **({"notes": notes} if notes else {}),
        },
        **on_host,
    )


def _repeated(measure: Any, *, rounds: int = _UPDATE_ROUNDS) -> Rate:
    found = [measure() for _ in range(rounds)]
    return Rate(max(found), round(min(1.0, max(found) / statistics.median(found) - 1), 3))


def _probe_disk(where: Path, device: torch.device) -> Link:
    """Each direction alone, both at once, and each while the device computes.

    One read and one written at once are measured in files of their own; the rounds take turns.
    """
    alone = [probe_disk(where, seconds=_DISK_S, file_bytes=_FILE_BYTES) for _ in range(_DISK_ROUNDS)]
    read = statistics.median(link.read_bytes_per_s for link in alone)
    written = statistics.median(link.write_bytes_per_s for link in alone)
    both = probe_disk_beside(where, directions=("read", "write"), seconds=_BESIDE_S, file_bytes=_FILE_BYTES)
    matrix = torch.ones(_COMPUTED, _COMPUTED, device=device)

    def compute() -> None:
        torch.mm(matrix, matrix)
        if devices.is_accelerator(device):
            devices.of(device).synchronize(device)

    free = probe_disk_beside(where, directions=(), seconds=_BESIDE_S / 2, file_bytes=_FILE_BYTES, meanwhile=compute)
    busy = {
        direction: probe_disk_beside(
            where, directions=(direction,), seconds=_BESIDE_S, file_bytes=_FILE_BYTES, meanwhile=compute
        )
        for direction in ("read", "write")
    }
    share = statistics.fmean(one.calls_per_s for one in busy.values()) / free.calls_per_s
    spread = max(
        statistics.pstdev([getattr(link, name) for link in alone]) / level
        for name, level in (("read_bytes_per_s", read), ("write_bytes_per_s", written))
    )
    return Link(
        read_bytes_per_s=read,
        write_bytes_per_s=written,
        both_read_bytes_per_s=min(read, both.bytes_per_s["read"]),
        both_write_bytes_per_s=min(written, both.bytes_per_s["write"]),
        busy_read_bytes_per_s=min(read, busy["read"].bytes_per_s["read"]),
        busy_write_bytes_per_s=min(written, busy["write"].bytes_per_s["write"]),
        compute_share=round(min(1.0, max(0.05, share)), 3),
        spread=round(min(1.0, spread), 3),
    )


def _own_memory_bytes() -> int:
    """Memory that this process may have: the machine's, or what its cgroup allows."""
    try:
        ceiling = read_host().memory.ceiling
    except TierUnavailableError:
        ceiling = None
    return memory_bytes() if ceiling is None else min(memory_bytes(), int(ceiling.value))


def _notes(rates: Mapping[WorkKind, Rate], others: OthersMeter) -> str:
    found = others.read()
    said = "" if found is None else found.sentence()
    rough = [str(kind) for kind, rate in rates.items() if rate.spread > 0.5]
    if rough:
        said = f"{said}; " if said else ""
        said += f"classes whose operations differ by more than half: {', '.join(rough)}"
    return said
