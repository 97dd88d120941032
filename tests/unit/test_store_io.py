"""Disk transfers, stores, scratch and probe where all goes well: bytes against bytes, books against arithmetic."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from memfit.core.errors import StoreError, UsageError
from memfit.store import (
    DiskIO,
    DiskStore,
    DiskTransfer,
    FileHandle,
    FileOperations,
    Memory,
    RegionSpec,
    ScratchFile,
    aligned_memory,
    memory_of_storage,
    memory_of_tensor,
    open_file,
    probe_disk,
    store_bytes,
)
from memfit.store.manifest import FORMAT, VERSIONS

KIB, MIB = 1 << 10, 1 << 20


class NoDirect(FileOperations):
    """A file system that refuses direct I/O, as some do."""

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return super().open(path, flags, mode)


class Gate(FileOperations):
    """Lets transfers through only while it is open, and notes their order."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.order: list[tuple[str, int]] = []

    def pread(self, descriptor: int, into: memoryview, offset: int) -> int:
        assert self.opened.wait(30)
        self.order.append(("read", offset))
        return super().pread(descriptor, into, offset)

    def pwrite(self, descriptor: int, source: memoryview, offset: int) -> int:
        assert self.opened.wait(30)
        self.order.append(("write", offset))
        return super().pwrite(descriptor, source, offset)


@pytest.fixture(name="io")
def make_io() -> Iterator[DiskIO]:
    with DiskIO(piece_bytes=64 * KIB, staging_bytes=16 * KIB) as io:
        yield io


def make_file(path: Path, nbytes: int, operations: FileOperations | None = None) -> FileHandle:
    handle = open_file(path, create=True, operations=operations)
    handle.allocate(0, nbytes)
    return handle


def filled(content: bytes) -> Memory:
    memory = aligned_memory(len(content))
    memory.view()[:] = content
    return memory


def wait_until(condition: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.002)


