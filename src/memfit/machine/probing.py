"""Probing: measures what plans are priced with on this machine.

In: a `Machine`, a directory on the disk that homes would use. Out: `Hardware`: rates of matrix
products, of links between tiers, of codecs; sizes of tiers.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memfit import devices
from memfit.core.errors import TierUnavailableError
from memfit.core.hardware import Hardware, Link, Rate, TierSpec
from memfit.core.layout import PIECE_ELEMENTS
from memfit.core.limits import MIB
from memfit.core.tiers import Tier
from memfit.core.work_kinds import PRODUCT_KINDS, WorkKind
from memfit.devices.binding import install
from memfit.homes.masters import probe_rounding, probe_splitting
from memfit.homes.state_codecs import probe_codecs
from memfit.machine.described import disk_name, identity_of, load_saved
from memfit.machine.host.measure import OthersMeter
from memfit.machine.host.read import cache_bytes, read_host
from memfit.machine.machine import Machine
from memfit.machine.measuring_rates import measure_rates
from memfit.machine.meters import AcceleratorMeter
from memfit.optimizers.detect import probe_updates
from memfit.optimizers.driver import OptimizerDriver
from memfit.optimizers.shadow import State
from memfit.store import probe_disk, probe_disk_beside

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


# Speed of updates as homes make them: piece by piece, through a driver, of more than caches hold.
#
# In: a device. Out: parameters a second.


def probe_piece_updates(device: torch.device, *, pieces: int = 10, tries: int = 3) -> float:
    """Parameters that torch's AdamW passes in a second, best of several rounds over all pieces,
    since other work can only slow one down.

    Memory: 8 MiB a piece.

    Args:
        device: whose processor works.
        pieces: of the one parameter that is updated.
        tries: rounds behind the first, which makes states.
    """
    elements = pieces * PIECE_ELEMENTS
    weight = torch.nn.Parameter(torch.zeros(elements, device=device))
    gradient = torch.full_like(weight, 0.5)
    driver = OptimizerDriver(torch.optim.AdamW([weight]), {"weight": weight})
    states: dict[int, State] = {}
    best = float("inf")
    clock = devices.clock_of(device)
    for index in range(tries + 1):
        devices.finish(device)
        began = clock()
        driver.begin_step()
        for at in range(0, elements, PIECE_ELEMENTS):
            part = slice(at, at + PIECE_ELEMENTS)
            is_last = at + PIECE_ELEMENTS == elements
            states[at] = driver.update(
                "weight", weight.detach()[part], gradient[part], states.get(at, {}), first=at == 0, last=is_last
            )
        driver.end_step()
        devices.finish(device)
        if index:
            best = min(best, clock() - began)
    return elements / best


# The whole probe: what a step of this machine costs, class by class and link by link, for a file.
#
# In: a device and a directory. Out: `Hardware` with rates, spreads, contention and origin.

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
