"""The small state of a step: a few numbers and tensors, whole, in the one of two files that is not
current.

In: bytes. Out: bytes, checked. Both files have their blocks claimed at creation; a state that
outgrows its file claims more before it is written, and the committed one stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core.errors import StoreError, UsageError
from memfit.core.units import MIB, format_bytes, round_up
from memfit.store.checksums import checksum
from memfit.store.file_operations import FileHandle, write_all
from memfit.store.manifest import STATE_LIMIT_BYTES, StateEntry
from memfit.store.memory_ranges import ALIGNMENT_BYTES
from memfit.store.os_errors import explain, store_error

_PART_BYTES = MIB


def write_state(handles: Sequence[FileHandle], content: bytes, *, current: StateEntry | None) -> StateEntry:
    """Writes a state beside the current one.

    It becomes current by a manifest that names the entry returned.

    Args:
        handles: the two files.
        content: the state.
        current: the committed one, which stays.

    Raises:
        UsageError: longer than a state may be.
        StoreError: the disk is full or broken; the committed state is whole and this may be
            repeated.
    """
    if len(content) > STATE_LIMIT_BYTES:
        raise UsageError(
            f"a state of {format_bytes(len(content))} is more than a store keeps beside its blocks "
            f"({format_bytes(STATE_LIMIT_BYTES)}): save what is large on its own"
        )
    number = 0 if current is None else 1 - current.file
    handle = handles[number]
    try:
        missing_bytes = round_up(len(content), ALIGNMENT_BYTES) - handle.size_bytes()
        if missing_bytes > 0:
            handle.allocate(handle.size_bytes(), missing_bytes)
        write_all(handle.operations, handle.descriptor, content)
    except OSError as error:
        raise explain(
            error, doing="write the state (the step before is whole and current)", path=handle.path
        ) from error
    return StateEntry(file=number, nbytes=len(content), checksum=checksum(content))


def read_state(handles: Sequence[FileHandle], entry: StateEntry) -> bytes:
    """The committed state. It is summed a MiB at a time before memory of its length is taken.

    Raises:
        StoreError: it is damaged, or cannot be read.
    """
    handle = handles[entry.file]
    try:
        part = bytearray(min(_PART_BYTES, entry.nbytes))
        found = position = 0
        while position < entry.nbytes:
            view = memoryview(part)[: min(len(part), entry.nbytes - position)]
            _fill(handle, view, position)
            found = checksum(view, found)
            position += view.nbytes
        if found != entry.checksum:
            raise store_error(
                f"{handle.path} is damaged: the state of the step (bytes 0 to {entry.nbytes}) has checksum {found:08x}, and "
                f"{entry.checksum:08x} was written; restore the store from a copy, or start again"
            )
        content = bytearray(entry.nbytes)
        _fill(handle, memoryview(content), 0)
    except _EndedError as error:
        raise store_error(
            f"{handle.path} is damaged: the state of the step has {entry.nbytes} bytes and the file ends at byte "
            f"{error.position}; restore the store from a copy, or start again"
        ) from error
    except StoreError:
        raise
    except OSError as error:
        raise explain(error, doing="read the state", path=handle.path) from error
    return bytes(content)


class _EndedError(Exception):
    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def _fill(handle: FileHandle, view: memoryview, offset: int) -> None:
    while view.nbytes:
        moved = handle.operations.pread(handle.descriptor, view, offset)
        if moved <= 0:
            raise _EndedError(offset)
        view, offset = view[moved:], offset + moved
