"""Disks that are full, broken, read-only, in use or tampered with: a clean error, and the committed step whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memfit.core.errors import StoreError, StoreInUseError, UsageError
from memfit.store import (
    DiskIO,
    DiskStore,
    FileOperations,
    Memory,
    RegionSpec,
    ScratchFile,
    aligned_memory,
    open_file,
    probe_disk,
)
from memfit.store.manifest import LIMIT_BYTES

MIB = 1 << 20
NOBODY = 65534
SPECS = {"B0/weight": RegionSpec(nbytes=300_000, slots=2), "B0/gradient": RegionSpec(nbytes=5000)}


class Broken(FileOperations):
    """Fails the calls of a name with an error number, from a given call on."""

    def __init__(self) -> None:
        self._errors: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def break_from(self, name: str, number: int, *, after_calls: int = 0) -> None:
        self._errors[name] = (number, after_calls)

    def mend(self) -> None:
        self._errors.clear()

    def _maybe_fail(self, name: str) -> None:
        with self._lock:
            if name not in self._errors:
                return
            number, calls = self._errors[name]
            if calls:
                self._errors[name] = (number, calls - 1)
                return
        raise OSError(number, os.strerror(number))

    def open(self, path: Path, flags: int, mode: int = 0o644) -> int:
        self._maybe_fail("open")
        if path.name in ("manifest.json.new", "manifest.json.partial"):
            self._maybe_fail("open manifest")
        return super().open(path, flags, mode)

    def pread(self, descriptor: int, into: memoryview, offset: int) -> int:
        self._maybe_fail("pread")
        return super().pread(descriptor, into, offset)

    def pwrite(self, descriptor: int, source: memoryview, offset: int) -> int:
        self._maybe_fail("pwrite")
        return super().pwrite(descriptor, source, offset)

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        self._maybe_fail("allocate")
        super().allocate(descriptor, offset, nbytes)

    def fdatasync(self, descriptor: int) -> None:
        self._maybe_fail("fdatasync")
        super().fdatasync(descriptor)

    def fsync(self, descriptor: int) -> None:
        self._maybe_fail("fsync")
        super().fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._maybe_fail("rename")
        super().rename(source, target)

    def mkdir(self, path: Path) -> None:
        self._maybe_fail("mkdir")
        super().mkdir(path)

    def unlink(self, path: Path) -> None:
        self._maybe_fail("unlink")
        super().unlink(path)


class Stuttering(FileOperations):
    """Moves fewer bytes than asked, at odd lengths, as the system may."""

    def __init__(self) -> None:
        self._draw = random.Random(3)

    def _part(self, view: memoryview) -> memoryview:
        return view[: max(min(4096, view.nbytes), self._draw.randrange(1, view.nbytes + 1))]

    def pread(self, descriptor: int, into: memoryview, offset: int) -> int:
        # A direct read is asked for whole and reported short.
        whole = super().pread(descriptor, into, offset)
        return min(whole, self._part(into).nbytes)

    def pwrite(self, descriptor: int, source: memoryview, offset: int) -> int:
        whole = super().pwrite(descriptor, source, offset)
        return min(whole, self._part(source).nbytes)


def filled(content: bytes) -> Memory:
    memory = aligned_memory(len(content))
    memory.view()[:] = content
    return memory


def content_of(store: DiskStore, name: str) -> bytes:
    region = store.region(name)
    memory = aligned_memory(region.nbytes)
    region.read(0, region.nbytes, memory).wait()
    return bytes(memory.view())


def committed(directory: Path, operations: FileOperations | None = None) -> tuple[DiskStore, bytes]:
    """A store with one committed step."""
    store = DiskStore.create(directory, SPECS, identity={"model": "m"}, operations=operations)
    content = os.urandom(300_000)
    store.region("B0/weight").write(0, 300_000, filled(content))
    store.commit(1, ["B0/weight"])
    return store, content


# ---- creation


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"its parent .*/none does not exist; create it or choose another"):
        DiskStore.create(tmp_path / "none" / "store", SPECS, identity={})


def test_a_file_in_the_place_of_the_directory_or_its_parent_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match=r"create the directory at .*/file: File exists.*choose another path"):
        DiskStore.create(tmp_path / "file", SPECS, identity={})
    with pytest.raises(StoreError, match=r"there is a file where a directory should be"):
        DiskStore.create(tmp_path / "file" / "store", SPECS, identity={})
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EACCES, "a directory that you may write"), (errno.EROFS, "mounted read-only")]
)
@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_directory_that_cannot_be_written_is_told_with_the_cure(
    tmp_path: Path, number: int, advice: str, call: str
) -> None:
    broken = Broken()
    broken.break_from(call, number)
    with pytest.raises(StoreError, match=advice) as caught:
        DiskStore.create(tmp_path / "store", SPECS, identity={}, operations=broken)
    assert caught.value.errno == number
    assert str(tmp_path / "store") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@contextmanager
def as_anybody() -> Iterator[None]:
    """Without root's rights, where the tests have them: the kernel asks for permissions again."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_directory_without_permission_is_told() -> None:
    # Not in pytest's own directory, which nobody else may enter.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        closed = Path(name) / "closed"
        closed.mkdir()
        (closed / "before").mkdir()
        closed.chmod(0o555)
        before = list(closed.iterdir())
        with as_anybody():
            for directory in (closed / "store", closed):
                with pytest.raises(StoreError, match="permission is denied") as caught:
                    DiskStore.create(directory, SPECS, identity={})
                assert caught.value.errno == errno.EACCES
                assert str(directory) in str(caught.value)
        assert list(closed.iterdir()) == before
        closed.chmod(0o755)
        committed(closed / "store")[0].close()
        (closed / "store" / "lock").chmod(0o444)
        with as_anybody(), pytest.raises(StoreError, match="permission is denied"):
            DiskStore.open(closed / "store")