def resident_pages(path: Path) -> int:
    """Pages of a file that the page cache holds, by the system's own count."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        held = ctypes.create_string_buffer(len(pages) // mmap.PAGESIZE)
        first = ctypes.c_char.from_buffer(pages)
        assert mincore(ctypes.addressof(first), len(pages), held) == 0
        del first
    return sum(page[0] & 1 for page in held)


def threads_of_memfit() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("memfit-disk")]


# ---- transfers


@pytest.mark.parametrize("operations", [FileOperations(), NoDirect()], ids=["direct", "cached"])
def test_any_range_at_any_address_arrives_unchanged_and_leaves_its_neighbours(
    tmp_path: Path, io: DiskIO, operations: FileOperations
) -> None:
    draw = random.Random(7)
    size = 512 * KIB
    handle = make_file(tmp_path / "data", size, operations)
    assert handle.is_direct != isinstance(operations, NoDirect)
    expected = bytearray(size)
    memory = aligned_memory(size + 4096)
    for _ in range(60):
        offset = draw.choice([0, 4096, 65536, draw.randrange(size)])
        nbytes = min(size - offset, draw.choice([1, 4095, 4096, 4097, 65536, draw.randrange(1, 200_000)]))
        part = memory.narrow(draw.choice([0, 64, 1, offset % 4096]), nbytes)
        content = draw.randbytes(nbytes)
        part.view()[:] = content
        io.write(handle, offset, part).wait()
        expected[offset : offset + nbytes] = content
        part.view()[:] = bytes(nbytes)
        io.read(handle, offset, part).wait()
        assert bytes(part.view()) == content
    assert (tmp_path / "data").read_bytes() == bytes(expected)
    handle.close()


@pytest.mark.parametrize("operations", [FileOperations(), NoDirect()], ids=["direct", "cached"])
def test_a_write_that_pads_makes_zeros_up_to_the_end_of_its_block_and_no_further(
    tmp_path: Path, io: DiskIO, operations: FileOperations
) -> None:
    draw = random.Random(11)
    size = 512 * KIB
    handle = make_file(tmp_path / "data", size, operations)
    expected = bytearray(draw.randbytes(size))
    io.write(handle, 0, filled(bytes(expected))).wait()
    memory = aligned_memory(size + 4096)
    for _ in range(40):
        offset = draw.choice([0, 4096, 65536, draw.randrange(size)])
        nbytes = min(size - offset, draw.choice([1, 3072, 4095, 4096, 4097, 65536 + 5, draw.randrange(1, 200_000)]))
        part = memory.narrow(draw.choice([0, 64, 1, offset % 4096]), nbytes)
        content = draw.randbytes(nbytes)
        part.view()[:] = content
        io.write(handle, offset, part, pads=True).wait()
        expected[offset : offset + nbytes] = content
        padding = -(offset + nbytes) % 4096
        expected[offset + nbytes : offset + nbytes + padding] = bytes(padding)
    assert (tmp_path / "data").read_bytes() == bytes(expected)
    handle.close()


def test_a_padded_write_reads_nothing_and_a_version_of_padded_writes_is_whole(tmp_path: Path) -> None:
    class Counting(FileOperations):
        reads = 0

        def pread(self, descriptor: int, into: memoryview, offset: int) -> int:
            self.reads += 1
            return super().pread(descriptor, into, offset)

    operations, sizes = Counting(), (3072, 9216, 4096, 100)
    starts = (0, 4096, 16384, 20480)
    specs = {"h": RegionSpec(nbytes=24576, slots=2)}
    store = DiskStore.create(tmp_path / "s", specs, identity={}, piece_bytes=8192, operations=operations)
    with store:
        store.commit(0)
        region, before = store.region("h"), operations.reads
        for start, size in zip(starts, sizes, strict=True):
            region.write(start, size, filled(bytes([7]) * size), pads=True).wait()
        store.commit(1, ["h"])
        assert operations.reads == before, "neither edges nor what has no checksum"
        found = aligned_memory(24576)
        region.read(0, 24576, found, verify=True).wait()
        for start, stop, size in zip(starts, (*starts[1:], 24576), sizes, strict=True):
            assert bytes(found.view()[start:stop]) == bytes([7]) * size + bytes(stop - start - size)


def test_many_unaligned_writes_at_once_keep_each_others_bytes(tmp_path: Path) -> None:
    with DiskIO(write_threads=4, piece_bytes=8 * KIB, staging_bytes=8 * KIB) as io:
        handle = make_file(tmp_path / "data", 256 * KIB)
        content = random.Random(1).randbytes(256 * KIB - 5)
        memory, cuts = filled(content), [*range(0, len(content), 1999), len(content)]
        transfers = [io.write(handle, start, memory.narrow(start, end - start)) for start, end in pairwise(cuts)]
        for transfer in transfers:
            transfer.wait()
        assert (tmp_path / "data").read_bytes()[: len(content)] == content
        handle.close()


def test_direct_transfers_leave_nothing_in_the_page_cache_and_cached_ones_are_counted(tmp_path: Path) -> None:
    with DiskIO() as io:
        direct, cached = make_file(tmp_path / "a", 4 * MIB), make_file(tmp_path / "b", 4 * MIB, NoDirect())
        if not direct.is_direct:
            pytest.skip("the temporary directory refuses direct I/O")
        memory = filled(os.urandom(4 * MIB))
        for handle in (direct, cached):
            io.write(handle, 0, memory).wait()
            io.read(handle, 0, memory).wait()
            assert resident_pages(handle.path) == 0
        (tmp_path / "c").write_bytes(bytes(4 * MIB))
        assert resident_pages(tmp_path / "c") > 0, "the way of counting sees nothing"
        found = io.statistics().total
        assert found.read_bytes == found.written_bytes == 8 * MIB
        assert found.cached_bytes == 8 * MIB
        direct.close()
        cached.close()


def test_torch_memory_goes_out_and_comes_back(tmp_path: Path, io: DiskIO) -> None:
    handle = make_file(tmp_path / "data", 2 * MIB)
    source = torch.randn(300_000)
    target = torch.zeros(300_000)
    io.write(handle, 0, memory_of_tensor(source)).wait()
    io.read(handle, 0, memory_of_storage(target.untyped_storage())).wait()
    assert torch.equal(source, target)
    io.read(handle, 400, memory_of_tensor(target[50:150])).wait()
    assert torch.equal(target[50:150], source[100:200])
    handle.close()


def test_memory_that_is_not_one_range_is_refused() -> None:
    with pytest.raises(UsageError, match="not one range"):
        memory_of_tensor(torch.zeros(4, 4).t())
    with pytest.raises(UsageError, match="processor can address"):
        memory_of_storage(torch.empty(4, device="meta").untyped_storage())
    with pytest.raises(UsageError, match="not inside"):
        aligned_memory(10).narrow(5, 6)
    with pytest.raises(UsageError):
        aligned_memory(-1)


def test_counters_add_up_by_purpose(tmp_path: Path, io: DiskIO) -> None:
    handle = make_file(tmp_path / "data", MIB)
    memory = aligned_memory(MIB)
    for tag, nbytes in (("weight", 100), ("state", 70_000), ("weight", MIB)):
        io.write(handle, 0, memory, nbytes, tag=tag).wait()
    io.read(handle, 0, memory, 5, tag="state").wait()
    found = io.statistics()
    assert {tag: (part.read_bytes, part.written_bytes, part.transfers) for tag, part in found.by_tag.items()} == {
        "weight": (0, MIB + 100, 2),
        "state": (5, 70_000, 2),
    }
    assert found.total.written_bytes == MIB + 70_100
    assert found.staging_bytes == 4 * 16 * KIB
    handle.close()


def test_a_transfer_tells_its_length_and_time_and_an_empty_one_ends_too(tmp_path: Path, io: DiskIO) -> None:
    handle = make_file(tmp_path / "data", MIB)
    transfer = io.write(handle, 0, aligned_memory(MIB))
    transfer.wait()
    assert transfer.done()
    assert transfer.nbytes == MIB
    assert transfer.seconds > 0
    empty = io.read(handle, 0, aligned_memory(0))
    empty.wait()
    assert empty.seconds == 0
    handle.close()


def test_urgent_reads_pass_the_others_at_the_next_piece(tmp_path: Path) -> None:
    gate = Gate()
    with DiskIO(read_threads=1, piece_bytes=64 * KIB) as io:
        gate.opened.set()
        handle = make_file(tmp_path / "data", MIB, gate)
        gate.opened.clear()
        gate.order.clear()
        memory = aligned_memory(MIB)
        slow = io.read(handle, 0, memory, 256 * KIB)
        wait_until(lambda: slow.cursor > 0, "the first piece did not start")
        urgent = io.read(handle, 512 * KIB, memory, 128 * KIB, urgent=True)
        gate.opened.set()
        slow.wait()
        urgent.wait()
        offsets = [offset // KIB for _, offset in gate.order]
        assert offsets == [0, 512, 576, 64, 128, 192]
        handle.close()


def test_a_read_after_a_write_waits_for_it(tmp_path: Path) -> None:
    gate = Gate()
    with DiskIO() as io:
        gate.opened.set()
        handle = make_file(tmp_path / "data", 64 * KIB, gate)
        gate.opened.clear()
        gate.order.clear()
        content = os.urandom(64 * KIB)
        target = aligned_memory(64 * KIB)
        written = io.write(handle, 0, filled(content))
        read = io.read(handle, 0, target, after=(written,))
        overwritten = io.write(handle, 0, filled(bytes(64 * KIB)), after=(read,))
        gate.opened.set()
        overwritten.wait()
        assert bytes(target.view()) == content
        assert [kind for kind, _ in gate.order] == ["write", "read", "write"]
        handle.close()


def test_cancelling_ends_a_transfer_and_the_threads_go_on(tmp_path: Path) -> None:
    gate = Gate()
    with DiskIO(read_threads=1, write_threads=1, piece_bytes=64 * KIB) as io:
        gate.opened.set()
        handle = make_file(tmp_path / "data", MIB, gate)
        gate.opened.clear()
        gate.order.clear()
        memory = aligned_memory(MIB)
        first, second, third = (io.read(handle, 0, memory, 256 * KIB) for _ in range(3))
        wait_until(lambda: first.cursor > 0, "the first piece did not start")
        assert first.cancel()
        assert second.cancel()
        assert second.done()
        assert not first.done(), "a piece is still under way, so its memory is still in use"
        assert not second.cancel()
        gate.opened.set()
        for transfer in (first, second):
            with pytest.raises(StoreError, match="cancelled"):
                transfer.wait()
        third.wait()
        assert not third.cancel()
        assert len(gate.order) == 1 + 4
        assert io.statistics().total.failed_transfers == 2
        handle.close()


def test_long_rows_of_cancelled_transfers_that_wait_for_each_other_end(tmp_path: Path) -> None:
    gate = Gate()
    with DiskIO() as io:
        gate.opened.set()
        handle = make_file(tmp_path / "data", 4096, gate)
        gate.opened.clear()
        memory = aligned_memory(4096)
        row = [io.write(handle, 0, memory)]
        for number in range(3000):
            start = io.read if number % 2 else io.write
            row.append(start(handle, 0, memory, after=(row[-1],)))
        for transfer in row[1:]:
            transfer.cancel()
        gate.opened.set()
        for transfer in row:
            transfer.join()
        assert row[0].failure is None
        handle.close()


def test_memory_and_file_are_held_until_the_transfer_is_done_and_not_longer(tmp_path: Path) -> None:
    gate = Gate()
    with DiskIO() as io:
        gate.opened.set()
        handle = make_file(tmp_path / "data", 64 * KIB, gate)
        gate.opened.clear()
        storage = torch.zeros(16 * KIB).untyped_storage()
        alive = weakref.ref(storage)
        transfer = io.write(handle, 0, memory_of_storage(storage))
        del storage
        assert alive() is not None
        descriptor = handle.descriptor
        handle.close()
        os.fstat(descriptor)  # Closing is deferred: the number cannot be given to another file under the write.
        gate.opened.set()
        transfer.wait()
        assert alive() is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        with pytest.raises(StoreError, match="closed"):
            io.write(handle, 0, aligned_memory(8))


def test_closing_brings_transfers_to_their_end_and_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    before, descriptors = len(threads_of_memfit()), len(list(Path("/proc/self/fd").iterdir()))
    io = DiskIO(read_threads=2, write_threads=3)
    assert len(threads_of_memfit()) == before + 5
    handle = make_file(tmp_path / "data", 8 * MIB)
    transfers = [io.write(handle, number * MIB, aligned_memory(MIB)) for number in range(8)]
    io.close()
    io.close()
    assert all(transfer.done() and transfer.failure is None for transfer in transfers)
    handle.close()
    assert len(threads_of_memfit()) == before
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert io.staging_bytes == 0
    with pytest.raises(StoreError, match="closed"):
        io.read(handle, 0, aligned_memory(8))


def test_dropping_the_object_ends_its_threads_without_a_garbage_collection(tmp_path: Path) -> None:
    before = threads_of_memfit()
    gc.disable()
    try:
        io = DiskIO()
        handle = make_file(tmp_path / "data", MIB)
        io.write(handle, 0, aligned_memory(MIB)).wait()
        alive, descriptor = weakref.ref(io), handle.descriptor
        del io, handle
        assert alive() is None
        wait_until(lambda: len(threads_of_memfit()) == len(before), "threads outlive their owner")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    finally:
        gc.enable()


@pytest.mark.parametrize("ending", ["pass", "del store, transfers; sys.exit(0)"])
def test_the_interpreter_exits_with_transfers_under_way(tmp_path: Path, ending: str) -> None:
    script = f"""
