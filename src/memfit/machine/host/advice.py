"""Advice: settings of the machine that a person may change, and the gain to expect.

In: `Host`, its settings, and measurements where there are any. Out: `SettingChange`s, the ones that
matter most first. memfit does none of them: they need other rights, another command, or a decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memfit.core.limits import format_bytes
from memfit.machine.host.measure import DiskRates, Measurements, Waiting
from memfit.machine.host.read import SET_BY_MEMFIT, Ceiling, Host, HostMemory, Malloc, Processors, format_cpu_list
from memfit.machine.host.settings import Setting, compute_threads, own_waiting
from memfit.machine.host.system_files import BlockDevice, Disk

NOT_MEASURED = "not measured"
_WORTH_SAYING = 1.1  # a gain below a tenth is within the noise of a short measurement
_SLOW_ON_FAST_DISKS = frozenset({"bfq", "cfq"})


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """Something that a person may change.

    Attributes:
        found: what is there now.
        how: the change, as a command where there is one.
        brings: what for.
        measured: the gain on this machine, or why there is no figure ("not measured ...").
    """

    found: str
    how: str
    brings: str
    measured: str


def advise_changes(
    host: Host, settings: tuple[Setting, ...], measured: Measurements | None
) -> tuple[SettingChange, ...]:
    """Looks for what stands in the way; empty where nothing does.

    How threads wait and how many there are is not advised by figures of a busy machine: they say
    more about the other work.
    """
    return (
        *_disk_changes(host.disk, measured),
        *_swap_changes(host),
        *_waiting_changes(host, settings, measured),
        *_thread_changes(host, settings, measured),
        *_processor_changes(host),
        *_malloc_changes(host, measured),
        *_page_changes(host, measured),
    )


def _disk_changes(disk: Disk | None, measured: Measurements | None) -> Iterator[SettingChange]:
    if disk is None:
        return
    if disk.is_memory:
        yield SettingChange(
            found=f"{disk.directory} is memory ({disk.file_system})",
            how="name a directory on a disk: --directory",
            brings="homes on disk leave memory; here they would stay in it, and count against a cgroup's limit",
            measured=NOT_MEASURED,
        )
    elif disk.is_remote:
        yield SettingChange(
            found=f"{disk.directory} lies behind a network ({disk.file_system})",
            how="name a directory on a local disk: --directory",
            brings="steps do not wait for the network",
            measured=_rates(measured.disk_direct or measured.disk_cached) if measured else NOT_MEASURED,
        )
    if disk.direct_io_refusal is not None:
        yield SettingChange(
            found=f"no direct I/O in {disk.directory}: {disk.direct_io_refusal}",
            how="name a directory on another file system, such as ext4 or xfs: --directory",
            brings="what passes through the disk does not fill the page cache, which a cgroup's limit counts",
            measured=_left_in_cache(measured),
        )
    for device in disk.devices:
        if device.scheduler in _SLOW_ON_FAST_DISKS and device.is_rotational is False and "none" in device.schedulers:
            yield SettingChange(
                found=f"I/O scheduler {device.scheduler} on {device.name}, which has no moving parts",
                how=f"echo none | sudo tee /sys/block/{device.name}/queue/scheduler",
                brings="large transfers are not held back to be sorted",
                measured=f"{NOT_MEASURED}: it needs an administrator",
            )


def _swap_changes(host: Host) -> Iterator[SettingChange]:
    memory = host.memory
    if not memory.swap_total_bytes:
        return
    used = f"{format_bytes(memory.swap_used_bytes)} of {format_bytes(memory.swap_total_bytes)} swap in use"
    yield SettingChange(
        found=f"{used}, {format_bytes(memory.process_swap_bytes)} by this process; swappiness {memory.swappiness}",
        how="sudo sysctl vm.swappiness=1, or sudo swapoff -a while training",
        brings="memfit moves tensors before they are needed, swap when they are: no stalls, and resident figures that leave nothing out",
        measured=f"{NOT_MEASURED}: it needs an administrator",
    )


def _waiting_changes(
    host: Host, settings: tuple[Setting, ...], measured: Measurements | None
) -> Iterator[SettingChange]:
    own = own_waiting(host)
    waiting = measured.waiting if measured else None
    if own is not None:
        yield SettingChange(
            found=f"{own}: threads that wait keep their cores",
            how=f"unset {' '.join(part.partition('=')[0] for part in own.split(', '))}",
            brings="memfit then has them sleep, and disk, checksums and update have the cores",
            measured=_waiting_gain(waiting) if waiting else NOT_MEASURED,
        )
    elif (
        settings[0].yours is None and waiting and not host.processors.is_busy and waiting.alone_gain < 1 / _WORTH_SAYING
    ):
        yield SettingChange(
            found="threads that wait sleep, which costs time to wake them",
            how="export OMP_WAIT_POLICY=ACTIVE for plans that keep everything on the device, on a machine with no other work",
            brings="a faster step there, a slower one elsewhere",
            measured=_waiting_gain(waiting),
        )


def _thread_changes(
    host: Host, settings: tuple[Setting, ...], measured: Measurements | None
) -> Iterator[SettingChange]:
    yours, wanted = settings[1].yours, compute_threads(host)
    own = host.environment.get("OMP_NUM_THREADS", "")
    if yours is not None and not own.isdigit():
        return  # threads are ruled by other variables, or level by level
    now = wanted if yours is None else int(own)
    times = {one.threads: one.step_s for one in measured.threads} if measured else {}
    if measured is not None and now in times:
        best = measured.fastest_threads
        gain = times[now] / best.step_s
        if gain >= _WORTH_SAYING and not host.processors.is_busy:
            yield SettingChange(
                found=f"{now} threads compute" + (f" ({yours})" if yours else ""),
                how=f"export OMP_NUM_THREADS={best.threads}",
                brings="a faster step; large models may want more threads than the small one that was measured",
                measured=f"small step {gain:.2f}x faster with OMP_NUM_THREADS={best.threads} than with {now}",
            )
    elif now != wanted:
        yield SettingChange(
            found=f"{yours}, and {settings[1].reason}",
            how=f"unset OMP_NUM_THREADS, or set it to {wanted}",
            brings="one thread a core" if now > wanted else "all cores compute",
            measured=NOT_MEASURED,
        )


def _processor_changes(host: Host) -> Iterator[SettingChange]:
    processors = host.processors
    if processors.quota is not None and processors.quota.value < processors.physical_cores:
        yield SettingChange(
            found=f"{processors.quota.value:g} processors by the quota in {processors.quota.file}",
            how=f"give the container or service {processors.physical_cores} processors (docker: --cpus; Kubernetes: resources.limits.cpu)",
            brings=f"up to {processors.physical_cores / max(1.0, processors.quota.value):.3g} times the compute",
            measured=f"{NOT_MEASURED}: the quota holds for measuring too",
        )
    if processors.physical_cores < processors.machine_cores:
        yield SettingChange(
            found=f"processors {format_cpu_list(processors.allowed)} only, {processors.physical_cores} of {processors.machine_cores} cores",
            how="start without taskset or numactl, or widen the container's cpuset, if the others are meant to be yours",
            brings="more cores",
            measured=f"{NOT_MEASURED}: the affinity holds for measuring too",
        )


def _malloc_changes(host: Host, measured: Measurements | None) -> Iterator[SettingChange]:
    if host.malloc.compiler is None:
        yield SettingChange(
            found="no C++ compiler (g++, c++, clang++ or $CXX)",
            how="install one, such as: sudo apt install g++",
            brings="memfit's own allocator: peaks exact to the byte, a limit that is an error before it is passed, fewer page faults",
            measured=_reuse_gain(measured),
        )


def _page_changes(host: Host, measured: Measurements | None) -> Iterator[SettingChange]:
    pages = host.huge_pages
    if pages.mode == "never":
        yield SettingChange(
            found="huge pages are switched off",
            how="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            brings="fresh memory is touched at a multiple of the speed",
            measured=f"{NOT_MEASURED}: it needs an administrator",
        )
    elif pages.mode == "always":
        yield SettingChange(
            found="huge pages everywhere, asked for or not",
            how="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            brings="memfit asks where they pay; elsewhere they round what is resident up to 2 MiB",
            measured=f"{NOT_MEASURED}: it needs an administrator",
        )
    share = measured.first_touch.huge_share if measured is not None else None
    if pages.mode == "madvise" and share is not None and share < 0.5:
        yield SettingChange(
            found=f"the kernel gave huge pages for {share:.0%} of what asked for them (defrag: {pages.defrag})",
            how="echo 1 | sudo tee /proc/sys/vm/compact_memory",
            brings="free memory in one piece, so that there are huge pages to give",
            measured=f"{NOT_MEASURED}: it needs an administrator",
        )


def _waiting_gain(waiting: Waiting) -> str:
    return (
        f"small step with {waiting.threads} threads, PASSIVE beside {waiting.before}: {waiting.alone_gain:.2f}x as fast alone, "
        f"{waiting.contended_gain:.2f}x beside one busy thread"
    )


def _reuse_gain(measured: Measurements | None) -> str:
    if measured is None:
        return NOT_MEASURED
    touch = measured.first_touch
    return f"memory that is used again is written {touch.again_bytes_per_s / touch.small_bytes_per_s:.1f}x as fast as fresh memory"


def _rates(rates: DiskRates | None) -> str:
    if rates is None:
        return NOT_MEASURED
    read, written = (format_bytes(int(rate)) for rate in (rates.read_bytes_per_s, rates.write_bytes_per_s))
    return f"reads {read}/s, writes {written}/s"


def _left_in_cache(measured: Measurements | None) -> str:
    if measured is None or measured.disk_cached is None:
        return NOT_MEASURED
    cached, whole = (format_bytes(n) for n in (measured.disk_cached.cached_bytes, measured.file_bytes))
    return f"a file of {whole} leaves {cached} in the page cache"


# Describes the host in words.
#
# In: `Host`. Out: lines of (what, found).


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
