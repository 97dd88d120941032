"""What is read of a machine: on trees that look like machines we do not have, and on this one beside other tools."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memfit.core.errors import TierUnavailableError, UsageError
from memfit.devices.compiling import find_compiler
from memfit.machine.host.read import SET_BY_MEMFIT, format_cpu_list, parse_cpu_list, read_host

GIB = 2**30

MEMINFO = """MemTotal:       67108864 kB
MemFree:         1024 kB
MemAvailable:   33554432 kB
SwapTotal:       4194304 kB
SwapFree:        3145728 kB
HugePages_Total:       7
"""
STATUS = "Name:\tpython\nVmLck:\t    2048 kB\nVmSwap:\t     12 kB\nCpus_allowed_list:\t0-7\n"
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         65536                8388608              bytes
Max address space         unlimited            unlimited            bytes
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, **files: str) -> Path:
    """Eight logical processors on four cores, two sockets: siblings are n and n + 4."""
    write(root, {"proc/meminfo": MEMINFO, "proc/self/status": STATUS, "proc/self/limits": LIMITS})
    write(root, {"sys/devices/system/cpu/online": "0-7\n", "proc/sys/vm/swappiness": "60\n"})
    for number in range(8):
        topology = f"sys/devices/system/cpu/cpu{number}/topology"
        # Core ids begin at 0 on each socket: whoever counts those finds two cores.
        write(root, {f"{topology}/thread_siblings_list": f"{number % 4},{number % 4 + 4}\n"})
        write(root, {f"{topology}/core_id": f"{number % 2}\n"})
    return write(root, {name.replace("__", "/"): text for name, text in files.items()})


def mountinfo(*lines: str) -> dict[str, str]:
    return {"proc/self/mountinfo": "".join(f"{30 + n} 1 {line}\n" for n, line in enumerate(lines))}


def quota_of(root: Path) -> tuple[float, str] | None:
    quota = read_host(root=root, allowed_cpus=range(8)).processors.quota
    return None if quota is None else (quota.value, quota.file)


def memory_limit_of(root: Path) -> tuple[float, str] | None:
    found = read_host(root=root, allowed_cpus=range(8)).memory.ceiling
    return None if found is None else (found.value, found.file)


def test_hyper_threads_of_one_core_count_once(tmp_path: Path) -> None:
    processors = read_host(root=machine(tmp_path), allowed_cpus=range(8)).processors
    assert (processors.logical, processors.machine_cores) == (8, 4)
    assert (processors.physical_cores, processors.usable_cores) == (4, 4)
    assert processors.load == 0 and not processors.is_busy


def test_a_machine_is_busy_when_more_than_half_of_it_works(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__loadavg="4.01 0.50 0.25 1/100 4242\n")
    processors = read_host(root=root, allowed_cpus=(0,)).processors
    assert processors.load == 4.01 and processors.is_busy


@pytest.mark.parametrize(
    ("allowed", "cores"),
    [((0, 4), 1), ((0, 1), 2), ((0, 1, 5), 2), ((3,), 1), ((1, 2, 3, 4), 4)],
)
def test_affinity_leaves_the_cores_behind_the_allowed_processors(
    tmp_path: Path, allowed: tuple[int, ...], cores: int
) -> None:
    processors = read_host(root=machine(tmp_path), allowed_cpus=allowed).processors
    assert processors.allowed == allowed
    assert (processors.physical_cores, processors.usable_cores, processors.machine_cores) == (cores, cores, 4)


def test_without_a_topology_each_processor_is_a_core(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": MEMINFO})
    processors = read_host(root=root, allowed_cpus=(2, 3, 9)).processors
    assert (processors.logical, processors.physical_cores, processors.machine_cores) == (3, 3, 3)


def test_memory_swap_and_locked_memory_are_in_bytes(tmp_path: Path) -> None:
    memory = read_host(root=machine(tmp_path), allowed_cpus=range(8)).memory
    assert (memory.total_bytes, memory.available_bytes) == (64 * GIB, 32 * GIB)
    assert (memory.swap_total_bytes, memory.swap_used_bytes) == (4 * GIB, 1 * GIB)
    assert (memory.process_swap_bytes, memory.locked_bytes) == (12 * 1024, 2 * 2**20)
    assert (memory.lockable_bytes, memory.swappiness) == (65536, 60)
    assert memory.ceiling is None and memory.slow_above is None


def test_locked_memory_without_a_limit_is_none(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__limits="Max locked memory         unlimited            unlimited   bytes\n")
    assert read_host(root=root, allowed_cpus=range(8)).memory.lockable_bytes is None


def test_huge_pages_are_what_stands_in_brackets(tmp_path: Path) -> None:
    where = "sys/kernel/mm/transparent_hugepage"
    files = {"enabled": "always [madvise] never\n", "defrag": "always defer [defer+madvise] madvise never\n"}
    root = write(machine(tmp_path), {f"{where}/{name}": text for name, text in files.items()})
    write(root, {f"{where}/hpage_pmd_size": "2097152\n"})
    pages = read_host(root=root, allowed_cpus=range(8)).huge_pages
    assert (pages.mode, pages.defrag, pages.page_bytes, pages.reserved) == ("madvise", "defer+madvise", 2**21, 7)


def test_a_kernel_without_huge_pages_has_no_mode(tmp_path: Path) -> None:
    assert read_host(root=machine(tmp_path), allowed_cpus=range(8)).huge_pages.mode is None


def test_no_cgroup_means_no_bounds(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert quota_of(root) is None and memory_limit_of(root) is None


V1_MOUNTS = mountinfo(
    "0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755",
    "0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
    "0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
    "0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
)
V1_CGROUP = "4:memory:/work/job\n3:cpuset:/\n1:cpu,cpuacct:/work\n0::/\n"


def test_cgroup_v1_bounds_are_the_least_on_the_way_up(tmp_path: Path) -> None:
    root = write(machine(tmp_path, proc__self__cgroup=V1_CGROUP), V1_MOUNTS)
    cpu, memory = root / "sys/fs/cgroup/cpu,cpuacct", root / "sys/fs/cgroup/memory"
    write(cpu, {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"})
    write(cpu / "work", {"cpu.cfs_quota_us": "250000\n", "cpu.cfs_period_us": "100000\n"})
    write(memory, {"memory.limit_in_bytes": "9223372036854771712\n"})
    write(memory / "work", {"memory.limit_in_bytes": f"{2 * GIB}\n"})
    write(memory / "work/job", {"memory.limit_in_bytes": f"{8 * GIB}\n"})
    assert quota_of(root) == (2.5, "/sys/fs/cgroup/cpu,cpuacct/work/cpu.cfs_quota_us")
    assert memory_limit_of(root) == (2 * GIB, "/sys/fs/cgroup/memory/work/memory.limit_in_bytes")
    # Two and a half processors are two threads: a third would be stopped half of the time, and the others wait for it.
    assert read_host(root=root, allowed_cpus=range(8)).processors.usable_cores == 2


def test_cgroup_v1_without_a_quota_has_none(tmp_path: Path) -> None:
    root = write(machine(tmp_path, proc__self__cgroup=V1_CGROUP), V1_MOUNTS)
    write(root / "sys/fs/cgroup/cpu,cpuacct/work", {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"})
    write(root / "sys/fs/cgroup/memory/work/job", {"memory.limit_in_bytes": "9223372036854771712\n"})
    assert quota_of(root) is None and memory_limit_of(root) is None


def test_a_v1_container_sees_its_own_group_as_the_mount(tmp_path: Path) -> None:
    # Without a cgroup namespace: the group is told by its name outside, and the mount shows that group only.
    lines = mountinfo("0:29 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu")
    root = write(machine(tmp_path, proc__self__cgroup="1:cpu:/docker/abc\n"), lines)
    write(root / "sys/fs/cgroup/cpu", {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"})
    assert quota_of(root) == (0.5, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    assert read_host(root=root, allowed_cpus=range(8)).processors.usable_cores == 1


V2_MOUNTS = mountinfo("0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate")


def test_cgroup_v2_bounds_are_the_least_on_the_way_up(tmp_path: Path) -> None:
    root = write(machine(tmp_path, proc__self__cgroup="0::/user.slice/job.scope\n"), V2_MOUNTS)
    write(root / "sys/fs/cgroup", {"cgroup.controllers": "cpu memory\n"})  # the top has no bounds of its own
    slice_, scope = root / "sys/fs/cgroup/user.slice", root / "sys/fs/cgroup/user.slice/job.scope"
    write(slice_, {"cpu.max": "300000 100000\n", "memory.max": f"{16 * GIB}\n", "memory.high": "max\n"})
    write(scope, {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.high": f"{12 * GIB}\n"})
    assert quota_of(root) == (3.0, "/sys/fs/cgroup/user.slice/cpu.max")
    assert memory_limit_of(root) == (16 * GIB, "/sys/fs/cgroup/user.slice/memory.max")
    high = read_host(root=root, allowed_cpus=range(8)).memory.slow_above
    assert high is not None and (high.value, high.file) == (
        12 * GIB,
        "/sys/fs/cgroup/user.slice/job.scope/memory.high",
    )
    assert read_host(root=root, allowed_cpus=range(8)).processors.usable_cores == 3
    # Affinity and quota bind together: one core is less than three processors.
    assert read_host(root=root, allowed_cpus=(0, 4)).processors.usable_cores == 1


@pytest.mark.parametrize("group", ["/", "/../../outside", "/docker/abc"])
def test_a_v2_container_sees_its_own_group_as_the_mount(tmp_path: Path, group: str) -> None:
    mounts = mountinfo(f"0:26 {'/other' if group == '/docker/abc' else '/'} /sys/fs/cgroup ro - cgroup2 cgroup rw")
    root = write(machine(tmp_path, proc__self__cgroup=f"0::{group}\n"), mounts)
    write(root / "sys/fs/cgroup", {"cpu.max": "150000 100000\n", "memory.max": f"{GIB}\n"})
    assert quota_of(root) == (1.5, "/sys/fs/cgroup/cpu.max")
    assert memory_limit_of(root) == (GIB, "/sys/fs/cgroup/memory.max")


def test_v1_and_v2_side_by_side_both_hold(tmp_path: Path) -> None:
    root = write(machine(tmp_path, proc__self__cgroup="1:cpu:/\n0::/\n"), V1_MOUNTS)
    write(root / "sys/fs/cgroup/cpu,cpuacct", {"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"})
    write(root / "sys/fs/cgroup/unified", {"memory.max": f"{GIB}\n"})
    assert quota_of(root) == (4.0, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us")
    assert memory_limit_of(root) == (GIB, "/sys/fs/cgroup/unified/memory.max")


def block_device(root: Path, name: str, number: str, *, scheduler: str, rotational: str = "0") -> Path:
    device = root / "sys/devices/pci0" / name
    write(device, {"queue/scheduler": f"{scheduler}\n", "queue/rotational": f"{rotational}\n"})
    for link in (f"sys/dev/block/{number}", f"sys/class/block/{name}"):
        (root / link).parent.mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(device)
    return device


def devices_under(root: Path, directory: Path) -> list[tuple[str, str | None]]:
    found = read_host(directory, root=root, allowed_cpus=range(8)).disk
    assert found is not None
    return [(device.name, device.scheduler) for device in found.devices]


def test_a_partition_has_the_scheduler_of_its_disk(tmp_path: Path) -> None:
    root, home = machine(tmp_path / "tree"), tmp_path / "a home"
    home.mkdir()
    disk = block_device(root, "nvme0n1", "259:0", scheduler="[none] mq-deadline bfq")
    write(disk, {"nvme0n1p2/partition": "2\n"})
    (root / "sys/dev/block/259:2").symlink_to(disk / "nvme0n1p2")
    escaped = str(home).replace(" ", "\\040")  # as the kernel writes spaces
    write(
        root,
        mountinfo(
            "8:1 / / rw - ext4 /dev/sda1 rw",
            f"0:50 / {escaped} rw - tmpfs under rw",
            f"259:2 / {escaped} rw,relatime shared:1 - xfs /dev/nvme0n1p2 rw",  # mounted over the one before
        ),
    )
    found = read_host(home / ".", root=root, allowed_cpus=range(8)).disk
    assert found is not None
    assert (found.file_system, found.source, found.mount_point) == ("xfs", "/dev/nvme0n1p2", str(home))
    (device,) = found.devices
    assert (device.name, device.scheduler, device.is_rotational) == ("nvme0n1", "none", False)
    assert device.schedulers == ("none", "mq-deadline", "bfq")


def test_a_volume_has_the_schedulers_of_all_disks_below(tmp_path: Path) -> None:
    root = machine(tmp_path / "tree")
    volume = block_device(root, "dm-0", "253:0", scheduler="none")
    (volume / "slaves").mkdir()
    for index, scheduler in enumerate(("none [bfq]", "[mq-deadline] none")):
        disk = block_device(root, f"sd{'ab'[index]}", f"8:{16 * index}", scheduler=scheduler, rotational="1")
        (volume / "slaves" / disk.name).symlink_to(disk)
    write(root, mountinfo("253:0 / / rw - ext4 /dev/mapper/data rw"))
    assert devices_under(root, tmp_path) == [("sda", "bfq"), ("sdb", "mq-deadline")]


def test_a_file_system_with_a_number_of_its_own_is_found_by_its_source(tmp_path: Path) -> None:
    root = machine(tmp_path / "tree")
    block_device(root, "vdb", "254:16", scheduler="none")
    write(root, mountinfo("0:40 /@ / rw - btrfs /dev/vdb rw"))
    assert devices_under(root, tmp_path) == [("vdb", "none")]


@pytest.mark.parametrize(
    ("line", "is_memory", "is_remote"),
    [
        ("0:50 / / rw - tmpfs tmpfs rw", True, False),
        ("0:51 / / rw - nfs4 server:/home rw", False, True),
        ("0:52 / / rw - overlay overlay rw,upperdir=/x", False, False),
    ],
)
def test_what_has_no_device_says_what_it_is(tmp_path: Path, line: str, is_memory: bool, is_remote: bool) -> None:
    root = write(machine(tmp_path / "tree"), mountinfo(line))
    found = read_host(tmp_path, root=root, allowed_cpus=range(8)).disk
    assert found is not None
    assert (found.devices, found.is_memory, found.is_remote) == ((), is_memory, is_remote)


def test_only_variables_that_matter_are_kept(tmp_path: Path) -> None:
    environment = {
        "OMP_NUM_THREADS": "3",
        "HOME": "/root",
        "MKL_NUM_THREADS": "1",
        "SECRET": "x",
        "GOMP_SPINCOUNT": "0",
    }
    host = read_host(root=machine(tmp_path), environment=environment, allowed_cpus=range(8))
    assert set(host.environment) == {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT"}
    assert host.set_by_memfit == frozenset()


def test_what_memfit_has_set_is_told_apart(tmp_path: Path) -> None:
    environment = {SET_BY_MEMFIT: "OMP_WAIT_POLICY,OMP_NUM_THREADS", "OMP_NUM_THREADS": "3"}
    host = read_host(root=machine(tmp_path), environment=environment, allowed_cpus=range(8))
    assert host.set_by_memfit == {"OMP_WAIT_POLICY", "OMP_NUM_THREADS"}


def test_another_malloc_is_seen_in_what_is_preloaded(tmp_path: Path) -> None:
    environment = {"LD_PRELOAD": "/usr/lib/libfoo.so:/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "PATH": ""}
    malloc = read_host(root=machine(tmp_path), environment=environment, allowed_cpus=range(8)).malloc
    assert (malloc.preloaded, malloc.compiler) == ("libtcmalloc_minimal.so.4", None)


def test_a_compiler_is_looked_for_as_the_allocator_does(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("c++", "mine"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)

    def compiler(**environment: str) -> str | None:
        found = read_host(root=machine(tmp_path / "m"), environment=environment, allowed_cpus=range(8))
        return found.malloc.compiler

    assert compiler(PATH=str(tools)) == str(tools / "c++")
    assert compiler(PATH=str(tools), CXX="mine") == str(tools / "mine")
    assert compiler(PATH=str(tools), CXX="not-there") is None


def test_a_machine_without_proc_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailableError, match="on Linux only"):
        read_host(root=tmp_path, allowed_cpus=(0,))


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        read_host(tmp_path / "nowhere")


def test_a_directory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(UsageError, match="/proc cannot be written"):
        read_host("/proc")


def test_refused_direct_io_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "pwrite", refuse)
    found = read_host(tmp_path).disk
    assert found is not None and found.direct_io_refusal == "Invalid argument"


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8-11,15", "7,9"])
def test_cpu_lists_are_written_as_they_are_read(text: str) -> None:
    assert format_cpu_list(parse_cpu_list(text)) == text


# This machine, beside other tools.


def test_processors_agree_with_os_and_lscpu() -> None:
    found = read_host().processors
    assert set(found.allowed) == os.sched_getaffinity(0)
    assert found.logical == os.cpu_count()
    lscpu = shutil.which("lscpu")
    if lscpu is None:
        pytest.skip("no lscpu")
    text = subprocess.run([lscpu, "-p=CPU,CORE,SOCKET"], capture_output=True, text=True, check=True).stdout
    lines = [tuple(map(int, line.split(","))) for line in text.splitlines() if not line.startswith("#")]
    assert found.machine_cores == len({(core, socket) for _, core, socket in lines})
    assert found.physical_cores == len({(core, socket) for cpu, core, socket in lines if cpu in found.allowed})


def test_the_affinity_is_that_of_the_thread_which_asks() -> None:
    one = min(os.sched_getaffinity(0))

    def ask() -> tuple[tuple[int, ...], int]:
        os.sched_setaffinity(0, {one})  # of this thread alone
        found = read_host().processors
        return found.allowed, found.usable_cores

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ask).result() == ((one,), 1)


def test_memory_agrees_with_sysconf_and_getrlimit(tmp_path: Path) -> None:
    host = read_host(tmp_path)
    assert host.memory.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert host.memory.lockable_bytes == (None if soft == resource.RLIM_INFINITY else soft)
    assert (
        host.memory.swap_total_bytes == int(Path("/proc/meminfo").read_text().split("SwapTotal:")[1].split()[0]) * 1024
    )


def test_the_disk_agrees_with_the_file_system_and_df(tmp_path: Path) -> None:
    found = read_host(tmp_path).disk
    assert found is not None
    assert found.total_bytes == shutil.disk_usage(tmp_path).total
    text = subprocess.run(["df", "--output=fstype,target", str(tmp_path)], capture_output=True, text=True, check=True)
    file_system, target = text.stdout.splitlines()[1].split()
    assert (found.file_system, found.mount_point) == (file_system, target)


def test_the_compiler_is_the_one_that_builds_the_allocator() -> None:
    found = read_host().malloc.compiler
    try:
        expected = find_compiler()
    except TierUnavailableError:
        expected = None
    assert found == expected