import sys
from memfit.store import DiskIO, DiskStore, RegionSpec, aligned_memory
store = DiskStore.create({str(tmp_path / "s")!r}, {{"a": RegionSpec(nbytes=32 << 20)}}, identity={{}}, durable=False)
io = DiskIO()
memory = aligned_memory(1 << 20)
transfers = [store.region("a").write(n << 20, 1 << 20, memory, slot="current") for n in range(32)]
{ending}
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_settings_that_cannot_be_are_refused() -> None:
    for settings in ({"read_threads": 0}, {"piece_bytes": 1000}, {"staging_bytes": 0}, {"write_threads": 65}):
        with pytest.raises(UsageError):
            DiskIO(**settings)


# ---- stores


def test_a_store_keeps_its_regions_apart_and_finds_them_again(tmp_path: Path) -> None:
    sizes = {"B0/weight": 10_000, "B0/exp_avg": 4096, "B1/weight": 1, "norm": 0, "B1/exp_avg": 300_001}
    specs = {name: RegionSpec(nbytes=size, slots=2, tag="state") for name, size in sizes.items()}
    content = {name: os.urandom(size) for name, size in sizes.items()}
    with DiskStore.create(tmp_path / "store", specs, identity={"model": "m1"}) as store:
        assert store.disk_bytes == store_bytes(specs) == 2 * (12288 + 4096 + 4096 + 0 + 303_104)
        assert sum(path.stat().st_blocks for path in (tmp_path / "store").glob("*.bin")) * 512 >= store.disk_bytes
        assert store.step is None
        for name, data in content.items():
            store.region(name).write(0, len(data), filled(data))
        store.commit(3, specs)
        assert (store.step, store.generation) == (3, 1)
    with DiskStore.open(tmp_path / "store", identity={"model": "m1"}) as store:
        assert (store.step, store.identity, dict(store.regions)) == (3, {"model": "m1"}, specs)
        assert not store.previous_owner_died
        for name, data in content.items():
            memory = aligned_memory(len(data))
            store.region(name).read(0, len(data), memory).wait()
            assert bytes(memory.view()) == data
            assert store.region(name).step == 3