def test_a_disk_that_is_known_to_be_too_small_is_told_before_anything_is_made(tmp_path: Path) -> None:
    class Small(FileOperations):
        def free_bytes(self, path: Path) -> int:
            return 600_000

    with pytest.raises(StoreError, match=r"\(614400 bytes\) needed, 585\.9 KiB \(600000 bytes\) free") as caught:
        DiskStore.create(tmp_path / "store", SPECS, identity={}, operations=Small())
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path / "store") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["allocate", "fsync", "rename", "open manifest", "pwrite"])
def test_a_disk_that_fills_up_during_creation_leaves_nothing_behind(tmp_path: Path, call: str) -> None:
    broken = Broken()
    broken.break_from(call, errno.ENOSPC)
    (tmp_path / "mine").write_text("kept")
    for directory in (tmp_path / "store", tmp_path):
        with pytest.raises(StoreError, match="disk is full") as caught:
            DiskStore.create(directory, SPECS, identity={}, operations=broken)
        assert caught.value.errno == errno.ENOSPC
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    broken.mend()
    DiskStore.create(tmp_path / "store", SPECS, identity={}, operations=broken).close()


@pytest.fixture(name="small_disk")
def mount_small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 8 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "memfit-test", str(where)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this process may not mount a file system")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_disk_that_is_really_full_is_told_at_creation_and_in_scratch(small_disk: Path) -> None:
    with pytest.raises(StoreError, match=r"16\.0 MiB \(16777216 bytes\) needed, 8\.0 MiB"):
        DiskStore.create(small_disk / "store", {"w": RegionSpec(nbytes=8 * MIB, slots=2)}, identity={})
    assert list(small_disk.iterdir()) == []

    class Optimist(FileOperations):
        def free_bytes(self, path: Path) -> int:
            return 1 << 40

    with pytest.raises(StoreError, match=r"16\.0 MiB \(16777216 bytes\) needed") as caught:
        DiskStore.create(
            small_disk / "store", {"w": RegionSpec(nbytes=8 * MIB, slots=2)}, identity={}, operations=Optimist()
        )
    assert caught.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []
    with DiskIO() as io, ScratchFile(small_disk, io) as scratch:
        content = os.urandom(5 * MIB)
        extent = scratch.put(filled(content))  # 64 MiB of growth do not fit, what is needed does.
        with pytest.raises(StoreError, match="disk is full"):
            scratch.put(aligned_memory(5 * MIB), label="B3.mlp")
        memory = aligned_memory(5 * MIB)
        scratch.get(extent, memory).wait()
        assert bytes(memory.view()) == content
    with pytest.raises(StoreError, match="cannot probe the disk"):
        probe_disk(small_disk, seconds=0.1, file_bytes=64 * MIB)


