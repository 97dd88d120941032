"""Reading tensors from a safetensors file that anybody may have written.

In: a file. Out: its checked header, and its tensors copied into memory that exists already: the
file decides no allocation.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from memfit.core.documents import ROOM_BYTES, parse_json, read_document
from memfit.core.errors import StoreError, UsageError
from memfit.core.limits import format_bytes
from memfit.core.process_state import ClosesAtExit
from memfit.files.tensor_bytes import row_major_parts
from memfit.files.writer import PIECE_BYTES
from memfit.store import memory_of_storage
from memfit.store.files import explain
from memfit.tensors.container import HEADER_LIMIT_BYTES, LENGTH_BYTES, Header, TensorEntry, damaged, read_header
from memfit.tensors.trees import new_storage, typed_view


class TensorFile(ClosesAtExit):
    """An open file.

    Memory: the header; one piece of 2 MiB while a tensor is read. The page cache is emptied behind
    the reading.

    Args:
        path: a regular file, or a link to one.

    Raises:
        StoreError: it cannot be opened, or its header is missing or wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self.header = self._read_header(os.fstat(self._descriptor))
        except StoreError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise explain(error, doing="read the file", path=path) from error

    def _read_header(self, status: os.stat_result) -> Header:
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{self.path} is not a regular file")
        file_bytes = status.st_size
        if file_bytes < LENGTH_BYTES:
            raise damaged(self.path, f"it has {file_bytes} bytes")
        length = int.from_bytes(os.pread(self._descriptor, LENGTH_BYTES, 0), "little")
        # Checked before anything of that size is allocated.
        if length > min(file_bytes - LENGTH_BYTES, HEADER_LIMIT_BYTES):
            raise damaged(
                self.path, f"its header should have {length} bytes, the whole file has {format_bytes(file_bytes)}"
            )
        raw = os.pread(self._descriptor, LENGTH_BYTES + length, 0)
        if len(raw) != LENGTH_BYTES + length:
            raise damaged(self.path, "its header ends early")
        return read_header(raw, path=self.path, file_bytes=file_bytes)

    def read_into(self, entry: TensorEntry, tensor: torch.Tensor, begin: int = 0) -> None:
        """Copies elements of an entry, row-major from element `begin` on, into a tensor of any
        strides, on any device; floats convert to its dtype.

        Raises:
            StoreError: the disk, or the file became shorter.
        """
        size = entry.dtype.itemsize
        total = tensor.numel()
        assert begin >= 0 and begin + total <= (entry.end - entry.begin) // size
        staged = new_storage(min(PIECE_BYTES, total * size))
        per_piece = PIECE_BYTES // size
        with torch.no_grad():
            for first in range(0, total, per_piece):
                count = min(per_piece, total - first)
                self._fill(staged, entry.begin + (begin + first) * size, count * size)
                flat = typed_view(staged, 0, entry.dtype, (count,))
                for part, start in row_major_parts(tensor, first, count):
                    part.copy_(flat[start : start + part.numel()].view(part.shape))

    def holds_same(self, entry: TensorEntry, other: TensorFile, other_entry: TensorEntry) -> bool:
        """Two entries have the same dtype, shape and bytes. Memory: two pieces.

        Raises:
            StoreError: the disk, or a file became shorter.
        """
        if (entry.dtype, entry.shape) != (other_entry.dtype, other_entry.shape):
            return False
        total = entry.end - entry.begin
        mine, theirs = (new_storage(min(PIECE_BYTES, total)) for _ in range(2))
        for first in range(0, total, PIECE_BYTES):
            count = min(PIECE_BYTES, total - first)
            self._fill(mine, entry.begin + first, count)
            other._fill(theirs, other_entry.begin + first, count)
            views = [typed_view(storage, 0, torch.uint8, (count,)) for storage in (mine, theirs)]
            if not torch.equal(*views):
                return False
        return True

    def _fill(self, storage: torch.UntypedStorage, offset: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            view = memory_of_storage(storage, done, nbytes - done).view()
            try:
                moved = os.preadv(self._descriptor, [view], offset + done)
            except OSError as error:
                raise explain(error, doing="read the file", path=self.path) from error
            if moved == 0:
                raise damaged(self.path, f"it ended at byte {offset + done} while it was read")
            done += moved
        os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes the file; may be repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


# Reading tensors from a file that `torch.save` wrote (a checkpoint, as such files are called; the
# runs that memfit commits are in `runs`), without loading it.
#
# In: a file. Out: what `TensorFile` gives for safetensors: names and places, then tensors copied
# into memory that exists already.
#
# [Note: places in a checkpoint]
# Such a file is a zip archive of records: one is a pickle that says which tensors there are, each
# of the others holds the bytes of one storage, stored as they are. torch's own restricted reader
# (`weights_only=True`: tensors, numbers, texts, collections, nothing that is called) makes the
# tensors on the device `meta`, without bytes, and notes where each storage lies. The bytes are then
# read from there like those of any file, a piece at a time. Nothing is mapped: mapped pages that
# are read count as resident.

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


# Which files hold a model's weights.
#
# In: a directory. Out: names of the files of weights in it, from `model.safetensors.index.json` (or
# `pytorch_model.bin.index.json`) where there is one.

_LIMIT_BYTES = 100_000_000


def weight_file_names(source: Path, known: re.Pattern[str], *, single: str = "model.safetensors") -> list[str]:
    """File names, sorted; the one of all weights where there is no index.

    Args:
        source: the directory.
        known: what a file of weights may be called.
        single: the one of all weights; its index is called after it.

    Raises:
        StoreError: the index is invalid, or names other files.
    """
    index = source / f"{single}.index.json"
    if not index.exists() and not index.is_symlink():
        return [single]
    try:
        content = read_document(index, limit_bytes=_LIMIT_BYTES)
        weights_bytes = sum(path.lstat().st_size for path in source.iterdir() if known.fullmatch(path.name))
        document = parse_json(content, room_bytes=ROOM_BYTES + weights_bytes)
        names = sorted(set(document["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{index} is no index of weights ({type(error).__name__}: {str(error)[:200]}); take another save"
        ) from error
    for name in names:
        # A name with directories in it would read files from elsewhere.
        if not isinstance(name, str) or Path(name).name != name or not known.fullmatch(name):
            raise StoreError(f"{index} names the file {str(name)[:80]!r}, which no save has; take another save")
    return names


# The files of a model's weights, whichever library wrote them.
#
# In: a directory, or one file. Out: open files with the names and places of their tensors.

_SAFETENSORS = re.compile(r"[\w.-]+\.safetensors")
_CHECKPOINTS = re.compile(r"[\w.-]+\.(bin|pt|pth)")
_CHECKPOINT_NAME = "pytorch_model.bin"


def open_weight_files(source: Path, stack: ExitStack) -> list[TensorFile]:
    """Opens safetensors files, or what `torch.save` wrote: one file, or a directory with
    `model.safetensors` or `pytorch_model.bin`, or the index of their shards.

    Args:
        source: the directory or the file.
        stack: closes the files.

    Raises:
        StoreError: there is none, or a file cannot be read. UsageError: a file has no state dict.
    """
    if source.is_dir():
        has_other = any((source / f"{_CHECKPOINT_NAME}{end}").exists() for end in ("", ".index.json"))
        has_safe = any((source / f"model.safetensors{end}").exists() for end in ("", ".index.json"))
        if has_other and not has_safe:
            names = weight_file_names(source, _CHECKPOINTS, single=_CHECKPOINT_NAME)
            return [stack.enter_context(CheckpointFile(source / name)) for name in names]
        return [stack.enter_context(TensorFile(source / name)) for name in weight_file_names(source, _SAFETENSORS)]
    if not source.exists():
        raise StoreError(
            f"{source} does not exist: name a directory with model.safetensors, pytorch_model.bin or their shards, or one such file"
        )
    kind = TensorFile if source.suffix == ".safetensors" else CheckpointFile
    return [stack.enter_context(kind(source))]