def test_a_new_version_is_seen_after_its_commit_and_not_before(tmp_path: Path) -> None:
    target = aligned_memory(4096)
    with DiskStore.create(tmp_path / "s", {"w": RegionSpec(nbytes=4096, slots=2)}, identity={}) as store:
        region = store.region("w")
        for step in range(5):
            region.write(0, 4096, filled(bytes([step + 1]) * 4096)).wait()
            region.read(0, 4096, target).wait()
            assert set(target.view()) == {step}
            region.read(0, 4096, target, slot="spare").wait()
            assert set(target.view()) == {step + 1}
            store.commit(step, ["w"])
            region.read(0, 4096, target).wait()
            assert set(target.view()) == {step + 1}
        region.write(0, 4096, filled(b"x" * 4096)).wait()
    with DiskStore.open(tmp_path / "s") as store:
        store.region("w").read(0, 4096, target).wait()
        assert set(target.view()) == {5}, "what was not committed is gone"


def test_transfers_of_one_region_happen_in_the_order_asked_for(tmp_path: Path) -> None:
    with DiskStore.create(tmp_path / "s", {"g": RegionSpec(nbytes=MIB)}, identity={}, durable=False) as store:
        region = store.region("g")
        reads: list[tuple[int, Memory, DiskTransfer]] = []
        for number in range(40):
            region.write(0, MIB, filled(bytes([number]) * MIB), slot="current")
            memory = aligned_memory(MIB)
            reads.append((number, memory, region.read(0, MIB, memory)))
        for number, memory, transfer in reads:
            transfer.wait()
            assert bytes(memory.view()) == bytes([number]) * MIB


