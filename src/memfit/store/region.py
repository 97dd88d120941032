"""A region: one tensor's home in a store, read and written by ranges.

In: byte ranges of a region and memory. Out: transfers. Transfers of the same bytes happen in the
order in which they are asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from memfit.core.errors import UsageError
from memfit.core.limits import round_up
from memfit.store.checksums import ALIGNMENT_BYTES, Memory, ReadCheck, SlotSums
from memfit.store.files import FileHandle, store_error
from memfit.store.io import DiskIO
from memfit.store.manifest import RegionSpec, SlotPlace, TensorPlace, tensors_between
from memfit.store.transfer import AccessLog, DiskTransfer, Watcher, padding_after

Slot = Literal["current", "spare", "committed"]


class CheckUsable(Protocol):
    """Raises `StoreError` if the store that a region belongs to cannot be read, or written, any
    more.
    """

    def __call__(self, *, is_write: bool) -> None:
        """Asks before each transfer."""


@dataclass(slots=True)
class RegionState:
    """State of one region of an open store."""

    spec: RegionSpec
    places: tuple[SlotPlace, ...]
    steps: list[int | None]
    committed: int
    """The slot of the last commit; writes to the spare slot go to the other one."""
    piece_bytes: int | None = None
    """How many bytes a checksum covers; None if none are kept of this region."""
    under: tuple[tuple[tuple[RegionState, int], ...], ...] = ()
    """For each slot, the slots (region, number) of others that share room with it: only in a store
    with a journal.
    """
    current: int = field(init=False)
    """The slot that reads see: the committed one, or the other one after steps that are not
    committed yet.
    """
    logs: tuple[AccessLog, ...] = field(init=False)
    """Transfers by slot."""
    sums: tuple[SlotSums, ...] | None = field(init=False)
    """For each slot, the checksums of what is in it."""

    def __post_init__(self) -> None:
        self.current = self.committed
        self.logs = tuple(AccessLog() for _ in self.places)
        self.sums = None
        if self.piece_bytes is not None:
            self.sums = tuple(SlotSums(self.spec.nbytes, self.piece_bytes) for _ in self.places)

    @property
    def spare(self) -> int:
        """The slot that the next version is written to."""
        return 1 - self.committed

    @property
    def is_whole(self) -> bool:
        """A version is committed."""
        return self.steps[self.committed] is not None

    def is_free(self, number: int, moved: Collection[RegionState] = ()) -> bool:
        """No committed version of another region lies where this slot does.

        The next versions of those that `moved` count as committed.
        """
        shared = self.under[number] if self.under else ()
        gone = {id(other) for other in moved}
        return not any(
            other.is_whole and slot == (other.spare if id(other) in gone else other.committed) for other, slot in shared
        )


class Region:
    """One region of an open store; made by `DiskStore.region`.

    Attributes:
        name: as given at creation.
        nbytes: its length.
        slots: 1 if it is written in place, 2 if it has a spare slot.
        tag: purpose, for the counters.
    """

    def __init__(
        self,
        *,
        name: str,
        state: RegionState,
        handles: tuple[FileHandle, ...],
        io: DiskIO,
        lock: threading.RLock,
        check_usable: CheckUsable,
        verifies: bool = False,
    ) -> None:
        self.name = name
        self.nbytes = state.spec.nbytes
        self.slots = state.spec.slots
        self.tag = state.spec.tag
        self._state = state
        self._handles = handles
        self._io = io
        self._lock = lock
        self._check_usable = check_usable
        self._verifies = verifies

    @property
    def step(self) -> int | None:
        """The step that the committed slot was committed at; None if it never was."""
        return self._state.steps[self._state.committed]

    @property
    def has_advanced(self) -> bool:
        """Reads see a version that is not committed yet.

        Writes to the spare slot change it in place.
        """
        return self._state.current != self._state.committed

    @property
    def has_sums(self) -> bool:
        """The committed version has checksums."""
        return self._state.sums is not None and self.step is not None

    def unreadable(self, piece: int, piece_bytes: int, problem: str) -> PieceDamage:
        """Describes a piece of the committed version that cannot be read."""
        place = self._state.places[self._state.committed]
        path = self._handles[place.file].path
        return damage_of(self.name, self._state.spec, place, path, piece_bytes, piece, problem)

    @property
    def tensors(self) -> tuple[TensorPlace, ...]:
        """Tensors of the region, in order."""
        return self._state.spec.tensors

    def read(
        self,
        offset: int,
        nbytes: int,
        into: Memory,
        *,
        slot: Slot = "current",
        urgent: bool = False,
        verify: bool | None = None,
        damaged: list[PieceDamage] | None = None,
    ) -> DiskTransfer:
        """Starts a read of bytes of the region.

        Bytes that were never written are zero, in a store that was just created.

        Args:
            offset: first byte in the region.
            nbytes: length.
            into: at least as long; not to be touched until the transfer has ended.
            slot: the current version, what has been written of the next one, or the one of the last
                commit.
            urgent: before other reads.
            verify: compare pieces that are read whole with their checksums, in the threads of the
                disk, and fail with the names of the tensors if they differ; as the store was opened
                by default. Parts of a piece are not checked.
            damaged: if given, such pieces are appended to it instead, and the read goes on.

        Raises:
            UsageError: outside of the region or the memory, or no such slot.
            StoreError: the store is closed, or these bytes could not be written before.
        """
        with self._lock:
            number = self._slot(slot, offset, nbytes, is_write=False)
            log, place = self._state.logs[number], self._state.places[number]
            verifies = self._verifies if verify is None else verify
            after = log.before_read(offset, offset + nbytes)
            transfer = self._io.read(
                self._handles[place.file],
                place.offset + offset,
                into,
                nbytes,
                tag=self.tag,
                label=self.name,
                urgent=urgent,
                after=after,
                watcher=self._check(number, offset, nbytes, damaged) if verifies or damaged is not None else None,
            )
            log.note(transfer, offset, offset + nbytes)
            return transfer

    def write(
        self,
        offset: int,
        nbytes: int,
        source: Memory,
        *,
        slot: Slot = "spare",
        urgent: bool = False,
        pads: bool = False,
    ) -> DiskTransfer:
        """Starts a write of bytes of the region.

        The spare slot becomes current by `DiskStore.commit`, once all of it is written. The current
        slot is written in place, which no commit protects: that is for regions of one slot, and for
        filling a new region before its first commit.

        Args:
            offset: first byte in the region.
            nbytes: length.
            source: at least as long; must not change until the transfer has ended.
            slot: where to.
            urgent: before other writes.
            pads: what is left of the last block of 4096 bytes becomes zeros; it must be nobody's.

        Raises:
            UsageError: outside of the region or the memory, no such slot, or in place where a
                committed version would be lost.
            StoreError: the store is closed or must be opened again.
        """
        with self._lock:
            number = self._slot(slot, offset, nbytes, is_write=True)
            log, place = self._state.logs[number], self._state.places[number]
            end = self.end_of_write(offset + nbytes, pads=pads)
            after = log.before_write(offset, end)
            transfer = self._io.write(
                self._handles[place.file],
                place.offset + offset,
                source,
                nbytes,
                tag=self.tag,
                label=self.name,
                urgent=urgent,
                after=after,
                watcher=note_sums(self._state, number, offset, nbytes, end - offset - nbytes),
                pads=pads,
            )
            log.note(transfer, offset, end)
            return transfer

    def end_of_write(self, end: int, *, pads: bool) -> int:
        """Where a write ends in the region whose bytes end at `end`."""
        return min(self.nbytes, end + padding_after(end)) if pads else end

    def _check(self, number: int, offset: int, nbytes: int, damaged: list[PieceDamage] | None = None) -> Watcher | None:
        """Looks at what a read of a slot brings, if the slot has checksums."""
        if self._state.sums is None:
            return None
        check = ReadCheck(self._state.sums[number], offset, nbytes)
        place, spec, name = self._state.places[number], self._state.spec, self.name
        path = self._handles[place.file].path

        def look(position: int, address: int, moved_bytes: int) -> None:
            for piece, expected, found in check.note(offset + position, address, moved_bytes):
                problem = f"have checksum {found:08x}, and {expected:08x} was written"
                damage = damage_of(name, spec, place, path, check.piece_bytes, piece, problem)
                if damaged is None:
                    raise store_error(damage.in_words())
                damaged.append(damage)

        return look

    def _slot(self, slot: Slot, offset: int, nbytes: int, *, is_write: bool) -> int:
        self._check_usable(is_write=is_write)
        if slot not in ("current", "spare", *(() if is_write else ("committed",))):
            raise UsageError(f"region {self.name!r}: a slot is 'current' or 'spare', not {slot!r:.80}")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise UsageError(
                f"region {self.name!r}: bytes {offset} to {offset + nbytes} are not inside its {self.nbytes} bytes"
            )
        state = self._state
        if slot == "spare" and self.slots == 1:
            raise UsageError(f"region {self.name!r} has one slot: use slot='current', or create it with slots=2")
        is_protected = self.slots == 2 or state.sums is not None
        if is_write and slot == "current" and is_protected and state.is_whole:
            raise UsageError(
                f"region {self.name!r} holds the committed step {self.step}: write slot='spare' and commit; in place, "
                "a crash would leave neither the old version nor the new one"
            )
        number = {"current": state.current, "spare": state.spare, "committed": state.committed}[slot]
        if is_write and not state.is_free(number):
            raise UsageError(
                f"region {self.name!r} cannot be written yet: the committed version of another region lies there until it has moved"
            )
        return number


def note_sums(state: RegionState, number: int, offset: int, nbytes: int, padding_bytes: int = 0) -> Watcher | None:
    """Sums what a transfer of `nbytes` from or to a slot, which starts at `offset`, has moved, and
    zeros behind it; None without checksums.
    """
    if state.sums is None:
        return None
    sums = state.sums[number]

    def note(position: int, address: int, moved_bytes: int) -> None:
        sums.note(offset + position, address, moved_bytes)
        if padding_bytes and position + moved_bytes == nbytes:
            sums.note_zeros(offset + nbytes, padding_bytes)

    return note


def share_room(states: Mapping[str, RegionState]) -> None:
    """Tells each slot of which others it shares room with; see `RegionState.under`."""
    slots = sorted(
        (
            (place.file, place.offset, state, number)
            for state in states.values()
            for number, place in enumerate(state.places)
        ),
        key=lambda found: found[:2],
    )
    under: dict[tuple[int, int], list[tuple[RegionState, int]]] = {}
    for index, (file, offset, state, number) in enumerate(slots):
        end = offset + round_up(state.spec.nbytes, ALIGNMENT_BYTES)
        for other_file, other_offset, other, other_number in slots[index + 1 :]:
            if (other_file, other_offset) >= (file, end):
                break
            if other is not state:
                under.setdefault((id(state), number), []).append((other, other_number))
                under.setdefault((id(other), other_number), []).append((state, number))
    for state in states.values():
        state.under = tuple(tuple(under.get((id(state), number), ())) for number in range(len(state.places)))


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceDamage:
    """A piece of a slot that does not hold what was written, or cannot be read."""

    path: Path
    file_offset: int
    """First byte in the file."""
    nbytes: int
    block: str
    """The region's name."""
    offset: int
    """First byte in the region."""
    tensors: tuple[str, ...]
    """The tensors that have bytes in the piece."""
    problem: str

    def in_words(self) -> str:
        """A sentence that names file, block and tensors."""
        shown = ", ".join(f"{name!r:.80}" for name in self.tensors[:4]) + (" and more" if len(self.tensors) > 4 else "")
        of = f", of {shown}" if shown else ""
        return (
            f"{self.path} is damaged: bytes {self.file_offset} to {self.file_offset + self.nbytes}, of block "
            f"{self.block!r:.80} (its bytes {self.offset} to {self.offset + self.nbytes}{of}), {self.problem}; look at the "
            "disk (dmesg), then restore the store from a copy or go back to a saved state"
        )


