"""What a committed store promises where nothing crashes: durability, checksums, refusals, room; and what hostile files get."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import struct
import tracemalloc
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from faults.crash_story import KILLED, PIECE_BYTES, TWO_BLOCKS, Story, WithoutSyncs, filled
from memfit.core.errors import StoreError, StoreInUseError, UnsupportedError, UsageError
from memfit.store import (
    CommittedStore,
    DiskIO,
    DiskStore,
    FileOperations,
    RegionSpec,
    TensorPlace,
    aligned_memory,
    verify,
)
from memfit.store.checksums import checksum
from memfit.store.state import decode_state, encode_state

KEPT = Path(__file__).parents[1] / "data" / "store-format-2"
MIB = 1 << 20


@pytest.fixture(name="io", scope="module")
def make_io() -> Iterator[DiskIO]:
    with DiskIO(read_threads=1, write_threads=1, staging_bytes=64 << 10) as io:
        yield io


def committed(directory: Path, io: DiskIO, *, steps: int = 3, story: Story = TWO_BLOCKS) -> Path:
    """A store that is closed after some steps."""
    with story.create(WithoutSyncs(), directory, io=io) as store:
        for name, nbytes in story.sizes.items():
            store.region(name).write(0, nbytes, filled(story.content(0, name)), slot="current")
        store.end_step(0)
        store.commit(story.state(0))
        for step in range(1, steps + 1):
            story.step(store, step)
    return directory


def body_of(directory: Path) -> Any:
    return json.loads((directory / "manifest.json").read_bytes())["body"]


def seal(directory: Path, body: Any, *, version: int = 2) -> None:
    """Writes a manifest whose checksum is right, by the rule in the format's description."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    whole = {"format": "memfit-store", "version": version, "checksum": hashlib.sha256(text).hexdigest(), "body": body}
    (directory / "manifest.json").write_text(json.dumps(whole))


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


# ---- durability


def test_each_durability_commits_when_it_says(tmp_path: Path, io: DiskIO) -> None:
    wanted = {"step": [1, 2, 3, 4, 5], 2: [2, 4], 3: [3], "exit": []}
    for durability, steps in wanted.items():
        directory = tmp_path / str(durability)
        committed(directory, io, steps=0)
        called: list[int] = []
        with TWO_BLOCKS.open(directory, io, durability) as store:
            for step in range(1, 6):
                TWO_BLOCKS.write(store, step)
                store.end_step(step, TWO_BLOCKS.changes(step))

                def state(step: int = step, called: list[int] = called) -> dict[str, Any]:
                    called.append(step)
                    return TWO_BLOCKS.state(step)

                assert store.commit(state) == (step in steps)
                assert not store.commit(state), "nothing has ended since"
                assert store.step == step
                for name in TWO_BLOCKS.sizes:
                    memory = aligned_memory(TWO_BLOCKS.sizes[name])
                    store.region(name).read(0, memory.nbytes, memory, verify=True).wait()
                    assert bytes(memory.view()) == TWO_BLOCKS.content(step, name), "reads see the step that has ended"
            assert called == steps, "the state is gathered only for a commit"
        with TWO_BLOCKS.open(directory, io) as store:
            assert TWO_BLOCKS.check(store) == (steps[-1] if steps else 0)


def test_an_exit_with_a_state_commits_and_one_without_does_not(tmp_path: Path, io: DiskIO) -> None:
    directory = committed(tmp_path / "s", io, steps=0)
    for state_given, expected in ((False, 0), (True, 2)):
        store = TWO_BLOCKS.open(directory, io, "exit")
        for step in (1, 2):
            TWO_BLOCKS.step(store, step)
        store.close(TWO_BLOCKS.state(2) if state_given else None)
        store.close()
        with TWO_BLOCKS.open(directory, io) as again:
            assert TWO_BLOCKS.check(again) == expected


