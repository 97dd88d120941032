"""Speed of a disk while something else goes on: the other direction, or compute.

In: a directory, directions, and what the caller does meanwhile. Out: bytes a second by direction,
and how often the caller's function ran.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from memfit.core.units import MIB
from memfit.store.file_operations import FileHandle, FileOperations, open_unnamed
from memfit.store.io import DEFAULT_PIECE_BYTES, DiskIO
from memfit.store.memory_ranges import aligned_memory
from memfit.store.probe import claim_probe_file, keep_moving


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
