"""The manifest: one small JSON file that says what a store holds and which version of it is
current.

In: bytes from a disk, trusted in nothing. Out: a `Manifest`, every field of it checked, or a
`StoreError`.

[Note: format]
`{"format": "memfit-store", "version": 2, "checksum": "...", "body": {...}}`. The checksum is
SHA-256 over the body, as JSON with sorted keys and no spaces. Readers refuse other versions and
unknown fields: a field that an older reader skips could be the one that says that its data is
compressed. A slot's step is the last step that was committed in it; the slot that is not current
may have been written since, so its step is history, not a promise. A store with a journal
(`journal`, [Note: journal]) has version 3: there slots of different regions may share room, as long
as no two current ones do, and regions with one slot are summed as well while a step is committed in
them. `sums` are the CRC-32C of the current slot's pieces of `piece_bytes` bytes, eight hexadecimal
digits each, one behind the other; null where none are kept. `state` says which of two files holds
the small state of the step, how long it is, and its CRC-32C.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from memfit.core.documents import ROOM_BYTES, parse_json, parsed_bytes
from memfit.core.errors import StoreError, UsageError
from memfit.core.layout import Scheme, spare_room_bytes
from memfit.core.limits import GIB, MIB, round_up
from memfit.store.checksums import ALIGNMENT_BYTES
from memfit.store.files import store_error

# The tensors inside a region: names, dtypes, shapes and places, and how two lists of them differ.
#
# In: what a job has, and what a manifest says. Out: checked tables; differences in words.

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
_LONGEST_NAME = 512
_MOST_DIMENSIONS = 64
_LARGEST = 1 << 60
"""Most elements of a dimension, and of all together, zeros apart."""
_SHOWN_DIFFERENCES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """A tensor of a region: elements in row-major order from `offset` on."""

    name: str
    """A parameter's name, or a state's (`exp_avg` of a parameter), for people; once in a region."""
    dtype: str
    """Torch's name without the prefix: "float32", "bfloat16"."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the region."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return _DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in the manifest."""
    return str(dtype).removeprefix("torch.")


def problem_of_tensors(tensors: Sequence[TensorPlace], region_bytes: int) -> str | None:
    """Returns the problem with the tensors of a region, in words, or None."""
    names: set[str] = set()
    for tensor in tensors:
        problem = _problem_of_tensor(tensor, region_bytes)
        if problem is not None:
            return problem
        if tensor.name in names:
            return f"the tensor {tensor.name!r:.200} is there twice"
        names.add(tensor.name)
    end = 0
    for tensor in sorted(tensors, key=lambda found: (found.offset, found.nbytes)):
        if tensor.nbytes and tensor.offset < end:
            return f"the tensor {tensor.name!r:.200} overlaps the one before it"
        end = max(end, tensor.offset + tensor.nbytes)
    return None


def _problem_of_tensor(tensor: TensorPlace, region_bytes: int) -> str | None:
    name, shape = tensor.name, tensor.shape
    if not isinstance(name, str) or not name or len(name) > _LONGEST_NAME or not name.isprintable():
        return f"a tensor's name is 1 to {_LONGEST_NAME} printable characters, not {name!r:.80}"
    if tensor.dtype not in _DTYPES:
        return f"the tensor {name!r:.200} has the dtype {tensor.dtype!r:.80}, which memfit does not know"
    if len(shape) > _MOST_DIMENSIONS or any(type(size) is not int or not 0 <= size <= _LARGEST for size in shape):
        return f"the tensor {name!r:.200} has the shape {list(shape[:8])!r:.160}"
    if math.prod(max(size, 1) for size in shape) > _LARGEST:
        return f"the tensor {name!r:.200} of shape {list(shape[:8])!r:.160} is larger than any memory"
    if type(tensor.offset) is not int or tensor.offset < 0 or tensor.offset + tensor.nbytes > region_bytes:
        return (
            f"the tensor {name!r:.200} at {tensor.offset!r:.40} does not lie inside the region's {region_bytes} bytes"
        )
    return None