def test_rolling_back_goes_to_the_last_commit_and_the_step_can_be_made_again(tmp_path: Path, io: DiskIO) -> None:
    directory = committed(tmp_path / "s", io, steps=1)
    with TWO_BLOCKS.open(directory, io, 4) as store:
        for step in (2, 3):
            TWO_BLOCKS.step(store, step)
        TWO_BLOCKS.write(store, 4)
        assert store.step == 3
        assert store.roll_back() == 1
        assert TWO_BLOCKS.check(store) == 1
        with pytest.raises(UsageError, match=r"0 of its 4796 bytes"):
            store.end_step(2, ["h.0/weight"])
        for step in (2, 3, 4, 5):
            TWO_BLOCKS.step(store, step)
        assert (store.committed_step, TWO_BLOCKS.check(store)) == (5, 5)


def test_the_same_step_can_be_sealed_again_with_another_state(tmp_path: Path, io: DiskIO) -> None:
    with TWO_BLOCKS.open(committed(tmp_path / "s", io), io) as store:
        assert store.commit({"lr": 0.5}, force=True)
        assert (store.committed_step, store.read_state()) == (3, {"lr": 0.5})


def test_settings_that_cannot_be_are_refused(tmp_path: Path, io: DiskIO) -> None:
    for durability in ("never", 0, -1, True, 1.5, None):
        with pytest.raises(UsageError, match="durability is"):
            TWO_BLOCKS.create(WithoutSyncs(), tmp_path / "s", durability=durability)
    with pytest.raises(UsageError, match="multiple of 4096"):
        DiskStore.create(tmp_path / "s", {}, identity={}, piece_bytes=1000)
    with pytest.raises(UsageError, match="checksums make a manifest above"):
        DiskStore.create(tmp_path / "s", {"w": RegionSpec(nbytes=1 << 40, slots=2)}, identity={}, piece_bytes=4096)
    overlapping = tuple(
        TensorPlace(name=name, dtype="float32", shape=(4,), offset=o) for name, o in (("a", 0), ("b", 8))
    )
    for tensors, said in (
        (overlapping, "overlaps"),
        ((overlapping[0], overlapping[0]), "twice"),
        ((TensorPlace(name="a", dtype="float33", shape=(1,), offset=0),), "does not know"),
        ((TensorPlace(name="a", dtype="float32", shape=(26,), offset=0),), "does not lie inside"),
    ):
        with pytest.raises(UsageError, match=said):
            DiskStore.create(tmp_path / "s", {"w": RegionSpec(nbytes=100, slots=2, tensors=tensors)}, identity={})
    assert not (tmp_path / "s").exists()
    with TWO_BLOCKS.create(WithoutSyncs(), tmp_path / "s", io=io) as store, pytest.raises(UsageError, match="nothing"):
        store.commit({}, force=True)
    with pytest.raises(StoreError, match="never committed"):
        CommittedStore.open(tmp_path / "s")
    with (
        DiskStore.create(tmp_path / "t", {}, identity={}, durable=False) as bare,
        pytest.raises(UsageError, match="state_"),
    ):
        bare.commit(0, state=b"")
    with pytest.raises(StoreError, match="no checksums"):
        CommittedStore.open(tmp_path / "t")


# ---- checksums


