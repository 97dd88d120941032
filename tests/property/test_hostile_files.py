"""No file can crash, hang or mislead: whatever is read is either what memfit writes, or refused by one family of errors that say what is wrong.

`pytest tests/property/test_hostile_files.py --examples 25000` draws 200,000 cases.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faults import small_run
from faults.crash_disk import RecordedDisk
from faults.journal_story import EVEN
from memfit.core.errors import MemfitError, StoreInUseError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.limits import MIB
from memfit.core.plan import Plan
from memfit.core.tiers import Tier
from memfit.files.names import STALE
from memfit.files.reader import TensorFile, weight_file_names
from memfit.files.trainer import read_text
from memfit.runs import run_state
from memfit.runs.exporting import export_run
from memfit.store import FileOperations
from memfit.store.checksums import checksum
from memfit.store.lock import DirectoryLock
from memfit.store.manifest import read_manifest
from memfit.store.state import decode_state, encode_state
from memfit.tensors.container import LENGTH_BYTES
from property.mutations import mutate_bytes, mutate_json

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
THREADS_BYTES = 1 << 30
"""Address space that the disk's threads reserve, and do not touch."""
OWNER = json.dumps({"pid": 7, "start_time": 12345, "host": "here", "boot": "0123456789abcdef"}).encode()
SEEDS = st.integers(0, (1 << 63) - 1)


LINK = Link(read_bytes_per_s=1.5e9, write_bytes_per_s=1e9)
MACHINE = Hardware(
    device="cpu",
    flops_per_s=1e11,
    tiers={
        Tier.DEVICE: TierSpec(nbytes=1 << 33),
        Tier.HOST: TierSpec(nbytes=1 << 36, link=LINK),
        Tier.DISK: TierSpec(nbytes=1 << 40, link=LINK),
    },
    bf16_flops_per_s=2e11,
)


@cache
def files() -> dict[str, bytes]:
    """One of each kind, of a small run: made once."""
    import tempfile

    with tempfile.TemporaryDirectory() as name, torch.random.fork_rng(devices=[]):
        place = Path(name)
        python, numpy = random.getstate(), np.random.get_state()
        small_run.train("tied-and-frozen", Plan(), place / "run", total=1)
        random.setstate(python)
        np.random.set_state(numpy)
        export_run(place / "run", place / "out", max_shard_bytes=20_000)
        manifest = (place / "run" / "manifest.json").read_bytes()
        entry = json.loads(manifest)["body"]["state"]
        state = (place / "run" / f"state-{entry['file']}.bin").read_bytes()[: entry["nbytes"]]
        homes = (place / "run" / "homes-0.bin").read_bytes()
        with EVEN.begin(RecordedDisk(place / "journal")) as store:
            EVEN.step(store, 1)
        shards = sorted(place.glob("out/model-*.safetensors"))
        return {
            "manifest": manifest,
            "journal": (place / "journal" / "manifest.json").read_bytes(),
            "state": state,
            "homes": homes,
            "tensors": shards[0].read_bytes(),
            "index": (place / "out" / "model.safetensors.index.json").read_bytes(),
            "trainer": (place / "out" / "memfit_state.json").read_bytes(),
            "hardware": MACHINE.to_json().encode(),
            "plan": small_run.PLANS["clipped"](small_run.profile("tied-and-frozen"))[0].to_json().encode(),
        }


def resealed(content: bytes, text: str) -> bytes:
    """A manifest around a body that was changed, with its checksum made right."""
    whole = json.loads(content)
    try:
        body = json.loads(text)
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    except (ValueError, RecursionError):
        return content.replace(json.dumps(whole["body"], separators=(",", ":")).encode(), text.encode(errors="replace"))
    whole |= {"body": body, "checksum": hashlib.sha256(canonical).hexdigest()}
    return json.dumps(whole).encode()


def safetensors_with(content: bytes, change: Callable[[Any], str]) -> bytes:
    """A safetensors block with another header, its length made right."""
    (length,) = struct.unpack("<Q", content[:LENGTH_BYTES])
    header = change(json.loads(content[LENGTH_BYTES : LENGTH_BYTES + length])).encode(errors="replace")
    return struct.pack("<Q", len(header)) + header + content[LENGTH_BYTES + length :]


