"""Scratch, regions and layouts under random use, against dictionaries of bytes."""

from __future__ import annotations

import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memfit.core.errors import StoreError
from memfit.store import DiskIO, DiskStore, Extent, Memory, RegionSpec, ScratchFile, aligned_memory
from memfit.store.manifest import Manifest, RegionEntry, lay_out, read_manifest, write_manifest
from memfit.store.scratch import ExtentAllocator
from memfit.store.transfer import ByteRanges

QUICK = settings(max_examples=20, stateful_step_count=25, deadline=None)
SIZES = st.one_of(st.sampled_from([0, 1, 4095, 4096, 4097]), st.integers(0, 60_000))


def filled(content: bytes, shift: int = 0) -> Memory:
    memory = aligned_memory(len(content) + shift).narrow(shift, len(content))
    memory.view()[:] = content
    return memory


def pattern(seed: int, nbytes: int) -> bytes:
    return (seed.to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]


class ScratchMachine(RuleBasedStateMachine):
    """Puts, gets, frees and drops; every extent always gives back its own bytes, and the books add up."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = Path(tempfile.mkdtemp())
        self._io = DiskIO(piece_bytes=16384, staging_bytes=8192)
        self._scratch = ScratchFile(self._directory, self._io)
        self._held: list[tuple[Extent, bytes]] = []
        self._count = 0
        self._most = 0

    @rule(size=SIZES, shift=st.sampled_from([0, 1, 64]))
    def put(self, size: int, shift: int) -> None:
        self._count += 1
        content = pattern(self._count, size)
        self._held.append((self._scratch.put(filled(content, shift)), content))
        self._most = max(self._most, self._room())

    @precondition(lambda self: self._held)
    @rule(data=st.data(), shift=st.sampled_from([0, 1, 64]))
    def get(self, data: st.DataObject, shift: int) -> None:
        # By number: hypothesis would keep a drawn extent alive.
        extent, content = self._held[data.draw(st.integers(0, len(self._held) - 1))]
        memory = aligned_memory(len(content) + shift).narrow(shift, len(content))
        self._scratch.get(extent, memory).wait()
        assert bytes(memory.view()) == content

    @precondition(lambda self: self._held)
    @rule(data=st.data(), is_dropped=st.booleans())
    def free(self, data: st.DataObject, is_dropped: bool) -> None:
        extent, _ = self._held.pop(data.draw(st.integers(0, len(self._held) - 1)))
        extent.written.join()
        if not is_dropped:
            self._scratch.free(extent)

    @invariant()
    def live_extents_do_not_overlap(self) -> None:
        ranges = sorted((extent.offset, extent.offset + len(content)) for extent, content in self._held)
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))

    @invariant()
    def the_books_add_up(self) -> None:
        found = self._scratch.statistics()
        assert found.extents == len(self._held)
        assert found.live_bytes == self._room()
        assert found.high_water_bytes >= self._most
        assert found.file_bytes >= found.high_water_bytes

    def _room(self) -> int:
        return sum(max(1, -(-len(content) // 4096)) * 4096 for _, content in self._held)

    def teardown(self) -> None:
        self._scratch.close()
        self._io.close()
        shutil.rmtree(self._directory)


class StoreMachine(RuleBasedStateMachine):
    """Writes, commits, closes and opens; what is current is always the last commit, of all regions at once."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = Path(tempfile.mkdtemp()) / "store"
        self._count = 0

    @initialize(sizes=st.lists(SIZES, min_size=1, max_size=3))
    def create(self, sizes: list[int]) -> None:
        self._sizes = {f"B{number}": size for number, size in enumerate(sizes)}
        specs = {name: RegionSpec(nbytes=size, slots=2) for name, size in self._sizes.items()}
        self._store = DiskStore.create(self._directory, specs, identity={}, durable=False)
        self._current = {name: bytes(size) for name, size in self._sizes.items()}
        self._next: dict[str, bytes] = {}
        self._step: int | None = None

    @rule(data=st.data())
    def write_a_version_in_parts(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self._sizes)))
        size = self._sizes[name]
        self._count += 1
        content = pattern(self._count, size)
        cut = data.draw(st.integers(0, size))
        for start, end in ((cut, size), (0, cut)):
            self._store.region(name).write(start, end - start, filled(content[start:end]))
        self._next[name] = content

    @rule(step=st.integers(0, 1000), data=st.data())
    def commit(self, step: int, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self._sizes)), unique=True))
        chosen = [name for name in names if name in self._next or not self._sizes[name]]
        self._store.commit(step, chosen)
        self._step = step
        for name in chosen:
            self._current[name] = self._next.pop(name, b"")

    @rule()
    def close_and_open(self) -> None:
        self._store.close()
        self._store = DiskStore.open(self._directory, durable=False)
        self._next.clear()

    @invariant()
    def current_is_the_last_commit(self) -> None:
        if not hasattr(self, "_store"):
            return
        assert self._store.step == self._step
        for name, content in self._current.items():
            memory = aligned_memory(len(content))
            self._store.region(name).read(0, len(content), memory).wait()
            assert bytes(memory.view()) == content

    def teardown(self) -> None:
        if hasattr(self, "_store"):
            self._store.close(delete=True)
            assert not self._directory.exists() or not list(self._directory.iterdir())
        shutil.rmtree(self._directory.parent)


