"""Random runs on a committed store, cut off at random; checksums in random cuts; manifests changed at random."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import random
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.crash_disk import Disk, RecordedDisk, some_crash_states
from faults.crash_story import IDENTITY, TWO_BLOCKS, Story
from memfit.core.errors import StoreError
from memfit.store import CommittedStore, DiskIO, aligned_memory
from memfit.store.checksums import PartsOfPieces, ReadCheck, SlotSums, checksum, joined
from memfit.store.manifest import read_manifest, write_manifest
from memfit.store.state import decode_state, encode_state

# ---- checksums


@given(content=st.binary(max_size=3000), data=st.data())
def test_the_checksum_of_a_whole_follows_from_its_parts(content: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(content)))
    assert joined(checksum(content[:cut]), checksum(content[cut:]), len(content) - cut) == checksum(content)
    assert checksum(content[cut:], checksum(content[:cut])) == checksum(content)


def bitwise_crc32c(content: bytes) -> int:
    """RFC 3720, section 12.1, a bit at a time."""
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@given(st.binary(max_size=200))
def test_the_checksum_is_crc32c(content: bytes) -> None:
    assert checksum(b"123456789") == 0xE3069283
    assert checksum(content) == bitwise_crc32c(content)


@given(
    nbytes=st.integers(0, 40),
    piece_bytes=st.integers(1, 12),
    writes=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 40), st.binary(min_size=40, max_size=40)), max_size=12
    ),
    is_new=st.booleans(),
)
def test_sums_of_a_slot_are_right_or_unknown_after_any_writes(
    nbytes: int, piece_bytes: int, writes: list[tuple[int, int, bytes]], is_new: bool
) -> None:
    sums, truth = SlotSums(nbytes, piece_bytes), bytearray(nbytes)
    if is_new:
        sums.know_zeros()
    memory = aligned_memory(40)
    written_since: dict[int, set[int]] = {}
    for first, second, content in writes:
        start, end = sorted((min(first, nbytes), min(second, nbytes)))
        memory.view()[:] = content
        sums.note(start, memory.address + start, end - start)
        truth[start:end] = content[start:end]
        for position in range(start, end):
            written_since.setdefault(position // piece_bytes, set()).add(position)
    for piece in range(-(-nbytes // piece_bytes)):
        start, end = piece * piece_bytes, min(nbytes, (piece + 1) * piece_bytes)
        found = sums.get(piece)
        assert found is None or found == checksum(bytes(truth[start:end]))
        if is_new and piece not in written_since:
            assert found is not None, "untouched zeros are known"
        if any(min(a, b) <= start and end <= max(a, b) for a, b, _ in writes[-1:]):
            assert found is not None, "a piece that was just written whole is known"
    assert {start // piece_bytes for start, _ in sums.unknown()} == {
        piece for piece in range(-(-nbytes // piece_bytes)) if sums.get(piece) is None
    }


@given(
    content=st.binary(min_size=1, max_size=60),
    piece_bytes=st.integers(1, 12),
    data=st.data(),
)
def test_a_read_in_any_parts_finds_exactly_the_damaged_pieces_that_it_covers(
    content: bytes, piece_bytes: int, data: st.DataObject
) -> None:
    nbytes = len(content)
    sums, memory = SlotSums(nbytes, piece_bytes), aligned_memory(nbytes)
    memory.view()[:] = content
    sums.note(0, memory.address, nbytes)
    damaged = data.draw(st.sets(st.integers(0, nbytes - 1), max_size=3))
    for position in damaged:
        memory.view()[position] ^= 0x10
    start, end = sorted((data.draw(st.integers(0, nbytes)), data.draw(st.integers(0, nbytes))))
    cuts = sorted({start, end, *data.draw(st.lists(st.integers(start, end), max_size=5))})
    parts = data.draw(st.permutations(list(pairwise(cuts))))
    check, found = ReadCheck(sums, start, end - start), set[int]()
    for low, high in parts:
        found |= {piece for piece, _, _ in check.note(low, memory.address + low, high - low)}
    covered = {
        piece
        for piece in range(-(-nbytes // piece_bytes))
        if start <= piece * piece_bytes and min(nbytes, (piece + 1) * piece_bytes) <= end
    }
    assert found == covered & {position // piece_bytes for position in damaged}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), max_size=20))
def test_parts_make_a_piece_whole_only_when_they_cover_it(ranges: list[tuple[int, int]]) -> None:
    parts, content = PartsOfPieces(10, 10), bytes(range(10))
    covered = set[int]()
    for first, length in ranges:
        start, end = first, min(10, first + length)
        whole = parts.add(0, start, end, checksum(content[start:end]))
        covered |= set(range(start, end))
        if whole is not None:
            assert whole == checksum(content)
            assert len(covered) == 10
            covered.clear()


# ---- crashes of random runs


@st.composite
def stories(draw: st.DrawFn) -> Story:
    sizes = draw(
        st.lists(st.one_of(st.sampled_from([0, 1, 4096, 4097]), st.integers(1, 30_000)), min_size=1, max_size=4)
    )
    seed = draw(st.integers(0, 1 << 30))
    names = [f"h.{number}/weight" for number in range(len(sizes))]

    def changes(step: int) -> list[str]:
        chosen = random.Random(f"{seed} {step}")
        return [name for name in names if chosen.random() < 0.7]

    def cuts(step: int, nbytes: int) -> list[int]:
        chosen = random.Random(f"{seed} {step} {nbytes}")
        inside = chosen.sample(range(nbytes + 1), min(nbytes, chosen.randrange(4)))
        return sorted({0, nbytes, *inside})

    return Story(sizes=dict(zip(names, sizes, strict=True)), changes=changes, cuts=cuts)


def run_and_crash(story: Story, seed: int, durability: Any, states_per_note: int) -> None:
    draw = random.Random(seed)
    directory = Path(tempfile.mkdtemp())
    recorded = RecordedDisk(directory / "s")
    try:
        with DiskIO(read_threads=1, write_threads=1, piece_bytes=8192, staging_bytes=4096) as io:
            store, step = story.begin(recorded, io=io, durability=durability), 0
            for _ in range(draw.randrange(1, 5)):
                event = draw.random()
                if event < 0.15:
                    story.write(store, step + 1)  # A step that fails before its end.
                    step = store.roll_back() or 0
                elif event < 0.3:
                    store.close()
                    store = CommittedStore.open(recorded.directory, durability=durability, io=io, operations=recorded)
                    step = story.check(store)
                    recorded.promise(step)
                step += 1
                story.step(store, step, recorded)
            store.close()
            disk, known = Disk(), set[tuple[tuple[str, bytes], ...]]()
            for note in recorded.notes:
                disk.take(note)
                if disk.promised is None or draw.random() < 0.5:
                    continue
                for files in some_crash_states(disk, draw, states_per_note):
                    key = tuple(sorted(files.items()))
                    if key in known:
                        continue
                    known.add(key)
                    where = directory / "crash"
                    assert story.step_found(files, where, io) in disk.allowed
                    shutil.rmtree(where)
    finally:
        shutil.rmtree(directory)


@settings(max_examples=12)
@given(story=stories(), seed=st.integers(0, 1 << 30), durability=st.sampled_from(["step", 2, 3, "exit"]))
def test_a_random_run_that_is_cut_off_anywhere_is_found_at_a_commit(story: Story, seed: int, durability: Any) -> None:
    run_and_crash(story, seed, durability, 2)


@pytest.mark.slow
@settings(max_examples=300)
@given(story=stories(), seed=st.integers(0, 1 << 30), durability=st.sampled_from(["step", 2, 3, "exit"]))
def test_many_random_runs_that_are_cut_off_anywhere_are_found_at_a_commit(
    story: Story, seed: int, durability: Any
) -> None:
    run_and_crash(story, seed, durability, 8)


# ---- manifests that lie

HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, 1, 2, 4095, 4096, 4097, 1 << 31, 1 << 40, 1 << 60, 1 << 63, 10**400]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["../../etc/passwd", "/dev/zero", "uint8", "bfloat16", "0" * 8, "f" * 16, "\x00", "\ud800"]),
    st.lists(st.integers(-3, 1 << 40), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all parts of a JSON value, itself aside."""
    found: list[tuple[Any, ...]] = []
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found += [(*path, key), *places(value[key], (*path, key))]
    return found


