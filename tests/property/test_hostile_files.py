"""No file can crash, hang or mislead: whatever is read is either what memfit writes, or refused by one family of errors that say what is wrong.

`pytest tests/property/test_hostile_files.py --examples 25000` draws 200,000 cases.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from faults import small_run
from faults.crash_disk import RecordedDisk
from faults.journal_story import EVEN
from memfit.api import run_state
from memfit.api.exporting import export_run
from memfit.core.errors import MemfitError
from memfit.core.hardware import Hardware, Link
from memfit.core.plan import Plan
from memfit.core.units import MIB
from memfit.runtime.export.format import LENGTH_BYTES
from memfit.runtime.export.index import weight_file_names
from memfit.runtime.export.names import STALE
from memfit.runtime.export.reader import TensorFile
from memfit.runtime.export.trainer import read_text
from memfit.runtime.store.manifest import read_manifest
from memfit.runtime.store.state import decode_state, encode_state
from property.mutations import mutate_bytes, mutate_json

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SEEDS = st.integers(0, (1 << 63) - 1)


LINK = Link(read_bytes_per_s=1.5e9, write_bytes_per_s=1e9)
MACHINE = Hardware(
    device="cpu",
    flops_per_s=1e11,
    device_bytes=1 << 33,
    disk=LINK,
    disk_bytes=1 << 40,
    host=LINK,
    host_bytes=1 << 36,
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
        with EVEN.begin(RecordedDisk(place / "journal")) as store:
            EVEN.step(store, 1)
        shards = sorted(place.glob("out/model-*.safetensors"))
        return {
            "manifest": manifest,
            "journal": (place / "journal" / "manifest.json").read_bytes(),
            "state": state,
            "tensors": shards[0].read_bytes(),
            "index": (place / "out" / "model.safetensors.index.json").read_bytes(),
            "trainer": (place / "out" / "trainer_state.json").read_bytes(),
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
    text = mutate_json(json.loads(tensors["state.json"].numpy().tobytes()), chance).encode(errors="replace") or b" "
    tensors["state.json"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return safetensors.torch.save(tensors)


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
        run_state.give_random(run_state.part(state, "random", dict))
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
    path = place / "trainer_state.json"
    path.write_text(mutate_json(json.loads(files()["trainer"]), chance), errors="replace")
    refused_or_read(lambda: read_text(path), path.stat().st_size)


@given(SEEDS)
def test_a_state_that_memfit_wrote_is_read(seed: int) -> None:
    """The mutator's own values, where they can be kept, come back: the reader does not refuse too much."""
    chance = random.Random(seed)
    value = {"a": chance.choice((0, -1, 1 << 62, 0.5, "x", None, True, [1, [2]], {"b": (1, 2)}, {1: {2}}))}
    assert decode_state(encode_state(value)) == value
