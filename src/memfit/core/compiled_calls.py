"""Calls of blocks that torch.compile compiles, as plans are priced.

In: what was measured of one block of each class. Out: a profile in which its calls take that share
of their work, and those bytes. See [Note: compiled blocks] in `planner.compiled_blocks`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from memfit.core.profile import CallProfile, Profile, StorageProfile, TraceProfile
from memfit.core.work_kinds import Work

# Numbers that a graph keeps as tensors.
_SCALARS = 1024


@dataclass(frozen=True, kw_only=True)
class CompiledBytes:
    """Bytes that a compiled call was measured to take.

    Attributes:
        saved: kept from its forward to its backward, what it keeps of arguments and outputs that
            the plain one lets go among that.
        plain_saved: by the plain one, without arguments and outputs.
        forward_peak: above what is there before its forward.
        backward_peak: above what is there before its backward, gradients of parameters included.
        plain: of the plain call in the trace of the sample that it was measured with.
    """

    saved: int
    plain_saved: int
    forward_peak: int
    backward_peak: int
    plain: CallProfile

    def is_of(self, call: CallProfile) -> bool:
        """Tells whether a plain call does the same with tensors of the same sizes."""
        return _sizes(call) == _sizes(self.plain)


@dataclass(frozen=True, kw_only=True)
class CompiledShare:
    """A compiled call, beside the plain one.

    Attributes:
        forward: share of the seconds of its forward.
        backward: of its backward.
        bytes: measured; None: at most those of the plain call.
    """

    forward: float
    backward: float
    bytes: CompiledBytes | None = None


def at_shares(profile: Profile, shares: Mapping[str, CompiledShare]) -> Profile:
    """Returns the profile with calls at these sites compiled.

    Of calls with tensors of other sizes than were measured (other microbatches, another dtype),
    bytes stay those of plain ones, which compiled ones were measured not to pass. What a compiled
    call computes cannot be looked at one by one, so that no policy that selects is for it.

    Args:
        profile: of plain calls.
        shares: by site.
    """
    if not shares:
        return profile
    largest = {block.name: block.largest_gradient_bytes for block in profile.blocks}
    traces = {rows: _in_trace(trace, shares, largest) for rows, trace in profile.traces.items()}
    return replace(profile, traces=traces, compiled=tuple(shares))


def without_selection(profile: Profile, sites: Collection[str]) -> Profile:
    """Returns the profile with calls at these sites that hold no results by selection."""

    def plain(trace: TraceProfile) -> TraceProfile:
        return replace(trace, calls=tuple(replace(c, held_results=()) if c.site in sites else c for c in trace.calls))

    return replace(profile, traces={rows: plain(trace) for rows, trace in profile.traces.items()})


def _in_trace(
    trace: TraceProfile, shares: Mapping[str, CompiledShare], largest_gradients: Mapping[str, int]
) -> TraceProfile:
    storages = list(trace.storages)
    calls: list[CallProfile] = []
    for call in trace.calls:
        share = shares.get(call.site)
        if share is None:
            calls.append(call)
            continue
        compiled = _compiled(call, share)
        own = [s for s in trace.storages if _is_own(s, call.index)]
        measured = share.bytes
        # If these are not what the copy kept, somebody else has one of its tensors.
        if measured and measured.is_of(call) and abs(sum(s.nbytes for s in own) - measured.plain_saved) <= _SCALARS:
            freed = _shrink(own, measured.saved, storages)
            compiled = _at_bytes(compiled, measured, freed)
        largest = max((largest_gradients[name] for name in call.blocks), default=0)
        calls.append(_all_gradients_at_once(compiled, largest))
    return replace(trace, calls=tuple(calls), storages=tuple(storages))


def _compiled(call: CallProfile, share: CompiledShare) -> CallProfile:
    return replace(
        call,
        held_results=(),
        # Compiled code makes what it saves also where nobody keeps it.
        unsaved_peak_bytes=None,
        forward_flops=round(call.forward_flops * share.forward),
        backward_flops=round(call.backward_flops * share.backward),
        forward_work=_times(call.forward_work, share.forward),
        backward_work=_times(call.backward_work, share.backward),
    )


def _times(work: Work, share: float) -> Work:
    return tuple((kind, amount * share) for kind, amount in work)


def _sizes(call: CallProfile) -> tuple[object, ...]:
    return (call.forward_peak_bytes, call.inside_peak_bytes, call.output_bytes, call.backward_peak_bytes)


def _is_own(storage: StorageProfile, call: int) -> bool:
    """The call makes the storage and saves it, and nobody else has it."""
    is_alone = not (storage.saved_outside or storage.argument_of or storage.is_input or storage.is_lasting)
    is_through = max(storage.last_use, storage.held_until) <= call
    return is_alone and is_through and storage.segment == call and storage.saved_inside == (call,)


def _shrink(own: list[StorageProfile], saved: int, storages: list[StorageProfile]) -> int:
    """Makes these storages take so many bytes together; returns how many fewer."""
    whole, left = sum(s.nbytes for s in own), saved
    if saved >= whole:
        return 0
    for storage in own:
        nbytes = min(left, -(-storage.nbytes * saved // whole))
        storages[storage.index] = replace(storage, nbytes=nbytes)
        left -= nbytes
    return whole - saved


def _at_bytes(call: CallProfile, measured: CompiledBytes, freed: int) -> CallProfile:
    """The call with its measured peaks, where it saves so many bytes fewer than the plain one.

    Code behind the call, in its segment, meets what is kept: as high as the plain segment's peak at
    most, without those.
    """
    # The last part of a segment's backward is that of the code in front of the call.
    leaves = call.backward_leaves_bytes + freed
    last_part = leaves - call.between_leaves_bytes + call.between_peak_bytes + call.gradient_bytes
    return replace(
        call,
        forward_peak_bytes=max(measured.forward_peak, call.forward_peak_bytes - freed),
        inside_peak_bytes=measured.forward_peak,
        backward_peak_bytes=0,
        backward_fresh_peak_bytes=max(measured.backward_peak, last_part if call.between_peak_bytes > 0 else 0),
        backward_leaves_bytes=leaves,
    )


def _all_gradients_at_once(call: CallProfile, largest: int) -> CallProfile:
    """The call with the peaks of a backward that hands over all gradients of parameters at its end,
    where that of a plain block makes one after the other.

    Args:
        call: with a peak that holds all of them.
        largest: bytes of the largest one, which is counted for a backward that adds to others.
    """
    fresh, beside = call.backward_fresh_peak_bytes, call.backward_peak_bytes
    fresh = beside + call.gradient_bytes if fresh is None else fresh
    return replace(
        call,
        backward_peak_bytes=max(beside, fresh - largest),
        backward_fresh_peak_bytes=fresh,
        backward_adding_peak_bytes=fresh,
        backward_summed_peak_bytes=None,
    )