@pytest.fixture(name="body", scope="module")
def make_body() -> Any:
    directory = Path(tempfile.mkdtemp())
    try:
        with TWO_BLOCKS.begin(RecordedDisk(directory / "s")) as store:
            TWO_BLOCKS.step(store, 1)
        return json.loads((directory / "s" / "manifest.json").read_bytes())["body"]
    finally:
        shutil.rmtree(directory)


def change(body: Any, data: st.DataObject) -> Any:
    """A body with up to three parts replaced, removed, repeated or swapped."""
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3))):
        paths = places(body)
        if not paths:
            return body
        *way, key = data.draw(st.sampled_from(paths))
        parent = body
        for part in way:
            parent = parent[part]
        match data.draw(st.sampled_from(["replace", "remove", "other", "repeat"])):
            case "replace":
                parent[key] = data.draw(HOSTILE)
            case "remove":
                del parent[key]
            case "other":
                *other_way, other = data.draw(st.sampled_from(paths))
                source = body
                try:
                    for part in other_way:
                        source = source[part]
                    parent[key] = copy.deepcopy(source[other])
                except (LookupError, TypeError):
                    continue  # It lay below what was changed before.
            case "repeat":
                if isinstance(parent, list):
                    parent.append(copy.deepcopy(parent[key]))
                else:
                    parent[f"{key}x"] = copy.deepcopy(parent[key])
    return body


