"""Reads and writes at a position of a file, whole: the system may move a part only, where a disk is
nearly full or of more than 2 GiB.

In: a descriptor, bytes. Out: the same bytes in the file, or in memory; its position does not move.
"""

from __future__ import annotations

import os


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
