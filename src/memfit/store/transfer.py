"""One piece of a transfer, in the calling thread: straight where all is aligned, else through a
bounce buffer.

In: an open file, a range of it and a range of memory. Out: bytes moved, all of them or an
`OSError`.

[Note: edges]
Direct I/O moves whole aligned blocks. A read that is not aligned reads the blocks around it into
the bounce buffer and copies its part out. A write that is not aligned must keep its neighbours'
bytes: it reads the first and last block, changes its part and writes them back, under the file's
edge lock, because the neighbour may be doing the same. Such a write repeats the neighbours' old
bytes, so a reader of them sees nothing change. A write that *pads* makes zeros of the rest of its
last block, which is nobody's, and reads nothing there.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os

from memfit.core.units import round_up
from memfit.store.file_operations import FileHandle
from memfit.store.memory_ranges import ALIGNMENT_BYTES, Memory, view_of

_MOST_FRUITLESS = 8
"""Calls in a row that move less than a block, after which the device counts as broken, or the file
as ended.
"""


class ShortReadError(OSError):
    """The file ended before the range did."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(errno.EIO, os.strerror(errno.EIO))
        self.missing_bytes = missing_bytes


def move(
    handle: FileHandle,
    *,
    is_write: bool,
    offset: int,
    address: int,
    nbytes: int,
    staging: Memory,
    pads: bool = False,
) -> None:
    """Moves bytes between a file and memory and returns when they are there.

    Nothing stays in the page cache.

    Args:
        handle: the file; acquired by the caller.
        is_write: memory to file, else file to memory.
        offset: first byte in the file.
        address: first byte in memory, kept alive by the caller.
        nbytes: length.
        staging: an aligned bounce buffer of whole blocks that no other thread uses.
        pads: a write also makes zeros of what is left of its last block.

    Raises:
        OSError: what the system said; `ShortReadError` if the file is too short.
    """
    if not handle.is_direct:
        _straight(handle, offset, address, nbytes, is_write=is_write, needed_bytes=nbytes)
        padding_bytes = padding_after(offset + nbytes) if pads else 0
        # The staging buffer is this thread's own: no lock is needed to overwrite it.
        ctypes.memset(staging.address, 0, padding_bytes)
        _straight(handle, offset + nbytes, staging.address, padding_bytes, is_write=True, needed_bytes=padding_bytes)
        _forget(handle, offset, nbytes + padding_bytes, is_write=is_write)
        return
    # Direct I/O wants file offset, length and address on blocks. What is not goes through the
    # staging buffer; the aligned middle goes straight.
    bounced = functools.partial(_write_bounced, pads=pads) if is_write else _read_bounced
    head_bytes = min(nbytes, -offset % ALIGNMENT_BYTES)
    if (address + head_bytes) % ALIGNMENT_BYTES:
        bounced(handle, offset, address, nbytes, staging)
        return
    body_bytes = (nbytes - head_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    tail_bytes = nbytes - head_bytes - body_bytes
    # Head and tail share a block with neighbours: a write reads that block, changes its part and
    # writes it back, so transfers of one block must be ordered by the caller.
    if head_bytes:
        bounced(handle, offset, address, head_bytes, staging)
    if body_bytes:
        start = head_bytes
        _straight(handle, offset + start, address + start, body_bytes, is_write=is_write, needed_bytes=body_bytes)
    if tail_bytes:
        start = head_bytes + body_bytes
        bounced(handle, offset + start, address + start, tail_bytes, staging)


def padding_after(position: int) -> int:
    """Bytes from a position of a file to the end of its block."""
    return -position % ALIGNMENT_BYTES


def _straight(handle: FileHandle, offset: int, address: int, nbytes: int, *, is_write: bool, needed_bytes: int) -> None:
    """Repeats the system call until at least `needed_bytes` of `nbytes` are moved.

    A call may move fewer than asked.
    """
    call = handle.operations.pwrite if is_write else handle.operations.pread
    done = fruitless = 0
    while done < needed_bytes:
        moved = call(handle.descriptor, view_of(address + done, nbytes - done), offset + done)
        if moved > 0 and done + moved >= needed_bytes:
            return
        if handle.is_direct and moved > 0:
            # The next direct call must start on a block again: the part of a block is moved a
            # second time, with the same bytes. Where that was all, the next call tells why, or gets
            # further.
            fruitless = fruitless + 1 if moved < ALIGNMENT_BYTES else 0
            moved = moved // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            if 0 < fruitless < _MOST_FRUITLESS:
                continue
        if moved <= 0:
            if is_write:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            raise ShortReadError(needed_bytes - done)
        done += moved


def _read_bounced(handle: FileHandle, offset: int, address: int, nbytes: int, staging: Memory) -> None:
    position, end = offset, offset + nbytes
    while position < end:
        start = position - position % ALIGNMENT_BYTES
        stop = min(start + staging.nbytes, round_up(end, ALIGNMENT_BYTES))
        part_end = min(end, stop)
        # The last block may reach beyond the end of the file: only the asked bytes must come.
        _straight(handle, start, staging.address, stop - start, is_write=False, needed_bytes=part_end - start)
        # ctypes gives up the interpreter lock while it copies.
        ctypes.memmove(address + position - offset, staging.address + position - start, part_end - position)
        position = part_end


def _write_bounced(handle: FileHandle, offset: int, address: int, nbytes: int, staging: Memory, *, pads: bool) -> None:
    position, end = offset, offset + nbytes
    while position < end:
        start = position - position % ALIGNMENT_BYTES
        stop = min(start + staging.nbytes, round_up(end, ALIGNMENT_BYTES))
        part_end = min(end, stop)
        filled_end = stop if pads else part_end
        if start == position and stop == filled_end:
            _fill(staging.address, address + position - offset, part_end - position, filled_end - part_end)
            _straight(handle, start, staging.address, stop - start, is_write=True, needed_bytes=stop - start)
        else:
            with handle.edge_lock:
                _read_edges(handle, start, stop, position, filled_end, staging)
                place = staging.address + position - start
                _fill(place, address + position - offset, part_end - position, filled_end - part_end)
                _straight(handle, start, staging.address, stop - start, is_write=True, needed_bytes=stop - start)
        position = part_end


def _fill(place: int, address: int, nbytes: int, padding_bytes: int) -> None:
    ctypes.memmove(place, address, nbytes)
    ctypes.memset(place + nbytes, 0, padding_bytes)


def _read_edges(handle: FileHandle, start: int, stop: int, position: int, part_end: int, staging: Memory) -> None:
    """Reads the first and last block of the range into the bounce buffer, where the write does not
    cover them.
    """
    last = stop - ALIGNMENT_BYTES
    if position > start or last == start:
        _straight(handle, start, staging.address, ALIGNMENT_BYTES, is_write=False, needed_bytes=ALIGNMENT_BYTES)
    if part_end < stop and last != start:
        address = staging.address + last - start
        _straight(handle, last, address, ALIGNMENT_BYTES, is_write=False, needed_bytes=ALIGNMENT_BYTES)


def _forget(handle: FileHandle, offset: int, nbytes: int, *, is_write: bool) -> None:
    """Empties the page cache of a range.

    Dirty pages cannot be dropped, so a written range goes to the device first.
    """
    if is_write:
        handle.operations.fdatasync(handle.descriptor)
    handle.operations.forget(handle.descriptor, offset, nbytes)