def test_a_version_that_is_not_whole_is_not_committed(tmp_path: Path) -> None:
    with DiskStore.create(tmp_path / "s", {"w": RegionSpec(nbytes=10_000, slots=2)}, identity={}) as store:
        region = store.region("w")
        memory = aligned_memory(10_000)
        region.write(0, 4000, memory)
        region.write(3000, 3000, memory)
        with pytest.raises(UsageError, match=r"6000 of its 10000 bytes"):
            store.commit(0, ["w"])
        region.write(6000, 4000, memory)
        store.commit(0, ["w"])
        with pytest.raises(UsageError, match=r"0 of its 10000 bytes"):
            store.commit(1, ["w"])


def test_wrong_uses_of_a_store_are_refused_with_the_cure(tmp_path: Path) -> None:
    specs = {"two": RegionSpec(nbytes=100, slots=2), "one": RegionSpec(nbytes=100)}
    memory = aligned_memory(100)
    with DiskStore.create(tmp_path / "s", specs, identity={}, durable=False) as store:
        two, one = store.region("two"), store.region("one")
        with pytest.raises(UsageError, match="no region 'three'"):
            store.region("three")
        with pytest.raises(UsageError, match="not inside its 100 bytes"):
            two.read(50, 51, memory)
        with pytest.raises(UsageError, match="slots=2"):
            one.write(0, 100, memory)
        with pytest.raises(UsageError, match="leave it out"):
            store.commit(0, ["one"])
        with pytest.raises(UsageError, match="twice"):
            store.commit(0, ["two", "two"])
        with pytest.raises(UsageError, match="whole number"):
            store.commit(-1)
        two.write(0, 100, memory, slot="current")  # Filling a new region is in order ...
        store.commit(0)
        assert two.step == 0
        with pytest.raises(UsageError, match="neither the old version nor the new one"):
            two.write(0, 100, memory, slot="current")  # ... overwriting a committed one is not.
    with pytest.raises(StoreError, match="closed"):
        one.read(0, 1, memory)
    for spec in (RegionSpec(nbytes=-1), RegionSpec(nbytes=1, slots=3), RegionSpec(nbytes=1, tag="")):
        with pytest.raises(UsageError):
            DiskStore.create(tmp_path / "t", {"x": spec}, identity={})
    with pytest.raises(UsageError, match="name"):
        DiskStore.create(tmp_path / "t", {"": RegionSpec(nbytes=1)}, identity={})
    assert not (tmp_path / "t").exists()


