"""The allocator under torch against counts made by hand and against what the kernel says."""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memfit.core.errors import TierUnavailableError, UsageError
from memfit.devices import compiling as build
from memfit.devices.binding import Allocator, install, installed, shortfall_bytes
from memfit.devices.fallback import FallbackAllocator
from memfit.devices.kernel import refusal_words

MIB = 1 << 20
POOL_SLACK_BYTES = 2 * MIB  # kPoolSlack of allocator.cpp


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    found = install()
    gc.collect()
    pool_limit_bytes = found.pool_limit_bytes
    found.trim()
    yield found
    for ledger in ("device", "host"):
        found.set_limit(None, ledger)
    found.set_pool_limit(pool_limit_bytes)
    found.trim()


def make_bytes(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def run_child(script: str) -> str:
    """Runs a script in a process of its own, where limits and crashes harm nobody."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_second_install_returns_the_allocator_of_the_first(allocator: Allocator) -> None:
    assert install() is allocator
    assert installed() is allocator


def test_live_and_peak_bytes_equal_the_sums_of_what_was_requested(allocator: Allocator) -> None:
    draw = random.Random(0)
    base = allocator.stats()
    allocator.reset_peak()
    held: list[torch.Tensor] = []
    live = peak = count = 0
    for _ in range(400):
        if held and draw.random() < 0.45:
            live -= held.pop(draw.randrange(len(held))).numel()
        else:
            nbytes = int(2 ** draw.uniform(0, 22))
            held.append(make_bytes(nbytes))
            live, count = live + nbytes, count + 1
            peak = max(peak, live)
        now = allocator.stats()
        assert now.live_bytes - base.live_bytes == live
        assert now.live_blocks - base.live_blocks == len(held)
    now = allocator.stats()
    assert now.peak_bytes - base.live_bytes == peak
    assert now.allocations - base.allocations == count
    assert now.mapped_bytes >= now.live_bytes + now.pooled_bytes
    held.clear()
    assert allocator.stats().live_bytes == base.live_bytes


def test_resizing_a_storage_goes_through_the_allocator(allocator: Allocator) -> None:
    base = allocator.stats().live_bytes
    tensor = torch.arange(3 * MIB, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    assert allocator.stats().live_bytes - base == 3 * MIB
    storage.resize_(0)
    assert allocator.stats().live_bytes == base
    storage.resize_(5 * MIB)
    assert allocator.stats().live_bytes - base == 5 * MIB
    storage.resize_(2 * MIB)
    assert allocator.stats().live_bytes - base == 2 * MIB


def test_small_blocks_are_aligned_to_64_bytes_and_large_ones_to_pages(allocator: Allocator) -> None:
    tensors = [make_bytes(nbytes) for nbytes in [1, 7, 63, 64, 65, 1000, 4096, 65536, 131071] * 8]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    large = [make_bytes(nbytes) for nbytes in (131072, 200_000, MIB, 2 * MIB, 7 * MIB + 3)]
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in large)
    assert make_bytes(4 * MIB).data_ptr() % (2 * MIB) == 0


def test_writing_every_byte_of_many_blocks_changes_no_other_block(allocator: Allocator) -> None:
    draw = random.Random(1)
    held: list[tuple[torch.Tensor, int]] = []
    for index in range(300):
        tensor = make_bytes(int(2 ** draw.uniform(0, 21)))
        tensor.fill_(index % 251)
        held.append((tensor, index % 251))
        if len(held) > 60:
            old, value = held.pop(draw.randrange(len(held)))
            assert bool((old == value).all())
    assert all(bool((tensor == value).all()) for tensor, value in held)


def rise(nbytes: int) -> None:
    """Raises the peak of use by as much; what was freed is then kept up to there."""
    make_bytes(nbytes)


def test_requests_take_parts_of_a_freed_block_and_freed_parts_become_one(allocator: Allocator) -> None:
    rise(16 * MIB)
    allocator.set_pool_limit(0)
    allocator.set_pool_limit(None)
    block = make_bytes(8 * MIB)
    address = block.data_ptr()
    del block
    assert allocator.stats().pooled_bytes == 8 * MIB
    first = make_bytes(3 * MIB)
    assert first.data_ptr() == address
    second = make_bytes(4 * MIB)
    assert second.data_ptr() == address + 3 * MIB
    assert allocator.stats().pooled_bytes == MIB
    mapped = allocator.stats().mapped_bytes
    with allocator.ledger("host"):
        del first
        assert allocator.stats("host").pooled_bytes == 0
        other = make_bytes(MIB)  # of another ledger: it takes none of it
        assert allocator.stats("device").pooled_bytes == 4 * MIB
    del second
    assert allocator.stats().pooled_bytes == 8 * MIB
    assert make_bytes(8 * MIB).data_ptr() == address
    assert allocator.stats().mapped_bytes == mapped
    del other


def test_steps_of_other_sizes_than_freed_blocks_take_no_fresh_pages(allocator: Allocator) -> None:
    """Forward keeps four and frees them; backward asks for other sizes, and none is faulted in anew."""
    faults: list[int] = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.ones(nbytes, dtype=torch.uint8) for nbytes in (3 * MIB, 5 * MIB, 700 << 10, 9 * MIB)]
        while kept:
            nbytes = kept.pop().numel()
            torch.ones(nbytes * 2 // 3, dtype=torch.uint8)
            torch.ones(nbytes // 2 + 4096, dtype=torch.uint8)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert faults[0] > 100  # the first time they are
    assert faults[2] < 20


def test_the_pool_is_bounded_and_gives_back_the_oldest_blocks_first(allocator: Allocator) -> None:
    rise(30 * MIB)
    allocator.set_pool_limit(0)
    allocator.set_pool_limit(10 * MIB)
    first, second, third = make_bytes(4 * MIB), make_bytes(5 * MIB), make_bytes(6 * MIB)
    mapped = allocator.stats().mapped_bytes
    del first
    del second
    assert allocator.stats().pooled_bytes == 9 * MIB
    del third  # 15 MiB: 5 of them have to go, and up to a huge page more
    now = allocator.stats()
    assert 8 * MIB <= now.pooled_bytes <= 10 * MIB
    assert mapped - now.mapped_bytes == 15 * MIB - now.pooled_bytes
    pooled = allocator.stats().pooled_bytes
    too_large = make_bytes(11 * MIB)
    del too_large
    assert allocator.stats().pooled_bytes == pooled
    assert allocator.trim() == pooled
    assert allocator.stats().pooled_bytes == 0


def test_freed_blocks_are_kept_below_the_peak_of_use_and_no_further(allocator: Allocator) -> None:
    base = allocator.stats().mapped_bytes
    peak = [make_bytes(4 * MIB) for _ in range(3)]
    del peak
    assert allocator.stats().pooled_bytes == 12 * MIB  # the process needed them once
    other_size = make_bytes(6 * MIB)  # serves itself; two of the three give way
    assert allocator.stats().mapped_bytes - base <= 12 * MIB + POOL_SLACK_BYTES
    assert allocator.stats().pooled_bytes <= 8 * MIB
    allocator.trim()
    rest = make_bytes(MIB)
    del rest, other_size
    assert allocator.stats().mapped_bytes - base <= 7 * MIB + POOL_SLACK_BYTES  # trimmed: the old peak is forgotten


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.sampled_from([130, 200, 512, 513, 900, 1024, 3000, 4096, 9000])), max_size=60
    )
)
def test_the_pool_does_not_raise_the_peak(changes: list[tuple[int, int]]) -> None:
    """Against the same allocations without a pool."""
    allocator = install()
    peaks: list[int] = []
    for pool_limit_bytes in (0, None):
        allocator.set_pool_limit(pool_limit_bytes)
        allocator.trim()
        allocator.reset_peak()
        base = allocator.stats().mapped_bytes
        held: dict[int, torch.Tensor] = {}
        for place, kib in changes:
            held.pop(place, None)
            held[place] = make_bytes(kib << 10)
        peaks.append(allocator.stats().mapped_peak_bytes - base)
        held.clear()
    assert peaks[0] <= peaks[1] <= peaks[0] + POOL_SLACK_BYTES


def test_ledgers_are_counted_and_limited_apart_and_a_block_remembers_its_own(allocator: Allocator) -> None:
    device, host = allocator.stats("device").live_bytes, allocator.stats("host").live_bytes
    with allocator.ledger("host"):
        here = make_bytes(2 * MIB)
        with allocator.ledger("device"):
            there = make_bytes(3 * MIB)
        small = make_bytes(100)
    assert allocator.stats("host").live_bytes - host == 2 * MIB + 100
    assert allocator.stats("device").live_bytes - device == 3 * MIB
    allocator.set_limit(allocator.stats("host").mapped_bytes, "host")
    with allocator.ledger("host"), pytest.raises(torch.OutOfMemoryError, match="limit of host memory") as breach:
        make_bytes(MIB)
    assert "limit of host memory" in refusal_words(breach.value)
    also = make_bytes(MIB)
    del here, small, there, also
    assert (allocator.stats("device").live_bytes, allocator.stats("host").live_bytes) == (device, host)
    with pytest.raises(UsageError, match="unknown ledger"):
        allocator.stats("disk")  # type: ignore[arg-type]


def test_a_breach_raises_with_the_bytes_and_leaves_everything_usable(allocator: Allocator) -> None:
    kept = torch.arange(1 << 18, dtype=torch.float32)
    base = allocator.stats()
    limit = base.mapped_bytes + 8 * MIB
    allocator.set_limit(limit)
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError) as breach:
            make_bytes(9 * MIB)
        message = str(breach.value)
        live = allocator.stats().live_bytes
        told, advice, exact = message.splitlines()
        assert told == (
            f"memfit: 9.0 MiB more would pass the limit: of the {limit / MIB:.1f} MiB that it leaves for tensors "
            f"{base.mapped_bytes / MIB:.1f} MiB are taken, {live / MIB:.1f} MiB of them by tensors that are alive."
        )
        assert "Nothing was allocated" in advice
        assert "limit=" in advice
        assert exact == f"In bytes: requested {9 * MIB}, mapped {base.mapped_bytes}, limit {limit}"
        assert shortfall_bytes(breach.value) == 9 * MIB + base.mapped_bytes - limit
        assert refusal_words(breach.value).startswith("9.0 MiB were asked for, and of the ")
        assert live == base.live_bytes
        fits = make_bytes(8 * MIB)
        assert allocator.stats().mapped_bytes == limit
        del fits
    # Pooled bytes count, and give way before anything fails.
    assert allocator.stats().pooled_bytes == 8 * MIB
    other_size = make_bytes(3 * MIB)
    assert allocator.stats().mapped_bytes <= limit
    assert torch.equal(kept, torch.arange(1 << 18, dtype=torch.float32))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 60, dtype=torch.uint8)
    allocator.set_limit(None)
    assert make_bytes(9 * MIB).numel() + other_size.numel() == 12 * MIB
    for wrong in (-1, 1.5, True):
        with pytest.raises(UsageError):
            allocator.set_limit(wrong)  # type: ignore[arg-type]


def test_small_blocks_stop_at_the_limit_too(allocator: Allocator) -> None:
    allocator.set_limit(allocator.stats().mapped_bytes + 100_000)
    held: list[torch.Tensor] = []
    with pytest.raises(torch.OutOfMemoryError):
        held.extend(make_bytes(1000) for _ in range(1000))
    # Each takes 1000 + 64 + 8 bytes of malloc's heap, rounded up to 1072.
    assert len(held) == 100_000 // 1072


def test_many_threads_leave_the_counts_exact(allocator: Allocator) -> None:
    base = allocator.stats()
    rounds, failures = 200, []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        held: list[torch.Tensor] = []
        try:
            for _ in range(rounds):
                nbytes = int(2 ** draw.uniform(3, 20))
                tensor = make_bytes(nbytes)
                tensor[:1], tensor[-1:] = seed, seed
                held.append(tensor)
                if len(held) > 8:
                    gone = held.pop(draw.randrange(8))
                    assert gone[-1] == seed
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    now = allocator.stats()
    assert (now.live_bytes, now.live_blocks) == (base.live_bytes, base.live_blocks)
    assert now.allocations - base.allocations >= 6 * rounds
    allocator.trim()
    # Nothing is pooled and nothing new is live, so nothing more may be mapped either.
    assert allocator.stats().mapped_bytes == base.mapped_bytes


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 says so of every profile
def test_the_profiler_still_sees_cpu_memory(allocator: Allocator) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = torch.empty(3 * MIB, dtype=torch.uint8)
    seen = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    assert seen["aten::empty"] == kept.numel()


CHILD_OLDER_TENSORS = """
import gc, os, threading, torch
older = torch.arange(300_000)
older_storage = older.untyped_storage()
from memfit.devices.binding import install, installed
assert installed() is None
allocator = install()
assert allocator.stats().live_bytes == 0
copy = older.clone()
assert allocator.stats().live_bytes == 2_400_000 and torch.equal(copy, older)
older_storage.resize_(4_000_000)               # stays with the allocator that made it
assert allocator.stats().live_bytes == 2_400_000
del older, older_storage, copy
gc.collect()
assert allocator.stats().live_bytes == 0 and allocator.stats().live_blocks == 0

# A fork while other threads allocate: the child must not inherit the lock.
stop = threading.Event()
def hammer():
    while not stop.is_set():
        torch.empty(1000)
threads = [threading.Thread(target=hammer) for _ in range(3)]
for thread in threads: thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        torch.empty(3_000_000); torch.empty(10)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
stop.set()
for thread in threads: thread.join()

# Blocks that are live at the end of the process are freed by torch after Python is gone.
left = [torch.empty(size) for size in (10, 1_000_000)]
left.append(left)
print("done")
"""


def test_older_memory_is_left_alone_and_forked_children_can_allocate() -> None:
    assert "done" in run_child(CHILD_OLDER_TENSORS)


CHILD_TRAINING = """
import torch
from memfit.devices.binding import install
from memfit.devices import procfs
allocator = install()
torch.set_num_threads(2)
model = torch.nn.Sequential(*[layer for _ in range(6) for layer in (torch.nn.Linear(768, 768), torch.nn.GELU())])
batch = torch.randn(1024, 768)
def step():
    loss = model(batch).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=-1e-3)
            parameter.grad = None
