"""Storages of a trace by themselves: who makes, uses and lets go of them in the plain run.

In: `TraceProfile`. Out: `TraceStorages`, which all plans of a profile share (`known_facts`). What a
plan's segments make of them is in `segment_storages`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

from memfit.core.profile import TraceProfile
from memfit.core.storage_profile import StorageProfile

# Stands for a release that only the end of the microbatch brings.
END = -2


class TraceStorages:
    """Storages of one microbatch in the plain run.

    Args:
        trace: of the microbatch.
        storages: as they were found for the same trace before.
    """

    def __init__(self, trace: TraceProfile, storages: tuple[StorageProfile, ...] | None) -> None:
        self.trace = trace
        self.storages = merged(s for s in trace.storages if not s.is_input) if storages is None else storages
        self.lasting_bytes = sum(s.nbytes for s in self.storages if s.is_lasting)

    def used_until(self, s: StorageProfile) -> int:
        """Last call of the trace at the end of whose segment use still keeps the storage alive;
        below the storage's own segment: not even there.
        """
        found = self.uses.get(s.index)
        if found is None:
            found = self.uses[s.index] = self._used_until(s)
        return found

    @cached_property
    def uses(self) -> dict[int, int]:
        """Results of `used_until` by storage."""
        return {}

    def _used_until(self, s: StorageProfile) -> int:
        last = max(s.last_use, s.segment, *s.saved_inside, *s.saved_outside, *s.argument_of)
        until = s.held_until if s.held_until > last else last - 1
        # Recorded although nobody saves or receives it: then because it is alive at the end of its
        # segment.
        is_noted = s.saved_inside or s.saved_outside or s.argument_of
        return until if is_noted else max(until, s.segment)

    @cached_property
    def related(self) -> dict[int, list[StorageProfile]]:
        """By call: storages that it saved, that the code behind it saved or that it received, each
        once, in order.
        """
        found: dict[int, list[StorageProfile]] = {}
        for s in self.storages:
            for call in sorted({*s.saved_inside, *s.saved_outside, *s.argument_of}):
                found.setdefault(call, []).append(s)
        return found

    def _related_to(self, first: int, last: int) -> list[StorageProfile]:
        found = {s.index: s for call in range(first, last + 1) for s in self.related.get(call, ())}
        return list(found.values())

    @cached_property
    def made_at(self) -> dict[int, list[StorageProfile]]:
        """Storages by the call in whose segment they were made."""
        made: dict[int, list[StorageProfile]] = {}
        for s in self.storages:
            made.setdefault(s.segment, []).append(s)
        return made

    @cached_property
    def released_in(self) -> dict[int, list[StorageProfile]]:
        """By call: storages that its backward lets go of in the plain run; by the number of calls:
        those that the seed does.
        """
        found: dict[int, list[StorageProfile]] = {}
        for s in self.storages:
            found.setdefault(self.plain_release.get(s.index, END), []).append(s)
        return found

    @cached_property
    def plain_release(self) -> dict[int, int]:
        """By storage: the call whose backward lets go of it in the plain run; absent: forward does.

        The number of calls stands for the seed, `END` for the end.
        """
        release: dict[int, int] = {}
        calls = self.trace.calls
        for s in self.storages:
            found = [next((c for c in range(i, -1, -1) if calls[c].has_backward), END) for i in s.saved_inside]
            found += [
                next((c for c in range(i + 1, len(calls)) if calls[c].has_backward), len(calls))
                for i in s.saved_outside
            ]
            if self.used_until(s) >= len(calls) - 1:
                found.append(END)
            if s.is_lasting:
                found = [END]
            if found:
                release[s.index] = min(found)
        return release

    @cached_property
    def of_segments(self) -> dict[object, Any]:
        """Facts about segments by their roles, whatever plan they belong to."""
        return {}


def merged(storages: Iterable[StorageProfile]) -> tuple[StorageProfile, ...]:
    """Returns storages of which those that are made, held and let go by the same are one. All that
    is asked of them are sums of bytes.
    """
    found: dict[object, StorageProfile] = {}
    for s in storages:
        role = tuple(value for name, value in vars(s).items() if name not in ("index", "nbytes"))
        known = found.get(role)
        found[role] = s if known is None else replace(known, nbytes=known.nbytes + s.nbytes)
    return tuple(found.values())