def test_a_file_size_limit_is_told(tmp_path: Path) -> None:
    script = f"""
import resource
from memfit.store import DiskStore, RegionSpec
resource.setrlimit(resource.RLIMIT_FSIZE, ({MIB}, {MIB}))
try:
    DiskStore.create({str(tmp_path / "s")!r}, {{"w": RegionSpec(nbytes={2 * MIB})}}, identity={{}})
except OSError as error:
    print(error)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] in (resource.RLIM_INFINITY, -1)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "raise `ulimit -f`" in ended.stdout, ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_a_store_is_not_overwritten(tmp_path: Path) -> None:
    store, content = committed(tmp_path / "s")
    store.close()
    with pytest.raises(StoreError, match="holds a store already"):
        DiskStore.create(tmp_path / "s", SPECS, identity={})
    with DiskStore.open(tmp_path / "s") as again:
        assert content_of(again, "B0/weight") == content


def test_what_an_interrupted_creation_left_is_replaced_and_data_that_lost_their_manifest_are_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "homes-0.bin").write_bytes(b"the only copy")
    with pytest.raises(StoreError, match=r"holds data of a store \(homes-0.bin\) and no manifest.json"):
        DiskStore.create(tmp_path / "s", SPECS, identity={}, durable=False)
    assert (tmp_path / "s" / "homes-0.bin").read_bytes() == b"the only copy"
    (tmp_path / "s" / "manifest.json.partial").touch()  # the name of what is made or removed
    with DiskStore.create(tmp_path / "s", SPECS, identity={}, durable=False) as store:
        assert content_of(store, "B0/weight") == bytes(300_000)


# ---- one writer


def test_a_store_in_use_by_a_live_process_is_refused_and_a_dead_owners_lock_is_taken_over(tmp_path: Path) -> None:
    """Also where a child that it forked, as data loaders do, lives on."""
    script = f"""
import os, sys, time, warnings
warnings.simplefilter("ignore")
from memfit.store import DiskStore, RegionSpec
store = DiskStore.create({str(tmp_path / "s")!r}, {{"w": RegionSpec(nbytes=10, slots=2)}}, identity={{}})
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner.stdin, owner.stdout:
        child = int(owner.stdout.readline())
        for start in (DiskStore.open, lambda where: DiskStore.create(where, SPECS, identity={})):
            with pytest.raises(
                StoreInUseError, match=rf"in use by a live job \(pid {owner.pid}, boot [0-9a-f]{{8}}\): wait for it"
            ):
                start(tmp_path / "s")
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    with DiskStore.open(tmp_path / "s") as store:
        assert store.previous_owner_died
        with pytest.raises(StoreInUseError, match="by this process .* close the job that has it first"):
            DiskStore.open(tmp_path / "s")
    with DiskStore.open(tmp_path / "s") as store:
        assert not store.previous_owner_died
    os.kill(child, signal.SIGKILL)  # it lived until now


def test_rubbish_in_the_lock_file_does_no_harm(tmp_path: Path) -> None:
    committed(tmp_path / "s")[0].close()
    for rubbish in (b"\xff" * 5000, b"[" * 4000, b'{"pid": "x"}', b"7"):
        (tmp_path / "s" / "lock").write_bytes(rubbish)
        DiskStore.open(tmp_path / "s").close()


