"""The safetensors container: a header of known size, then raw bytes.

In: names, dtypes and shapes; or the bytes of a header that anybody may have written. Out: where
each tensor lies; or an error.

A file is 8 bytes (the header's length, little endian), the header (JSON: name -> dtype, shape,
first and last byte counted from the header's end; "__metadata__": text by text), and the tensors,
row-major, without gaps. Source: the format section of the safetensors README.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memfit.core.documents import ROOM_BYTES, parse_json
from memfit.core.errors import StoreError, UnsupportedError
from memfit.core.limits import round_up

# Tensor data begins on a page of the file, so that pieces of it can be moved by direct I/O.
DATA_ALIGNMENT_BYTES = 4096
LENGTH_BYTES = 8
# The limit that the reference reader sets, too.
HEADER_LIMIT_BYTES = 100_000_000
_ENTRY_BYTES = 500
_LONGEST_NAME = 4096
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 60

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor to be written: what a header tells of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor in a file.

    Attributes:
        begin, end: its bytes, counted from the beginning of the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """Contents of a file.

    Attributes:
        raw: the bytes that precede the tensors, length field included.
        entries: in the order of the file.
        metadata: text by text.
        file_bytes: length of the whole file.
    """

    raw: bytes
    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    file_bytes: int


def holds(dtype: torch.dtype) -> bool:
    """The format knows the dtype."""
    return dtype in _NAMES


def lay_out(
    tensors: Sequence[TensorSpec], metadata: Mapping[str, str], alignment_bytes: int = DATA_ALIGNMENT_BYTES
) -> Header:
    """Places tensors in a file: wide dtypes first, so that each begins at a multiple of its
    element's size.

    Args:
        tensors: to be written.
        metadata: text by text.
        alignment_bytes: where the first of them begins; a multiple of 8.

    Raises:
        UnsupportedError: a dtype that the format does not know.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    placed: list[tuple[TensorSpec, int]] = []
    end = 0
    for tensor in sorted(tensors, key=lambda t: -t.dtype.itemsize):
        if tensor.name in fields:
            raise UnsupportedError(
                f"{tensor.name!r:.200} is twice among what is written, or a word of the format: rename it"
            )
        if tensor.dtype not in _NAMES:
            raise UnsupportedError(
                f"{tensor.name!r} has dtype {tensor.dtype}, which safetensors cannot hold: convert it, or register it as a non-persistent buffer"
            )
        fields[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        placed.append((tensor, end))
        end += tensor.nbytes
    try:
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(f"the name of a tensor is no text ({error}): rename it") from error
    length = round_up(LENGTH_BYTES + len(text), alignment_bytes) - LENGTH_BYTES
    raw = length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)
    return Header(
        raw=raw,
        entries=tuple(
            TensorEntry(
                name=t.name, dtype=t.dtype, shape=t.shape, begin=len(raw) + begin, end=len(raw) + begin + t.nbytes
            )
            for t, begin in placed
        ),
        metadata=dict(metadata),
        file_bytes=len(raw) + end,
    )


def read_header(raw: bytes, *, path: Path, file_bytes: int) -> Header:
    """Reads and checks a header that anybody may have written.

    Memory: at most 16 MiB beside as many bytes as the file has.

    Args:
        raw: the length field and the header.
        path: for messages.
        file_bytes: length of the file.

    Raises:
        StoreError: not a header, or one that lies: sizes that do not multiply to the bytes, gaps,
            overlaps, bytes beyond the file.
    """
    try:
        room_bytes = ROOM_BYTES + file_bytes - 2 * len(raw) - _ENTRY_BYTES * raw.count(b"{")
        fields = parse_json(raw[LENGTH_BYTES:], room_bytes=room_bytes)
    except ValueError as error:
        raise damaged(path, f"its header cannot be read ({str(error)[:200]})") from error
    if not isinstance(fields, dict):
        raise damaged(path, "its header is not a JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged(path, "its metadata is not text by text")
    entries = sorted(
        (_entry(name, field, len(raw), path) for name, field in fields.items()), key=lambda e: (e.begin, e.end)
    )
    position = len(raw)
    for entry in entries:
        if entry.begin != position:
            raise damaged(path, f"the bytes of {entry.name!r:.200} do not follow those before them (gap or overlap)")
        position = entry.end
    if position != file_bytes:
        raise damaged(path, f"its header tells of {position} bytes, the file has {file_bytes}")
    return Header(raw=raw, entries=tuple(entries), metadata=metadata, file_bytes=file_bytes)


def _entry(name: str, field: Any, base: int, path: Path) -> TensorEntry:
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise damaged(path, f"the entry of {name!r:.200} is not dtype, shape and data_offsets")
    if len(name) > _LONGEST_NAME:
        raise damaged(path, f"the name {name!r:.80}... has {len(name)} characters")
    dtype, shape, offsets = _DTYPES.get(str(field["dtype"])), field["shape"], field["data_offsets"]
    if dtype is None:
        raise damaged(path, f"{name!r:.200} has a dtype {str(field['dtype'])[:40]!r} that memfit does not know")
    if not is_shape(shape):
        raise damaged(path, f"the shape of {name!r:.200} is invalid: {shape!r:.200}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise damaged(path, f"the offsets of {name!r:.200} are not two whole numbers from 0 on")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise damaged(
            path,
            f"{name!r:.200} of shape {str(shape)[:200]} and {dtype} does not take the {offsets[1] - offsets[0]} bytes it is given",
        )
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), begin=base + offsets[0], end=base + offsets[1])


def is_shape(value: Any) -> bool:
    """A list that can be the shape of a tensor: its product, zeros apart, is one that addresses can
    hold.

    Bounded before it is multiplied: the product of a long list of long numbers would take hours.
    """
    return (
        isinstance(value, list)
        and len(value) <= _MOST_DIMENSIONS
        and all(_is_size(size) for size in value)
        and math.prod(max(size, 1) for size in value) <= _MOST_ELEMENTS
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_ELEMENTS


def damaged(path: Path, why: str) -> StoreError:
    """The error for a file that is not what it says."""
    return StoreError(f"{path} is damaged or was not written by memfit: {why}; take another save, or write it again")