step(); step()
for pool_bytes in (0, None):
    allocator.set_pool_limit(pool_bytes)
    allocator.trim()
    procfs.reset_peak(); allocator.reset_peak()
    before, start = procfs.read_status(), allocator.stats()
    step(); step()
    after, end = procfs.read_status(), allocator.stats()
    assert end.live_bytes == start.live_bytes and end.live_blocks == start.live_blocks
    process = after.resident_peak_bytes - after.file_bytes - before.anonymous_bytes - before.shared_bytes
    print(process, end.mapped_peak_bytes - start.mapped_bytes, end.peak_bytes - start.live_bytes)
"""


def test_the_peak_of_the_process_follows_the_mapped_peak_over_training_steps() -> None:
    for line in run_child(CHILD_TRAINING).splitlines():  # without a pool, with one
        process, mapped, live = map(int, line.split())
        # At the peak, at the end of forward: six pairs of activations of 3 MiB, but for the input of the first.
        assert live > 30 * MIB
        assert mapped >= live
        # The kernel's counts are good to about 0.1 MB a thread; scratch of the libraries is the rest.
        assert abs(process - mapped) < 3 * MIB


CHILD_FALLBACK = """
import torch
from memfit.devices.fallback import FallbackAllocator
from memfit.devices.binding import installed
torch.randn(64, 64) @ torch.randn(64, 64)
allocator = FallbackAllocator.create()
assert installed() is None
held = torch.ones(40 << 20, dtype=torch.uint8)
seen = allocator.stats().live_bytes
assert abs(seen - (40 << 20)) < (4 << 20), seen
del held
assert allocator.stats().live_bytes < 4 << 20, "freed memory goes back"
assert allocator.stats().peak_bytes > 36 << 20
allocator.reset_peak()
assert allocator.stats().peak_bytes < 4 << 20
allocator.set_limit(100 << 20)
for _ in range(3):
    try:
        torch.ones(110 << 20, dtype=torch.uint8)
    except RuntimeError as error:
        assert "allocate memory" in str(error), error
    else:
        raise SystemExit("the limit did not hold")
    assert torch.ones(80 << 20, dtype=torch.uint8)[-1] == 1