# ---- transfers that fail


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EIO, "device reports an error"), (errno.ENOSPC, "disk is full"), (errno.EFBIG, "ulimit -f")],
)
def test_a_write_that_fails_in_the_middle_leaves_the_committed_step_whole(
    tmp_path: Path, number: int, advice: str
) -> None:
    broken = Broken()
    with DiskIO(piece_bytes=65536) as io:
        store = DiskStore.create(tmp_path / "s", SPECS, identity={}, io=io, operations=broken)
        region = store.region("B0/weight")
        old, new = os.urandom(300_000), os.urandom(300_000)
        region.write(0, 300_000, filled(old))
        store.commit(1, ["B0/weight"])
        broken.break_from("pwrite", number, after_calls=2)
        transfer = region.write(0, 300_000, filled(new))
        with pytest.raises(
            StoreError, match=rf"write B0/weight \(bytes .* of the file\) at .*homes-0\.bin.*{advice}"
        ) as e:
            transfer.wait()
        assert e.value.errno == number
        with pytest.raises(StoreError, match="could not write"):
            transfer.wait()
        broken.mend()
        with pytest.raises(StoreError, match="could not write B0/weight"):
            region.read(100, 10, aligned_memory(10), slot="spare")
        with pytest.raises(StoreError, match=r"cannot be committed, it was not written.*write the region again"):
            store.commit(2, ["B0/weight"])
        assert (content_of(store, "B0/weight"), store.step) == (old, 1)
        # The threads live, and the same step goes through once the disk is well.
        region.write(0, 300_000, filled(new))
        store.commit(2, ["B0/weight"])
        assert content_of(store, "B0/weight") == new
        store.close()
    with DiskStore.open(tmp_path / "s") as again:
        assert (content_of(again, "B0/weight"), again.step) == (new, 2)


def test_a_read_behind_a_write_that_fails_does_not_give_old_bytes(tmp_path: Path) -> None:
    broken = Broken()
    with DiskStore.create(tmp_path / "s", SPECS, identity={}, durable=False, operations=broken) as store:
        gradient = store.region("B0/gradient")
        gradient.write(0, 5000, filled(os.urandom(5000)), slot="current").wait()
        broken.break_from("pwrite", errno.EIO)
        gradient.write(0, 5000, filled(os.urandom(5000)), slot="current")
        with pytest.raises(StoreError, match=r"could not write|was not written"):
            gradient.read(0, 5000, aligned_memory(5000)).wait()
        broken.mend()
        with pytest.raises(StoreError, match="write it again first"):
            store.commit(1)
        gradient.write(0, 5000, filled(bytes(5000)), slot="current")
        store.commit(1)
        assert content_of(store, "B0/gradient") == bytes(5000)


def test_a_read_that_fails_names_the_region_and_may_be_repeated(tmp_path: Path) -> None:
    broken = Broken()
    store, content = committed(tmp_path / "s", broken)
    broken.break_from("pread", errno.EIO)
    with pytest.raises(StoreError, match=r"could not read B0/weight .*Input/output error.*dmesg"):
        content_of(store, "B0/weight")
    broken.mend()
    assert content_of(store, "B0/weight") == content
    store.close()


def test_a_file_that_was_cut_is_told_as_such(tmp_path: Path) -> None:
    store, _ = committed(tmp_path / "s")
    os.truncate(tmp_path / "s" / "homes-0.bin", 400_000)
    with pytest.raises(StoreError, match=r"the file ends \d+ bytes too early; it was cut or replaced from outside"):
        content_of(store, "B0/weight")
    store.close()
    with pytest.raises(StoreError, match=r"has 400000 bytes and its manifest says 614400"):
        DiskStore.open(tmp_path / "s")
    (tmp_path / "s" / "homes-0.bin").unlink()
    with pytest.raises(StoreError, match=r"open the file at .*homes-0\.bin: No such file"):
        DiskStore.open(tmp_path / "s")


