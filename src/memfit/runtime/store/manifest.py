"""The manifest: one small JSON file that says what a store holds and which version of it is current.

In: bytes from a disk, trusted in nothing. Out: a `Manifest`, every field of it checked, or a `StoreError`.

[Note: format]
`{"format": "memfit-store", "version": 1, "checksum": "...", "body": {...}}`. The checksum is SHA-256 over the body, as
JSON with sorted keys and no spaces. Readers refuse other versions and unknown fields: a field that an older reader
skips could be the one that says that its data is compressed. A slot's step is the last step that was committed in it;
the slot that is not current may have been written since, so its step is history, not a promise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from memfit.core.errors import StoreError, UsageError
from memfit.core.units import MIB
from memfit.runtime.store.explain import store_error
from memfit.runtime.store.layout import LARGEST_BYTES, RegionSpec, SlotPlace, check_places, check_spec
from memfit.runtime.store.memory import ALIGNMENT_BYTES

FORMAT = "memfit-store"
VERSION = 1
MANIFEST_NAME = "manifest.json"
NEW_MANIFEST_NAME = "manifest.json.new"
LIMIT_BYTES = 16 * MIB
"""A longer manifest is not read: some 80,000 regions fit. Hostile JSON grows some twentyfold in memory."""

_LARGEST_STEP = (1 << 63) - 1
_MOST_FILES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionEntry:
    """A region as the manifest has it."""

    spec: RegionSpec
    places: tuple[SlotPlace, ...]
    steps: tuple[int | None, ...]
    """Of each slot, the last step committed in it; None if none was."""
    current: int
    """The slot that holds the committed version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a store holds."""

    identity: Mapping[str, str]
    """Whose store it is: model, plan, whatever the maker wants to find again."""
    file_bytes: tuple[int, ...]
    regions: Mapping[str, RegionEntry]
    generation: int
    """Number of commits, over all openings."""
    step: int | None
    """The committed step; None before the first commit."""


def file_name(number: int) -> str:
    """The name of a data file."""
    return f"homes-{number}.bin"


def check_identity(identity: Mapping[str, str]) -> None:
    """Refuses an identity that is not text to text. Raises `UsageError`."""
    for key, value in identity.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"a store's identity maps text to text, not {key!r:.80} to {value!r:.80}")


def check_step(step: int) -> None:
    """Refuses a step that is not a whole number from 0. Raises `UsageError`."""
    if type(step) is not int or not 0 <= step <= _LARGEST_STEP:
        raise UsageError(f"a step is a whole number from 0, not {step!r:.80}")


def write_manifest(manifest: Manifest) -> bytes:
    """The manifest as bytes; about 200 a region.

    Raises:
        UsageError: more regions than a manifest may hold.
    """
    body = {
        "identity": dict(manifest.identity),
        "alignment_bytes": ALIGNMENT_BYTES,
        "generation": manifest.generation,
        "step": manifest.step,
        "files": [{"name": file_name(number), "nbytes": size} for number, size in enumerate(manifest.file_bytes)],
        "regions": {
            name: {
                "nbytes": entry.spec.nbytes,
                "tag": entry.spec.tag,
                "current": entry.current,
                "slots": [
                    {"file": place.file, "offset": place.offset, "step": step}
                    for place, step in zip(entry.places, entry.steps, strict=True)
                ],
            }
            for name, entry in manifest.regions.items()
        },
    }
    text = _canonical(body)
    whole = {"format": FORMAT, "version": VERSION, "checksum": _checksum(text), "body": body}
    content = json.dumps(whole, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    if len(content) > LIMIT_BYTES:
        raise UsageError(
            f"a store of {len(manifest.regions)} regions needs a manifest above {LIMIT_BYTES} bytes: join small regions"
        )
    return content


def read_manifest(content: bytes, *, path: Path) -> Manifest:
    """Reads and checks a manifest.

    Args:
        content: at most `LIMIT_BYTES` bytes; reading takes up to some twenty times as much.
        path: for messages.

    Raises:
        StoreError: torn, changed, of another version, or not a manifest.
    """
    try:
        whole = json.loads(content, object_pairs_hook=_without_repetition, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"it is not JSON ({type(error).__name__})") from error
    fields = _fields(whole, path, "it", {"format": str, "version": int, "checksum": str, "body": dict}, is_open=True)
    if fields["format"] != FORMAT:
        raise store_error(f"{path} is not a manifest of a memfit store: its format is {fields['format']!r:.80}")
    if fields["version"] != VERSION:
        raise store_error(
            f"{path} has format version {fields['version']!r:.40}; this memfit reads version {VERSION}: "
            "use the version of memfit that wrote it"
        )
    _fields(whole, path, "it", {"format": str, "version": int, "checksum": str, "body": dict})
    if _checksum(_canonical(fields["body"])) != fields["checksum"]:
        raise _broken(path, "its checksum does not match")
    return _read_body(fields["body"], path)


def _read_body(body: Any, path: Path) -> Manifest:
    kinds = {
        "identity": dict,
        "alignment_bytes": int,
        "generation": int,
        "step": (int, type(None)),
        "files": list,
        "regions": dict,
    }
    fields = _fields(body, path, "its body", kinds)
    if fields["alignment_bytes"] != ALIGNMENT_BYTES:
        raise _broken(path, f"its blocks are {fields['alignment_bytes']!r:.40} bytes, not {ALIGNMENT_BYTES}")
    for key, value in fields["identity"].items():
        if not isinstance(value, str):
            raise _broken(path, f"identity {key!r:.80} is not text")
    if len(fields["files"]) > _MOST_FILES:
        raise _broken(path, f"it names {len(fields['files'])} files")
    file_bytes = tuple(_read_file(found, number, path) for number, found in enumerate(fields["files"]))
    regions = {name: _read_region(name, found, path) for name, found in fields["regions"].items()}
    ranges = [(place.file, place.offset, entry.spec.nbytes) for entry in regions.values() for place in entry.places]
    problem = check_places(file_bytes, ranges)
    if problem is not None:
        raise _broken(path, problem)
    step = _number(fields["step"], path, "step", none_allowed=True)
    for name, entry in regions.items():
        if step is None and any(found is not None for found in entry.steps):
            raise _broken(path, f"region {name!r:.80} has a committed slot, but no step is committed")
    return Manifest(
        identity=fields["identity"],
        file_bytes=file_bytes,
        regions=regions,
        generation=_number(fields["generation"], path, "generation") or 0,
        step=step,
    )


def _read_file(found: Any, number: int, path: Path) -> int:
    fields = _fields(found, path, f"file {number}", {"name": str, "nbytes": int})
    # Names are fixed by position, so that a manifest cannot point outside of its directory.
    if fields["name"] != file_name(number):
        raise _broken(path, f"file {number} is called {fields['name']!r:.80}")
    size = fields["nbytes"]
    if not 0 <= size <= LARGEST_BYTES or size % ALIGNMENT_BYTES:
        raise _broken(path, f"file {number} has {size!r:.40} bytes")
    return size


def _read_region(name: str, found: Any, path: Path) -> RegionEntry:
    what = f"region {name!r:.80}"
    fields = _fields(found, path, what, {"nbytes": int, "tag": str, "current": int, "slots": list})
    spec = RegionSpec(nbytes=fields["nbytes"], slots=len(fields["slots"]), tag=fields["tag"])
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
    return RegionEntry(spec=spec, places=tuple(places), steps=tuple(steps), current=fields["current"])


def _fields(found: Any, path: Path, what: str, kinds: Mapping[str, Any], *, is_open: bool = False) -> dict[str, Any]:
    """The fields of a JSON object, each of its kind; with `is_open`, others are left for later."""
    if not isinstance(found, dict):
        raise _broken(path, f"{what} is not an object")
    for key, kind in kinds.items():
        # `bool` is an `int` to Python, not to the format.
        if key not in found or not isinstance(found[key], kind) or isinstance(found[key], bool):
            raise _broken(path, f"{what} has no proper {key!r}")
    extra = sorted(found.keys() - kinds.keys())
    if extra and not is_open:
        raise _broken(path, f"{what} has the unknown field {extra[0]!r:.80}")
    return found


def _number(found: int | None, path: Path, what: str, *, none_allowed: bool = False) -> int | None:
    if (found is None and none_allowed) or (found is not None and 0 <= found <= _LARGEST_STEP):
        return found
    raise _broken(path, f"{what} is {found!r:.40}")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of the format")


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _broken(path: Path, problem: str) -> StoreError:
    return store_error(
        f"the manifest {path} is damaged: {problem}; restore it from a copy, or remove the directory and start again"
    )
