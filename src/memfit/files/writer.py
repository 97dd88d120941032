"""Writing a safetensors file from tensors that may be away.

In: sources. Out: a file on stable storage. The file is cut into pieces; while one is written, the
next one's parts come from their homes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch

from memfit.core.errors import StoreError
from memfit.core.limits import MIB, round_up
from memfit.files.tensor_bytes import TensorSource
from memfit.homes.home import DONE, TransferGroup, TransferHandle
from memfit.store import FileOperations, aligned_memory, memory_of_storage, open_file
from memfit.store.checksums import ALIGNMENT_BYTES
from memfit.store.files import explain
from memfit.store.transfer import move
from memfit.tensors.container import Header
from memfit.tensors.trees import new_storage

PIECE_BYTES = 2 * MIB
"""Size of one of the two buffers, alignment included."""


class FilePieces:
    """The two buffers of a save.

    Memory: twice `PIECE_BYTES` of the host, or less for files that are smaller. They come from
    torch's allocator, so that a limit counts them.

    Args:
        largest_file_bytes: of what will be written.
    """

    def __init__(self, largest_file_bytes: int) -> None:
        wanted = round_up(max(largest_file_bytes, 1), ALIGNMENT_BYTES) + ALIGNMENT_BYTES
        reserved_bytes = min(PIECE_BYTES, wanted)
        self.nbytes = reserved_bytes - ALIGNMENT_BYTES
        self._storages = tuple(new_storage(reserved_bytes) for _ in range(2))
        self._turn = 0

    def take(self) -> tuple[torch.UntypedStorage, int]:
        """The other buffer, and the byte at which it is aligned.

        What it held must have been written.
        """
        self._turn = 1 - self._turn
        storage = self._storages[self._turn]
        return storage, -storage.data_ptr() % ALIGNMENT_BYTES


def write_tensors(
    path: Path,
    header: Header,
    sources: Mapping[str, TensorSource],
    pieces: FilePieces,
    *,
    operations: FileOperations | None = None,
) -> None:
    """Writes a new file and returns when it is on stable storage.

    Args:
        path: must not exist.
        header: of the file.
        sources: by tensor name.
        pieces: the buffers.
        operations: the system calls.

    Raises:
        StoreError: the disk; what was written remains for the caller to remove.
    """
    handle = open_file(path, create=True, operations=operations)
    whole_blocks = round_up(header.file_bytes, ALIGNMENT_BYTES)
    # In the order of `read_tensors`, which other ranks run meanwhile.
    filling = _Filling(header, sources)
    coming: TransferHandle = DONE
    try:
        handle.allocate(0, whole_blocks)
        edges = aligned_memory(ALIGNMENT_BYTES)
        storage, base = pieces.take()
        coming = filling.begin(0, pieces.nbytes, storage, base)
        for start in range(0, header.file_bytes, pieces.nbytes):
            coming.wait()
            here = memory_of_storage(storage, base, min(pieces.nbytes, whole_blocks - start))
            if start + pieces.nbytes < header.file_bytes:
                # The reads of the next piece run in the disk's threads while this thread writes.
                storage, base = pieces.take()
                coming = filling.begin(start + pieces.nbytes, pieces.nbytes, storage, base)
            move(handle, is_write=True, offset=start, address=here.address, nbytes=here.nbytes, staging=edges)
        # The last block was written whole.
        os.ftruncate(handle.descriptor, header.file_bytes)
        handle.sync_data()
    except StoreError:
        raise
    except OSError as error:
        # Nothing may still be on its way into a buffer that the caller uses again.
        coming.wait()
        raise explain(error, doing="write the file", path=path, needed_bytes=header.file_bytes) from error
    finally:
        handle.close()


def read_tensors(header: Header, sources: Mapping[str, TensorSource], pieces: FilePieces) -> None:
    """Reads all pieces of a file as `write_tensors` does, and writes none: on a rank that others
    gather from while one of them writes.
    """
    filling = _Filling(header, sources)
    coming = filling.begin(0, pieces.nbytes, *pieces.take())
    for start in range(0, header.file_bytes, pieces.nbytes):
        coming.wait()
        if start + pieces.nbytes < header.file_bytes:
            coming = filling.begin(start + pieces.nbytes, pieces.nbytes, *pieces.take())


class _Filling:
    """Fills one piece of the file after the other."""

    def __init__(self, header: Header, sources: Mapping[str, TensorSource]) -> None:
        self._header = header
        self._sources = sources
        self._waiting = deque(entry for entry in header.entries if entry.end > entry.begin)

    def begin(self, start: int, nbytes: int, storage: torch.UntypedStorage, base: int) -> TransferHandle:
        """Begins to copy bytes [start, start + nbytes) of the file to byte `base` of a storage."""
        stop = min(start + nbytes, self._header.file_bytes)
        raw = self._header.raw[start:stop]
        if raw:
            memory_of_storage(storage, base, len(raw)).view()[:] = raw
        transfers: list[TransferHandle] = []
        try:
            while self._waiting and self._waiting[0].begin < stop:
                entry = self._waiting[0]
                size = entry.dtype.itemsize
                first, last = max(entry.begin, start), min(entry.end, stop)
                source = self._sources[entry.name]
                # Pieces begin and end on pages, tensors at multiples of their element's size: no
                # element is ever cut.
                transfers.append(
                    source.read((first - entry.begin) // size, (last - first) // size, storage, base + first - start)
                )
                if entry.end > stop:
                    break
                self._waiting.popleft()
        except BaseException:
            TransferGroup(transfers).wait()
            raise
        return TransferGroup(transfers)


# Reads and writes at a position of a file, whole: the system may move a part only, where a disk is
# nearly full or of more than 2 GiB.
#
# In: a descriptor, bytes. Out: the same bytes in the file, or in memory; its position does not
# move.


def write_at(file: int, data: object, offset: int) -> None:
    """Writes all of it.

    Args:
        file: descriptor.
        data: anything with contiguous bytes.
        offset: of its first byte in the file.

    Raises:
        OSError: it does not go in.
    """
    left = memoryview(data).cast("B")  # type: ignore[arg-type]
    while left:
        done = os.pwrite(file, left, offset)
        left, offset = left[done:], offset + done


def read_at(file: int, into: object, offset: int) -> bool:
    """Fills memory.

    Args:
        file: descriptor.
        into: anything with contiguous bytes that may be written.
        offset: of its first byte in the file.

    Returns:
        False: the file ends before.
    """
    left = memoryview(into).cast("B")  # type: ignore[arg-type]
    while left:
        done = os.preadv(file, [left], offset)
        if not done:
            return False
        left, offset = left[done:], offset + done
    return True