allocator.set_limit(None)
assert torch.ones(110 << 20, dtype=torch.uint8)[-1] == 1
print("done")
"""


def test_the_fallback_measures_and_limits_without_a_compiler() -> None:
    assert "done" in run_child(CHILD_FALLBACK)


def test_the_fallback_has_no_host_ledger() -> None:
    with pytest.raises(TierUnavailableError, match="ledger"):
        FallbackAllocator(base_bytes=0, unlimited=(-1, -1)).stats("host")


@pytest.fixture
def copying_compiler(allocator: Allocator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A "compiler" that notes each call and copies the library that is already built. Returns the notes."""
    original = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    built = original / "memfit" / "allocator" / build._key() / build._LIBRARY_NAME
    if not built.exists():
        pytest.skip("the cache of this user cannot be written")
    notes, compiler = tmp_path / "calls", tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {notes}\nwhile [ "$1" != -o ]; do shift; done\nsleep 0.2\ncp {built} "$2"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return notes


def calls(notes: Path) -> int:
    return len(notes.read_text().splitlines()) if notes.exists() else 0


def test_the_library_is_built_once_and_found_again(copying_compiler: Path, tmp_path: Path) -> None:
    build.load_library()
    build.load_library()
    assert calls(copying_compiler) == 1
    directory = next((tmp_path / "cache").rglob(build._LIBRARY_NAME)).parent
    assert [entry.name for entry in directory.iterdir()] == [build._LIBRARY_NAME]


