"""Calls of blocks that torch.compile compiles, as plans are priced.

In: shares that were measured of one block of each class. Out: a profile in which its calls take
that share of their work. See [Note: compiled blocks] in `job.compiled_blocks`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from memfit.core.profile import CallProfile, Profile, TraceProfile
from memfit.core.work_kinds import Work


@dataclass(frozen=True, kw_only=True)
class CompiledShare:
    """Seconds of a compiled call, as shares of those of the plain one.

    Attributes:
        forward: of its forward.
        backward: of its backward.
    """

    forward: float
    backward: float


def at_shares(profile: Profile, shares: Mapping[str, CompiledShare]) -> Profile:
    """Returns the profile with calls at these sites compiled.

    Bytes stay those of plain blocks, which compiled ones were measured not to pass. What a compiled
    call computes cannot be looked at one by one, so that no policy that selects is for it.

    Args:
        profile: of plain calls.
        shares: by site.
    """
    if not shares:
        return profile
    traces = {rows: _in_trace(trace, shares) for rows, trace in profile.traces.items()}
    return replace(profile, traces=traces, compiled=tuple(shares))


def without_selection(profile: Profile, sites: Collection[str]) -> Profile:
    """Returns the profile with calls at these sites that hold no results by selection."""

    def plain(trace: TraceProfile) -> TraceProfile:
        return replace(trace, calls=tuple(replace(c, held_results=()) if c.site in sites else c for c in trace.calls))

    return replace(profile, traces={rows: plain(trace) for rows, trace in profile.traces.items()})


def _in_trace(trace: TraceProfile, shares: Mapping[str, CompiledShare]) -> TraceProfile:
    return replace(trace, calls=tuple(_compiled(call, shares.get(call.site)) for call in trace.calls))


def _compiled(call: CallProfile, share: CompiledShare | None) -> CallProfile:
    if share is None:
        return call
    return replace(
        call,
        held_results=(),
        forward_flops=round(call.forward_flops * share.forward),
        backward_flops=round(call.backward_flops * share.backward),
        forward_work=_times(call.forward_work, share.forward),
        backward_work=_times(call.backward_work, share.backward),
    )


def _times(work: Work, share: float) -> Work:
    return tuple((kind, amount * share) for kind, amount in work)
