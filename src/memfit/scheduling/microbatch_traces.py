"""Traces of the microbatches of a step: a batch of 41 rows in two makes one of 21 and one of 20.

In: `Profile`. Out: a `TraceProfile` for each microbatch, in order.

[Note: a row fewer]
Plans are looked for with the traces of a few sizes, of which the smaller microbatch's need not be
one. Then each figure of it is taken from the straight line between its two neighbours. What is a
maximum of sums, each of which grows by as much with each row, lies on or below that line, so that
a peak is not predicted too low. Where no smaller size was traced, or another one made other
storages, the smaller microbatch counts as the larger one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from memfit.core.profile import CallProfile, HeldResults, Profile, TraceProfile
from memfit.core.storage_profile import StorageProfile
from memfit.core.work_kinds import summed
from memfit.scheduling.known_facts import KnownFacts
from memfit.scheduling.sizes import trace_of

_RecordT = TypeVar("_RecordT", CallProfile, HeldResults, StorageProfile, TraceProfile)
# What changes with the rows of a microbatch; `rows` and structure do not.
_BYTES = ("bytes", "flops")


def traces_of(profile: Profile, microbatches: int, known: KnownFacts | None = None) -> tuple[TraceProfile, ...]:
    """Returns the trace of each microbatch, the larger ones first.

    Args:
        profile: with a trace of the larger ones.
        microbatches: into how many the batch is cut.
        known: facts about the profile that were found before, and are added to.

    Raises:
        PlanError: there is no trace of the larger ones.
    """
    larger = trace_of(profile, microbatches)
    rows, more = divmod(profile.batch_rows, microbatches)
    if not more or not profile.rows_are_alike:
        return (larger,) * microbatches
    smaller = (known or KnownFacts()).found(("trace", rows), lambda: _trace_with(profile, rows, larger))
    return (larger,) * more + (smaller,) * (microbatches - more)


def input_bytes(traces: Sequence[TraceProfile], known: KnownFacts) -> int:
    """Returns the bytes of the batch: of all microbatches' parts."""

    def found() -> int:
        return sum(s.nbytes for trace in traces for s in trace.storages if s.is_input and not s.is_buffer)

    return known.found(("inputs", *(trace.rows for trace in traces)), found)


def _trace_with(profile: Profile, rows: int, larger: TraceProfile) -> TraceProfile:
    if rows in profile.traces:
        found = profile.traces[rows]
        return found if _is_alike(found, larger) else larger
    below = max((size for size in profile.traces if size < rows), default=0)
    if not below or not _is_alike(profile.traces[below], larger):
        return larger
    return _between(profile.traces[below], larger, rows)


def _is_alike(small: TraceProfile, large: TraceProfile) -> bool:
    """Tells whether both traces made the same storages for the same calls."""
    return [_role(s) for s in small.storages] == [_role(s) for s in large.storages] and [
        (c.site, c.has_backward) for c in small.calls
    ] == [(c.site, c.has_backward) for c in large.calls]


def _role(s: StorageProfile) -> tuple[Any, ...]:
    return s.segment, s.saved_inside, s.saved_outside, s.argument_of, s.last_use, s.held_until, s.is_input


def scaled(profile: Profile, rows: int, microbatches: int, growth: float) -> Profile:
    """Profile for a batch that was not traced: all sizes of the largest trace times a factor.

    Args:
        profile: of another batch of the same program.
        rows: of the batch.
        microbatches: into how many the batch is cut.
        growth: bound of bytes and work of a microbatch, relative to the largest one that was
            traced; at least 1, since gradients of parameters do not shrink with the batch.
    """
    largest = profile.traces[max(profile.traces)]
    size = -(-rows // microbatches)
    return replace(profile, batch_rows=rows, traces={size: _mixed_trace(largest, largest, size, growth, base=0)})


def _between(small: TraceProfile, large: TraceProfile, rows: int) -> TraceProfile:
    return _mixed_trace(small, large, rows, (rows - small.rows) / (large.rows - small.rows))


def _mixed_trace(small: TraceProfile, large: TraceProfile, rows: int, share: float, *, base: int = 1) -> TraceProfile:
    """A trace on the line that begins at the small one (base 1) or at nothing (base 0)."""

    def mix(low: float, high: float) -> int:
        return math.ceil(base * low + share * (high - base * low))

    def mixed(low: _RecordT, high: _RecordT) -> _RecordT:
        found: dict[str, Any] = {}
        for name in (field.name for field in fields(high)):
            parts: list[Any] = [getattr(low, name), getattr(high, name)]
            if name.endswith(_BYTES) and None not in parts:
                found[name] = mix(*parts)
            elif name.endswith("work"):
                found[name] = summed(zip(parts, (base * (1.0 - share), share), strict=True))
        return replace(high, **found)

    calls = [
        replace(
            mixed(low, high),
            held_results=tuple(
                mixed(a, b) if a.saved is b.saved else b
                for a, b in zip(low.held_results, high.held_results, strict=True)
            ),
        )
        for low, high in zip(small.calls, large.calls, strict=True)
    ]
    storages = [mixed(low, high) for low, high in zip(small.storages, large.storages, strict=True)]
    return replace(mixed(small, large), rows=rows, calls=tuple(calls), storages=tuple(storages))
