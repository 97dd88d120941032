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
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.core.documents import ROOM_BYTES, parse_json, parsed_bytes
from memfit.core.errors import StoreError, UsageError
from memfit.core.layout import Scheme
from memfit.core.units import MIB
from memfit.store.memory_ranges import ALIGNMENT_BYTES
from memfit.store.os_errors import store_error
from memfit.store.placement import LARGEST_BYTES, RegionSpec, SlotPlace, check_places, check_spec
from memfit.store.tensor_tables import TensorPlace

FORMAT = "memfit-store"
VERSIONS: dict[Scheme, int] = {"generations": 2, "journal": 3}
"""The format's version of each scheme: a reader that knows no journal refuses one by its version.
"""
MANIFEST_NAME = "manifest.json"
NEW_MANIFEST_NAME = "manifest.json.new"
PREPARED_MANIFEST_NAME = "manifest.json.prepared"
"""Manifest of a commit that waits for those of other stores; see `publish`, [Note: commit of
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
