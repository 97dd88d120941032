"""Describes the host in words.

In: `Host`. Out: lines of (what, found).
"""

from __future__ import annotations

from memfit.core.units import format_bytes
from memfit.host.cgroups import Ceiling
from memfit.host.file_systems import BlockDevice, Disk
from memfit.host.processors import Processors, format_cpu_list
from memfit.host.read import SET_BY_MEMFIT, Host, HostMemory, Malloc


def describe_host(host: Host) -> tuple[tuple[str, str], ...]:
    """Writes what was found for a person, a line a subject; nothing is judged here."""
    pages = host.huge_pages
    lines = [
        ("processors", _processors(host.processors)),
        ("memory", _memory(host.memory)),
        ("swap", _swap(host.memory)),
        ("locked memory", _locked(host.memory)),
        (
            "huge pages",
            "the kernel has none"
            if pages.mode is None
            else f"{pages.mode}, defrag {pages.defrag}, of {format_bytes(pages.page_bytes or 0)}; {pages.reserved} set aside",
        ),
        ("malloc", _malloc(host.malloc)),
    ]
    if host.disk is not None:
        lines.append(("disk", _disk(host.disk)))
    variables = [f"{name}={value}" for name, value in host.environment.items() if name != SET_BY_MEMFIT]
    lines.append(("environment", ", ".join(variables) or "nothing about threads or malloc is set"))
    return tuple(lines)


def _processors(found: Processors) -> str:
    quota = "no quota" if found.quota is None else f"a quota of {found.quota.value:g} ({found.quota.file})"
    return (
        f"{found.logical} logical, {found.machine_cores} cores; allowed {format_cpu_list(found.allowed)} on {found.physical_cores} cores, "
        f"{quota}: {found.usable_cores} to compute on; load {found.load:g}"
    )


def _memory(found: HostMemory) -> str:
    text = f"{format_bytes(found.total_bytes)}, {format_bytes(found.available_bytes)} available; "
    text += f"cgroup limit {_ceiling(found.ceiling)}"
    return text if found.slow_above is None else f"{text}, slowed down above {_ceiling(found.slow_above)}"


def _ceiling(found: Ceiling | None) -> str:
    return "none" if found is None else f"{format_bytes(int(found.value))} ({found.file})"


def _swap(found: HostMemory) -> str:
    if not found.swap_total_bytes:
        return "none"
    return (
        f"{format_bytes(found.swap_total_bytes)}, {format_bytes(found.swap_used_bytes)} used, {format_bytes(found.process_swap_bytes)} by this process; "
        f"swappiness {'unknown' if found.swappiness is None else found.swappiness}"
    )


def _locked(found: HostMemory) -> str:
    limit = "without limit" if found.lockable_bytes is None else f"up to {format_bytes(found.lockable_bytes)}"
    return f"{limit}, {format_bytes(found.locked_bytes)} in use; memfit locks none, and pins only beside a GPU"


def _malloc(found: Malloc) -> str:
    library = f"glibc {found.glibc}" if found.glibc else "not glibc"
    preloaded = f", replaced by {found.preloaded}" if found.preloaded else ""
    compiler = f"built by {found.compiler}" if found.compiler else "cannot be built: no C++ compiler"
    return f"{library}{preloaded}; memfit's own for tensors {compiler}"


def _disk(found: Disk) -> str:
    kind = f"{found.file_system or 'unknown file system'} of {found.source or 'an unknown source'}"
    devices = "; ".join(_device(device) for device in found.devices) or "no block device to be seen"
    direct = "direct I/O works" if found.direct_io_refusal is None else f"no direct I/O ({found.direct_io_refusal})"
    return f"{found.directory}: {kind}, {format_bytes(found.free_bytes)} free, {direct}; {devices}"


def _device(device: BlockDevice) -> str:
    kind = {True: "rotating by its own word", False: "no moving parts", None: "kind unknown"}[device.is_rotational]
    others = ", ".join(name for name in device.schedulers if name != device.scheduler)
    scheduler = f"scheduler {device.scheduler or 'unknown'}" + (f" (others: {others})" if others else "")
    return f"{device.name}: {kind}, {scheduler}"
