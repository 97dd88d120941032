"""What is set, what is advised, and starting again: decided on machines that are made up, done in processes that are real."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit import cli
from memfit.machine.host import settings
from memfit.machine.host.advice import advise_changes, describe_host
from memfit.machine.host.measure import DiskRates, FirstTouch, Measurements, ThreadTime, Waiting
from memfit.machine.host.read import SET_BY_MEMFIT, Ceiling, Host, HostMemory, HugePages, Malloc, Processors
from memfit.machine.host.settings import choose_settings, compute_threads
from memfit.machine.host.system_files import BlockDevice, Disk

GIB = 2**30
SOURCE = Path(cli.__file__).parents[1]

CORES = Processors(logical=8, allowed=tuple(range(8)), physical_cores=4, machine_cores=4, quota=None, load=0.5)
MEMORY = HostMemory(
    total_bytes=64 * GIB,
    available_bytes=32 * GIB,
    ceiling=None,
    slow_above=None,
    swap_total_bytes=0,
    swap_used_bytes=0,
    process_swap_bytes=0,
    swappiness=60,
    lockable_bytes=8 << 20,
    locked_bytes=0,
)
PAGES = HugePages(mode="madvise", defrag="madvise", page_bytes=2 << 20, reserved=0)
MALLOC = Malloc(glibc="2.36", preloaded=None, compiler="/usr/bin/g++")
SSD = BlockDevice(name="nvme0n1", scheduler="none", schedulers=("none", "bfq"), is_rotational=False)
DISK = Disk(
    directory="/data",
    mount_point="/data",
    file_system="ext4",
    source="/dev/nvme0n1p1",
    devices=(SSD,),
    total_bytes=100 * GIB,
    free_bytes=50 * GIB,
    direct_io_refusal=None,
)
HOST = Host(processors=CORES, memory=MEMORY, huge_pages=PAGES, malloc=MALLOC, environment={}, disk=DISK)
MEASURED = Measurements(
    waiting=Waiting(
        before="OpenMP's default",
        threads=4,
        before_alone_s=0.010,
        passive_alone_s=0.010,
        before_contended_s=0.080,
        passive_contended_s=0.020,
    ),
    threads=(
        ThreadTime(threads=1, step_s=0.04),
        ThreadTime(threads=4, step_s=0.01),
        ThreadTime(threads=8, step_s=0.02),
    ),
    first_touch=FirstTouch(small_bytes_per_s=2e9, huge_bytes_per_s=1e10, again_bytes_per_s=2e10, huge_share=1.0),
    disk_direct=DiskRates(write_bytes_per_s=2e9, read_bytes_per_s=3e9, cached_bytes=0),
    disk_cached=DiskRates(write_bytes_per_s=1e9, read_bytes_per_s=1e9, cached_bytes=64 << 20),
    file_bytes=64 << 20,
    seconds=5.0,
)


def wanted(host: Host) -> dict[str, str]:
    return {setting.name: setting.value for setting in choose_settings(host) if setting.yours is None}


def kept(host: Host) -> dict[str, str]:
    return {setting.name: setting.yours for setting in choose_settings(host) if setting.yours is not None}


def with_environment(**environment: str) -> Host:
    return replace(HOST, environment=environment)


def test_waiting_is_passive_and_threads_are_the_physical_cores() -> None:
    assert wanted(HOST) == {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize(("quota", "threads"), [(None, 4), (16.0, 4), (4.0, 4), (3.99, 3), (1.5, 1), (0.25, 1)])
def test_a_quota_is_rounded_down_to_whole_threads(quota: float | None, threads: int) -> None:
    ceiling = None if quota is None else Ceiling(value=quota, file="/sys/fs/cgroup/cpu.max")
    host = replace(HOST, processors=replace(CORES, quota=ceiling))
    assert wanted(host)["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(("ranks", "threads"), [("1", 4), ("2", 2), ("3", 1), ("16", 1), ("nonsense", 4)])
def test_ranks_on_one_machine_share_its_cores(ranks: str, threads: int) -> None:
    assert compute_threads(with_environment(LOCAL_WORLD_SIZE=ranks)) == threads


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC"])
def test_the_users_threads_stay(name: str) -> None:
    host = with_environment(**{name: "7"})
    assert wanted(host) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert kept(host) == {"OMP_NUM_THREADS": f"{name}=7"}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_users_way_of_waiting_stays(name: str) -> None:
    host = with_environment(**{name: "x"})
    assert wanted(host) == {"OMP_NUM_THREADS": "4"}
    assert kept(host) == {"OMP_WAIT_POLICY": f"{name}=x"}


@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"])
def test_who_binds_threads_has_decided_about_all_of_them(name: str) -> None:
    assert wanted(with_environment(**{name: "x"})) == {}


def test_an_empty_value_is_a_value() -> None:
    assert "OMP_WAIT_POLICY" not in wanted(with_environment(OMP_WAIT_POLICY=""))


def test_what_memfit_has_set_is_not_the_users() -> None:
    names = "OMP_WAIT_POLICY,OMP_NUM_THREADS"
    host = with_environment(**{SET_BY_MEMFIT: names, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "4"})
    assert kept(host) == {}


NO_COMPILER = replace(MALLOC, compiler=None)
MALLOC_NAMES = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "THP_MEM_ALLOC_ENABLE"}


def test_malloc_is_set_only_where_the_allocator_cannot_be_built() -> None:
    without = wanted(replace(HOST, malloc=NO_COMPILER))
    assert without.keys() >= MALLOC_NAMES and not MALLOC_NAMES & wanted(HOST).keys()
    assert without["MALLOC_MMAP_THRESHOLD_"] == without["MALLOC_TRIM_THRESHOLD_"] == str(128 * 1024)


@pytest.mark.parametrize(
    "malloc", [replace(NO_COMPILER, glibc=None), replace(NO_COMPILER, preloaded="libtcmalloc.so.4")]
)
def test_another_malloc_is_left_alone(malloc: Malloc) -> None:
    assert not MALLOC_NAMES & wanted(replace(HOST, malloc=malloc)).keys()


@pytest.mark.parametrize("mode", ["never", None])
def test_huge_pages_are_not_asked_for_where_there_are_none(mode: str | None) -> None:
    host = replace(HOST, malloc=NO_COMPILER, huge_pages=replace(PAGES, mode=mode))
    assert wanted(host).keys() & MALLOC_NAMES == MALLOC_NAMES - {"THP_MEM_ALLOC_ENABLE"}


def test_the_users_malloc_settings_stay_in_both_spellings() -> None:
    environment = {"MALLOC_TRIM_THRESHOLD_": "0", "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1"}
    host = replace(HOST, malloc=NO_COMPILER, environment=environment)
    assert wanted(host).keys() & MALLOC_NAMES == {"THP_MEM_ALLOC_ENABLE"}


# What a person may change.


def changes(host: Host, measured: Measurements | None = None) -> str:
    found = advise_changes(host, choose_settings(host), measured)
    return "\n".join(f"{one.found} | {one.how} | {one.brings} | {one.measured}" for one in found)


def test_a_machine_that_gives_all_it_has_needs_no_change() -> None:
    assert changes(HOST) == changes(HOST, MEASURED) == ""


def quota(value: float) -> Ceiling:
    return Ceiling(value=value, file="/sys/fs/cgroup/cpu.max")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (
            replace(HOST, disk=replace(DISK, file_system="tmpfs", devices=())),
            ["/data is memory (tmpfs)", "--directory"],
        ),
        (replace(HOST, disk=replace(DISK, file_system="nfs4", devices=())), ["behind a network (nfs4)"]),
        (
            replace(HOST, disk=replace(DISK, direct_io_refusal="Invalid argument")),
            ["no direct I/O", "Invalid argument"],
        ),
        (
            replace(HOST, disk=replace(DISK, devices=(replace(SSD, scheduler="bfq"),))),
            ["bfq on nvme0n1", "echo none | sudo tee /sys/block/nvme0n1/queue/scheduler"],
        ),
        (
            replace(HOST, memory=replace(MEMORY, swap_total_bytes=4 * GIB, process_swap_bytes=1 << 20)),
            ["4.00 GiB swap", "1.0 MiB by this process", "vm.swappiness"],
        ),
        (
            replace(HOST, processors=replace(CORES, quota=quota(1.5))),
            ["1.5 processors", "/sys/fs/cgroup/cpu.max", "2.67"],
        ),
        (
            replace(HOST, processors=replace(CORES, allowed=(0, 1, 4, 5), physical_cores=2)),
            ["processors 0-1,4-5 only, 2 of 4 cores"],
        ),
        (replace(HOST, malloc=NO_COMPILER), ["no C++ compiler", "apt install g++"]),
        (replace(HOST, huge_pages=replace(PAGES, mode="never")), ["switched off", "echo madvise"]),
        (replace(HOST, huge_pages=replace(PAGES, mode="always")), ["everywhere", "echo madvise"]),
        (with_environment(OMP_WAIT_POLICY="active"), ["unset OMP_WAIT_POLICY"]),
        (with_environment(OMP_NUM_THREADS="8"), ["OMP_NUM_THREADS=8", "set it to 4"]),
    ],
)
def test_each_hindrance_is_named_with_its_remedy(host: Host, words: list[str]) -> None:
    text = changes(host)
    assert all(word in text for word in words), text
    assert text.count("\n") == 0, text
    assert "not measured" in text  # no figure is made up


def test_a_spinning_disk_keeps_its_scheduler() -> None:
    disk = replace(SSD, scheduler="bfq", is_rotational=True)
    assert changes(replace(HOST, disk=replace(DISK, devices=(disk,)))) == ""


def test_figures_are_those_that_were_measured() -> None:
    waiting = replace(MEASURED.waiting, before="OMP_WAIT_POLICY=ACTIVE")
    text = changes(with_environment(OMP_WAIT_POLICY="ACTIVE"), replace(MEASURED, waiting=waiting))
    assert "PASSIVE beside OMP_WAIT_POLICY=ACTIVE: 1.00x as fast alone, 4.00x beside one busy thread" in text
    text = changes(with_environment(OMP_NUM_THREADS="8"), MEASURED)
    assert "8 threads compute (OMP_NUM_THREADS=8)" in text and "2.00x faster with OMP_NUM_THREADS=4 than with 8" in text
    text = changes(replace(HOST, malloc=NO_COMPILER), MEASURED)
    assert "10.0x as fast as fresh memory" in text
    text = changes(replace(HOST, disk=replace(DISK, direct_io_refusal="no")), replace(MEASURED, disk_direct=None))
    assert "a file of 64.0 MiB leaves 64.0 MiB in the page cache" in text


def test_thread_counts_that_are_no_number_or_were_not_measured_are_not_compared() -> None:
    assert changes(with_environment(OMP_NUM_THREADS="4,2"), MEASURED) == ""
    assert changes(with_environment(MKL_NUM_THREADS="1"), MEASURED) == ""
    assert "| not measured" in changes(with_environment(OMP_NUM_THREADS="4096"), MEASURED)
    slow = replace(MEASURED, threads=(ThreadTime(threads=1, step_s=0.01), ThreadTime(threads=4, step_s=0.02)))
    text = changes(HOST, slow)
    assert "4 threads compute |" in text and "export OMP_NUM_THREADS=1 " in text and "2.00x faster" in text


def test_figures_of_a_busy_machine_advise_nothing_about_threads() -> None:
    waiting = replace(MEASURED.waiting, before_alone_s=0.001)
    threads = (ThreadTime(threads=1, step_s=0.01), ThreadTime(threads=4, step_s=0.02))
    rough = replace(MEASURED, waiting=waiting, threads=threads)
    assert changes(replace(HOST, processors=replace(CORES, load=4.0)), rough) != ""
    assert changes(replace(HOST, processors=replace(CORES, load=4.1)), rough) == ""


def test_threads_that_sleep_too_deep_are_mentioned_with_both_figures() -> None:
    slow = replace(MEASURED.waiting, before_alone_s=0.008)
    text = changes(HOST, replace(MEASURED, waiting=slow))
    assert "export OMP_WAIT_POLICY=ACTIVE" in text and "0.80x as fast alone, 4.00x beside" in text


def test_huge_pages_that_were_not_given_are_mentioned() -> None:
    text = changes(HOST, replace(MEASURED, first_touch=replace(MEASURED.first_touch, huge_share=0.25)))
    assert "huge pages for 25%" in text
    assert changes(HOST, replace(MEASURED, first_touch=replace(MEASURED.first_touch, huge_share=None))) == ""


def test_the_description_says_what_was_found() -> None:
    bounded = replace(
        HOST,
        processors=replace(CORES, quota=quota(2.5)),
        memory=replace(MEMORY, ceiling=Ceiling(value=16 * GIB, file="/sys/fs/cgroup/memory.max"), lockable_bytes=None),
        environment={"OMP_NUM_THREADS": "3", SET_BY_MEMFIT: "x"},
    )
    lines = dict(describe_host(bounded))
    assert "8 logical, 4 cores" in lines["processors"] and "2.5 (/sys/fs/cgroup/cpu.max): 2" in lines["processors"]
    assert "64.00 GiB, 32.00 GiB available" in lines["memory"]
    assert "16.00 GiB (/sys/fs/cgroup/memory.max)" in lines["memory"]
    assert lines["swap"] == "none" and lines["locked memory"].startswith("without limit")
    assert "ext4 of /dev/nvme0n1p1, 50.00 GiB free, direct I/O works" in lines["disk"]
    assert lines["environment"] == "OMP_NUM_THREADS=3"


# Starting again.

# The package itself is left out: importing it loads torch, and the room is to work without.
PROGRAM = """
import os, sys, types
package = types.ModuleType("memfit")
package.__path__ = [SOURCE]
sys.modules["memfit"] = package
from memfit.machine.host.settings import restart_with_settings
print("start", os.getpid(), sys.argv[1:], flush=True)
PREPARE
restart_with_settings()
print({name: value for name, value in os.environ.items() if name.startswith(("OMP_", "MEMFIT_"))})
assert "torch" not in sys.modules
"""
BARE = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "MEMFIT_"))}


def run(prepare: str = "", *options: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    """The lines of each start, and the environment that the program ended with."""
    code = PROGRAM.replace("SOURCE", repr(str(SOURCE))).replace("PREPARE", prepare)
    done = subprocess.run(
        [sys.executable, *options, "-c", code, "an argument"],
        env={**BARE, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *starts, last = done.stdout.splitlines()
    return starts, eval(last)


@pytest.mark.usefixtures("a_compiler")
def test_a_program_starts_again_once_as_the_same_process_with_its_arguments() -> None:
    starts, environment = run()
    assert len(starts) == 2 and starts[0] == starts[1] and "an argument" in starts[0]
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert int(environment["OMP_NUM_THREADS"]) in range(1, len(os.sched_getaffinity(0)) + 1)
    assert environment[SET_BY_MEMFIT] == "OMP_WAIT_POLICY,OMP_NUM_THREADS"


def test_options_of_the_interpreter_stay() -> None:
    starts, _ = run("print(sys.flags.dev_mode, sys.flags.utf8_mode, flush=True)", "-X", "dev", "-X", "utf8")
    assert [line for line in starts if not line.startswith("start")] == ["True 1", "True 1"]


@pytest.mark.usefixtures("a_compiler")
def test_the_users_values_stay_and_the_rest_is_set() -> None:
    starts, environment = run(OMP_NUM_THREADS="1")
    assert len(starts) == 2
    assert environment["OMP_NUM_THREADS"] == "1" and environment[SET_BY_MEMFIT] == "OMP_WAIT_POLICY"


@pytest.mark.usefixtures("a_compiler")
@pytest.mark.parametrize(
    ("prepare", "environment"),
    [
        ("", {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "ACTIVE"}),  # all is decided
        ("", {SET_BY_MEMFIT: ""}),  # a child of a program that has started again
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", {}),
        ("sys.settrace(lambda *arguments: None)", {}),  # a debugger
        ("sys.ps1 = '>>> '", {}),  # an interactive interpreter
        ("sys.executable = ''", {}),  # an interpreter inside another program
        ("sys.platform = 'darwin'", {}),
    ],
)
def test_a_program_goes_on_where_a_restart_would_bring_nothing_or_break_something(
    prepare: str, environment: dict[str, str]
) -> None:
    # The thread waits for ever; a daemon ends with the program.
    starts, ended = run(prepare, **environment)
    assert len(starts) == 1
    assert ended == environment


def test_a_mask_that_openmp_has_put_on_this_thread_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    # No compiler, so that something is to be set even though the user binds threads.
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", SET_BY_MEMFIT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("CXX", "not-there")
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda path, arguments, environment: started.append(environment))
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    settings.restart_with_settings()
    assert not started
    monkeypatch.delitem(sys.modules, "torch")
    settings.restart_with_settings()
    assert len(started) == 1 and "MALLOC_TRIM_THRESHOLD_" in started[0] and "OMP_WAIT_POLICY" not in started[0]


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which command lines `main` would have started again."""
    asked: list[str] = []
    monkeypatch.setattr(
        "memfit.machine.host.settings.restart_with_settings", lambda: asked.append(" ".join(sys.argv[1:]))
    )
    monkeypatch.setattr("memfit.cli.console.app", lambda: None)
    monkeypatch.setattr(cli, "leave_at_once", lambda: None)  # it would give this process another answer to Ctrl-C
    return asked


