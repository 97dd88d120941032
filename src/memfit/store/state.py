"""The small state of a step as bytes: numbers, texts and containers as JSON, tensors raw, in one
safetensors block.

In: nested dictionaries, such as `state_dict`s and generators' states. Out: bytes; and from bytes
that anybody may have written, the same values with the same types and bits, or an error. Nothing is
pickled and nothing is called.

[Note: state format]
A safetensors block whose tensor `state.json` (bytes) is a JSON text; the other tensors are named by
number. None, truth values, whole numbers, finite floats, texts, lists and dictionaries with texts
as keys are JSON's own. What JSON has no word for is an object whose key "$" tells the type: {"$":
"tuple", "items": [...]}, {"$": "tensor", "name": "3"}. A tensor that is a single number is kept
once for all values that equal it, bit for bit; each gets one of its own. Floats are written with
all their digits, so that they come back bit for bit.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from memfit import devices
from memfit.core.documents import parse_json, parsed_bytes
from memfit.core.errors import StoreError, UnsupportedError, UsageError
from memfit.core.limits import MIB, format_bytes, round_up
from memfit.store.checksums import ALIGNMENT_BYTES, checksum
from memfit.store.files import FileHandle, explain, store_error, write_all
from memfit.store.manifest import STATE_LIMIT_BYTES, StateEntry
from memfit.tensors.container import TensorSpec, holds, lay_out

_TEXT_NAME = "state.json"
_LENGTH_BYTES = 8
_TAG = "$"
_DEEPEST = 100
_DEEPEST_TEXT = 4 * _DEEPEST + 4
"""Depth of the JSON text: a value takes up to three containers a level (an object, its items, a
pair).
"""
_ROOM_BYTES = 256 * MIB
"""Memory for numbers, texts and containers of a state, tensors apart: some two million numbers in
lists.
"""
_COPIES = 2
"""Depth of the values: as JSON has them, and as they were."""
_TENSOR_BYTES = 1024
_COUNTERS = {torch.float32: "F32", torch.float64: "F64", torch.int32: "I32", torch.int64: "I64"}
"""Dtypes of single numbers that are kept once however often they come."""
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,31}(:[0-9]{1,4})?")


def encode_state(state: Mapping[str, Any]) -> bytes:
    """The bytes of a state.

    Memory: twice its tensors while it is encoded, and those on a device once more.

    Args:
        state: None, truth values, numbers, texts, bytes, lists, tuples, sets, dictionaries (plain,
            ordered, `Counter`), torch's tensors, dtypes and devices, NumPy's arrays and numbers, in
            any nesting up to 100 deep.

    Raises:
        UnsupportedError: anything else, named by its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        text = json.dumps(_encode(dict(state), _Place("state"), tensors), separators=(",", ":"), allow_nan=False)
    except UnsupportedError:
        raise
    except ValueError as error:  # A whole number of more than some 4300 digits.
        raise UnsupportedError(f"the state has a number that cannot be written: {error}") from error
    needed = _COPIES * parsed_bytes(text.encode()) + _TENSOR_BYTES * len(tensors)
    if needed > _ROOM_BYTES:
        raise UnsupportedError(
            f"the state has so many numbers, texts and containers that reading them could take {format_bytes(needed)}, more than {format_bytes(_ROOM_BYTES)}: "
            "keep long lists as tensors or arrays"
        )
    tensors[_TEXT_NAME] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    specs = [TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in tensors.items()]
    header = lay_out(specs, {}, alignment_bytes=_LENGTH_BYTES)
    return b"".join([header.raw, *(_bytes_of(tensors[entry.name]) for entry in header.entries)])


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def decode_state(content: bytes) -> dict[str, Any]:
    """Returns the value that `encode_state` was given. Tensors are on the CPU.

    Memory: twice the bytes, and at most 256 MiB for numbers, texts and containers.

    Raises:
        StoreError: these are not the bytes of a state.
    """
    try:
        header = content[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")]
        room = _ROOM_BYTES - _TENSOR_BYTES * header.count(b"{")
        if room < 0:
            raise _damaged(f"it has {header.count(b'{')} tensors")
        tensors = safetensors.torch.load(content)
        text = tensors.pop(_TEXT_NAME).numpy().tobytes()
        found = parse_json(text, room_bytes=room // _COPIES, deepest=_DEEPEST_TEXT, any_text=True)
        state = _decode(found, tensors, 0)
    except StoreError:
        raise
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise _damaged(f"{type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise _damaged("it is not a dictionary with texts as keys")
    return cast("dict[str, Any]", state)


# ---- to JSON


_PLAIN = frozenset((type(None), bool, int, str))


class _Place:
    """Where a value stands in a state; put into words only for a message."""

    __slots__ = ("_name", "_outer", "depth")

    def __init__(self, name: object, outer: _Place | None = None) -> None:
        self._name, self._outer = name, outer
        self.depth: int = 0 if outer is None else outer.depth + 1

    def __str__(self) -> str:
        words = "state" if self._outer is None else f"{self._outer}[{self._name!r:.80}]"
        return f"{words:.200}"


def _encode(value: Any, where: _Place, tensors: dict[str, torch.Tensor]) -> Any:
    if where.depth > _DEEPEST:
        raise UnsupportedError(f"{where} is nested more than {_DEEPEST} deep")

    def inner(part: Any, name: object) -> Any:
        if type(part) in _PLAIN and where.depth < _DEEPEST:
            return part  # as below, without a place for each number of a long list
        return _encode(part, _Place(name, where), tensors)

    kind = type(value)
    if kind in _PLAIN or (kind is float and math.isfinite(value)):
        return value

    if kind is list:
        return [inner(part, n) for n, part in enumerate(value)]
    if kind in (tuple, set, frozenset):
        return {_TAG: kind.__name__, "items": [inner(part, n) for n, part in enumerate(value)]}
    if kind is dict and all(type(key) is str and key != _TAG for key in value):
        return {key: inner(part, key) for key, part in value.items()}
    if kind in (dict, OrderedDict, Counter):
        return {_TAG: kind.__name__, "items": [[inner(key, "key"), inner(part, key)] for key, part in value.items()]}
    return _encode_single(value, where, tensors)


def _encode_single(value: Any, where: _Place, tensors: dict[str, torch.Tensor]) -> Any:
    """Encodes a value that is no container and that JSON cannot express."""
    kind = type(value)
    if kind is float:
        return {_TAG: "float", "value": repr(value)}
    if kind is bytes:
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _encode_numbers(value, where, tensors)
    if kind in (torch.dtype, torch.device):
        return {_TAG: kind.__name__, "name": str(value).removeprefix("torch.")}
    raise UnsupportedError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be kept without pickling: keep numbers, texts, "
        "tensors and containers of them there"
    )


def _encode_numbers(value: Any, where: _Place, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise UnsupportedError(f"{where} is a tensor of layout {value.layout}: keep a dense one there")
        if value.is_meta:
            raise UnsupportedError(f"{where} is a tensor without values (of the meta device): give it some")
        tensor = value.detach().cpu().contiguous()
        found: dict[str, Any] = {_TAG: "tensor"}
    else:
        try:
            tensor = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError) as error:
            raise UnsupportedError(f"{where} is a NumPy array of {value.dtype}, which torch does not have") from error
        found = {_TAG: "array" if isinstance(value, np.ndarray) else "scalar"}
    if not holds(tensor.dtype):
        raise UnsupportedError(f"{where} has the dtype {tensor.dtype}, which a state cannot keep: convert it")
    found["name"] = _name_of_same(tensor, tensors)
    return found


def _name_of_same(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    """Keeps a tensor and gives its name.

    Counters are mostly one number many times: it is kept once.
    """
    name = str(len(tensors))
    kind = None if tensor.shape else _COUNTERS.get(tensor.dtype)
    if kind is not None:
        number = tensor.item()
        if not math.isnan(number):  # of which there are many
            name = f"{kind} {float(number).hex() if kind[0] == 'F' else number}"
    tensors[name] = tensor
    return name


# ---- from JSON


def _decode(value: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth > _DEEPEST:
        raise _damaged(f"it is nested more than {_DEEPEST} deep")
    if isinstance(value, list):
        return [_decode(part, tensors, depth + 1) for part in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(part, tensors, depth + 1) for key, part in value.items()}
    read = _READERS.get(str(value[_TAG]))
    if read is None:
        raise _damaged(f"it has a value of the unknown kind {str(value[_TAG])!r:.80}")
    return read(value, tensors, depth + 1)


_Reader = Callable[[dict[str, Any], Mapping[str, torch.Tensor], int], Any]


def _items(make: Callable[[list[Any]], Any]) -> _Reader:
    def read(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
        return make([_decode(part, tensors, depth) for part in value["items"]])

    return read


def _pairs(make: Callable[[dict[Any, Any]], Any]) -> _Reader:
    def read(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
        return make({_decode(k, tensors, depth): _decode(v, tensors, depth) for k, v in value["items"]})

    return read


def _read_float(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> float:
    if value["value"] not in ("nan", "inf", "-inf"):
        raise _damaged(f"it has the number {value['value']!r:.40}")
    return float(value["value"])


def _read_bytes(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> bytes:
    try:
        return base64.b64decode(value["base64"], validate=True)
    except binascii.Error as error:
        raise _damaged("it has bytes that are not base64") from error


def _read_dtype(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> torch.dtype:
    # By comparing names: a name from a file is not looked up among torch's attributes.
    for found in vars(torch).values():
        if isinstance(found, torch.dtype) and str(found) == f"torch.{value['name']}":
            return found
    raise _damaged(f"it has the dtype {value['name']!r:.40}")


def _read_device(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> torch.device:
    name = str(value["name"])
    if _DEVICE.fullmatch(name) is None:
        raise _damaged(f"it has the device {name!r:.40}")
    try:
        device = torch.device(name)
    except RuntimeError:  # a kind of device that this torch does not know
        raise _damaged(f"it has the device {name!r:.40}") from None
    if device.type != "cpu" and not devices.is_accelerator(device):  # meta holds no values
        raise _damaged(f"it has the device {name!r:.40}")
    return device


def _read_tensor(value: dict[str, Any], tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    found = tensors[value["name"]]
    if not found.shape:
        found = found.clone()  # several values may have it
    if value[_TAG] == "tensor":
        return found
    return found.numpy() if value[_TAG] == "array" else found.numpy()[()]


_READERS: dict[str, _Reader] = {
    "float": _read_float,
    "tuple": _items(tuple),
    "set": _items(set),
    "frozenset": _items(frozenset),
    "dict": _pairs(dict),
    "OrderedDict": _pairs(OrderedDict),
    "Counter": _pairs(Counter),
    "bytes": _read_bytes,
    "tensor": _read_tensor,
    "array": _read_tensor,
    "scalar": _read_tensor,
    "dtype": _read_dtype,
    "device": _read_device,
}


def _damaged(problem: str) -> StoreError:
    return store_error(f"the state of the step cannot be read: {problem}; it was not written by this version of memfit")


# The small state of a step: a few numbers and tensors, whole, in the one of two files that is not
# current.
#
# In: bytes. Out: bytes, checked. Both files have their blocks claimed at creation; a state that
# outgrows its file claims more before it is written, and the committed one stays where it is.

_PART_BYTES = MIB


def write_state(handles: Sequence[FileHandle], content: bytes, *, current: StateEntry | None) -> StateEntry:
    """Writes a state beside the current one.

    It becomes current by a manifest that names the entry returned.

    Args:
        handles: the two files.
        content: the state.
        current: the committed one, which stays.

    Raises:
        UsageError: longer than a state may be.
        StoreError: the disk is full or broken; the committed state is whole and this may be
            repeated.
    """
    if len(content) > STATE_LIMIT_BYTES:
        raise UsageError(
            f"a state of {format_bytes(len(content))} is more than a store keeps beside its blocks "
            f"({format_bytes(STATE_LIMIT_BYTES)}): save what is large on its own"
        )
    number = 0 if current is None else 1 - current.file
    handle = handles[number]
    try:
        missing_bytes = round_up(len(content), ALIGNMENT_BYTES) - handle.size_bytes()
        if missing_bytes > 0:
            handle.allocate(handle.size_bytes(), missing_bytes)
        write_all(handle.operations, handle.descriptor, content)
    except OSError as error:
        raise explain(
            error, doing="write the state (the step before is whole and current)", path=handle.path
        ) from error
    return StateEntry(file=number, nbytes=len(content), checksum=checksum(content))


def read_state(handles: Sequence[FileHandle], entry: StateEntry) -> bytes:
    """The committed state. It is summed a MiB at a time before memory of its length is taken.

    Raises:
        StoreError: it is damaged, or cannot be read.
    """
    handle = handles[entry.file]
    try:
        part = bytearray(min(_PART_BYTES, entry.nbytes))
        found = position = 0
        while position < entry.nbytes:
            view = memoryview(part)[: min(len(part), entry.nbytes - position)]
            _fill(handle, view, position)
            found = checksum(view, found)
            position += view.nbytes
        if found != entry.checksum:
            raise store_error(
                f"{handle.path} is damaged: the state of the step (bytes 0 to {entry.nbytes}) has checksum {found:08x}, and "
                f"{entry.checksum:08x} was written; restore the store from a copy, or start again"
            )
        content = bytearray(entry.nbytes)
        _fill(handle, memoryview(content), 0)
    except _EndedError as error:
        raise store_error(
            f"{handle.path} is damaged: the state of the step has {entry.nbytes} bytes and the file ends at byte "
            f"{error.position}; restore the store from a copy, or start again"
        ) from error
    except StoreError:
        raise
    except OSError as error:
        raise explain(error, doing="read the state", path=handle.path) from error
    return bytes(content)


class _EndedError(Exception):
    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def _fill(handle: FileHandle, view: memoryview, offset: int) -> None:
    while view.nbytes:
        moved = handle.operations.pread(handle.descriptor, view, offset)
        if moved <= 0:
            raise _EndedError(offset)
        view, offset = view[moved:], offset + moved
