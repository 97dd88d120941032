"""Builds the manifest of a commit from what was written to the regions of a store.

In: the manifest before, the regions' states, which of them flip. Out: the next manifest; nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from memfit.store.file_operations import FileHandle
from memfit.store.io import DiskIO
from memfit.store.manifest import Manifest, RegionEntry, StateEntry
from memfit.store.memory_ranges import Memory, aligned_memory
from memfit.store.os_errors import store_error
from memfit.store.region import RegionState, note_sums


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