def as_program(**facts: Any) -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__.update(facts)
    return module


STARTED_BY: dict[str, tuple[Callable[[], types.ModuleType], bool]] = {
    "memfit": (lambda: as_program(__file__="/opt/venv/bin/memfit", __spec__=None), True),
    "python -m memfit": (lambda: as_program(__spec__=types.SimpleNamespace(name="memfit.__main__")), True),
    "python -m memfit.cli": (lambda: as_program(__spec__=types.SimpleNamespace(name="memfit.cli.__main__")), True),
    "a program of the user's": (lambda: as_program(__file__="/home/me/train.py", __spec__=None), False),
    "python -c": (lambda: as_program(__spec__=None), False),
    "pytest": (lambda: as_program(__spec__=types.SimpleNamespace(name="pytest.__main__")), False),
}


@pytest.mark.parametrize("name", STARTED_BY)
def test_only_the_program_memfit_starts_again(name: str, restarts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make, is_program = STARTED_BY[name]
    monkeypatch.setitem(sys.modules, "__main__", make())
    monkeypatch.setattr(sys, "argv", ["memfit", "--traceback", "plan", "--recipe", "gpt-tiny"])
    cli.main()
    assert restarts == (["--traceback plan --recipe gpt-tiny"] if is_program else [])


@pytest.mark.parametrize("line", ["", "--help", "train --help", "doctor", "doctor --no-measure"])
def test_commands_that_load_no_torch_start_once(
    line: str, restarts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", STARTED_BY["memfit"][0]())
    monkeypatch.setattr(sys, "argv", ["memfit", *line.split()])
    cli.main()
    assert restarts == []


def test_openmp_itself_says_that_the_settings_arrived(tmp_path: Path) -> None:
    (tmp_path / "parts_of_mine.py").write_text("def build():\n    import torch\n    return torch.get_num_threads()\n")
    one = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "profile", "parts_of_mine:build"],
        env={**BARE, "OMP_DISPLAY_ENV": "TRUE"},  # the OpenMP library prints what it has read when it is loaded
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {one}),
    )
    assert "must return (model, optimizer, loss, sample), not int" in done.stderr
    last = done.stderr.rpartition("OPENMP DISPLAY ENVIRONMENT BEGIN")[2].replace(" ", "")
    assert "OMP_WAIT_POLICY='PASSIVE'" in last and "OMP_NUM_THREADS='1'" in last


def test_fit_leaves_the_environment_and_the_threads_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()  # torch's own first step names a cache directory of its compiler in the environment
    before, threads = dict(os.environ), torch.get_num_threads()
    job = memfit.fit(model, optimizer, lambda m, batch: m(batch).sum(), torch.ones(4, 8), directory=tmp_path)
    job.step(torch.ones(4, 8))
    job.close()
    # How many compiled kernels oneDNN keeps is bounded, once a process.
    bounded = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"} - before.keys()
    after = {name: value for name, value in os.environ.items() if name not in bounded}
    assert after == before and torch.get_num_threads() == threads