TestScratchGivesBackWhatWasPut = ScratchMachine.TestCase
TestScratchGivesBackWhatWasPut.settings = QUICK
TestStoreHoldsTheLastCommit = StoreMachine.TestCase
TestStoreHoldsTheLastCommit.settings = QUICK


@given(requests=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
@settings(deadline=None)
def test_the_allocator_agrees_with_a_line_of_marked_cells(requests: list[tuple[bool, int]]) -> None:
    cells = [False] * 40
    allocator, taken = ExtentAllocator(), []
    allocator.give(0, 40)
    for is_take, number in requests:
        if is_take:
            start = allocator.take(number)
            fits = [at for at in range(41 - number) if not any(cells[at : at + number])]
            assert start == (fits[0] if fits else None), "the first gap that is large enough"
            if start is not None:
                cells[start : start + number] = [True] * number
                taken.append((start, number))
        elif taken:
            start, length = taken.pop(number % len(taken))
            allocator.give(start, length)
            cells[start : start + length] = [False] * length
        free = {at for start, length in allocator.gaps for at in range(start, start + length)}
        assert free == {at for at, is_taken in enumerate(cells) if not is_taken}
        assert allocator.last_gap_bytes(40) == (cells[::-1].index(True) if any(cells) else 40)


@given(edits=st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), max_size=30))
def test_byte_ranges_agree_with_a_set_of_numbers(edits: list[tuple[bool, int, int]]) -> None:
    ranges, numbers = ByteRanges(), set[int]()
    for is_added, one, other in edits:
        start, end = min(one, other), max(one, other)
        if is_added:
            ranges.add(start, end)
            numbers |= set(range(start, end))
        else:
            ranges.remove(start, end)
            numbers -= set(range(start, end))
        assert ranges.nbytes == len(numbers)
        assert {at for low, high in ranges.ranges for at in range(low, high)} == numbers
        assert ranges.overlaps(start, end) == bool(numbers & set(range(start, end)))


SPECS = st.dictionaries(
    st.text(st.characters(min_codepoint=33, max_codepoint=0x17F), min_size=1, max_size=12).filter(str.isprintable),
    st.builds(lambda nbytes, slots: RegionSpec(nbytes=nbytes, slots=slots), st.integers(0, 1 << 40), st.integers(1, 2)),
    max_size=8,
)


@given(specs=SPECS, file_blocks=st.integers(1, 1 << 20))
def test_layouts_are_whole_apart_and_survive_the_manifest(specs: dict[str, RegionSpec], file_blocks: int) -> None:
    layout = lay_out(specs, file_bytes=file_blocks * 4096)
    ranges = sorted(
        (place.file, place.offset, place.offset + -(-specs[name].nbytes // 4096) * 4096)
        for name, places in layout.places.items()
        for place in places
    )
    for before, after in pairwise(ranges):
        assert before[0] < after[0] or before[2] <= after[1]
    assert sum(layout.file_bytes) == sum(end - start for _, start, end in ranges)
    manifest = Manifest(
        identity={"é": "\x00"},
        file_bytes=layout.file_bytes,
        regions={
            name: RegionEntry(spec=spec, places=layout.places[name], steps=(None,) * spec.slots, current=0)
            for name, spec in specs.items()
        },
        generation=0,
        step=None,
    )
    assert read_manifest(write_manifest(manifest), path=Path("m")) == manifest


@given(data=st.data())
@settings(deadline=None)
def test_a_manifest_with_any_byte_changed_is_refused_or_says_the_same(data: st.DataObject) -> None:
    layout = lay_out({"a": RegionSpec(nbytes=9, slots=2)})
    entry = RegionEntry(spec=RegionSpec(nbytes=9, slots=2), places=layout.places["a"], steps=(None, 4), current=1)
    manifest = Manifest(identity={}, file_bytes=layout.file_bytes, regions={"a": entry}, generation=1, step=4)
    content = bytearray(write_manifest(manifest))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    try:
        found = read_manifest(bytes(content[:cut]), path=Path("m"))
    except StoreError as error:
        said = str(error)
    else:
        assert found == manifest
        return
    assert "damaged" in said or "version" in said or "not a manifest" in said
