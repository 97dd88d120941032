"""Reading tensors from a safetensors file that anybody may have written.

In: a file. Out: its checked header, and its tensors copied into memory that exists already: the
file decides no allocation.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import torch

from memfit.core.closing import ClosesAtExit
from memfit.core.errors import StoreError
from memfit.core.units import format_bytes
from memfit.files.tensor_bytes import row_major_parts
from memfit.files.writer import PIECE_BYTES
from memfit.store import memory_of_storage
from memfit.store.os_errors import explain
from memfit.tensors.container import (
    HEADER_LIMIT_BYTES,
    LENGTH_BYTES,
    Header,
    TensorEntry,
    damaged,
    read_header,
)
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
