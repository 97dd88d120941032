"""Where regions lie in files.

In: names and sizes. Out: files and offsets, in whole blocks, in the order given; the same input
gives the same layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from memfit.core.errors import UsageError
from memfit.core.layout import spare_room_bytes
from memfit.core.units import GIB, round_up
from memfit.store.memory_ranges import ALIGNMENT_BYTES
from memfit.store.tensor_tables import TensorPlace, problem_of_tensors

FILE_BYTES = 16 * GIB
"""Files are filled up to here; a larger slot gets a file of its own."""

LARGEST_BYTES = 1 << 60
LONGEST_NAME = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionSpec:
    """Specification of a region."""

    nbytes: int
    """Length in bytes, 0 allowed."""
    slots: int = 1
    """1: written in place. 2: the next version is written beside the current one and made current
    by a commit.
    """
    tag: str = "other"
    """Purpose, for the counters: "weight", "state", "gradient", "activation"."""
    tensors: tuple[TensorPlace, ...] = ()
    """Tensors that lie in it, as far as they are to be named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlace:
    """One version's place: a range of one file, of the region's length, that starts on a block."""

    file: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Files and places."""

    file_bytes: tuple[int, ...]
    """Length of each file, in whole blocks."""
    places: Mapping[str, tuple[SlotPlace, ...]]
    """Slots by region."""


def check_spec(name: object, spec: RegionSpec) -> None:
    """Refuses what cannot be a region.

    Raises:
        UsageError: a bad name, length, number of slots or tag, or a tensor that cannot lie there.
    """
    if not isinstance(name, str) or not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise UsageError(f"a region's name is 1 to {LONGEST_NAME} printable characters, not {name!r:.80}")
    if type(spec.nbytes) is not int or not 0 <= spec.nbytes <= LARGEST_BYTES:
        raise UsageError(f"region {name!r}: its length is a number of bytes from 0 to 2**60, not {spec.nbytes!r:.80}")
    if type(spec.slots) is not int or spec.slots not in (1, 2):
        raise UsageError(f"region {name!r}: it has 1 or 2 slots, not {spec.slots!r:.80}")
    if not isinstance(spec.tag, str) or not spec.tag or len(spec.tag) > LONGEST_NAME or not spec.tag.isprintable():
        raise UsageError(f"region {name!r}: its tag is a printable word, not {spec.tag!r:.80}")
    problem = problem_of_tensors(spec.tensors, spec.nbytes)
    if problem is not None:
        raise UsageError(f"region {name!r}: {problem}")


def lay_out(regions: Mapping[str, RegionSpec], *, file_bytes: int = FILE_BYTES) -> Layout:
    """Places all slots of all regions, one behind the other.

    Args:
        regions: what shall be held.
        file_bytes: where to begin a new file.

    Returns:
        The layout; `sum(layout.file_bytes)` is all the disk it takes.

    Raises:
        UsageError: a region that cannot be.
    """
    files: list[int] = []
    places: dict[str, tuple[SlotPlace, ...]] = {}
    for name, spec in regions.items():
        check_spec(name, spec)
        slots: list[SlotPlace] = []
        for _ in range(spec.slots):
            room_bytes = round_up(spec.nbytes, ALIGNMENT_BYTES)
            if not files or (files[-1] and files[-1] + room_bytes > file_bytes):
                files.append(0)
            slots.append(SlotPlace(file=len(files) - 1, offset=files[-1]))
            files[-1] += room_bytes
        places[name] = tuple(slots)
    return Layout(file_bytes=tuple(files), places=places)


def lay_out_moving(regions: Mapping[str, RegionSpec], units: Sequence[Sequence[str]]) -> Layout:
    """Places regions so that units of them move from one place to the other through one spare room.

    See [Note: journal].

    All first slots of the units lie one behind the other; each second slot lies as far before its
    first one as the spare room is long (`spare_room_bytes`). So the second slots share room with
    the first slots of units before, and those of one region never with each other.

    Args:
        regions: what shall be held; what is in no unit is placed as `lay_out` does.
        units: names of regions with two slots.

    Returns:
        The layout. Units lie in one file, however large.

    Raises:
        UsageError: a region that cannot be, or that is in two units or has one slot and is in one.
    """
    names = [name for unit in units for name in unit]
    if len(set(names)) != len(names) or any(name not in regions or regions[name].slots != 2 for name in names):
        raise UsageError("a unit is made of regions with two slots, each in one unit")
    rest = lay_out({name: spec for name, spec in regions.items() if name not in set(names)})
    if not names:
        return rest
    lengths = {name: round_up(regions[name].nbytes, ALIGNMENT_BYTES) for name in names}
    spare_bytes = spare_room_bytes([sum(lengths[name] for name in unit) for unit in units])
    moving: dict[str, tuple[SlotPlace, ...]] = {}
    position = 0
    for name in names:
        check_spec(name, regions[name])
        moving[name] = (SlotPlace(file=0, offset=position + spare_bytes), SlotPlace(file=0, offset=position))
        position += lengths[name]
    shifted = {
        name: tuple(SlotPlace(file=place.file + 1, offset=place.offset) for place in places)
        for name, places in rest.places.items()
    }
    places = {name: moving.get(name) or shifted[name] for name in regions}
    return Layout(file_bytes=(position + spare_bytes, *rest.file_bytes), places=places)


def store_bytes(regions: Mapping[str, RegionSpec]) -> int:
    """Disk that a store of these regions takes without a journal, manifest aside.

    Raises `UsageError` for a region that cannot be.
    """
    return sum(lay_out(regions).file_bytes)


def check_places(file_bytes: Sequence[int], ranges: Sequence[tuple[int, int, int]]) -> str | None:
    """Returns the problem with ranges (file, offset, length), or None.

    They lie off blocks, outside of files, or overlap.
    """
    for file, offset, nbytes in ranges:
        if not 0 <= file < len(file_bytes):
            return f"a slot lies in file {file}, of {len(file_bytes)} files"
        if offset % ALIGNMENT_BYTES or offset < 0 or nbytes < 0 or offset + nbytes > file_bytes[file]:
            return f"a slot at {offset} of {nbytes} bytes does not fit file {file} of {file_bytes[file]} bytes"
    filled = sorted(found for found in ranges if found[2])
    for (file, offset, nbytes), (next_file, next_offset, _) in pairwise(filled):
        if file == next_file and offset + round_up(nbytes, ALIGNMENT_BYTES) > next_offset:
            return f"two slots overlap in file {file} at {next_offset}"
    return None
