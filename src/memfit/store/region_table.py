"""The regions of an open store and their versions: which slot is read, which is written, which may
be committed.

In: the manifest that was read, and the flips of commits. Out: the states of regions, waited for and
checked. Callers hold the store's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from memfit.core.errors import UsageError
from memfit.store.manifest import Manifest
from memfit.store.next_commit import JournalNote, filled_at_first
from memfit.store.os_errors import store_error
from memfit.store.region import RegionState, check_complete, share_room


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