def test_tensors_come_back_by_name_whatever_the_cuts_they_were_written_in(tmp_path: Path, io: DiskIO) -> None:
    weight, bias = torch.randn(700, 3), torch.randn(5).to(torch.bfloat16)
    spec = RegionSpec(
        nbytes=20_000,
        slots=2,
        tensors=(
            TensorPlace(name="weight", dtype="float32", shape=(700, 3), offset=4096),
            TensorPlace(name="bias", dtype="bfloat16", shape=(5,), offset=13_001),
        ),
    )
    content = bytearray(20_000)
    content[4096 : 4096 + 8400] = weight.numpy().tobytes()
    content[13_001:13_011] = bias.view(torch.uint8).numpy().tobytes()
    draw = random.Random(1)
    with CommittedStore.create(
        tmp_path / "s", {"b": spec}, identity={}, piece_bytes=4096, io=io, operations=WithoutSyncs(), durability=2
    ) as store:
        region = store.region("b")
        store.end_step(0)
        store.commit({})
        assert torch.equal(store.read_tensor("b", "weight"), torch.zeros(700, 3)), "zeros, and known to be"
        for step in range(1, 9):
            cuts = sorted({0, 20_000, *draw.sample(range(20_000), 6)})
            parts = list(pairwise(cuts))
            draw.shuffle(parts)
            for start, end in parts:
                region.write(start, end - start, filled(bytes(content[start:end])))
            store.end_step(step, ["b"])
            store.commit({})
            assert torch.equal(store.read_tensor("b", "weight"), weight)
            assert torch.equal(store.read_tensor("b", "bias"), bias)
        with pytest.raises(UsageError, match="no tensor 'head'"):
            store.read_tensor("b", "head")
    sums = body_of(tmp_path / "s")["regions"]["b"]["sums"]
    assert sums == "".join(f"{checksum(bytes(content[n : n + 4096])):08x}" for n in range(0, 20_000, 4096))
    assert verify(tmp_path / "s", operations=WithoutSyncs()).is_whole