def test_the_manifest_is_plain_json_with_version_steps_and_layout(tmp_path: Path) -> None:
    with DiskStore.create(
        tmp_path / "s", {"w": RegionSpec(nbytes=5, slots=2, tag="weight")}, identity={"a": "b"}
    ) as store:
        store.region("w").write(0, 5, filled(b"hello"))
        store.commit(7, ["w"])
    found = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert (found["format"], found["version"]) == (FORMAT, VERSIONS["generations"])
    assert found["body"]["regions"]["w"] == {
        "nbytes": 5,
        "tag": "weight",
        "tensors": [],
        "sums": None,
        "current": 1,
        "slots": [{"file": 0, "offset": 0, "step": None}, {"file": 0, "offset": 4096, "step": 7}],
    }
    assert (tmp_path / "s" / "homes-0.bin").read_bytes()[4096:4101] == b"hello"


def test_deleting_removes_what_the_store_made_and_nothing_else(tmp_path: Path) -> None:
    specs = {"w": RegionSpec(nbytes=5)}
    DiskStore.create(tmp_path / "a", specs, identity={}).close(delete=True)
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.safetensors").write_text("mine")
    DiskStore.create(tmp_path / "b", specs, identity={}).close(delete=True)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["model.safetensors"]


def test_a_store_that_is_not_durable_never_syncs_and_a_durable_one_syncs_in_order(tmp_path: Path) -> None:
    class Diary(FileOperations):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def fdatasync(self, descriptor: int) -> None:
            self.calls.append("data")
            super().fdatasync(descriptor)

        def fsync(self, descriptor: int) -> None:
            self.calls.append("directory" if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir() else "file")
            super().fsync(descriptor)

        def rename(self, source: Path, target: Path) -> None:
            self.calls.append("rename")
            super().rename(source, target)

    for durable, expected in ((False, ["rename"]), (True, ["data", "file", "rename", "directory"])):
        diary = Diary()
        specs = {"w": RegionSpec(nbytes=5, slots=2)}
        with DiskStore.create(tmp_path / str(durable), specs, identity={}, durable=durable, operations=diary) as store:
            store.region("w").write(0, 5, filled(b"hello"))
            diary.calls.clear()
            store.commit(0, ["w"])
            assert diary.calls == expected


def test_a_dropped_store_frees_its_directory_without_a_garbage_collection(tmp_path: Path) -> None:
    gc.disable()
    try:
        store = DiskStore.create(tmp_path / "s", {"w": RegionSpec(nbytes=5, slots=2)}, identity={}, durable=False)
        store.region("w").write(0, 5, filled(b"hello"))
        store.commit(0, ["w"])
        del store
        with DiskStore.open(tmp_path / "s") as again:
            assert again.step == 0
            assert again.previous_owner_died, "it was dropped, not closed"
    finally:
        gc.enable()