def damage_of(
    name: str, spec: RegionSpec, place: SlotPlace, path: Path, piece_bytes: int, piece: int, problem: str
) -> PieceDamage:
    """Describes a damaged piece."""
    start = piece * piece_bytes
    end = min(spec.nbytes, start + piece_bytes)
    return PieceDamage(
        path=path,
        file_offset=place.offset + start,
        nbytes=end - start,
        block=name,
        offset=start,
        tensors=tuple(tensors_between(spec.tensors, start, end)),
        problem=problem,
    )


def check_complete(name: str, state: RegionState) -> None:
    """Refuses to make a spare slot current that is not whole.

    Raises:
        UsageError: the region has no spare slot, or parts of it were not written since the last
            commit of the region.
        StoreError: a write to it failed.
    """
    if state.spec.slots == 1:
        raise UsageError(f"region {name!r} has one slot, so there is nothing to make current: leave it out of `flips`")
    log = state.logs[state.spare]
    failure = log.failure()
    if failure is not None:
        raise store_error(
            f"the next version of {name!r} cannot be committed, it was not written: {failure}; the committed version "
            "is whole: write the region again and repeat the commit",
            failure.errno,
        ) from failure
    if log.written_bytes != state.spec.nbytes:
        raise UsageError(
            f"the next version of {name!r} cannot be committed: {log.written_bytes} of its {state.spec.nbytes} bytes "
            "have been written since the last commit, the others are two versions old: write all of it"
        )
