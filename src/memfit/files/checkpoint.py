"""Reading tensors from a file that `torch.save` wrote (a checkpoint, as such files are called; the
runs that memfit commits are in `checkpoints`), without loading it.

In: a file. Out: what `TensorFile` gives for safetensors: names and places, then tensors copied into
memory that exists already.

[Note: places in a checkpoint]
Such a file is a zip archive of records: one is a pickle that says which tensors there are, each of
the others holds the bytes of one storage, stored as they are. torch's own restricted reader
(`weights_only=True`: tensors, numbers, texts, collections, nothing that is called) makes the
tensors on the device `meta`, without bytes, and notes where each storage lies. The bytes are then
read from there like those of any file, a piece at a time. Nothing is mapped: mapped pages that are
read count as resident.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from memfit.core.documents import ROOM_BYTES
from memfit.core.errors import StoreError, UsageError
from memfit.files.reader import TensorFile
from memfit.files.tensor_bytes import row_major_parts
from memfit.tensors.container import Header, TensorEntry, damaged
from memfit.tensors.trees import new_storage, typed_view

_KEYS = ("state_dict", "model_state_dict", "model", "module")
"""Under which programs keep the model's state in a checkpoint of several things.

The first that is there is taken.
"""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ROOM_OF_ANY_SIZE = b"\nbytearray\n"
"""Functions that torch's restricted reader would call with any number, which fill that many bytes
with zeros.
"""
_OBJECTS_PER_BYTE = 64
"""Bytes of memory for one of the pickle, at most: an empty container."""
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile put before every name."""


class CheckpointFile(TensorFile):
    """An open file of `torch.save`: a state dict, or a dictionary that has one under a usual key.

    See [Note: places in a checkpoint].

    Memory: the pickle's objects; one piece of 2 MiB while a tensor is read; a tensor of another
    memory order than row-major comes whole.

    Args:
        path: a regular file, or a link to one.

    Raises:
        StoreError: it cannot be opened, is no such file, is compressed, or holds what torch refuses
            to read with `weights_only=True`.
        UsageError: there is no state dict in it.
    """

    def _read_header(self, status: os.stat_result) -> Header:
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{self.path} is not a regular file")
        try:
            with zipfile.ZipFile(self.path) as archive:
                records = archive.infolist()
                pickles = [record for record in records if record.filename.endswith("data.pkl")]
                is_plain = all(record.compress_type == zipfile.ZIP_STORED for record in records)
                asks_for_room = is_plain and any(_ROOM_OF_ANY_SIZE in archive.read(record) for record in pickles)
        except (OSError, ValueError, NotImplementedError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
            raise StoreError(
                f"{self.path} is neither safetensors nor a zip archive of torch.save ({error}): save it again with safetensors, or with torch.save"
            ) from error
        if not is_plain:
            raise damaged(self.path, "its records are compressed, which torch.save's never are")
        if asks_for_room or _OBJECTS_PER_BYTE * sum(r.file_size for r in pickles) > ROOM_BYTES + status.st_size:
            raise damaged(self.path, "its pickle asks for more memory than tensors and their names take")
        try:
            content: object = torch.load(self.path, map_location="meta", weights_only=True)
        except Exception as error:  # whatever a file that lies provokes
            raise StoreError(
                f"{self.path} is not read with weights_only=True ({type(error).__name__}: {str(error)[:300]}): save the model's state_dict() alone"
            ) from error
        self._strides: dict[str, tuple[int, ...]] = {}
        state = _state_dict(content, self.path)
        entries = tuple(self._entry(name, tensor, status.st_size) for name, tensor in state.items())
        return Header(raw=b"", entries=entries, metadata={}, file_bytes=status.st_size)

    def _entry(self, name: str, tensor: torch.Tensor, file_bytes: int) -> TensorEntry:
        if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor) not in _PLAIN:
            raise StoreError(f"{self.path}: {name!r:.200} is no dense tensor; save it as one")
        storage = tensor.untyped_storage()
        place = getattr(storage, "_checkpoint_offset", None)
        size = tensor.dtype.itemsize
        span = (
            sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            if tensor.numel()
            else 0
        )
        within = int(tensor.storage_offset()) * size
        if place is None and span:
            raise StoreError(f"{self.path}: {name!r:.200} is no dense tensor; save it as one")
        begin = (place or 0) + within
        if within + span * size > storage.nbytes() or begin + span * size > file_bytes:
            raise damaged(self.path, f"{name!r:.200} should end at byte {begin + span * size} of {file_bytes}")
        if not tensor.is_contiguous():
            self._strides[name] = tuple(tensor.stride())
        return TensorEntry(
            name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), begin=begin, end=begin + span * size
        )

    def read_into(self, entry: TensorEntry, tensor: torch.Tensor, begin: int = 0) -> None:
        """See `TensorFile.read_into`."""
        stride = self._strides.get(entry.name)
        if stride is None:
            super().read_into(entry, tensor, begin)
            return
        staged = new_storage(entry.end - entry.begin)
        self._fill(staged, entry.begin, entry.end - entry.begin)
        with torch.no_grad():
            values = typed_view(staged, 0, entry.dtype, entry.shape, stride).reshape(-1)
            for part, start in row_major_parts(tensor, 0, tensor.numel()):
                part.copy_(values[begin + start : begin + start + part.numel()].view(part.shape))


def _state_dict(content: object, path: object) -> dict[str, torch.Tensor]:
    found: object = content
    for key in _KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            found = content[key]
            break
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{path} holds no state_dict (a {type(content).__name__}): save model.state_dict()")
    values: dict[str, Any] = dict(found)
    if other := [name for name, value in values.items() if not isinstance(value, torch.Tensor)]:
        raise UsageError(
            f"{path} holds {other[0]!r:.200}, which is no tensor: save model.state_dict() alone, or under the key 'state_dict'"
        )
    for wrapper in _WRAPPERS:
        if values and all(name.startswith(wrapper) for name in values):
            values = {name.removeprefix(wrapper): value for name, value in values.items()}
    return values