@contextmanager
def little_memory(nbytes: int) -> Iterator[None]:
    """So much address space and no more: an allocation that a file asks for beyond it fails, touched or not."""
    used = int(Path("/proc/self/statm").read_bytes().split()[0]) * PAGE_BYTES
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused_or_read(read: Callable[[], Any], file_bytes: int) -> str | None:
    """It is read, or refused by memfit's own errors with something to say. Anything else comes through, and so does memory above the file's size and 16 MiB."""
    message = None
    with little_memory(file_bytes + 16 * MIB):
        try:
            read()
        except MemfitError as error:
            message = str(error)
    assert message is None or 20 < len(message) < 4000
    assert message is None or message.encode()  # can be printed
    return message


@given(SEEDS)
def test_a_manifest_that_lies_is_refused(seed: int) -> None:
    chance = random.Random(seed)
    valid = files()[chance.choice(("manifest", "journal"))]
    if chance.random() < 0.1:
        content = mutate_bytes(valid, chance)
    elif chance.random() < 0.1:
        content = mutate_json(json.loads(valid), chance).encode(errors="replace")
    else:
        content = resealed(valid, mutate_json(json.loads(valid)["body"], chance))
    refused_or_read(lambda: read_manifest(content, path=Path("manifest.json")), len(content))


