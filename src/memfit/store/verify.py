"""Does a store still hold what was written to it? Every piece is read and compared with its
checksum.

In: a directory, or an open store. Out: a report by block, with each damaged piece by file, place
and tensors.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.core.errors import StoreError
from memfit.core.limits import MIB, format_bytes
from memfit.store.checksums import Memory, aligned_memory
from memfit.store.disk_store import DiskStore
from memfit.store.files import FileOperations
from memfit.store.journal import UnderWay, under_way
from memfit.store.region import PieceDamage, Region
from memfit.store.state import decode_state
from memfit.store.transfer import DiskTransfer

_READ_BYTES = 4 * MIB
_READS_UNDER_WAY = 4
_SHOWN_DAMAGES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockReport:
    """Result of checking one region."""

    name: str
    nbytes: int
    step: int | None
    """When it was committed last; None if never."""
    pieces: int
    """How many pieces were compared with a checksum; 0 for a region that keeps none."""
    damaged: tuple[PieceDamage, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreReport:
    """Result of checking a store."""

    directory: Path
    step: int | None
    """The committed step; None before the first commit."""
    blocks: tuple[BlockReport, ...]
    state_problem: str | None
    """Problem with the small state, or with a journal's record; None without one."""
    under_way: UnderWay | None = None
    """A step of a journal that is decided and not committed."""

    @property
    def is_whole(self) -> bool:
        """Nothing is damaged."""
        return self.state_problem is None and not any(block.damaged for block in self.blocks)

    @property
    def checked_bytes(self) -> int:
        """Bytes that were compared with a checksum, the state aside."""
        return sum(block.nbytes for block in self.blocks if block.pieces)

    def in_words(self) -> str:
        """A line for the store and one for each problem."""
        pieces = sum(block.pieces for block in self.blocks)
        bare = [block.name for block in self.blocks if block.nbytes and not block.pieces]
        at = "no step committed" if self.step is None else f"step {self.step}"
        if self.under_way is not None:
            left = len(self.under_way.pending)
            of = (
                f", {left} regions are still to be updated: the run's own program does so when it goes on"
                if left
                else ""
            )
            at += f", and step {self.under_way.step} is decided in the journal{of}"
        lines = [
            f"{self.directory}: {at}; {pieces} pieces, {format_bytes(self.checked_bytes)} compared with their checksums: "
            + ("all as written" if self.is_whole else "DAMAGED")
        ]
        damaged = [damage for block in self.blocks for damage in block.damaged]
        lines += [damage.in_words() for damage in damaged[:_SHOWN_DAMAGES]]
        if len(damaged) > _SHOWN_DAMAGES:
            blocks = sum(1 for block in self.blocks if block.damaged)
            lines.append(f"and {len(damaged) - _SHOWN_DAMAGES} pieces more, {len(damaged)} in {blocks} blocks")
        if self.state_problem is not None:
            lines.append(self.state_problem)
        if bare:
            lines.append(f"without checksums, so not compared: {', '.join(bare[:8])}{' and more' if bare[8:] else ''}")
        return "\n".join(lines)


def verify(
    directory: str | os.PathLike[str],
    *,
    on_progress: Callable[[int, int], None] | None = None,
    operations: FileOperations | None = None,
) -> StoreReport:
    """Reads all that is committed in a store and compares it.

    Costs one reading of half of the store, and memory for four reads of 4 MiB. Changes nothing, and
    needs no right to.

    Args:
        directory: of the store.
        on_progress: called with (bytes read, bytes in all).
        operations: the system calls.

    Raises:
        StoreInUseError: a live job owns it.
        StoreError: there is none, or what holds it together (manifest, lengths of files) is
            damaged.
    """
    with DiskStore.open(directory, reads_only=True, operations=operations) as store:
        return check_store(store, on_progress=on_progress)


def check_store(store: DiskStore, *, on_progress: Callable[[int, int], None] | None = None) -> StoreReport:
    """As `verify`, of a store that is open; what is not committed is not looked at."""
    total_bytes, done_bytes = summed_bytes(store), 0
    # The same memory for all regions: fresh pages would cost as much as the reading.
    piece_bytes = store.piece_bytes or 1
    buffers = [aligned_memory(max(1, _READ_BYTES // piece_bytes) * piece_bytes) for _ in range(_READS_UNDER_WAY)]
    blocks: list[BlockReport] = []
    for name in store.regions:
        region = store.region(name)
        blocks.append(_check_region(region, piece_bytes, buffers))
        done_bytes += region.nbytes if region.has_sums else 0
        if on_progress is not None:
            on_progress(done_bytes, total_bytes)
    problem, found = _state_of(store)
    return StoreReport(
        directory=store.directory, step=store.step, blocks=tuple(blocks), state_problem=problem, under_way=found
    )


def summed_bytes(store: DiskStore) -> int:
    """Returns the bytes of the regions that keep checksums."""
    return sum(spec.nbytes for name, spec in store.regions.items() if store.region(name).has_sums)


def _state_of(store: DiskStore) -> tuple[str | None, UnderWay | None]:
    """Checks the state and the journal's record; returns the problems and the record."""
    try:
        content = store.read_state()
        if content is not None:
            decode_state(content)
        return None, under_way(store)
    except StoreError as error:
        return str(error), None


def _check_region(region: Region, piece_bytes: int, buffers: Sequence[Memory]) -> BlockReport:
    """Reads the committed version of a region and compares it."""
    damaged: list[PieceDamage] = []
    pieces = 0
    if region.has_sums:
        pieces = -(-region.nbytes // piece_bytes)
        for start, nbytes, transfer in _reads(region, damaged, buffers):
            transfer.join()
            if transfer.failure is not None:
                damaged += _unreadable(region, start, nbytes, piece_bytes)
    # A piece may be found by both readings.
    by_piece = {damage.offset: damage for damage in damaged}
    return BlockReport(
        name=region.name,
        nbytes=region.nbytes,
        step=region.step,
        pieces=pieces,
        damaged=tuple(by_piece[offset] for offset in sorted(by_piece)),
    )


def _reads(
    region: Region, damaged: list[PieceDamage], buffers: Sequence[Memory]
) -> Iterator[tuple[int, int, DiskTransfer]]:
    """Reads of whole pieces (start, bytes, transfer), a few under way at once.

    Buffers are used again in turn.
    """
    read_bytes = buffers[0].nbytes
    waiting: deque[tuple[int, int, DiskTransfer, Memory]] = deque()
    free = list(buffers)
    for start in range(0, region.nbytes, read_bytes):
        if not free:
            oldest = waiting.popleft()
            yield oldest[:3]
            free.append(oldest[3])
        nbytes = min(read_bytes, region.nbytes - start)
        memory = free.pop()
        waiting.append((start, nbytes, region.read(start, nbytes, memory, slot="committed", damaged=damaged), memory))
    while waiting:
        yield waiting.popleft()[:3]


def _unreadable(region: Region, start: int, nbytes: int, piece_bytes: int) -> list[PieceDamage]:
    """After a read that failed: which of its pieces cannot be read, and which are damaged."""
    found: list[PieceDamage] = []
    memory = aligned_memory(piece_bytes)
    for piece in range(start // piece_bytes, -(-(start + nbytes) // piece_bytes)):
        first = piece * piece_bytes
        transfer = region.read(first, min(piece_bytes, region.nbytes - first), memory, slot="committed", damaged=found)
        transfer.join()
        if transfer.failure is not None:
            found.append(region.unreadable(piece, piece_bytes, f"cannot be read ({transfer.failure})"))
    return found
