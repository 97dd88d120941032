"""A region: one tensor's home in a store, read and written by ranges.

In: byte ranges of a region and memory. Out: tickets. Transfers of the same bytes happen in the order in which they are
asked for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal, Protocol

from memfit.core.errors import UsageError
from memfit.runtime.store.explain import store_error
from memfit.runtime.store.files import FileHandle
from memfit.runtime.store.io import DiskIO
from memfit.runtime.store.layout import RegionSpec, SlotPlace
from memfit.runtime.store.memory import Memory
from memfit.runtime.store.ordering import AccessLog
from memfit.runtime.store.ticket import Ticket

Slot = Literal["current", "spare"]


class CheckUsable(Protocol):
    """Raises `StoreError` if the store that a region belongs to cannot be read, or written, any more."""

    def __call__(self, *, is_write: bool) -> None:
        """Asks before each transfer."""


@dataclass(slots=True)
class RegionState:
    """What a store knows of one region while it is open."""

    spec: RegionSpec
    places: tuple[SlotPlace, ...]
    steps: list[int | None]
    current: int
    logs: tuple[AccessLog, ...] = field(init=False)
    """Of each slot."""

    def __post_init__(self) -> None:
        self.logs = tuple(AccessLog() for _ in self.places)


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

    @property
    def step(self) -> int | None:
        """The step that the current slot was committed at; None if it never was."""
        return self._state.steps[self._state.current]

    def read(self, offset: int, nbytes: int, into: Memory, *, slot: Slot = "current", urgent: bool = False) -> Ticket:
        """Starts a read of bytes of the region.

        Bytes that were never written are zero, in a store that was just created.

        Args:
            offset: first byte in the region.
            nbytes: length.
            into: at least as long; not to be touched until the ticket is done.
            slot: the current version, or what has been written of the next one.
            urgent: before other reads.

        Raises:
            UsageError: outside of the region or the memory, or no such slot.
            StoreError: the store is closed, or these bytes could not be written before.
        """
        with self._lock:
            log, place = self._slot(slot, offset, nbytes, is_write=False)
            after = log.before_read(offset, offset + nbytes)
            ticket = self._io.read(
                self._handles[place.file],
                place.offset + offset,
                into,
                nbytes,
                tag=self.tag,
                label=self.name,
                urgent=urgent,
                after=after,
            )
            log.note(ticket, offset, offset + nbytes)
            return ticket

    def write(self, offset: int, nbytes: int, source: Memory, *, slot: Slot = "spare", urgent: bool = False) -> Ticket:
        """Starts a write of bytes of the region.

        The spare slot becomes current by `DiskStore.commit`, once all of it is written. The current slot is written in
        place, which no commit protects: that is for regions of one slot, and for filling a new region before its first
        commit.

        Args:
            offset: first byte in the region.
            nbytes: length.
            source: at least as long; must not change until the ticket is done.
            slot: where to.
            urgent: before other writes.

        Raises:
            UsageError: outside of the region or the memory, no such slot, or in place where a committed version would
                be lost.
            StoreError: the store is closed or must be opened again.
        """
        with self._lock:
            log, place = self._slot(slot, offset, nbytes, is_write=True)
            after = log.before_write(offset, offset + nbytes)
            ticket = self._io.write(
                self._handles[place.file],
                place.offset + offset,
                source,
                nbytes,
                tag=self.tag,
                label=self.name,
                urgent=urgent,
                after=after,
            )
            log.note(ticket, offset, offset + nbytes)
            return ticket

    def _slot(self, slot: Slot, offset: int, nbytes: int, *, is_write: bool) -> tuple[AccessLog, SlotPlace]:
        self._check_usable(is_write=is_write)
        if slot not in ("current", "spare"):
            raise UsageError(f"region {self.name!r}: a slot is 'current' or 'spare', not {slot!r:.80}")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise UsageError(
                f"region {self.name!r}: bytes {offset} to {offset + nbytes} are not inside its {self.nbytes} bytes"
            )
        state = self._state
        if slot == "spare" and self.slots == 1:
            raise UsageError(f"region {self.name!r} has one slot: use slot='current', or create it with slots=2")
        if is_write and slot == "current" and self.slots == 2 and self.step is not None:
            raise UsageError(
                f"region {self.name!r} holds the committed step {self.step}: write slot='spare' and commit; in place, "
                "a crash would leave neither the old version nor the new one"
            )
        number = state.current if slot == "current" else 1 - state.current
        return state.logs[number], state.places[number]


def check_complete(name: str, state: RegionState) -> None:
    """Refuses to make a spare slot current that is not whole.

    Raises:
        UsageError: the region has no spare slot, or parts of it were not written since the last commit of the region.
        StoreError: a write to it failed.
    """
    if state.spec.slots == 1:
        raise UsageError(f"region {name!r} has one slot, so there is nothing to make current: leave it out of `flips`")
    log = state.logs[1 - state.current]
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