def test_an_unexpected_error_in_a_worker_reaches_the_waiter_and_leaves_the_thread_alive(tmp_path: Path) -> None:
    class Buggy(FileOperations):
        is_buggy = True

        def pwrite(self, descriptor: int, source: memoryview, offset: int) -> int:
            if self.is_buggy:
                raise KeyError("a bug")
            return super().pwrite(descriptor, source, offset)

    with DiskIO(write_threads=1) as io:
        operations = Buggy()
        handle = open_file(tmp_path / "data", create=True, operations=operations)
        handle.allocate(0, 4096)
        for _ in range(3):
            with pytest.raises(StoreError, match="KeyError"):
                io.write(handle, 0, aligned_memory(4096)).wait()
        operations.is_buggy = False
        io.write(handle, 0, aligned_memory(4096)).wait()
        handle.close()


def test_short_system_calls_are_continued(tmp_path: Path) -> None:
    with DiskIO(piece_bytes=65536, staging_bytes=8192) as io:
        handle = open_file(tmp_path / "data", create=True, operations=Stuttering())
        handle.allocate(0, MIB)
        content = os.urandom(300_001)
        for offset, shift in ((0, 0), (4096, 64), (777, 777), (777, 1)):
            source = aligned_memory(400_000).narrow(shift, len(content))
            source.view()[:] = content
            io.write(handle, offset, source).wait()
            target = aligned_memory(400_000).narrow(shift, len(content))
            io.read(handle, offset, target).wait()
            assert bytes(target.view()) == content
        handle.close()


# ---- commits that fail


@pytest.mark.parametrize("call", ["open manifest", "pwrite", "fsync", "rename"])
def test_a_commit_that_fails_before_its_instant_can_be_repeated(tmp_path: Path, call: str) -> None:
    broken = Broken()
    store, old = committed(tmp_path / "s", broken)
    new = os.urandom(300_000)
    store.region("B0/weight").write(0, 300_000, filled(new)).wait()
    broken.break_from(call, errno.ENOSPC)
    with pytest.raises(StoreError, match=r"manifest of step 2 \(the step before is whole and current\).*disk is full"):
        store.commit(2, ["B0/weight"])
    assert (store.step, content_of(store, "B0/weight")) == (1, old)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (tmp_path / "s").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    with DiskStore.open(copy) as crashed:
        assert (crashed.step, content_of(crashed, "B0/weight")) == (1, old), "as after a crash in this instant"
    broken.mend()
    store.commit(2, ["B0/weight"])
    assert (store.step, content_of(store, "B0/weight")) == (2, new)
    store.close()


def test_after_a_failed_sync_of_data_the_store_must_be_opened_again(tmp_path: Path) -> None:
    broken = Broken()
    store, old = committed(tmp_path / "s", broken)
    store.region("B0/weight").write(0, 300_000, aligned_memory(300_000)).wait()
    broken.break_from("fdatasync", errno.EIO)
    with pytest.raises(StoreError, match="open again"):
        store.commit(2, ["B0/weight"])
    broken.mend()
    for attempt in (
        lambda: store.commit(2, ["B0/weight"]),
        lambda: store.region("B0/weight").write(0, 1, aligned_memory(1)),
    ):
        with pytest.raises(StoreError, match=r"can only be read: the disk lost data.*open it again"):
            attempt()
    assert content_of(store, "B0/weight") == old
    store.close()
    with DiskStore.open(tmp_path / "s") as again:
        assert (again.step, content_of(again, "B0/weight")) == (1, old)


def test_when_nobody_can_say_which_manifest_is_durable_neither_version_is_overwritten(tmp_path: Path) -> None:
    broken = Broken()
    store, _ = committed(tmp_path / "s", broken)
    new = os.urandom(300_000)
    store.region("B0/weight").write(0, 300_000, filled(new)).wait()
    broken.break_from("fsync", errno.EIO, after_calls=1)
    with pytest.raises(StoreError, match=r"step 2 durable \(both steps are whole; open again\)"):
        store.commit(2, ["B0/weight"])
    broken.mend()
    with pytest.raises(StoreError, match="step 2 may or may not have become durable"):
        store.region("B0/weight").write(0, 1, aligned_memory(1))
    store.close()
    with DiskStore.open(tmp_path / "s") as again:
        assert (again.step, content_of(again, "B0/weight")) == (2, new)