def test_any_flipped_bit_of_what_is_committed_names_file_block_and_tensor(tmp_path: Path, io: DiskIO) -> None:
    source = committed(tmp_path / "s", io)
    regions = body_of(source)["regions"]
    for name, nbytes in TWO_BLOCKS.sizes.items():
        slot = regions[name]["slots"][regions[name]["current"]]
        other = regions[name]["slots"][1 - regions[name]["current"]]
        for position in {0, 1, nbytes // 2, PIECE_BYTES - 1, PIECE_BYTES, nbytes - 1}:
            if position >= nbytes:
                continue
            flip(source / "homes-0.bin", slot["offset"] + position, position % 8)
            with pytest.raises(StoreError, match=rf"homes-0\.bin is damaged: .*block '{name}' .*of '{name}\.w'\)"):
                TWO_BLOCKS.open(source, io)
            with CommittedStore.open(
                source, verify=False, verify_visits=True, io=io, operations=WithoutSyncs()
            ) as store:
                transfer = store.region(name).read(0, nbytes, aligned_memory(nbytes))
                with pytest.raises(
                    StoreError, match=rf"block '{name}' .*checksum [0-9a-f]{{8}}, and [0-9a-f]{{8}} was"
                ):
                    transfer.wait()
                store.region(name).read(0, nbytes, aligned_memory(nbytes), verify=False).wait()
                with pytest.raises(StoreError, match="is damaged"):
                    store.read_tensor(name, f"{name}.w")
            flip(source / "homes-0.bin", slot["offset"] + position, position % 8)
        flip(source / "homes-0.bin", other["offset"])
    TWO_BLOCKS.open(source, io).close()  # What is not committed may be anything.


def test_a_flipped_bit_of_state_or_manifest_is_told(tmp_path: Path, io: DiskIO) -> None:
    source = committed(tmp_path / "s", io)
    state = body_of(source)["state"]
    path = source / f"state-{state['file']}.bin"
    for position in (0, 8, 60, state["nbytes"] - 1):
        flip(path, position)
        with pytest.raises(StoreError, match=rf"{path.name} is damaged: the state of the step"):
            TWO_BLOCKS.open(source, io)
        flip(path, position)
    length = (source / "manifest.json").stat().st_size
    for position in range(0, length, 37):
        flip(source / "manifest.json", position, 1)
        with pytest.raises(StoreError, match=r"manifest\.json"):
            TWO_BLOCKS.open(source, io)
        flip(source / "manifest.json", position, 1)
    TWO_BLOCKS.open(source, io).close()


def test_verify_reports_each_damaged_piece_and_what_cannot_be_read(tmp_path: Path, io: DiskIO) -> None:
    source = committed(tmp_path / "s", io, story=KILLED, steps=1)
    seen: list[tuple[int, int]] = []
    report = verify(source, on_progress=lambda done, total: seen.append((done, total)))
    total = sum(KILLED.sizes.values())
    assert report.is_whole
    assert (report.step, report.checked_bytes, seen[-1]) == (1, total, (total, total))
    assert [block.pieces for block in report.blocks] == [-(-size // PIECE_BYTES) for size in KILLED.sizes.values()]
    assert "all as written" in report.in_words()
    regions = body_of(source)["regions"]
    name = "h.0/weight"
    slot = regions[name]["slots"][regions[name]["current"]]
    for piece in (3, 700):
        flip(source / "homes-0.bin", slot["offset"] + piece * PIECE_BYTES + 5)
    flip(source / f"state-{body_of(source)['state']['file']}.bin", 100)
    bad = slot["offset"] + 10 * PIECE_BYTES

    class BadBlock(FileOperations):
        def pread(self, descriptor: int, into: memoryview, offset: int) -> int:
            if offset <= bad < offset + into.nbytes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().pread(descriptor, into, offset)

    report = verify(source, operations=BadBlock())
    assert not report.is_whole
    assert [damage.offset // PIECE_BYTES for damage in report.blocks[0].damaged] == [3, 10, 700]
    assert not report.blocks[1].damaged
    said = report.in_words()
    assert "DAMAGED" in said
    assert "cannot be read" in said
    assert "the state of the step" in said
    assert f"'{name}.w'" in said


# ---- who may open it


def test_a_second_opener_is_refused_with_the_owners_number_and_boot(tmp_path: Path, io: DiskIO) -> None:
    with TWO_BLOCKS.open(committed(tmp_path / "s", io), io):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        with pytest.raises(
            StoreInUseError,
            match=rf"by this process \(pid {os.getpid()}, boot {boot}\): close the job that has it first",
        ):
            TWO_BLOCKS.open(tmp_path / "s", io)
        owner = json.loads((tmp_path / "s" / "lock").read_text())
        # The machine has started again, and the number now is another process's: the lock is held, not by its owner.
        (tmp_path / "s" / "lock").write_text(json.dumps({**owner, "boot": "another"}))
        with pytest.raises(StoreInUseError, match=r"its owner \(pid \d+, boot another\) has ended"):
            verify(tmp_path / "s")


def test_a_store_of_another_model_or_dtype_is_refused_with_the_differences(tmp_path: Path, io: DiskIO) -> None:
    directory = committed(tmp_path / "s", io)
    specs = TWO_BLOCKS.specs
    weight = specs["h.0/weight"]

    def with_tensor(**changes: Any) -> dict[str, RegionSpec]:
        (tensor,) = weight.tensors
        fields = {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape, "offset": 0, **changes}
        return {**specs, "h.0/weight": RegionSpec(nbytes=4796, slots=2, tag="weight", tensors=(TensorPlace(**fields),))}

    cases = {
        r"block 'h\.1/weight' is missing": {**specs, "h.1/weight": weight},
        r"block 'h\.0/state' is there and not wanted": {"h.0/weight": weight},
        r"tensor 'h\.0/weight\.w' has dtype uint8, wanted bfloat16": with_tensor(dtype="bfloat16", shape=(2398,)),
        r"has shape \[4796\], wanted \[2, 2398\]": with_tensor(shape=(2, 2398)),
        r"tensor 'v' is missing; .* tensor 'h\.0/weight\.w' is there and not wanted": with_tensor(name="v"),
        "nbytes is 4796, wanted 5000": {**specs, "h.0/weight": RegionSpec(nbytes=5000, slots=2, tag="weight")},
        "slots is 2, wanted 1": {**specs, "h.0/state": RegionSpec(nbytes=300)},
        "and 20 more": {f"layer {n}": weight for n in range(28)},
    }
    for said, wanted in cases.items():
        with pytest.raises(StoreError, match=f"holds another model.*{said}"):
            CommittedStore.open(directory, regions=wanted, io=io)
    with pytest.raises(
        StoreError, match=r"its 'model' is 'small', not 'large'; its 'dtype' is 'float32', not 'bfloat16'"
    ):
        CommittedStore.open(directory, identity={"model": "large", "dtype": "bfloat16"}, io=io)
    TWO_BLOCKS.open(directory, io).close()


def test_a_store_that_an_earlier_version_wrote_is_read_and_continued(tmp_path: Path, io: DiskIO) -> None:
    directory = tmp_path / "s"
    shutil.copytree(KEPT, directory)
    assert verify(directory).is_whole
    with TWO_BLOCKS.open(directory, io) as store:
        assert TWO_BLOCKS.check(store) == 3
        TWO_BLOCKS.step(store, 4)
    with TWO_BLOCKS.open(directory, io) as store:
        assert TWO_BLOCKS.check(store) == 4


def test_a_format_of_another_version_is_refused(tmp_path: Path, io: DiskIO) -> None:
    directory = committed(tmp_path / "s", io)
    for version in (1, 4):
        path = directory / "manifest.json"
        path.write_bytes(path.read_bytes().replace(b'"version":2', f'"version":{version}'.encode()))
        with pytest.raises(StoreError, match=f"format version {version}; this memfit reads versions 2 and 3"):
            TWO_BLOCKS.open(directory, io)
        path.write_bytes(path.read_bytes().replace(f'"version":{version}'.encode(), b'"version":2'))


# ---- room


def test_all_room_is_claimed_when_the_store_is_made_and_steps_need_no_more(tmp_path: Path) -> None:
    class Full(FileOperations):
        is_full = False

        def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().allocate(descriptor, offset, nbytes)

    disk = Full()
    with TWO_BLOCKS.create(disk, tmp_path / "s", durability=1) as store:
        files = [tmp_path / "s" / name for name in ("homes-0.bin", "state-0.bin", "state-1.bin")]
        before = [(path.stat().st_size, path.stat().st_blocks) for path in files]
        assert [size for size, _ in before] == [2 * (8192 + 4096), 4096, 4096]
        assert all(blocks * 512 >= size for size, blocks in before)
        disk.is_full = True
        for step in (0, 2, 4):
            for name in TWO_BLOCKS.sizes:
                slot = "spare" if step else "current"
                store.region(name).write(0, TWO_BLOCKS.sizes[name], filled(TWO_BLOCKS.content(step, name)), slot=slot)
            store.end_step(step, TWO_BLOCKS.sizes if step else ())
            store.commit(TWO_BLOCKS.state(step))
        assert [(path.stat().st_size, path.stat().st_blocks) for path in files] == before
        with pytest.raises(StoreError, match=r"write the state .*the step before is whole and current.*disk is full"):
            store.commit({"much": torch.zeros(100_000)}, force=True)
        assert store.read_state()["step"] == 4
        disk.is_full = False
        store.commit({"much": torch.zeros(100_000)}, force=True)
        assert store.read_state()["much"].numel() == 100_000


def test_a_disk_too_small_for_both_generations_is_told_when_the_store_is_made(tmp_path: Path) -> None:
    class Small(FileOperations):
        def free_bytes(self, path: Path) -> int:
            return 30_000

    with pytest.raises(StoreError, match=r"\(32768 bytes\) needed, 29\.3 KiB \(30000 bytes\) free"):
        TWO_BLOCKS.create(Small(), tmp_path / "s")
    assert not (tmp_path / "s").exists()


# ---- the small state


def test_a_state_comes_back_with_its_types_and_bits() -> None:
    generator = np.random.default_rng(3)
    state = {
        "step": 7,
        "big": 1 << 200,
        "floats": [0.1, -0.0, float("inf"), float("-inf"), 5e-324, 1e308],
        "nested": {"tuple": (1, ("a", None), True), 3: {"$": [b"\x00\xff"]}, (1, 2): {4, 5}, "f": frozenset({1})},
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "milestones": Counter({30: 1, 80: 2}),
        "rng": torch.get_rng_state(),
        "python": random.Random(1).getstate(),
        "numpy": generator.bit_generator.state,
        "old numpy": np.random.RandomState(3).get_state(),
        "scalar": np.float64(0.1),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "tensors": [
            torch.randn(3, 4).t(),
            torch.tensor(2.5, dtype=torch.bfloat16),
            torch.empty(0, 3),
            torch.arange(3)[::2],
        ],
        "shared": (shared := torch.randn(5), shared[1:]),
    }
    found = decode_state(encode_state(state))
    assert_same(found, state)
    assert np.isnan(decode_state(encode_state({"x": float("nan")}))["x"])
    random.Random().setstate(found["python"])
    again = np.random.default_rng()
    again.bit_generator.state = found["numpy"]
    assert again.random() == generator.random()


def test_equal_counters_are_kept_once_and_come_back_one_by_one() -> None:
    nan = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    numbers = [torch.tensor(v, dtype=d) for d in (torch.float32, torch.float64, torch.int64) for v in (17, 17, 0, -3)]
    numbers += [torch.tensor(0.0), torch.tensor(-0.0), nan[0].clone(), nan[1].clone(), torch.tensor(float("inf"))]
    found = decode_state(encode_state({"n": numbers}))["n"]
    for one, wanted in zip(found, numbers, strict=True):
        assert one.dtype is wanted.dtype and one.shape == ()
        assert bytes(one.reshape(1).view(torch.uint8).tolist()) == bytes(wanted.reshape(1).view(torch.uint8).tolist())
    found[0].add_(1)
    assert found[1] == 17, "each counter counts for itself"
    few = len(encode_state({"n": [torch.tensor(17.0)] * 1000})) - len(encode_state({"n": [torch.tensor(17.0)] * 999}))
    assert few < 64, "one place for all, and its name for each"


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b)
    elif isinstance(wanted, float):
        assert struct.pack("d", found) == struct.pack("d", wanted)
    else:
        assert found == wanted


def test_what_would_need_pickling_is_refused_by_its_place() -> None:
    deep: Any = 1
    for _ in range(120):
        deep = [deep]
    cases: dict[str, Any] = {
        r"^state\['a'\]\[1\] is a builtins\.function|^state\['a'\]\[1\] is a .*function": {"a": [1, lambda: 0]},
        r"state\['m'\] is a torch\.nn": {"m": torch.nn.Linear(1, 1)},
        r"tensor of layout": {"s": torch.eye(3).to_sparse()},
        r"tensor without values": {"t": torch.empty(2, device="meta")},
        r"state\['c'\] has the dtype torch.complex128": {"c": torch.zeros(2, dtype=torch.complex128)},
        r"NumPy array of object": {"o": np.array([{}], dtype=object)},
        r"nested more than 100 deep": {"d": deep},
        r"number that cannot be written": {"n": 1 << 100_000},
    }
    for said, state in cases.items():
        with pytest.raises(UnsupportedError, match=said):
            encode_state(state)


def state_block(text: bytes, **tensors: torch.Tensor) -> bytes:
    return safetensors.torch.save({"state.json": torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors})


def test_bytes_that_are_no_state_are_a_clean_error() -> None:
    good = encode_state({"a": torch.arange(4), "b": [1]})
    header = int.from_bytes(good[:8], "little")
    cases = [
        b"",
        good[:7],
        good[: header // 2],
        good[:-1],
        good + b"x",
        (1 << 62).to_bytes(8, "little") + good[8:],
        (1 << 20).to_bytes(8, "little") + good[8:],
        good.replace(b'"shape":[4]', b'"shape":[9]'),
        good.replace(b'"I64"', b'"I63"'),
        good.replace(b"state.json", b"stale.json"),
        safetensors.torch.save({"state.json": torch.zeros(3)}),
        state_block(b"[]"),
        state_block(b"{"),
        state_block(b"\xff"),
        state_block(b'{"a":1,"a":2}'),
        state_block(b'{"a":NaN}'),
        state_block(b"[" * 100_000),
        state_block(b'{"a":' + b"[" * 200 + b"]" * 200 + b"}"),
        state_block(b'{"a":{"$":"eval","items":[]}}'),
        state_block(b'{"a":{"$":["x"]}}'),
        state_block(b'{"a":{"$":"tuple"}}'),
        state_block(b'{"a":{"$":"tuple","items":7}}'),
        state_block(b'{"a":{"$":"set","items":[[1]]}}'),
        state_block(b'{"a":{"$":"dict","items":[[1]]}}'),
        state_block(b'{"a":{"$":"dict","items":[[[1],2]]}}'),
        state_block(b'{"a":{"$":"float","value":"1e5"}}'),
        state_block(b'{"a":{"$":"bytes","base64":"*"}}'),
        state_block(b'{"a":{"$":"tensor","name":"0"}}'),
        state_block(b'{"a":{"$":"tensor","name":[]}}'),
        state_block(b'{"a":{"$":"array","name":"t"}}', t=torch.zeros(2, dtype=torch.bfloat16)),
        state_block(b'{"a":{"$":"dtype","name":"load"}}'),
        state_block(b'{"a":{"$":"device","name":"meta"}}'),
        state_block(b'{"a":{"$":"device","name":"cuda:x"}}'),
        state_block(b'{"$":"tuple","items":[]}'),
        state_block(b'{"a":' + b"9" * 5000 + b"}"),
    ]
    for content in cases:
        with pytest.raises(StoreError, match="the state of the step cannot be read"):
            decode_state(content)


# ---- hostile files


def edit(*keys: str | int, value: object) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return change


WEIGHT = ("regions", "h.0/weight")
TENSOR = (*WEIGHT, "tensors", 0)
EDITS = {
    "no checksums": edit(*WEIGHT, "sums", value=None),
    "too few checksums": edit(*WEIGHT, "sums", value="00000000"),
    "too many checksums": edit(*WEIGHT, "sums", value="0" * 24),
    "checksums of other signs": edit(*WEIGHT, "sums", value="0000000g00000000"),
    "checksums of foreign digits": edit(*WEIGHT, "sums", value="\u0660" * 16),
    "checksums as a list": edit(*WEIGHT, "sums", value=[0, 0]),
    "pieces of nothing": edit("piece_bytes", value=0),
    "pieces off the blocks": edit("piece_bytes", value=4097),
    "pieces of the sky": edit("piece_bytes", value=1 << 40),
    "no pieces": edit("piece_bytes", value=None),
    "a state in a third file": edit("state", "file", value=2),
    "a state of negative length": edit("state", "nbytes", value=-1),
    "a state as long as the sky": edit("state", "nbytes", value=1 << 50),
    "a state with a large checksum": edit("state", "checksum", value=1 << 32),
    "a state with more": edit("state", "path", value="/etc/passwd"),
    "a state that is text": edit("state", value="state-0.bin"),
    "a state without files": edit("has_state_files", value=False),
    "files of the state as a number": edit("has_state_files", value=1),
    "a tensor outside": edit(*TENSOR, 3, value=4096),
    "a tensor before": edit(*TENSOR, 3, value=-1),
    "a tensor larger than its region": edit(*TENSOR, 2, value=[5000]),
    "a tensor of a negative length": edit(*TENSOR, 2, value=[-1, -4]),
    "a tensor of many dimensions": edit(*TENSOR, 2, value=[1] * 65),
    "a tensor whose size overflows": edit(*TENSOR, 2, value=[1 << 60] * 64),
    "a tensor of half an element": edit(*TENSOR, 2, value=[0.5]),
    "a tensor of truth": edit(*TENSOR, 2, value=[True]),
    "a tensor of no shape": edit(*TENSOR, 2, value=None),
    "a tensor of an unknown dtype": edit(*TENSOR, 1, value="__import__"),
    "a tensor with a name that clears the screen": edit(*TENSOR, 0, value="\x1b[2J"),
    "a tensor that is an object": edit(*TENSOR, value={"name": "w"}),
    "a tensor of three things": edit(*TENSOR, value=["w", "uint8", [1]]),
    "two tensors in one place": edit(*WEIGHT, "tensors", value=[["a", "uint8", [9], 0], ["b", "uint8", [9], 8]]),
    "two tensors of one name": edit(*WEIGHT, "tensors", value=[["a", "uint8", [1], 0], ["a", "uint8", [1], 8]]),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_hostile_manifest_is_a_clean_error(tmp_path: Path, io: DiskIO, name: str) -> None:
    directory = committed(tmp_path / "s", io, steps=1)
    body = body_of(directory)
    seal(directory, body)
    TWO_BLOCKS.open(directory, io).close()  # The seal itself is right.
    EDITS[name](body)
    seal(directory, body)
    with pytest.raises(StoreError, match=r"manifest .* is damaged: .*; restore it"):
        CommittedStore.open(directory, io=io)


def test_a_state_that_is_longer_than_its_file_is_not_read_nor_given_room(tmp_path: Path, io: DiskIO) -> None:
    directory = committed(tmp_path / "s", io)
    body = body_of(directory)
    body["state"]["nbytes"] = 1 << 30
    seal(directory, body)
    file_bytes = sum(path.stat().st_size for path in directory.iterdir())
    with CommittedStore.open(directory, verify=False, io=io) as store:
        tracemalloc.start()
        with pytest.raises(StoreError, match=r"has 1073741824 bytes and the file ends at byte 8192"):
            store.read_state()
        assert tracemalloc.get_traced_memory()[1] < file_bytes + 16 * MIB
        tracemalloc.stop()


def test_files_that_lead_out_of_the_directory_are_not_touched(tmp_path: Path, io: DiskIO) -> None:
    for name in ("homes-0.bin", "state-0.bin", "state-1.bin", "manifest.json", "lock"):
        directory = committed(tmp_path / name, io)
        outside = tmp_path / f"{name}.outside"
        shutil.move(directory / name, outside)
        before = outside.read_bytes()
        (directory / name).symlink_to(outside)
        with pytest.raises(StoreError, match=r"symbolic link"):
            TWO_BLOCKS.open(directory, io)
        (directory / name).unlink()
        if name not in ("manifest.json", "lock"):
            os.link(outside, directory / name)
            with pytest.raises(StoreError, match="has another name too"):
                TWO_BLOCKS.open(directory, io)
            (directory / name).unlink()
            os.mkfifo(directory / name)
            with pytest.raises(StoreError, match="not a plain file"):
                TWO_BLOCKS.open(directory, io)
            (directory / name).unlink()
            with pytest.raises(StoreError, match="No such file"):
                TWO_BLOCKS.open(directory, io)
        assert outside.read_bytes() == before


@pytest.mark.parametrize(
    ("put", "words"),
    [(os.symlink, "symbolic link"), (os.link, "hard link"), (lambda _, path: os.mkfifo(path), "a pipe or a socket")],
    ids=["link", "hard link", "pipe"],
)
def test_a_new_manifest_that_leads_elsewhere_is_not_followed(
    tmp_path: Path, io: DiskIO, put: Callable[[Path, Path], None], words: str
) -> None:
    directory = committed(tmp_path / "s", io)
    (tmp_path / "mine").write_text("kept")
    with TWO_BLOCKS.open(directory, io) as store:
        put(tmp_path / "mine", directory / "manifest.json.new")
        with pytest.raises(StoreError, match=words):
            TWO_BLOCKS.step(store, 4)
        (directory / "manifest.json.new").unlink()
        assert TWO_BLOCKS.commit(store, 4)
    put(tmp_path / "mine", directory / "manifest.json.new")
    with pytest.raises(StoreError, match=words):
        TWO_BLOCKS.open(directory, io)
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_lock_file_that_is_a_hard_link_is_not_written_to(tmp_path: Path, io: DiskIO) -> None:
    directory = committed(tmp_path / "s", io)
    (tmp_path / "mine").write_text("kept")
    (directory / "lock").unlink()
    os.link(tmp_path / "mine", directory / "lock")
    with pytest.raises(StoreError, match="is a hard link, or not a plain file: remove it"):
        TWO_BLOCKS.open(directory, io)
    assert (tmp_path / "mine").read_text() == "kept"