def tensors_between(tensors: Sequence[TensorPlace], start: int, end: int) -> list[str]:
    """The names of the tensors that have bytes in a range of their region, in order."""
    return [t.name for t in tensors if t.nbytes and t.offset < end and start < t.offset + t.nbytes]


def differences(wanted: Mapping[str, RegionSpec], found: Mapping[str, RegionSpec]) -> list[str]:
    """How a store differs from what is wanted of it, a line each; empty if it does not."""
    lines = [f"block {name!r} is missing" for name in wanted if name not in found]
    lines += [f"block {name!r} is there and not wanted" for name in found if name not in wanted]
    for name, spec in wanted.items():
        other = found.get(name)
        if other is not None and other != spec:
            lines += _differences_of_region(name, spec, other)
    return lines


def _differences_of_region(name: str, wanted: RegionSpec, found: RegionSpec) -> list[str]:
    lines: list[str] = []
    there = {tensor.name: tensor for tensor in found.tensors}
    for tensor in wanted.tensors:
        other = there.pop(tensor.name, None)
        if other is None:
            lines.append(f"{name}: tensor {tensor.name!r} is missing")
        elif other != tensor:
            for what in ("dtype", "shape", "offset"):
                has, wants = getattr(other, what), getattr(tensor, what)
                if has != wants:
                    lines.append(f"{name}: tensor {tensor.name!r} has {what} {_plain(has)}, wanted {_plain(wants)}")
    lines += [f"{name}: tensor {other!r} is there and not wanted" for other in there]
    for what in ("nbytes", "slots", "tag"):
        has, wants = getattr(found, what), getattr(wanted, what)
        if has != wants:
            lines.append(f"{name}: {what} is {has}, wanted {wants}")
    return lines or [f"{name}: its tensors stand in another order"]


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def in_words(lines: Sequence[str]) -> str:
    """The first differences, and how many more there are."""
    more = len(lines) - _SHOWN_DIFFERENCES
    return "; ".join(lines[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


# Where regions lie in files.
#
# In: names and sizes. Out: files and offsets, in whole blocks, in the order given; the same input
# gives the same layout.

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


FORMAT = "memfit-store"
VERSIONS: dict[Scheme, int] = {"generations": 2, "journal": 3}
"""The format's version of each scheme: a reader that knows no journal refuses one by its version.
"""
MANIFEST_NAME = "manifest.json"
NEW_MANIFEST_NAME = "manifest.json.new"
PREPARED_MANIFEST_NAME = "manifest.json.prepared"
"""Manifest of a commit that waits for those of other stores; see `disk_store`, [Note: commit of
several stores].
"""
PARTIAL_MANIFEST_NAME = "manifest.json.partial"
"""Manifest of a store that is being made or removed; see `directory`, [Note: data without a
manifest].
"""
LIMIT_BYTES = 16 * MIB
"""A longer manifest is not read.

What a shorter one may take to read is bounded too: see `read_manifest`.
"""
_COPIES = 4
"""Most bytes of the text while its checksum is made again."""

_LARGEST_STEP = (1 << 63) - 1
_MOST_FILES = 1 << 16
STATE_LIMIT_BYTES = 1 << 30
"""A longer small state is not one; it is read whole."""
_LARGEST_PIECE = 1 << 30
_SUM_DIGITS = 8
_PARSED_GROWTH = 8
"""Bytes of memory for each byte by which a manifest grows, at most: checksums and long numbers, and
copies of the text.
"""
_ROOM_FOR_NUMBERS = 64
"""Bytes by which a region's entry may grow: steps become long numbers, null becomes text."""
_SUMS = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionEntry:
    """A region as the manifest has it."""

    spec: RegionSpec
    places: tuple[SlotPlace, ...]
    steps: tuple[int | None, ...]
    """For each slot, the last step committed in it; None if none was."""
    current: int
    """The slot that holds the committed version."""
    sums: tuple[int, ...] | None = None
    """Checksums of its pieces; None if none are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateEntry:
    """Where the small state of the committed step lies."""

    file: int
    """Which of the two files."""
    nbytes: int
    checksum: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Contents of a store as of one commit."""

    identity: Mapping[str, str]
    """Whose store it is: model, plan, whatever the maker wants to find again."""
    file_bytes: tuple[int, ...]
    regions: Mapping[str, RegionEntry]
    generation: int
    """Number of commits, over all openings."""
    step: int | None
    """The committed step; None before the first commit."""
    piece_bytes: int | None = None
    """How many bytes a checksum covers; None in a store without checksums."""
    state: StateEntry | None = None
    """The small state of the step; None if it has none."""
    has_state_files: bool = False
    scheme: Scheme = "generations"

    def keeps_sums_of(self, spec: RegionSpec) -> bool:
        """True if committed versions of such a region have checksums."""
        return self.piece_bytes is not None and (spec.slots == 2 or self.scheme == "journal")


def file_name(number: int) -> str:
    """The name of a data file."""
    return f"homes-{number}.bin"


def state_file_name(number: int) -> str:
    """The name of a file of the small state."""
    return f"state-{number}.bin"


def check_identity(identity: Mapping[str, str]) -> None:
    """Refuses an identity that is not text to text. Raises `UsageError`."""
    for key, value in identity.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"a store's identity maps text to text, not {key!r:.80} to {value!r:.80}")


def check_step(step: int) -> None:
    """Refuses a step that is not a whole number from 0. Raises `UsageError`."""
    if type(step) is not int or not 0 <= step <= _LARGEST_STEP:
        raise UsageError(f"a step is a whole number from 0, not {step!r:.80}")


def check_piece_bytes(piece_bytes: int | None) -> None:
    """Refuses a length of pieces that a manifest cannot have. Raises `UsageError`."""
    if piece_bytes is not None and not _is_piece_length(piece_bytes):
        raise UsageError(
            f"a checksum covers a multiple of {ALIGNMENT_BYTES} bytes, at most {_LARGEST_PIECE}, not {piece_bytes!r:.40}"
        )


def _is_piece_length(piece_bytes: object) -> bool:
    return (
        type(piece_bytes) is int
        and ALIGNMENT_BYTES <= piece_bytes <= _LARGEST_PIECE
        and piece_bytes % ALIGNMENT_BYTES == 0
    )


def check_room_for_sums(content: bytes, manifest: Manifest) -> None:
    """Refuses a store whose manifest would be too long once it has all its checksums.

    Raises `UsageError`.
    """
    if manifest.piece_bytes is None:
        return
    pieces = sum(-(-entry.spec.nbytes // manifest.piece_bytes) for entry in manifest.regions.values())
    growth = _SUM_DIGITS * pieces + _ROOM_FOR_NUMBERS * len(manifest.regions)
    needed = parsed_bytes(content) + _PARSED_GROWTH * growth
    if len(content) + growth > LIMIT_BYTES or needed > _room_bytes(content, sum(manifest.file_bytes)):
        raise UsageError(
            f"{pieces} checksums make a manifest above {LIMIT_BYTES} bytes: let one cover more than "
            f"{manifest.piece_bytes} bytes"
        )


def write_manifest(manifest: Manifest, kept: dict[str, tuple[RegionEntry, str]] | None = None) -> bytes:
    """The manifest as bytes; about 200 a region.

    Args:
        manifest: what it says.
        kept: by name, the regions and their texts of the manifest before. A commit of a journal
            changes few of them: the others are taken from here, and those that changed put in.

    Raises:
        UsageError: more regions than a manifest may hold.
    """
    body: dict[str, Any] = {
        "identity": dict(manifest.identity),
        "alignment_bytes": ALIGNMENT_BYTES,
        "generation": manifest.generation,
        "step": manifest.step,
        "piece_bytes": manifest.piece_bytes,
        "has_state_files": manifest.has_state_files,
        "state": None
        if manifest.state is None
        else {"file": manifest.state.file, "nbytes": manifest.state.nbytes, "checksum": manifest.state.checksum},
        "files": [{"name": file_name(number), "nbytes": size} for number, size in enumerate(manifest.file_bytes)],
    }
    if manifest.scheme == "journal":
        body["scheme"] = "journal"
    kept = {} if kept is None else kept
    for name, entry in manifest.regions.items():
        known = kept.get(name)
        if known is None or known[0] != entry:
            kept[name] = entry, _canonical(_region(entry))
    texts = {name: kept[name][1] for name in manifest.regions}
    parts = {key: _canonical(value) for key, value in body.items()}
    checksum = _checksum(_joined(sorted((parts | {"regions": _joined(sorted(texts.items()))}).items())))
    fields = {"format": FORMAT, "version": VERSIONS[manifest.scheme], "checksum": checksum}
    # in the order of the layout
    text = _joined((parts | {"regions": _joined(texts.items())}).items())
    content = f'{_canonical(fields)[:-1]},"body":{text}}}'.encode()
    if len(content) > LIMIT_BYTES or parsed_bytes(content) > _room_bytes(content, sum(manifest.file_bytes)):
        raise UsageError(
            f"a store of {len(manifest.regions)} regions needs a manifest of {len(content)} bytes, above what is read of one: join small regions"
        )
    return content


def _region(entry: RegionEntry) -> dict[str, Any]:
    return {
        "nbytes": entry.spec.nbytes,
        "tag": entry.spec.tag,
        "tensors": [[t.name, t.dtype, list(t.shape), t.offset] for t in entry.spec.tensors],
        "current": entry.current,
        "sums": None if entry.sums is None else _hexadecimal(entry.sums),
        "slots": [
            {"file": place.file, "offset": place.offset, "step": step}
            for place, step in zip(entry.places, entry.steps, strict=True)
        ],
    }


def _joined(texts: Iterable[tuple[str, str]]) -> str:
    """A JSON object of keys and the texts of their values; canonical if they are sorted."""
    return "{" + ",".join([f"{_canonical(key)}:{text}" for key, text in texts]) + "}"


def _room_bytes(content: bytes, data_bytes: int) -> int:
    """Memory for the values of a manifest: as much as the data that it speaks of, and a little."""
    return ROOM_BYTES + data_bytes - _COPIES * len(content)


def read_manifest(content: bytes, *, path: Path, data_bytes: int = 0) -> Manifest:
    """Reads and checks a manifest.

    Memory: at most 16 MiB beside its own bytes and `data_bytes`.

    Args:
        content: at most `LIMIT_BYTES` bytes.
        path: for messages.
        data_bytes: of the files beside it that it speaks of.

    Raises:
        StoreError: torn, changed, of another version, or not a manifest.
    """
    try:
        whole = parse_json(content, room_bytes=_room_bytes(content, data_bytes))
    except ValueError as error:
        raise _broken(path, f"it is not JSON that can be read ({str(error)[:200]})") from error
    fields = _fields(whole, path, "it", {"format": str, "version": int, "checksum": str, "body": dict}, is_open=True)
    if fields["format"] != FORMAT:
        raise store_error(f"{path} is not a manifest of a memfit store: its format is {fields['format']!r:.80}")
    schemes: dict[int, Scheme] = {version: scheme for scheme, version in VERSIONS.items()}
    if fields["version"] not in schemes:
        raise store_error(
            f"{path} has format version {fields['version']!r:.40}; this memfit reads versions {' and '.join(map(str, schemes))}: "
            "use the version of memfit that wrote it"
        )
    _fields(whole, path, "it", {"format": str, "version": int, "checksum": str, "body": dict})
    if _checksum(_canonical(fields["body"])) != fields["checksum"]:
        raise _broken(path, "its checksum does not match")
    return _read_body(fields["body"], path, schemes[fields["version"]])


def _read_body(body: Any, path: Path, scheme: Scheme) -> Manifest:
    kinds: dict[str, Any] = {
        "identity": dict,
        "alignment_bytes": int,
        "generation": int,
        "step": (int, type(None)),
        "piece_bytes": (int, type(None)),
        "has_state_files": bool,
        "state": (dict, type(None)),
        "files": list,
        "regions": dict,
    }
    if scheme == "journal":
        kinds["scheme"] = str  # so that the version, which no checksum covers, cannot change alone
    fields = _fields(body, path, "its body", kinds)
    if scheme == "journal" and fields["scheme"] != scheme:
        raise _broken(path, f"its scheme is {fields['scheme']!r:.80}, not {scheme!r}")
    if fields["alignment_bytes"] != ALIGNMENT_BYTES:
        raise _broken(path, f"its blocks are {fields['alignment_bytes']!r:.40} bytes, not {ALIGNMENT_BYTES}")
    for key, value in fields["identity"].items():
        if not isinstance(value, str):
            raise _broken(path, f"identity {key!r:.80} is not text")
    if len(fields["files"]) > _MOST_FILES:
        raise _broken(path, f"it names {len(fields['files'])} files")
    file_bytes = tuple(_read_file(found, number, path) for number, found in enumerate(fields["files"]))
    piece_bytes = fields["piece_bytes"]
    if piece_bytes is not None and not _is_piece_length(piece_bytes):
        raise _broken(path, f"its checksums cover {piece_bytes!r:.40} bytes each")
    regions = {name: _read_region(name, found, path, piece_bytes) for name, found in fields["regions"].items()}
    problem = _problem_of_places(file_bytes, regions, scheme)
    if problem is not None:
        raise _broken(path, problem)
    step = _number(fields["step"], path, "step", none_allowed=True)
    for name, entry in regions.items():
        if step is None and any(found is not None for found in entry.steps):
            raise _broken(path, f"region {name!r:.80} has a committed slot, but no step is committed")
        has_sums = piece_bytes is not None and (entry.spec.slots == 2 or scheme == "journal")
        is_summed = has_sums and entry.steps[entry.current] is not None
        if is_summed != (entry.sums is not None):
            raise _broken(path, f"region {name!r:.80} should have {'' if is_summed else 'no '}checksums")
    state = _read_state(fields["state"], path)
    if state is not None and (step is None or not fields["has_state_files"]):
        raise _broken(path, "it has a state, but no step or no files for it")
    return Manifest(
        identity=fields["identity"],
        file_bytes=file_bytes,
        regions=regions,
        generation=_number(fields["generation"], path, "generation") or 0,
        step=step,
        piece_bytes=piece_bytes,
        state=state,
        has_state_files=fields["has_state_files"],
        scheme=scheme,
    )


def _problem_of_places(file_bytes: Sequence[int], regions: Mapping[str, RegionEntry], scheme: Scheme) -> str | None:
    """Returns the problem with where slots lie, or None.

    Slots that share room may do so in a journal, unless both are current or one region's.
    """

    def ranges(entry: RegionEntry, places: Sequence[SlotPlace]) -> list[tuple[int, int, int]]:
        return [(place.file, place.offset, entry.spec.nbytes) for place in places]

    if scheme == "generations":
        return check_places(file_bytes, [found for entry in regions.values() for found in ranges(entry, entry.places)])
    for entry in regions.values():
        problem = check_places(file_bytes, ranges(entry, entry.places))
        if problem is not None:
            return problem
    current = [found for entry in regions.values() for found in ranges(entry, [entry.places[entry.current]])]
    return check_places(file_bytes, current)


def _read_state(found: Any, path: Path) -> StateEntry | None:
    if found is None:
        return None
    fields = _fields(found, path, "its state", {"file": int, "nbytes": int, "checksum": int})
    if fields["file"] not in (0, 1) or not 0 <= fields["nbytes"] <= STATE_LIMIT_BYTES:
        raise _broken(path, f"its state has {fields['nbytes']!r:.40} bytes in file {fields['file']!r:.40}")
    if not 0 <= fields["checksum"] < 1 << 32:
        raise _broken(path, f"its state has the checksum {fields['checksum']!r:.40}")
    return StateEntry(file=fields["file"], nbytes=fields["nbytes"], checksum=fields["checksum"])


def _read_file(found: Any, number: int, path: Path) -> int:
    fields = _fields(found, path, f"file {number}", {"name": str, "nbytes": int})
    # Names are fixed by position, so that a manifest cannot point outside of its directory.
    if fields["name"] != file_name(number):
        raise _broken(path, f"file {number} is called {fields['name']!r:.80}")
    size = fields["nbytes"]
    if not 0 <= size <= LARGEST_BYTES or size % ALIGNMENT_BYTES:
        raise _broken(path, f"file {number} has {size!r:.40} bytes")
    return size


def _read_region(name: str, found: Any, path: Path, piece_bytes: int | None) -> RegionEntry:
    what = f"region {name!r:.80}"
    kinds = {"nbytes": int, "tag": str, "tensors": list, "current": int, "sums": (str, type(None)), "slots": list}
    fields = _fields(found, path, what, kinds)
    spec = RegionSpec(
        nbytes=fields["nbytes"],
        slots=len(fields["slots"]),
        tag=fields["tag"],
        tensors=tuple(_read_tensor(tensor, path, what) for tensor in fields["tensors"]),
    )
    try:
        check_spec(name, spec)
    except UsageError as error:
        raise _broken(path, str(error)) from error
    places: list[SlotPlace] = []
    steps: list[int | None] = []
    for slot in fields["slots"]:
        parts = _fields(slot, path, what, {"file": int, "offset": int, "step": (int, type(None))})
        places.append(SlotPlace(file=parts["file"], offset=parts["offset"]))
        steps.append(_number(parts["step"], path, f"{what}: step", none_allowed=True))
    if not 0 <= fields["current"] < spec.slots:
        raise _broken(path, f"{what} has slot {fields['current']!r:.40} current, of {spec.slots}")
    return RegionEntry(
        spec=spec,
        places=tuple(places),
        steps=tuple(steps),
        current=fields["current"],
        sums=_read_sums(fields["sums"], spec.nbytes, piece_bytes, path, what),
    )


def _read_tensor(found: Any, path: Path, what: str) -> TensorPlace:
    # What the values must be is asked by `check_spec`; here, only that they have the types of a
    # place.
    if not isinstance(found, list) or len(found) != 4 or not isinstance(found[2], list):
        raise _broken(path, f"{what}: a tensor is not name, dtype, shape and offset")
    name, dtype, shape, offset = found
    if not isinstance(name, str) or not isinstance(dtype, str) or type(offset) is not int:
        raise _broken(path, f"{what}: a tensor is not name, dtype, shape and offset")
    return TensorPlace(name=name, dtype=dtype, shape=tuple(shape), offset=offset)


def _read_sums(
    found: str | None, nbytes: int, piece_bytes: int | None, path: Path, what: str
) -> tuple[int, ...] | None:
    if found is None:
        return None
    if piece_bytes is None or len(found) != _SUM_DIGITS * -(-nbytes // piece_bytes) or not _SUMS.fullmatch(found):
        raise _broken(path, f"{what}: its checksums are not {_SUM_DIGITS} hexadecimal digits for each piece")
    return tuple(int(found[n : n + _SUM_DIGITS], 16) for n in range(0, len(found), _SUM_DIGITS))


def _hexadecimal(sums: Sequence[int]) -> str:
    return struct.pack(f">{len(sums)}I", *sums).hex()


def _fields(found: Any, path: Path, what: str, kinds: Mapping[str, Any], *, is_open: bool = False) -> dict[str, Any]:
    """The fields of a JSON object, each of its kind; with `is_open`, others are left for later."""
    if not isinstance(found, dict):
        raise _broken(path, f"{what} is not an object")
    for key, kind in kinds.items():
        # `bool` is an `int` to Python, not to the format.
        if key not in found or not isinstance(found[key], kind) or (isinstance(found[key], bool) and kind is not bool):
            raise _broken(path, f"{what} has no proper {key!r}")
    extra = sorted(found.keys() - kinds.keys())
    if extra and not is_open:
        raise _broken(path, f"{what} has the unknown field {extra[0]!r:.80}")
    return found


def _number(found: int | None, path: Path, what: str, *, none_allowed: bool = False) -> int | None:
    if (found is None and none_allowed) or (found is not None and 0 <= found <= _LARGEST_STEP):
        return found
    raise _broken(path, f"{what} is {found!r:.40}")


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _broken(path: Path, problem: str) -> StoreError:
    return store_error(
        f"the manifest {path} is damaged: {problem}; restore it from a copy, or remove the directory and start again"
    )