def changed_state(seed: int) -> bytes:
    """A small state with another header, another text, or other bytes."""
    chance = random.Random(seed)
    valid = files()["state"]
    if chance.random() < 0.1:
        return mutate_bytes(valid, chance)
    if chance.random() < 0.3:
        return safetensors_with(valid, lambda header: mutate_json(header, chance))
    import safetensors.torch

    tensors = safetensors.torch.load(valid)
    if chance.random() < 0.3:
        name = chance.choice(sorted(tensors.keys() - {"state.json"}))
        tensors[name] = changed_tensor(tensors[name], chance)
        return safetensors.torch.save(tensors)
    text = mutate_json(json.loads(tensors["state.json"].numpy().tobytes()), chance).encode(errors="replace") or b" "
    tensors["state.json"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return safetensors.torch.save(tensors)


def changed_tensor(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Another shape, another dtype, or other bytes: the state of a generator, most of the time."""
    if chance.random() < 0.2:
        return chance.choice(
            (
                torch.zeros(0),
                torch.zeros(()),
                torch.zeros(5056),
                tensor.reshape(-1)[:-1],
                tensor.to(torch.float32),
                tensor.repeat(2),
            )
        )
    content = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for _ in range(chance.choice((1, 2, 8))):
        at = chance.choice((0, 4, 8, 12, 16, 20, chance.randrange(max(1, len(content)))))
        content[at : at + 4] = chance.choice(
            (0, 1, 623, 624, 625, 2000, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
        ).to_bytes(4, "little")
    found = torch.frombuffer(content, dtype=torch.uint8)[: tensor.nbytes].clone()
    return found.view(tensor.dtype).reshape(tensor.shape)


@given(SEEDS)
def test_a_state_that_lies_is_refused(seed: int) -> None:
    content = changed_state(seed)
    refused_or_read(lambda: decode_state(content), len(content))


@cache
def live() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = small_run.build("tied-and-frozen")
    return model, small_run.adamw(model)


@given(SEEDS)
def test_what_a_state_says_of_a_run_is_refused_where_it_does_not_fit(seed: int) -> None:
    """A state that can be read, and is not the one that was written, meets the optimizer, its states and the generators."""
    content = changed_state(seed)
    model, optimizer = live()
    names = {id(p): name for name, p in model.named_parameters()}
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]

    def use() -> None:
        state = decode_state(content)
        optimizer_state = run_state.part(state, "optimizer", dict)
        run_state.check_optimizer(optimizer_state, optimizer, names)
        run_state.give_numbers(optimizer_state.get("numbers"), {}, optimizer)
        run_state.give_settings(run_state.settings_of(optimizer_state), optimizer)
        run_state.changed_training(state.get("frozen"), [], set(names.values()))
        run_state.give_random(run_state.part(state, "random", dict))
        # A generator that stands outside of its table ends the process here.
        assert torch.rand(700).max() < 1
        assert np.random.rand(700).max() < 1
        assert random.random() < 1
        Plan.from_json(run_state.part(state, "plan", str))

    try:
        refused_or_read(use, 2 * len(content))
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)


@given(SEEDS)
def test_a_plan_that_lies_is_refused(seed: int) -> None:
    chance = random.Random(seed)
    text = mutate_json(json.loads(files()["plan"]), chance)
    refused_or_read(lambda: Plan.from_json(text), len(text))


@given(SEEDS)
def test_a_hardware_file_that_lies_is_refused(seed: int) -> None:
    chance = random.Random(seed)
    text = mutate_json(json.loads(files()["hardware"]), chance)
    refused_or_read(lambda: Hardware.from_json(text), len(text))


@pytest.fixture(name="place", scope="module")
def a_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@given(seed=SEEDS)
def test_a_safetensors_file_that_lies_is_refused(seed: int, place: Path) -> None:
    chance = random.Random(seed)
    valid = files()["tensors"]
    content = mutate_bytes(valid, chance)
    if chance.random() < 0.9:
        content = safetensors_with(valid, lambda header: mutate_json(header, chance))
    path = place / "model.safetensors"
    path.write_bytes(content)

    def use() -> None:
        with TensorFile(path) as file:
            for entry in file.header.entries:
                file.read_into(entry, torch.empty(entry.shape, dtype=entry.dtype))

    refused_or_read(use, len(content))


def resealed_state(manifest: bytes, content: bytes) -> bytes:
    """A manifest with the length and the checksum of another state."""
    body = json.loads(manifest)["body"]
    body["state"] |= {"nbytes": len(content), "checksum": checksum(content)}
    return resealed(manifest, json.dumps(body))


@given(seed=SEEDS)
def test_a_run_that_lies_is_copied_out_or_refused(seed: int, place: Path) -> None:
    """The whole way through a store: lock, manifest, files, checksums, state, tensors; and what is written is what its header says."""
    chance = random.Random(seed)
    run, out = place / "run", place / "out"
    run.mkdir(exist_ok=True)
    manifest, state = files()["manifest"], files()["state"]
    if chance.random() < 0.4:
        manifest = resealed(manifest, mutate_json(json.loads(manifest)["body"], chance))
    else:
        state = changed_state(seed)
        manifest = resealed_state(manifest, state)
    number = json.loads(files()["manifest"])["body"]["state"]["file"]
    lock = chance.choice(
        (b"", b"", mutate_bytes(OWNER, chance), mutate_json(json.loads(OWNER), chance).encode(errors="replace"))
    )
    contents = {
        "manifest.json": manifest,
        "homes-0.bin": files()["homes"],
        f"state-{number}.bin": state,
        f"state-{1 - number}.bin": b"",
        "lock": lock,
    }
    for name, content in contents.items():
        (run / name).write_bytes(content)

    def use() -> None:
        export_run(run, out, max_shard_bytes=20_000)
        for name in weight_file_names(out, STALE):
            TensorFile(out / name).close()

    refused_or_read(use, sum(map(len, contents.values())) + THREADS_BYTES)


@settings(max_examples=6)
@given(seed=SEEDS)
def test_a_run_that_lies_is_taken_up_or_refused(seed: int, place: Path) -> None:
    """By the program that it was made with: model, optimizer, registered objects, generators."""
    chance = random.Random(seed)
    run = place / "taken"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    state = changed_state(seed)
    number = json.loads(files()["manifest"])["body"]["state"]["file"]
    (run / "manifest.json").write_bytes(resealed_state(files()["manifest"], state))
    (run / "homes-0.bin").write_bytes(files()["homes"])
    (run / f"state-{number}.bin").write_bytes(state)
    (run / f"state-{1 - number}.bin").touch()
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    message = None
    try:
        small_run.train("tied-and-frozen", chance.choice((Plan(), None)), run, total=1)
    except MemfitError as error:
        message = str(error)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
    assert message is None or 20 < len(message) < 4000


@given(seed=SEEDS)
def test_a_lock_that_lies_harms_nobody(seed: int, place: Path) -> None:
    """What it says is shown to people, and believed by nobody."""
    chance = random.Random(seed)
    (place / "locked").mkdir(exist_ok=True)
    content = mutate_json(json.loads(OWNER), chance).encode(errors="replace")
    (place / "locked" / "lock").write_bytes(mutate_bytes(OWNER, chance) if chance.random() < 0.1 else content)
    lock = DirectoryLock(place / "locked", operations=FileOperations())
    (place / "locked" / "lock").write_bytes(content)
    with pytest.raises(StoreInUseError) as caught:
        DirectoryLock(place / "locked", operations=FileOperations())
    assert 20 < len(str(caught.value)) < 4000
    assert str(caught.value).isprintable()
    lock.release()


@given(seed=SEEDS)
def test_an_index_that_lies_is_refused(seed: int, place: Path) -> None:
    chance = random.Random(seed)
    (place / "model.safetensors").unlink(missing_ok=True)
    path = place / "model.safetensors.index.json"
    path.write_text(mutate_json(json.loads(files()["index"]), chance), errors="replace")

    def use() -> None:
        for name in weight_file_names(place, STALE):
            assert (place / name).resolve().parent == place.resolve(), "a file of another directory"

    refused_or_read(use, path.stat().st_size)


@given(seed=SEEDS)
def test_a_trainer_state_that_lies_is_refused(seed: int, place: Path) -> None:
    chance = random.Random(seed)
    path = place / "memfit_state.json"
    path.write_text(mutate_json(json.loads(files()["trainer"]), chance), errors="replace")
    refused_or_read(lambda: read_text(path), path.stat().st_size)


@given(SEEDS)
def test_a_state_that_memfit_wrote_is_read(seed: int) -> None:
    """The mutator's own values, where they can be kept, come back: the reader does not refuse too much."""
    chance = random.Random(seed)
    value = {"a": chance.choice((0, -1, 1 << 62, 0.5, "x", None, True, [1, [2]], {"b": (1, 2)}, {1: {2}}))}
    assert decode_state(encode_state(value)) == value


def document(kind: str, count: int) -> bytes:
    """A document of so many small values: what it takes most of is what the values become."""

    def text(value: Any) -> bytes:
        return json.dumps(value, separators=(",", ":")).encode()

    region = {
        "nbytes": 0,
        "tag": "x",
        "tensors": [],
        "current": 0,
        "sums": None,
        "slots": [{"file": 0, "offset": 0, "step": None}],
    }
    names = [f"{n:x}" for n in range(count)]
    match kind:
        case "plan":
            return text(json.loads(files()["plan"]) | {"calls": [{}] * count})
        case "trainer":
            return text(json.loads(files()["trainer"]) | {"extra": {"x": [[]] * count}})
        case "trainer with a tensor":
            inner = {"dtype": "float32", "shape": [count], "values": [1] * count, "device": "cpu"}
            return text(json.loads(files()["trainer"]) | {"extra": {"x": {"tensor": inner}}})
        case "index":
            return text({"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")})
        case "tensors":
            header = text({name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in names})
            return len(header).to_bytes(LENGTH_BYTES, "little") + header
        case "manifest of tensors":
            regions = {"a": region | {"tensors": [[name, "uint8", [], 0] for name in names], "nbytes": 1}}
        case _:
            regions = dict.fromkeys(names, region)
    return resealed(files()["manifest"], json.dumps(json.loads(files()["manifest"])["body"] | {"regions": regions}))


READERS: dict[str, Callable[[Path, bytes], Any]] = {
    "plan": lambda _, content: Plan.from_json(content),
    "trainer": lambda path, _: read_text(path),
    "trainer with a tensor": lambda path, _: read_text(path),
    "index": lambda path, _: weight_file_names(path.parent, STALE),
    "tensors": lambda path, _: TensorFile(path).close(),
    "manifest": lambda path, content: read_manifest(content, path=path),
    "manifest of tensors": lambda path, content: read_manifest(content, path=path),
}


@pytest.mark.usefixtures("older_objects_are_passed_over")
@pytest.mark.parametrize("kind", READERS)
def test_the_largest_documents_that_are_read_take_no_more_than_is_allowed(kind: str, tmp_path: Path) -> None:
    """The number of values is doubled until there are too many: up to there each document is read, or refused, within its own size and 16 MiB."""
    files()
    path = tmp_path / {"index": "model.safetensors.index.json", "tensors": "model.safetensors"}.get(kind, "any.json")
    count = 2000
    while True:
        content = document(kind, count)
        path.write_bytes(content)
        said = refused_or_read(lambda content=content: READERS[kind](path, content), len(content))
        if said is not None and "could take" in said:
            break
        count = count * 4 // 3
        assert count < 1 << 22, "it is never too large"
    assert count > 4000