def test_builders_at_the_same_time_both_end_with_a_whole_library(copying_compiler: Path) -> None:
    failures: list[BaseException] = []

    def load() -> None:
        try:
            build.load_library()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert 1 <= calls(copying_compiler) <= 3


def test_a_library_that_others_could_have_written_is_not_loaded(copying_compiler: Path, tmp_path: Path) -> None:
    build.load_library()
    library = next((tmp_path / "cache").rglob(build._LIBRARY_NAME))
    library.chmod(0o777)
    build.load_library()
    assert calls(copying_compiler) == 2
    assert not library.stat().st_mode & 0o022
    library.parent.chmod(0o777)
    build.load_library()  # privately: the directory is open to others
    assert calls(copying_compiler) == 3


def test_a_damaged_library_is_built_again(copying_compiler: Path, tmp_path: Path) -> None:
    directory = build._cache_directory()
    assert directory is not None
    library = directory / build._LIBRARY_NAME
    library.write_bytes(b"not a library")
    library.chmod(0o700)
    build.load_library()
    assert calls(copying_compiler) == 1
    assert library.stat().st_size > 1000


def test_no_compiler_or_a_failed_build_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "a-compiler-that-is-not-there")
    with pytest.raises(TierUnavailableError, match=r"no C\+\+ compiler .*FallbackAllocator"):
        build.load_library()
    refuse = shutil.which("false")
    assert refuse is not None
    monkeypatch.setenv("CXX", refuse)
    with pytest.raises(TierUnavailableError, match="did not compile"):
        build.load_library()
    assert not list((tmp_path / "cache").rglob("*.so"))
