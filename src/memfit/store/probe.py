"""How fast a disk is, measured through the same threads that will use it.

In: a directory and a time. Out: bytes a second for reading, writing and both at once, with the
piece size and thread counts that won.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.core.errors import StoreError, UsageError
from memfit.core.units import MIB
from memfit.store.disk_transfer import DiskTransfer
from memfit.store.file_operations import FileHandle, FileOperations, open_unnamed
from memfit.store.io import DiskIO
from memfit.store.memory_ranges import Memory, aligned_memory
from memfit.store.os_errors import explain, store_error

PIECES_BYTES = (1 * MIB, 4 * MIB, 16 * MIB)
THREADS = (1, 2, 4)
_REQUEST_BYTES = 4 * MIB
"""Smaller pieces are asked for in requests of this length, as a block's weights would be."""
_CLOSE_ENOUGH = 0.95
"""A smaller piece, or fewer threads, this close to the best is preferred: sooner interrupted, and
noise is larger.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskTrial:
    """One setting and what it reached."""

    piece_bytes: int
    threads: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskSpeed:
    """Measured rates of a disk.

    Bursts that a drive buffers are included: sustained writing may be slower.
    """

    read_bytes_per_s: float
    """Reading alone, with `piece_bytes` and `read_threads`."""
    write_bytes_per_s: float
    """Writing alone, with `piece_bytes` and `write_threads`."""
    both_read_bytes_per_s: float
    """Reading while writing goes on."""
    both_write_bytes_per_s: float
    """Writing while reading goes on."""
    piece_bytes: int
    read_threads: int
    write_threads: int
    is_direct: bool
    """False if the file system refuses direct I/O: the figures are then those of its cache or
    memory.
    """
    probed_bytes: int
    """Length of the file that was used."""
    trials: tuple[DiskTrial, ...]


def probe_disk(
    directory: str | os.PathLike[str],
    *,
    seconds: float = 1.2,
    file_bytes: int = 256 * MIB,
    pieces_bytes: Sequence[int] = PIECES_BYTES,
    thread_counts: Sequence[int] = THREADS,
    operations: FileOperations | None = None,
) -> DiskSpeed:
    """Measures a disk, with a file without a name that is gone afterwards.

    Memory: one buffer of the largest piece and the bounce buffers. Disk: `file_bytes`, or a quarter
    of what is free. The time is aimed at, not promised: each setting moves at least one round of
    pieces.

    Args:
        directory: on the disk.
        seconds: time to take, about.
        file_bytes: largest file to use.
        pieces_bytes: piece sizes to try.
        thread_counts: how many threads to try.
        operations: the system calls.

    Raises:
        UsageError: nothing to try, or not positive.
        StoreError: no room, or the disk fails.
    """
    if not pieces_bytes or not thread_counts or seconds <= 0:
        raise UsageError("a probe needs piece sizes, thread counts and a time above 0")
    where, used = Path(directory).absolute(), FileOperations() if operations is None else operations
    handle = open_unnamed(where, used)
    try:
        size_bytes = _claim(handle, where, used, file_bytes, max(pieces_bytes))
        buffer = aligned_memory(max(pieces_bytes))
        # Not zeros: some disks and hosts store those for free.
        buffer.view()[:] = os.urandom(MIB) * (buffer.nbytes // MIB) + os.urandom(buffer.nbytes % MIB)
        started_s = time.perf_counter()
        with DiskIO(piece_bytes=max(pieces_bytes)) as io:
            # The first write of a claimed block also marks it as written; homes pay that once, the
            # figures should not.
            for transfer in [io.write(handle, at, buffer) for at in range(0, size_bytes, buffer.nbytes)]:
                transfer.wait()
        left_s = seconds - (time.perf_counter() - started_s)
        slice_s = max(0.0, left_s / (2 * len(pieces_bytes) * len(thread_counts) + 2))
        trials = tuple(
            _try(handle, buffer, size_bytes, slice_s, piece_bytes, count)
            for piece_bytes in sorted(pieces_bytes)
            for count in sorted(thread_counts)
        )
        piece_bytes = _best_piece(trials)
        reader = _first_close(
            [(trial.threads, trial.read_bytes_per_s) for trial in trials if trial.piece_bytes == piece_bytes]
        )
        writer = _first_close(
            [(trial.threads, trial.write_bytes_per_s) for trial in trials if trial.piece_bytes == piece_bytes]
        )
        with DiskIO(read_threads=reader, write_threads=writer, piece_bytes=piece_bytes) as io:
            part = buffer.narrow(0, min(buffer.nbytes, max(piece_bytes, _REQUEST_BYTES)))
            both = _keep_busy(io, handle, part, size_bytes, 2 * slice_s, depth=2 * max(reader, writer))
    finally:
        handle.close()
    found = {(trial.piece_bytes, trial.threads): trial for trial in trials}
    return DiskSpeed(
        read_bytes_per_s=found[piece_bytes, reader].read_bytes_per_s,
        write_bytes_per_s=found[piece_bytes, writer].write_bytes_per_s,
        both_read_bytes_per_s=both[0],
        both_write_bytes_per_s=both[1],
        piece_bytes=piece_bytes,
        read_threads=reader,
        write_threads=writer,
        is_direct=handle.is_direct,
        probed_bytes=size_bytes,
        trials=trials,
    )


def _claim(handle: FileHandle, where: Path, operations: FileOperations, file_bytes: int, piece_bytes: int) -> int:
    """Claims the file, in whole pieces; returns its length."""
    try:
        free_bytes = operations.free_bytes(where)
        size_bytes = min(file_bytes, free_bytes // 4) // piece_bytes * piece_bytes
        if size_bytes < piece_bytes:
            raise store_error(
                f"cannot probe the disk at {where}: a file of {piece_bytes} bytes is needed, and {free_bytes} bytes "
                f"are free (a quarter may be used, up to {file_bytes}); free some space or try smaller pieces"
            )
        handle.allocate(0, size_bytes)
    except StoreError:
        raise
    except OSError as error:
        raise explain(error, doing="claim the file of the disk probe", path=where) from error
    return size_bytes


def _try(
    handle: FileHandle, buffer: Memory, size_bytes: int, slice_s: float, piece_bytes: int, threads: int
) -> DiskTrial:
    part = buffer.narrow(0, min(buffer.nbytes, max(piece_bytes, _REQUEST_BYTES)))
    with DiskIO(read_threads=threads, write_threads=threads, piece_bytes=piece_bytes) as io:
        read, _ = _keep_busy(io, handle, part, size_bytes, slice_s, depth=2 * threads, is_writing=False)
        _, written = _keep_busy(io, handle, part, size_bytes, slice_s, depth=2 * threads, is_reading=False)
    return DiskTrial(piece_bytes=piece_bytes, threads=threads, read_bytes_per_s=read, write_bytes_per_s=written)


def _keep_busy(
    io: DiskIO,
    handle: FileHandle,
    part: Memory,
    size_bytes: int,
    slice_s: float,
    *,
    depth: int,
    is_reading: bool = True,
    is_writing: bool = True,
) -> tuple[float, float]:
    """Keeps `depth` requests queued in each direction for a time.

    Returns bytes a second read and written.

    All transfers share one range of memory: what is read is not looked at, and whatever a write
    catches will do.
    """
    ways = [start for start, wanted in ((io.read, is_reading), (io.write, is_writing)) if wanted]
    queues: list[list[DiskTransfer]] = [[] for _ in ways]
    positions = [0 for _ in ways]
    somewhere_done = threading.Semaphore(0)
    before = io.statistics().total
    started_s = time.perf_counter()
    is_first = True
    while is_first or time.perf_counter() - started_s < slice_s:
        is_first = False
        for number, start in enumerate(ways):
            # The directions are fed apart: each goes at its own speed.
            queues[number] = [transfer for transfer in queues[number] if not _is_done_well(transfer)]
            while len(queues[number]) < depth:
                transfer = start(handle, positions[number], part)
                transfer.call_when_done(lambda _: somewhere_done.release())
                queues[number].append(transfer)
                next_position = positions[number] + part.nbytes
                positions[number] = next_position if next_position + part.nbytes <= size_bytes else 0
        somewhere_done.acquire()
    for queue in queues:
        for transfer in queue:
            transfer.wait()
    took_s = time.perf_counter() - started_s
    after = io.statistics().total
    return (after.read_bytes - before.read_bytes) / took_s, (after.written_bytes - before.written_bytes) / took_s


def _is_done_well(transfer: DiskTransfer) -> bool:
    """True if it has ended; raises its error if that was not well."""
    if not transfer.done():
        return False
    transfer.wait()
    return True


def _best_piece(trials: Sequence[DiskTrial]) -> int:
    """The smallest piece whose best round trip (one byte read and written) is close to the best of
    all.
    """
    pieces = sorted({trial.piece_bytes for trial in trials})
    speeds: list[tuple[int, float]] = []
    for piece_bytes in pieces:
        mine = [trial for trial in trials if trial.piece_bytes == piece_bytes]
        read = max(trial.read_bytes_per_s for trial in mine)
        written = max(trial.write_bytes_per_s for trial in mine)
        speeds.append((piece_bytes, 1 / (1 / read + 1 / written)))
    return _first_close(speeds)


def _first_close(speeds: Sequence[tuple[int, float]]) -> int:
    """The smallest setting whose speed is close enough to the best."""
    best = max(speed for _, speed in speeds)
    return min(setting for setting, speed in speeds if speed >= _CLOSE_ENOUGH * best)