def test_a_forked_child_that_cleans_up_leaves_the_store_to_its_parent(tmp_path: Path) -> None:
    script = f"""
import os, sys, warnings
warnings.simplefilter("ignore")
from memfit.store import DiskStore, RegionSpec, aligned_memory
store = DiskStore.create({str(tmp_path / "s")!r}, {{"w": RegionSpec(nbytes=4096, slots=2)}}, identity={{}})
memory = aligned_memory(4096)
child = os.fork()
if child == 0:
    try:
        store.region("w").write(0, 4096, memory)
    except OSError as error:
        assert "forked" in str(error), error
        store.close(delete=True)
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
store.region("w").write(0, 4096, memory)
store.commit(1, ["w"])
try:
    DiskStore.open({str(tmp_path / "s")!r})
except OSError as error:
    assert "in use" in str(error), error
else:
    sys.exit("the lock was lost")
store.close()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


# ---- scratch and probe


def test_scratch_gives_back_what_was_put_and_uses_room_again(tmp_path: Path, io: DiskIO) -> None:
    with ScratchFile(tmp_path, io) as scratch:
        assert list(tmp_path.iterdir()) == [], "the file has no name"
        for _ in range(3):
            content = [os.urandom(size) for size in (10, 4096, 100_000)]
            extents = [scratch.put(filled(data)) for data in content]
            for data, extent in zip(content, extents, strict=True):
                memory = aligned_memory(len(data))
                scratch.get(extent, memory).wait()
                assert bytes(memory.view()) == data
                scratch.free(extent)
        found = scratch.statistics()
        assert found.high_water_bytes == 4096 + 4096 + 102_400
        assert (found.live_bytes, found.extents, found.file_bytes) == (0, 0, 64 * MIB)
    assert io.statistics().by_tag["activation"].written_bytes == 3 * (10 + 4096 + 100_000)


def test_scratch_takes_room_back_only_when_transfers_have_ended_and_from_dropped_extents_too(tmp_path: Path) -> None:
    gate = Gate()
    gate.opened.set()
    with DiskIO(write_threads=1) as io, ScratchFile(tmp_path, io, operations=gate) as scratch:
        gate.opened.clear()
        first = scratch.put(aligned_memory(8192))
        written = first.written
        wait_until(lambda: written.cursor > 0, "the write did not start")
        second = scratch.put(aligned_memory(8192))
        scratch.free(second)  # Its write has not begun: given up, and its room is free at once.
        assert second.written.failure is not None
        offset = first.offset
        del first
        assert scratch.statistics().extents == 1
        third = scratch.put(aligned_memory(8192))
        assert third.offset != offset, "the room of a write that is under way was given away"
        gate.opened.set()
        written.wait()
        assert scratch.statistics().extents == 1
        assert scratch.put(aligned_memory(8192)).offset == offset
        with pytest.raises(UsageError, match="freed before"):
            scratch.get(second, aligned_memory(8192))
        with ScratchFile(tmp_path, io) as other, pytest.raises(UsageError, match="another"):
            other.free(third)


def test_scratch_stays_under_its_limit(tmp_path: Path, io: DiskIO) -> None:
    with ScratchFile(tmp_path, io, limit_bytes=MIB + 100) as scratch:
        kept = [scratch.put(aligned_memory(MIB // 2), label="B1.attention") for _ in range(2)]
        with pytest.raises(StoreError, match=r"B1\.mlp .* limit .* 1\.0 MiB; raise the disk limit"):
            scratch.put(aligned_memory(1), label="B1.mlp")
        kept[-1].written.wait()  # room is used again only after its transfers
        scratch.free(kept.pop())
        kept.append(scratch.put(aligned_memory(MIB // 2)))
        assert scratch.statistics().file_bytes == MIB


def test_the_probe_measures_both_directions_and_leaves_nothing(tmp_path: Path) -> None:
    speed = probe_disk(tmp_path, seconds=0.05, file_bytes=8 * MIB)
    assert list(tmp_path.iterdir()) == []
    # Slower than memory, faster than a floppy disk.
    assert all(1e5 < rate < 1e12 for rate in (speed.read_bytes_per_s, speed.write_bytes_per_s))
    with pytest.raises(UsageError):
        probe_disk(tmp_path, seconds=0, file_bytes=8 * MIB)
    with pytest.raises(StoreError, match="no such directory"):
        probe_disk(tmp_path / "none", seconds=0.05, file_bytes=8 * MIB)
