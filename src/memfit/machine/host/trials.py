"""The programs of `measure.py`: they run in child processes, as scripts, and load nothing of
memfit.

In: a line of JSON with the name of a trial and its arguments, on standard input. Out: a line of
JSON with its figures. Only `time_step` loads torch, and only when it is asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import mmap
import os
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

_ROWS = 512
_WIDTH = 256
_LAYERS = 4
_PIECE_BYTES = 4 << 20


def time_step(*, threads: int, seconds: float, is_contended: bool) -> dict[str, float]:
    """Mean seconds of a forward and backward pass of a small network, over about `seconds` and at
    least two of them.

    Contended: a thread computes checksums beside it and never waits, as the threads of disk homes
    do while they have work.
    """
    import torch

    step = _small_step()
    torch.set_num_threads(threads)
    step()  # threads start, memory is touched
    count = 0
    with _checksums() if is_contended else contextlib.nullcontext():
        began = time.perf_counter()
        while (took := time.perf_counter() - began) < seconds or count < 2:
            step()
            count += 1
    return {"step_s": took / count}


@functools.cache
def _small_step() -> Callable[[], None]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [[nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU()] for _ in range(_LAYERS)]
    model = nn.Sequential(*(module for layer in layers for module in layer))
    rows = torch.randn(_ROWS, _WIDTH)

    def step() -> None:
        model(rows).sum().backward()
        model.zero_grad()

    return step


@contextlib.contextmanager
def _checksums() -> Generator[None]:
    data, is_over = os.urandom(1 << 20), threading.Event()

    def work() -> None:
        while not is_over.is_set():
            zlib.crc32(data)  # without the interpreter's lock, as torch's operators are

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def touch_pages(*, nbytes: int) -> dict[str, float | None]:
    """Bytes a second of writing fresh memory, in small and in huge pages, and of writing it again.

    Memory: `nbytes`. `huge_share` is how much of it the kernel really gave in huge pages; None
    where it does not tell.
    """
    small, small_again, _ = _touch(nbytes, mmap.MADV_NOHUGEPAGE)
    huge, huge_again, share = _touch(nbytes, mmap.MADV_HUGEPAGE)
    return {
        "small_bytes_per_s": small,
        "huge_bytes_per_s": huge,
        "again_bytes_per_s": max(small_again, huge_again),
        "huge_share": share,
    }


def _touch(nbytes: int, advice: int) -> tuple[float, float, float | None]:
    """Bytes a second at the first and the second touch, and the share that came in huge pages."""
    before = _huge_bytes()
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(
            OSError
        ):  # EINVAL: a kernel without huge pages; both figures are then those of small ones
            memory.madvise(advice)
        start = ctypes.c_char.from_buffer(memory)
        rates: list[float] = []
        for value in (1, 2):
            began = time.perf_counter()
            ctypes.memset(ctypes.addressof(start), value, nbytes)
            rates.append(nbytes / (time.perf_counter() - began))
        after = _huge_bytes()
        del start  # a mapping that is looked at cannot be closed
    return rates[0], rates[1], None if before is None or after is None else (after - before) / nbytes


def _huge_bytes() -> int | None:
    """This process's anonymous huge pages; None where the kernel does not tell.

    Source: proc_pid_smaps(5); smaps_rollup is its sum.
    """
    try:
        text = Path("/proc/self/smaps_rollup").read_text("ascii", errors="replace")
    except OSError:
        return None
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("AnonHugePages:"))


def use_disk(*, directory: str, nbytes: int, is_direct: bool) -> dict[str, float]:
    """Bytes a second of writing a file and reading it back, and how much of it is in the page cache
    afterwards.

    Direct, or through the page cache: then written until the disk has it, and dropped from the
    cache before it is read. The file has no name.
    Memory: 4 MiB. Disk: `nbytes`, a multiple of 4 MiB.
    """
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file, mmap.mmap(-1, _PIECE_BYTES) as piece:
        number = file.fileno()
        piece[:] = os.urandom(_PIECE_BYTES)  # not zeros: some disks and hosts store those for free
        os.posix_fallocate(number, 0, nbytes)
        if is_direct:
            import fcntl

            fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_DIRECT)
        began = time.perf_counter()
        for offset in range(0, nbytes, _PIECE_BYTES):
            os.pwrite(number, piece, offset)
        os.fdatasync(number)
        written_s = time.perf_counter() - began
        os.posix_fadvise(number, 0, nbytes, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        for offset in range(0, nbytes, _PIECE_BYTES):
            os.preadv(number, [piece], offset)
        read_s = time.perf_counter() - began
        cached = _cached_bytes(number, nbytes)
    return {"write_bytes_per_s": nbytes / written_s, "read_bytes_per_s": nbytes / read_s, "cached_bytes": cached}


def _cached_bytes(number: int, nbytes: int) -> int:
    """How much of a file is in the page cache, by mincore(2)."""
    pages = -(-nbytes // mmap.PAGESIZE)
    is_there = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    # A private mapping that is never written: from_buffer wants one that could be.
    with mmap.mmap(number, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(nbytes), is_there)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(page & 1 for page in is_there) * mmap.PAGESIZE


TRIALS: dict[str, Callable[..., Any]] = {"step": time_step, "touch": touch_pages, "disk": use_disk}


def serve() -> None:
    """Answers request after request until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        answer = TRIALS[request.pop("trial")](**request)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
