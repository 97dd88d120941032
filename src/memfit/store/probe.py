"""Speed of a disk, measured through the same threads and pieces that homes use.

In: a directory and a time. Out: bytes a second for reading and for writing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from memfit.core.errors import StoreError, UsageError
from memfit.core.hardware import Link
from memfit.core.limits import MIB
from memfit.store.checksums import Memory, aligned_memory
from memfit.store.files import FileHandle, FileOperations, explain, open_unnamed, store_error
from memfit.store.io import DEFAULT_PIECE_BYTES, DEFAULT_THREADS, DiskIO
from memfit.store.transfer import DiskTransfer

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


# Speed of a disk while something else goes on: the other direction, or compute.
#
# In: a directory, directions, and what the caller does meanwhile. Out: bytes a second by direction,
# and how often the caller's function ran.


@dataclass(frozen=True, kw_only=True)
class BesideRates:
    """Speeds of what ran at once.

    Attributes:
        bytes_per_s: by direction ("read", "write").
        calls_per_s: of the caller's function; 0 where there was none.
    """

    bytes_per_s: Mapping[str, float]
    calls_per_s: float


def probe_disk_beside(
    directory: str | os.PathLike[str],
    *,
    directions: Collection[str],
    seconds: float,
    file_bytes: int,
    meanwhile: Callable[[], object] | None = None,
) -> BesideRates:
    """Keeps requests in these directions queued for a time, each in a file and a thread of its own,
    and calls a function again and again meanwhile.

    Memory: a piece of 4 MiB a direction and the bounce buffers. Disk: `file_bytes` a direction, or
    a quarter of what is free.

    Args:
        directory: on the disk.
        directions: "read", "write", both or none.
        seconds: time to take, about, behind the writing of the files.
        file_bytes: largest file to use.
        meanwhile: what the calling thread does; None: it waits.

    Raises:
        StoreError: there is no room, or the disk fails.
    """
    where, operations = Path(directory).absolute(), FileOperations()
    found: dict[str, float] = {}
    failures: list[BaseException] = []
    piece = aligned_memory(DEFAULT_PIECE_BYTES)
    piece.view()[:] = os.urandom(MIB) * (piece.nbytes // MIB)
    handles: dict[str, FileHandle] = {}
    try:
        sizes: dict[str, int] = {}
        with DiskIO() as io:
            for direction in directions:
                handles[direction] = open_unnamed(where, operations)
                sizes[direction] = claim_probe_file(handles[direction], where, operations, file_bytes)
                for at in range(0, sizes[direction], piece.nbytes):
                    io.write(handles[direction], at, piece).wait()

            def move(direction: str) -> None:
                # Its own memory: what is read must not change what the other direction writes.
                own = aligned_memory(DEFAULT_PIECE_BYTES)
                own.view()[:] = piece.view()
                try:
                    # Threads of its own: in one queue the faster direction would starve the other.
                    with DiskIO() as queue:
                        start = queue.read if direction == "read" else queue.write
                        found[direction] = keep_moving(start, handles[direction], own, sizes[direction], seconds)
                except BaseException as error:  # noqa: BLE001, raised again by the thread that waits
                    failures.append(error)

            threads = [threading.Thread(target=move, args=(direction,)) for direction in directions]
            for thread in threads:
                thread.start()
            calls, began = 0, time.perf_counter()
            while meanwhile is not None and time.perf_counter() - began < seconds:
                meanwhile()
                calls += 1
            took = time.perf_counter() - began
            for thread in threads:
                thread.join()
    finally:
        for handle in handles.values():
            handle.close()
    if failures:
        raise failures[0]
    return BesideRates(bytes_per_s=found, calls_per_s=calls / took if calls else 0.0)
