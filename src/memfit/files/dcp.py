"""Checkpoints of torch.distributed.checkpoint, written from tensors that rest anywhere.

In: a state dict of meta tensors, and by name where their bytes are. Out: a directory that
`torch.distributed.checkpoint.load` reads, on any number of ranks.

The planner and the storage writer are torch's own, so that the files are those of the installed
version; only where bytes come from, and when, is ours. Each tensor is written as chunks of rows,
one after the other, so that nothing is held but a chunk. (`.metadata` is a pickle: memfit writes
it and never reads one.)
"""

from __future__ import annotations

import io
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

# The record of where an item lies has a private name only.
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from memfit.core.errors import UnsupportedError
from memfit.core.limits import MIB
from memfit.files.tensor_bytes import TensorSource
from memfit.store.files import explain
from memfit.tensors.trees import new_storage, typed_view

CHUNK_BYTES = 16 * MIB
"""Largest chunk of a tensor, unless a row is larger."""


def write_checkpoint(
    directory: Path,
    state: Mapping[str, Any],
    sources: Mapping[str, TensorSource],
    aliases: Mapping[str, str],
    *,
    max_file_bytes: int,
) -> dict[str, int]:
    """Writes a checkpoint into an existing directory, durably.

    Memory: one chunk of 16 MiB, or a row, and what torch takes to serialize it.

    Args:
        directory: empty.
        state: nested; tensors on the meta device stand for those of `sources`.
        sources: by flat name, the keys of `state` joined by dots.
        aliases: further flat names, each with the one whose bytes it has as well.
        max_file_bytes: a file ends with the first chunk behind which it is larger.

    Returns:
        Bytes by file.

    Raises:
        StoreError: the disk.
        UnsupportedError: two names are one when they are flat.
    """
    planner, writer = _Planner(sources), _Writer(directory, max_file_bytes)
    try:
        planner.set_up_planner(dict(state), is_coordinator=True)
    except ValueError as error:
        raise UnsupportedError(f"torch.distributed.checkpoint has no place for these names: {error}") from error
    # What `torch.distributed.checkpoint.save` does, without a process group, and with our errors.
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    (plan,), metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan([plan])
    try:
        written = writer.write_data(planner.finish_plan(plan), planner).wait()
        for alias, name in aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            metadata.planner_data[alias] = (alias.partition(".")[0], alias.partition(".")[2])
            written += [replace(one, index=replace(one.index, fqn=alias)) for one in written if one.index.fqn == name]
        writer.finish(metadata, [written])
    except OSError as error:
        raise explain(error, doing="write the checkpoint", path=directory) from error
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir())}


class _Planner(DefaultSavePlanner):
    """Torch's own, with chunks of tensors that are read when they are written."""

    def __init__(self, sources: Mapping[str, TensorSource]) -> None:
        super().__init__()
        self._sources = sources

    def create_local_plan(self) -> SavePlan:
        """See `SavePlanner`."""
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in self._parts(item)])
        return self.plan

    def _parts(self, item: WriteItem) -> Iterator[WriteItem]:
        data = item.tensor_data
        if data is None or item.index.fqn not in self._sources or not data.size:
            yield item
            return
        rows, row_bytes = data.size[0], math.prod(data.size[1:]) * data.properties.dtype.itemsize
        count = max(CHUNK_BYTES // max(row_bytes, 1), 1)
        for index, first in enumerate(range(0, rows, count)):
            offsets = torch.Size([first, *[0] * (len(data.size) - 1)])
            sizes = torch.Size([min(count, rows - first), *data.size[1:]])
            yield replace(
                item,
                index=MetadataIndex(item.index.fqn, offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=replace(data, chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes)),
            )
        if not rows:
            yield item

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """See `SavePlanner`: a chunk, in memory of its own."""
        data = write_item.tensor_data
        source = self._sources.get(write_item.index.fqn)
        if source is None or data is None or data.chunk is None:
            return super().resolve_data(write_item)
        sizes, count = tuple(data.chunk.sizes), math.prod(data.chunk.sizes)
        # Exactly its bytes: torch writes the whole storage of what it is given.
        storage = new_storage(count * source.dtype.itemsize)
        if count:
            first = data.chunk.offsets[0] * math.prod(data.size[1:]) if data.size else 0
            source.read(first, count, storage, 0).wait()
        return typed_view(storage, 0, source.dtype, sizes)


class _Writer(FileSystemWriter):
    """Torch's own, which would hold all tensors of a file until it ends."""

    def __init__(self, directory: Path, max_file_bytes: int) -> None:
        super().__init__(directory)
        self._directory = directory
        self._max_file_bytes = max_file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `StorageWriter`."""
        results: list[WriteResult] = []
        items = deque(plan.items)
        number = 0
        while items:
            name = f"__0_{number}.distcp"
            results += self._write_file(name, items, planner)
            number += 1
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: deque[WriteItem], planner: SavePlanner) -> Sequence[WriteResult]:
        """Writes a file of the next items, and takes them off the list."""
        results: list[WriteResult] = []
        with (self._directory / name).open("wb") as stream:
            while items and (not results or stream.tell() < self._max_file_bytes):
                item, offset = items.popleft(), stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    _serialize(data, stream)
                length = stream.tell() - offset
                where = _StorageInfo(relative_path=name, offset=offset, length=length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=where))
            stream.flush()
            os.fsync(stream.fileno())
        return results


class _Noting:
    """A stream that keeps the error of a write: torch, in C++, raises another one instead."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of it."""
        try:
            return self._stream.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        """Hands on."""
        self._stream.flush()


def _serialize(data: torch.Tensor, stream: BinaryIO) -> None:
    """Writes a tensor as `torch.save` does.

    Raises:
        OSError: the disk.
    """
    noting = _Noting(stream)
    try:
        torch.save(data, cast("IO[bytes]", noting))
    except RuntimeError:
        if noting.error is not None:
            raise noting.error from None
        raise