def test_a_process_killed_at_any_moment_leaves_one_whole_step(tmp_path: Path) -> None:
    script = f"""
from memfit.store import DiskStore, RegionSpec, aligned_memory
names = ["a", "b"]
specs = {{name: RegionSpec(nbytes=200_000, slots=2) for name in names}}
store = DiskStore.create({str(tmp_path / "s")!r}, specs, identity={{}}, durable=False)
memory = aligned_memory(200_000)
step = 0
while True:
    memory.view()[:] = bytes([step % 251]) * 200_000
    for transfer in [store.region(name).write(0, 200_000, memory) for name in names]:
        transfer.wait()
    store.commit(step, names)
    if step == 3:
        print("ready", flush=True)
    step += 1
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "ready\n"
        child.kill()
        child.wait()
    with DiskStore.open(tmp_path / "s") as store:
        assert store.step is not None
        assert store.step >= 3
        expected = bytes([store.step % 251]) * 200_000
        assert content_of(store, "a") == content_of(store, "b") == expected


def test_what_cannot_be_removed_is_told_and_the_store_is_closed_even_so(tmp_path: Path) -> None:
    broken = Broken()
    store, _ = committed(tmp_path / "s", broken)
    broken.break_from("rename", errno.EACCES)
    with pytest.raises(StoreError, match="remove the file"):
        store.close(delete=True)
    DiskStore.open(tmp_path / "s").close()


@pytest.mark.parametrize("calls", range(4))
def test_a_removal_that_was_interrupted_is_no_store_and_makes_room_for_the_next(tmp_path: Path, calls: int) -> None:
    broken = Broken()
    store, _ = committed(tmp_path / "s", broken)
    broken.break_from("unlink", errno.EACCES, after_calls=calls)
    try:
        store.close(delete=True)
    except StoreError:
        assert (tmp_path / "s" / "manifest.json.partial").exists()
    with pytest.raises(StoreError, match="there is no store"):
        DiskStore.open(tmp_path / "s")
    with DiskStore.create(tmp_path / "s", SPECS, identity={}, durable=False) as again:
        assert content_of(again, "B0/weight") == bytes(300_000)
        assert not (tmp_path / "s" / "manifest.json.partial").exists()


# ---- manifests that are not to be trusted


def seal(body: Any) -> bytes:
    """A manifest whose checksum is right, computed by the rule in the format's description."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    whole = {"format": "memfit-store", "version": 2, "checksum": hashlib.sha256(text).hexdigest(), "body": body}
    return json.dumps(whole).encode()


def edit(*keys: str | int, value: object) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return change


WEIGHT = ("regions", "B0/weight")
EDITS = {
    "a file outside": edit("files", 0, "name", value="../../etc/passwd"),
    "a negative length": edit("files", 0, "nbytes", value=-4096),
    "a length off the blocks": edit("files", 0, "nbytes", value=614_401),
    "an enormous length": edit("files", 0, "nbytes", value=1 << 70),
    "another length": edit("files", 0, "nbytes", value=1 << 40),
    "files that are no list": edit("files", value={}),
    "a region as large as the sky": edit(*WEIGHT, "nbytes", value=1 << 62),
    "a negative region": edit(*WEIGHT, "nbytes", value=-1),
    "a fractional region": edit(*WEIGHT, "nbytes", value=1.5),
    "a boolean region": edit(*WEIGHT, "nbytes", value=True),
    "a slot in no file": edit(*WEIGHT, "slots", 0, "file", value=1),
    "a slot in a negative file": edit(*WEIGHT, "slots", 0, "file", value=-1),
    "a slot off the blocks": edit(*WEIGHT, "slots", 0, "offset", value=1),
    "a slot behind the end": edit(*WEIGHT, "slots", 0, "offset", value=614_400),
    "two slots in one place": edit(*WEIGHT, "slots", 0, "offset", value=303_104),
    "no slots": edit(*WEIGHT, "slots", value=[]),
    "three slots": edit(*WEIGHT, "slots", value=[{"file": 0, "offset": 0, "step": None}] * 3),
    "a current slot that is not there": edit(*WEIGHT, "current", value=2),
    "a step as text": edit("step", value="1"),
    "a negative step": edit("step", value=-1),
    "committed slots without a step": edit("step", value=None),
    "an unknown field": edit("compression", value="zip"),
    "a missing field": lambda body: body.pop("generation"),
    "an identity of numbers": edit("identity", value={"model": 1}),
    "a name of control characters": lambda body: body["regions"].update({"\x1b[2J": body["regions"].pop("B0/weight")}),
    "a body that is a list": None,
}


