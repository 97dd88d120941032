"""The journal of a store: from gradients that are durable to a step that every block has made,
whatever happens between.

In: an open store with a journal, what its blocks' regions are called. Out: which step is under way,
which blocks may be written next, and commits that say how far it is.

[Note: journal]
Two versions of everything take twice the room. A journal takes one, the gradients, and the room of
the largest block: once all gradients of a step are durable, with every number that its updates use
(the *record*), each block's new version follows from its old one, however often it is made. So the
step is decided by one commit, and then made block by block:

1. gradients are written in place, into regions with one slot that hold nothing yet; the record into
   its spare slot;
2. `begin` commits them ([Note: commit] in `disk_store`): from here on the step will be made;
3. a block's new version is written to its spare slot, which overlaps the places of blocks that have
   moved already, and no current version: `Region.write` refuses anything else;
4. `moved` commits such blocks, as many as fit the spare room, with a record that has their new
   counters. Only now may what lay there before be overwritten: (3) goes on with the blocks that
   this made room for;
5. the `moved` that leaves none behind also gives up the gradients, whose regions may be written in
   place again.

Blocks lie one behind the other, the spare room before the first or behind the last of them: each
step moves all of them past it, forwards and backwards in turn (`placement.lay_out_moving`). Each
slot has the number of its step, so that what is left to do is what has another number than the
record: a replay after a crash makes those updates and no others, from old versions that no write
has touched, and a crash in a replay changes nothing of this.

The step and the small state of the store stay, until the step is committed: what the program did
after it (a scheduler, an average) is not known before. A run that crashed between (2) and that
commit goes on one step earlier, finds the tensors of the step in the store, and takes what else
`job.step` gives from the record, instead of computing it again (`job.journaling`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.core.errors import UsageError
from memfit.core.limits import format_bytes, round_up
from memfit.store.checksums import Memory, aligned_memory
from memfit.store.disk_store import DiskStore
from memfit.store.files import store_error
from memfit.store.manifest import STATE_LIMIT_BYTES, RegionSpec
from memfit.store.region import Region
from memfit.store.region_table import JournalNote
from memfit.store.state import decode_state, encode_state

RECORD = "journal"
"""The region of the record."""
_LENGTH_BYTES = 8


def record_region(nbytes: int) -> RegionSpec:
    """The region that records of up to so many bytes are written to."""
    return RegionSpec(nbytes=nbytes, slots=2, tag="journal")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnderWay:
    """A step that is decided and not committed."""

    step: int
    pending: tuple[str, ...]
    """Regions that hold the step before: only the optimizer of the run can make their next version.
    """
    record: Mapping[str, Any]


def under_way(disk: DiskStore) -> UnderWay | None:
    """Returns the step under way in a store with a journal, or None.

    Raises:
        StoreError: the record cannot be read, or is damaged.
    """
    if disk.scheme != "journal" or RECORD not in disk.regions:
        return None
    journal = Journal(
        disk, {name: (name,) for name, spec in disk.regions.items() if spec.slots == 2 and spec.tag != "buffer"}, ()
    )
    step = journal.step
    return None if step is None else UnderWay(step=step, pending=journal.pending, record=journal.read())


class Journal:
    """The journal of an open store.

    Memory: the room of a record, from the first one on.

    Args:
        disk: whose `scheme` is "journal", with a region `RECORD`, committed at least once before
            `begin`.
        blocks: by name, the regions with two slots that an update writes.
        gradients: regions with one slot, in which nothing is committed unless a step is under way.
    """

    def __init__(self, disk: DiskStore, blocks: Mapping[str, Sequence[str]], gradients: Iterable[str]) -> None:
        if disk.scheme != "journal":
            raise UsageError(f"the store at {disk.directory} keeps no journal")
        self._disk = disk
        self._blocks = {name: tuple(regions) for name, regions in blocks.items()}
        self._gradients = tuple(gradients)
        self._memory: Memory | None = None

    @property
    def step(self) -> int | None:
        """The step that is decided and not committed yet; None if there is none."""
        decided, committed = self._disk.region(RECORD).step, self._disk.step
        return decided if decided is not None and committed is not None and decided > committed else None

    @property
    def pending(self) -> tuple[str, ...]:
        """The blocks that are still to be updated in it."""
        step = self.step
        if step is None:
            return ()
        return tuple(
            name for name, regions in self._blocks.items() if any(self._disk.region(r).step != step for r in regions)
        )

    def turns(self, *, of_next: bool = False) -> list[tuple[str, ...]]:
        """The pending blocks in the order in which they may be written: those of a turn when all
        before it have `moved`.

        Args:
            of_next: all blocks, as the next step will find them when it is decided.
        """
        left = list(self._blocks if of_next else self.pending)
        turns, moved = list[tuple[str, ...]](), set[str]()
        while left:
            free = tuple(n for n in left if all(self._disk.is_free(region, moved) for region in self._blocks[n]))
            assert free, "the spare room takes the largest block"
            turns.append(free)
            moved.update(region for name in free for region in self._blocks[name])
            left = [name for name in left if name not in free]
        return turns

    def read(self) -> dict[str, Any]:
        """The record of the step that is under way.

        Raises:
            StoreError: it cannot be read, or is damaged.
        """
        region = self._disk.region(RECORD)
        room_bytes = region.nbytes - _LENGTH_BYTES
        length = 0
        if room_bytes > 0:
            length = int.from_bytes(self._checked(region, _LENGTH_BYTES)[:_LENGTH_BYTES], "little")
        if not 0 < length <= min(room_bytes, STATE_LIMIT_BYTES):
            raise store_error(
                f"the record of a step in {self._disk.directory} is damaged: it has {length} bytes in a room of {region.nbytes}"
            )
        return decode_state(self._checked(region, _LENGTH_BYTES + length)[_LENGTH_BYTES:])

    def _checked(self, region: Region, nbytes: int) -> bytes:
        """The first bytes of a region, compared with its checksums."""
        whole = min(region.nbytes, round_up(nbytes, self._disk.piece_bytes or 1))
        memory = aligned_memory(whole)
        region.read(0, whole, memory, verify=True).wait()
        return bytes(memory.view()[:nbytes])  # while `memory` holds what the view shows

    def begin_step(self) -> None:
        """Before the gradients of a step are written: those of a step that failed before it was
        decided are void.

        Raises:
            UsageError: a step is under way.
        """
        if self.pending:
            raise UsageError(f"step {self.step} is under way: its gradients are still needed")
        self._disk.forget_writes(self._gradients)

    def begin(self, step: int, record: Mapping[str, Any], flips: Iterable[str] = ()) -> None:
        """Decides a step: its gradients and the record become durable, and the spare slots of
        `flips` current.

        Args:
            step: the one after the store's.
            record: every number that the updates need, see `encode_state`.
            flips: other regions whose next version belongs to the step.

        Raises:
            UsageError: another step. UnsupportedError: a record that cannot be kept.
            StoreError: the disk, or a record that is longer than its region. Unless the message
                says otherwise the step is not decided, and this may be repeated.
        """
        committed = self._disk.step
        if committed is None or step != committed + 1 or self.step is not None:
            raise UsageError(
                f"step {step} cannot be decided: step {committed} is the store's, and step {self.step} is under way"
            )
        self._write(record)
        note = JournalNote(step=step, fills=frozenset(self._gradients))
        self._disk.commit(committed, [RECORD, *flips], journal=note)

    def moved(self, blocks: Sequence[str], record: Mapping[str, Any]) -> None:
        """Commits the new versions of blocks, whose spare slots are whole.

        Args:
            blocks: of the first of `turns`.
            record: as it is with their new counters.

        Raises:
            UsageError: blocks that are not pending. UnsupportedError, StoreError: as `begin`; what
                was written is kept, and this may be repeated.
        """
        step, committed, pending = self.step, self._disk.step, self.pending
        if step is None or committed is None or not set(blocks) <= set(pending):
            raise UsageError(f"blocks {list(blocks)} are not to be updated in step {step}")
        self._write(record)
        is_last = set(blocks) == set(pending)
        note = JournalNote(step=step, frees=frozenset(self._gradients) if is_last else frozenset())
        flips = [region for name in blocks for region in self._blocks[name]]
        self._disk.commit(committed, [RECORD, *flips], journal=note)

    def _write(self, record: Mapping[str, Any]) -> None:
        region = self._disk.region(RECORD)
        content = encode_state(record)
        if _LENGTH_BYTES + len(content) > region.nbytes:
            raise store_error(
                f"the record of a step takes {format_bytes(len(content))}, and the journal of {self._disk.directory} has room for "
                f"{format_bytes(region.nbytes)}: what it holds beside counters and settings of the optimizer are the losses of microbatches; take fewer of these"
            )
        if self._memory is None:
            self._memory = aligned_memory(region.nbytes)
        view, end = self._memory.view(), _LENGTH_BYTES + len(content)
        view[:_LENGTH_BYTES] = len(content).to_bytes(_LENGTH_BYTES, "little")
        view[_LENGTH_BYTES:end] = content
        view[end:] = bytes(len(view) - end)
        region.write(0, region.nbytes, self._memory).wait()
