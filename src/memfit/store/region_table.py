"""The regions of an open store and their versions: which slot is read, which is written, which may
be committed.

In: the manifest that was read, and the flips of commits. Out: the states of regions, waited for and
checked. Callers hold the store's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memfit.core.errors import UsageError
from memfit.store.checksums import Memory, aligned_memory
from memfit.store.files import FileHandle, store_error
from memfit.store.io import DiskIO
from memfit.store.manifest import Manifest, RegionEntry, StateEntry
from memfit.store.region import RegionState, check_complete, note_sums, share_room

# Builds the manifest of a commit from what was written to the regions of a store.
#
# In: the manifest before, the regions' states, which of them flip. Out: the next manifest; nothing
# is changed.


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalNote:
    """Part of a journaled commit that is about a step under way.

    See [Note: journal].
    """

    step: int
    """Step of the slots that the commit makes current.

    The step of the store, and its small state, stay what they are.
    """
    fills: frozenset[str] = frozenset()
    """Regions with one slot that are whole now, and protected from here on."""
    frees: frozenset[str] = frozenset()
    """Regions with one slot that hold nothing from here on."""


def check_in_place(states: Mapping[str, RegionState]) -> None:
    """Refuses a commit while what reads see could not be written.

    Raises:
        StoreError: a write failed and was not repeated.
    """
    for name, state in states.items():
        failure = state.logs[state.current].failure()
        if failure is not None:
            raise store_error(
                f"{name!r} cannot be committed: {failure}; write it again first", failure.errno
            ) from failure


def complete_sums(
    states: Mapping[str, RegionState],
    flipped: Container[str],
    filled: Container[str],
    handles: Sequence[FileHandle],
    io: DiskIO,
) -> None:
    """Reads what has no checksum yet: pieces whose parts were written anew in other cuts, or not
    all of them.

    Memory: one piece.

    Raises:
        StoreError: it cannot be read.
    """
    buffer: Memory | None = None
    for name, state in states.items():
        if state.sums is None or (state.spec.slots == 1 and not state.is_whole and name not in filled):
            continue
        number = state.spare if name in flipped else state.committed
        place = state.places[number]
        for start, end in state.sums[number].unknown():
            buffer = buffer or aligned_memory(state.sums[number].piece_bytes)
            io.read(
                handles[place.file],
                place.offset + start,
                buffer,
                end - start,
                tag=state.spec.tag,
                label=name,
                watcher=note_sums(state, number, start, end - start),
            ).wait()


def next_manifest(
    manifest: Manifest,
    states: Mapping[str, RegionState],
    *,
    step: int,
    flipped: Container[str],
    filled: Container[str],
    state: StateEntry | None,
    journal: JournalNote | None = None,
) -> Manifest:
    """The manifest of a step.

    Args:
        manifest: of the commit before.
        states: of all regions, with all their checksums known.
        step: its number.
        flipped: regions whose spare slot becomes current.
        filled: regions with one slot and checksums that are whole now.
        state: where the small state of the step was written.
        journal: given, the slots that change are of its step.
    """
    slot_step = step if journal is None else journal.step
    freed = frozenset[str]() if journal is None else journal.frees
    entries: dict[str, RegionEntry] = {}
    for name, found in states.items():
        steps, current = list(found.steps), found.committed
        if name in flipped:
            current = found.spare
            steps[current] = slot_step
        elif name in freed:
            steps[current] = None
        elif name in filled or _is_filled_in_place(found):
            # From now on this is the committed version.
            steps[current] = slot_step
        entries[name] = RegionEntry(
            spec=found.spec,
            places=found.places,
            steps=tuple(steps),
            current=current,
            sums=None if found.sums is None or steps[current] is None else found.sums[current].values(),
        )
    return replace(manifest, regions=entries, generation=manifest.generation + 1, step=step, state=state)


def filled_at_first(states: Mapping[str, RegionState]) -> frozenset[str]:
    """The regions with one slot and checksums that have been written before the first commit."""
    return frozenset(
        name
        for name, state in states.items()
        if state.spec.slots == 1 and state.sums is not None and state.logs[0].written_bytes
    )


def _is_filled_in_place(state: RegionState) -> bool:
    if state.spec.slots == 1 and state.sums is not None:
        return False  # said by name
    if state.sums is not None and state.steps[state.committed] is None:
        # With checksums a region is whole from its first commit on: what was not written is zero,
        # and known to be.
        return True
    written_bytes = state.logs[state.committed].written_bytes
    return written_bytes == state.spec.nbytes or (state.spec.slots == 1 and written_bytes > 0)


class RegionTable(Mapping[str, RegionState]):
    """The state of each region by its name.

    Args:
        manifest: the last commit.
        is_new: the files were just created, so that they hold zeros, whose checksums are known.
    """

    def __init__(self, manifest: Manifest, *, is_new: bool) -> None:
        self._states = {
            name: RegionState(
                entry.spec,
                entry.places,
                list(entry.steps),
                entry.current,
                manifest.piece_bytes if manifest.keeps_sums_of(entry.spec) else None,
            )
            for name, entry in manifest.regions.items()
        }
        if manifest.scheme == "journal":
            share_room(self._states)
        for name, entry in manifest.regions.items():
            sums = self._states[name].sums
            if sums is not None and entry.sums is not None:
                sums[entry.current].load(entry.sums)
            elif sums is not None and is_new:
                for slot_sums in sums:
                    slot_sums.know_zeros()

    def __getitem__(self, name: str) -> RegionState:
        """Returns the state of a region.

        Raises `UsageError`, not `KeyError`, for an unknown name.
        """
        state = self._states.get(name)
        if state is None:
            known = ", ".join(sorted(self._states)[:5])
            raise UsageError(f"the store has no region {name!r:.200}; it has {len(self._states)}, such as {known}")
        return state

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def is_free(self, name: str, moved: Collection[str]) -> bool:
        """True if no committed version lies where the next one of `name` goes.

        `moved` count as committed.
        """
        state = self[name]
        return state.is_free(state.spare, [self[other] for other in moved])

    def ready(self, flips: Iterable[str], *, with_advanced: bool = False) -> dict[str, RegionState]:
        """Waits for all writes and returns the regions whose spare slots are whole.

        Args:
            flips: the regions, each once.
            with_advanced: those that have advanced are among them.

        Raises:
            UsageError: an unknown or repeated region, or one whose spare slot is not whole.
            StoreError: a write failed.
        """
        names = list(flips)
        if with_advanced:
            names += [name for name, found in self.items() if found.current != found.committed and name not in names]
        if len(set(names)) != len(names):
            raise UsageError("a region is named twice in `flips`")
        states = {name: self[name] for name in names}
        # Before any check: a version is whole only when its last write has ended, and a failed
        # write shows only then.
        for state in self.values():
            for log in state.logs:
                for transfer in log.pending_writes():
                    transfer.join()
        for name, state in states.items():
            check_complete(name, state)
        return states

    def end_transfers(self) -> None:
        """Waits for all transfers, reads too; failures stay in their handles."""
        for state in self.values():
            for log in state.logs:
                for transfer in log.pending():
                    transfer.join()

    def roll_back(self) -> None:
        """Lets reads see the committed slots again; what was written since is no version."""
        for state in self.values():
            state.current = state.committed
            if state.spec.slots == 2 and state.steps[state.committed] is not None:
                _forget(state, state.spare)

    def forget_writes(self, names: Iterable[str]) -> None:
        """Drops what was written to regions of one slot. See `DiskStore.forget_writes`."""
        for name in names:
            state = self[name]
            if state.spec.slots != 1 or (state.sums is not None and state.is_whole):
                raise UsageError(f"region {name!r} holds the committed step {state.steps[state.committed]}")
            _forget(state, 0)

    def filled(self, journal: JournalNote | None, *, is_first: bool) -> frozenset[str]:
        """Returns the regions with one slot and checksums that a commit makes whole.

        Raises:
            UsageError: the journal names another kind of region.
            StoreError: one of them could not be written.
        """
        if journal is None:
            return filled_at_first(self) if is_first else frozenset()
        for name in (*journal.fills, *journal.frees):
            state = self[name]
            if state.spec.slots != 1 or state.sums is None:
                raise UsageError(f"region {name!r} does not have one slot with checksums")
            failure = state.logs[0].failure() if name in journal.fills else None
            if failure is not None:
                raise store_error(f"{name!r} was not written: {failure}", failure.errno) from failure
        return journal.fills

    def adopt(self, manifest: Manifest, flipped: Collection[str]) -> None:
        """Takes over the versions of a manifest that has been committed."""
        for name, state in self.items():
            entry = manifest.regions[name]
            is_new = state.steps != list(entry.steps)
            state.steps, state.committed, state.current = list(entry.steps), entry.current, entry.current
            if name in flipped:
                # What was current is now the room for the next version, and none of that is
                # written.
                state.logs[state.spare].forget_writes()
            if is_new or entry.steps[entry.current] == manifest.step:
                state.logs[state.current].forget_writes()


def _forget(state: RegionState, slot: int) -> None:
    # A write under way would land in the next version: it must have ended before its slot counts as
    # empty.
    for transfer in state.logs[slot].pending():
        transfer.join()
    state.logs[slot].forget_writes()