@pytest.mark.parametrize("name", EDITS)
def test_a_hostile_manifest_is_a_clean_error(tmp_path: Path, name: str) -> None:
    committed(tmp_path / "s")[0].close()
    path = tmp_path / "s" / "manifest.json"
    body = json.loads(path.read_bytes())["body"]
    path.write_bytes(seal(body))
    DiskStore.open(tmp_path / "s").close()  # The seal itself is right.
    change = EDITS[name]
    if change is None:
        body = [body]
    else:
        change(body)
    path.write_bytes(seal(body))
    with pytest.raises(StoreError, match=r"manifest .* is damaged: .*; restore it|manifest says"):
        DiskStore.open(tmp_path / "s")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 100_000,
        b'{"format":"memfit-store","format":"memfit-store"}',
        b'{"format":"memfit-store","version":NaN,"checksum":"","body":{}}',
        b'{"format":"memfit-store","version":2,"checksum":"","body":{}}',
        b'{"format":"memfit-store","version":1e999,"checksum":"","body":{}}',
    ],
    ids=lambda content: repr(content[:20]),
)
def test_rubbish_in_the_place_of_the_manifest_is_a_clean_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(StoreError, match="is damaged"):
        DiskStore.open(tmp_path)


def test_a_manifest_of_another_version_or_format_or_identity_is_told_apart(tmp_path: Path) -> None:
    committed(tmp_path / "s")[0].close()
    with pytest.raises(StoreError, match=r"another's: its 'model' is 'm', not 'n'"):
        DiskStore.open(tmp_path / "s", identity={"model": "n"})
    path = tmp_path / "s" / "manifest.json"
    whole = json.loads(path.read_bytes())
    path.write_text(json.dumps({**whole, "version": 4, "signature": "new"}))
    with pytest.raises(StoreError, match="format version 4; this memfit reads versions 2 and 3"):
        DiskStore.open(tmp_path / "s")
    path.write_text(json.dumps({**whole, "format": "other"}))
    with pytest.raises(StoreError, match="not a manifest of a memfit store"):
        DiskStore.open(tmp_path / "s")


def test_a_changed_or_cut_manifest_is_found_by_its_checksum(tmp_path: Path) -> None:
    committed(tmp_path / "s")[0].close()
    path = tmp_path / "s" / "manifest.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"step":1', b'"step":2', 1))
    with pytest.raises(StoreError, match="checksum does not match"):
        DiskStore.open(tmp_path / "s")
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match="is damaged"):
        DiskStore.open(tmp_path / "s")


def test_what_is_not_a_plain_file_is_not_read(tmp_path: Path) -> None:
    for kind in ("pipe", "link", "directory", "huge", "nothing"):
        where = tmp_path / kind
        where.mkdir()
        path = where / "manifest.json"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to("/dev/zero")
        elif kind == "directory":
            path.mkdir()
        elif kind == "huge":
            with path.open("wb") as file:
                file.truncate(LIMIT_BYTES + 1)
        with pytest.raises(StoreError, match=r"is damaged|symbolic link|it is a directory|there is no store"):
            DiskStore.open(where)
    with pytest.raises(StoreError, match="no such directory"):
        DiskStore.open(tmp_path / "none")


def test_identities_and_steps_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    bad: Any = {"a": 1}
    with pytest.raises(UsageError, match="text to text"):
        DiskStore.create(tmp_path / "s", SPECS, identity=bad)