def read_or_refuse(body: Any) -> None:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    whole = {
        "format": "memfit-store",
        "version": 2,
        "checksum": hashlib.sha256(text.encode()).hexdigest(),
        "body": body,
    }
    try:
        found = read_manifest(json.dumps(whole).encode(), path=Path("manifest.json"))
    except StoreError:
        return
    # What is let through is a manifest in every part: it is written as it was read.
    again = json.loads(write_manifest(found))["body"]
    assert again == body
    ends = [place.offset + entry.spec.nbytes for entry in found.regions.values() for place in entry.places]
    assert all(end <= max(found.file_bytes) for end in ends)


@settings(max_examples=300)
@given(data=st.data())
def test_a_manifest_changed_at_random_is_refused_or_right(body: Any, data: st.DataObject) -> None:
    read_or_refuse(change(body, data))


@pytest.mark.slow
@settings(max_examples=20_000)
@given(data=st.data())
def test_many_manifests_changed_at_random_are_refused_or_right(body: Any, data: st.DataObject) -> None:
    read_or_refuse(change(body, data))


@settings(max_examples=25)
@given(data=st.data())
def test_a_store_whose_manifest_was_changed_at_random_opens_whole_or_not_at_all(body: Any, data: st.DataObject) -> None:
    directory = Path(tempfile.mkdtemp()) / "s"
    try:
        with TWO_BLOCKS.begin(RecordedDisk(directory)) as store:
            TWO_BLOCKS.step(store, 1)
        changed = change(body, data)
        text = json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()
        whole = {"format": "memfit-store", "version": 2, "checksum": hashlib.sha256(text).hexdigest(), "body": changed}
        (directory / "manifest.json").write_text(json.dumps(whole))
        try:
            with CommittedStore.open(directory, regions=TWO_BLOCKS.specs, identity=IDENTITY) as found:
                for name, nbytes in TWO_BLOCKS.sizes.items():
                    memory = aligned_memory(nbytes)
                    found.region(name).read(0, nbytes, memory).wait()
                    assert bytes(memory.view()) in (TWO_BLOCKS.content(0, name), TWO_BLOCKS.content(1, name))
        except StoreError:
            pass
    finally:
        shutil.rmtree(directory.parent)


@settings(max_examples=200)
@given(data=st.data())
def test_bytes_of_a_state_changed_at_random_are_refused_or_read(data: st.DataObject) -> None:
    content = bytearray(encode_state(TWO_BLOCKS.state(2)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    with contextlib.suppress(StoreError):
        assert isinstance(decode_state(bytes(content[:end])), dict)
