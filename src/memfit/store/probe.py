"""Speed of a disk, measured through the same threads and pieces that homes use.

In: a directory and a time. Out: bytes a second for reading and for writing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from memfit.core.errors import StoreError, UsageError
from memfit.core.hardware import Link
from memfit.core.units import MIB
from memfit.store.disk_transfer import DiskTransfer
from memfit.store.file_operations import FileHandle, FileOperations, open_unnamed
from memfit.store.io import DEFAULT_PIECE_BYTES, DEFAULT_THREADS, DiskIO
from memfit.store.memory_ranges import Memory, aligned_memory
from memfit.store.os_errors import explain, store_error

_DEPTH = 2 * DEFAULT_THREADS
"""Requests under way at once."""


def probe_disk(directory: str | os.PathLike[str], *, seconds: float, file_bytes: int) -> Link:
    """Measures a disk, with a file without a name that is gone afterwards.

    Bursts that a drive buffers are included: sustained writing may be slower.

    Memory: a piece of 4 MiB and the bounce buffers. Disk: `file_bytes`, or a quarter of what is
    free. The time is aimed at, not promised: each direction moves at least some pieces.

    Args:
        directory: on the disk.
        seconds: time to take, about.
        file_bytes: largest file to use.

    Raises:
        UsageError: the time is not positive.
        StoreError: there is no room, or the disk fails.
    """
    if seconds <= 0:
        raise UsageError("a probe needs a time above 0")
    where, operations = Path(directory).absolute(), FileOperations()
    handle = open_unnamed(where, operations)
    try:
        size_bytes = claim_probe_file(handle, where, operations, file_bytes)
        piece = aligned_memory(DEFAULT_PIECE_BYTES)
        # Not zeros: some disks and hosts store those for free.
        piece.view()[:] = os.urandom(MIB) * (piece.nbytes // MIB)
        started_s = time.perf_counter()
        with DiskIO() as io:
            # The first write of a claimed block also marks it as written; homes pay that once, the
            # figures should not.
            for transfer in [io.write(handle, at, piece) for at in range(0, size_bytes, piece.nbytes)]:
                transfer.wait()
            slice_s = (seconds - (time.perf_counter() - started_s)) / 2
            read, written = (keep_moving(start, handle, piece, size_bytes, slice_s) for start in (io.read, io.write))
    finally:
        handle.close()
    return Link(read_bytes_per_s=read, write_bytes_per_s=written)


def claim_probe_file(handle: FileHandle, where: Path, operations: FileOperations, file_bytes: int) -> int:
    """Claims the file, in whole pieces; returns its length."""
    try:
        free_bytes = operations.free_bytes(where)
        size_bytes = min(file_bytes, free_bytes // 4) // DEFAULT_PIECE_BYTES * DEFAULT_PIECE_BYTES
        if not size_bytes:
            raise store_error(
                f"cannot probe the disk at {where}: a file of {DEFAULT_PIECE_BYTES} bytes is needed, and {free_bytes} bytes "
                f"are free (a quarter may be used, up to {file_bytes}); free some space"
            )
        handle.allocate(0, size_bytes)
    except StoreError:
        raise
    except OSError as error:
        raise explain(error, doing="claim the file of the disk probe", path=where) from error
    return size_bytes


def keep_moving(
    start: Callable[[FileHandle, int, Memory], DiskTransfer],
    handle: FileHandle,
    piece: Memory,
    size_bytes: int,
    slice_s: float,
) -> float:
    """Keeps requests in one direction queued for a time; returns bytes a second.

    All transfers share one piece of memory: what is read is not looked at.
    """
    queue: list[DiskTransfer] = []
    requests = 0
    somewhere_done = threading.Semaphore(0)
    started_s = time.perf_counter()
    while not requests or time.perf_counter() - started_s < slice_s:
        queue = [transfer for transfer in queue if not _is_done_well(transfer)]
        while len(queue) < _DEPTH:
            transfer = start(handle, requests * piece.nbytes % size_bytes, piece)
            transfer.call_when_done(lambda _: somewhere_done.release())
            queue.append(transfer)
            requests += 1
        somewhere_done.acquire()
    for transfer in queue:
        transfer.wait()
    return requests * piece.nbytes / (time.perf_counter() - started_s)


def _is_done_well(transfer: DiskTransfer) -> bool:
    """True if it has ended; raises its error if that was not well."""
    if not transfer.done():
        return False
    transfer.wait()
    return True
