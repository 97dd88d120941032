"""Turns what a recorder logged into a `TraceProfile`: peaks, lifetimes, causes.

In: the log of a whole step, and, where there is one, that of a second forward in which nothing was
saved (it tells how long the program itself holds a storage).
Out: `TraceProfile`. Pure arithmetic over the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.core.errors import UnsupportedError
from memfit.core.profile import CallProfile, HeldResults, StorageProfile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.shape import leaves
from memfit.core.step_report import split_number
from memfit.core.work_kinds import Work, WorkKind, as_work, summed
from memfit.trace.recorder import TraceRecorder
from memfit.trace.storage_log import CallRecord, Role, SegmentRecord, StorageRecord, TraceEvent

_MOST_CAUSES = 20
_SUM_ITEM_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class _Range:
    """Most bytes above the start, and bytes above the start at the end, of a stretch of the log."""

    peak_bytes: int
    end_bytes: int


def summarize(
    step: TraceRecorder, forward_only: TraceRecorder | None, rows: int, block_names: Sequence[str]
) -> TraceProfile:
    """The profile of one traced step.

    Args:
        step: forward and backward, with everything saved.
        forward_only: the same forward, with nothing saved; None where the step itself tells what
            the program holds, and that it repeats itself is not asked.
        rows: of the traced microbatch.
        block_names: by index, as sites refer to blocks.

    Raises:
        UnsupportedError: the two forwards are not the same program.
    """
    held = _held_until(step, forward_only)
    largest = [(record, record.description) for record in _largest_saved(step)]
    ends = _forward_ends(step)
    storages = _storages(step, held)
    backward = _backward_ranges(step, _activations)
    gradients = _backward_ranges(step, _with_gradients), _backward_ranges(step, _until_added)
    summed_gradients = _backward_stretches(step, _summed_range)
    unsaved, between = _Unsaved(step, forward_only), _between_ranges(step)
    prologue = _forward_range(step, -1, ends[-1])
    seed = backward.get(-1, _Range(peak_bytes=0, end_bytes=0))
    return TraceProfile(
        rows=rows,
        calls=tuple(
            _call(step, call, ends, backward, between, gradients, summed_gradients, unsaved, block_names)
            for call in step.calls
        ),
        storages=storages,
        loose_reads=tuple(sorted(step.loose_reads)),
        uses_random=step.uses_random,
        prologue_peak_bytes=prologue.peak_bytes,
        seed_peak_bytes=seed.peak_bytes,
        seed_leaves_bytes=seed.end_bytes,
        whole_peak_bytes=_range(step, 0, len(step.events), _activations).peak_bytes,
        plain_peak_bytes=_range(
            step, 0, len(step.events), _with_gradients, inside=(TraceEvent.WORKSPACE, TraceEvent.PLAIN_WORKSPACE)
        ).peak_bytes,
        largest_saved=tuple((description, record.nbytes) for record, description in largest),
        # The first one's line remains.
        made_at={description: record.line for record, description in reversed(largest) if record.line},
        untiled_attention=step.attention.untiled(),
        prologue_work=_work(step.forward, -1),
        seed_work=_backward_work(step.backward, -1),
        kernel_bytes=step.kernels.nbytes,
        libraries=step.kernels.libraries,
    )


def note_made_once(step: TraceRecorder, second: TraceRecorder | None) -> None:
    """Marks tensors that the first forward leaves behind and a second one does not make again
    (tables of positions).

    Args:
        step: as `summarize` takes it.
        second: two forwards, one after the other; None: nothing is marked.
    """
    if second is None:
        return
    made, again = (
        Counter(r.cause for r in run.records if r.role is Role.MADE and not r.is_backward) for run in (step, second)
    )
    for record in step.records:
        record.is_made_once = record.is_lasting and again[record.cause] < 2 * made[record.cause]


def _call(
    step: TraceRecorder,
    call: CallRecord,
    ends: Mapping[int, int],
    backward: Mapping[int, _Range],
    between: Mapping[int, _Range],
    gradients: tuple[Mapping[int, _Range], Mapping[int, _Range]],
    summed_gradients: Mapping[int, _Range],
    unsaved: _Unsaved,
    block_names: Sequence[str],
) -> CallProfile:
    gone = backward.get(call.index)
    fresh, adding = (ranges.get(call.index) for ranges in gradients)
    sums = summed_gradients.get(call.index)
    own = [block_names[index] for index in call.site.blocks]
    return CallProfile(
        index=call.index,
        site=call.site.name,
        blocks=tuple(dict.fromkeys([*own, *sorted(call.reads)])),
        kind=type(call.site.module).__qualname__,
        is_repeated=call.site.is_repeated,
        has_backward=gone is not None,
        uses_random=call.uses_random,
        mutates_inputs=call.mutates_inputs,
        must_keep=call.must_keep and call.saves > 0,
        forward_peak_bytes=_forward_range(step, call.index, ends[call.index]).peak_bytes,
        unsaved_peak_bytes=unsaved.peak_bytes(call.index),
        inside_peak_bytes=_forward_range(step, call.index, call.returned).peak_bytes,
        changes_arguments=call.changes_arguments,
        is_substituted=call.is_substituted,
        changes_itself=call.changes_itself,
        output_bytes=call.output_bytes,
        passed_on_bytes=_passed_on_bytes(step, call.index),
        held_results=tuple(_held_results(step, call, unsaved, saved) for saved in Saved if saved.policy.kept_operators),
        gradient_bytes=fresh.end_bytes - gone.end_bytes if fresh and gone else 0,
        backward_fresh_peak_bytes=fresh.peak_bytes if fresh else None,
        backward_adding_peak_bytes=adding.peak_bytes if adding else None,
        gradient_sum_bytes=sums.end_bytes - gone.end_bytes if sums and gone else 0,
        backward_summed_peak_bytes=sums.peak_bytes if sums else None,
        backward_peak_bytes=gone.peak_bytes if gone else 0,
        backward_leaves_bytes=gone.end_bytes if gone else 0,
        between_peak_bytes=between[call.index].peak_bytes if call.index in between else 0,
        between_leaves_bytes=between[call.index].end_bytes if call.index in between else 0,
        forward_flops=sum(s.flops for s in step.forward if s.call == call.index),
        backward_flops=sum(s.flops for s in step.backward if s.call == call.index),
        forward_work=_work(step.forward, call.index),
        unreached_work=summed((facts.work, 1.0) for facts in call.since_save if call.saves),
        backward_work=_backward_work(step.backward, call.index),
    )


def _work(segments: Iterable[SegmentRecord], call: int) -> Work:
    own = [segment for segment in segments if segment.call == call]
    python = as_work({WorkKind.PYTHON: float(sum(segment.python_calls for segment in own))})
    return summed([*((as_work(segment.work), 1.0) for segment in own), (python, 1.0)])


def _backward_work(segments: Iterable[SegmentRecord], call: int) -> Work:
    """Amounts of a backward, whose operations autograd calls."""
    amounts = dict(_work(segments, call))
    amounts[WorkKind.NODES] = amounts.pop(WorkKind.OPERATIONS, 0.0)
    return as_work(amounts)


_SIGNS = {TraceEvent.ALLOCATED: 1, TraceEvent.FREED: -1, TraceEvent.LET_GO: 0, TraceEvent.ARRIVED: 0}
_UNTIL_ARRIVED = {TraceEvent.ALLOCATED: 1, TraceEvent.FREED: 0, TraceEvent.LET_GO: 0, TraceEvent.ARRIVED: -1}
Weigh = Callable[[TraceEvent, StorageRecord], int]
"""Change of an event of a storage to the bytes that are counted: 1 they come, -1 they go, 0
nothing.
"""


def _activations(event: TraceEvent, record: StorageRecord) -> int:
    """Gradients of parameters too, before they are known as such: some functions make them in their
    forward already.
    """
    if record.role is Role.GRADIENT and not record.is_backward:
        return _UNTIL_ARRIVED[event]
    return _SIGNS[event] if record.role is Role.MADE else 0


def _with_gradients(event: TraceEvent, record: StorageRecord) -> int:
    """Gradients of parameters too, which stay: they are freed only with the stand-ins for the
    parameters, behind the last backward.
    """
    if record.role is Role.GRADIENT:
        return 1 if event is TraceEvent.ALLOCATED else 0
    return _activations(event, record)


def _until_added(event: TraceEvent, record: StorageRecord) -> int:
    """Gradients of parameters too, until they have been added to those that are there."""
    return -1 if event is TraceEvent.ARRIVED else _with_gradients(event, record)


def _range(
    step: TraceRecorder,
    start: int,
    stop: int,
    weigh: Weigh,
    *,
    inside: Collection[TraceEvent] = (TraceEvent.WORKSPACE,),
) -> _Range:
    """Peak and end of the bytes that are counted over events start..stop, relative to the start.
    Bytes of events `inside` are there for a moment.
    """
    now = peak = 0
    for event, record, nbytes in step.events[start:stop]:
        if event in inside:
            peak = max(peak, now + nbytes)
        elif record is not None:
            now += weigh(event, record) * nbytes
            peak = max(peak, now)
    return _Range(peak_bytes=peak, end_bytes=now)


def _summed_range(step: TraceRecorder, start: int, stop: int) -> _Range:
    """Peak and end with gradients of parameters as they are added apart (`homes.gradients`): the
    first to arrive is copied into a sum, and is given up then.
    """
    now = peak = 0
    for event, record, nbytes in step.events[start:stop]:
        if event is TraceEvent.WORKSPACE:
            peak = max(peak, now + nbytes)
        elif record is not None and record.role is Role.GRADIENT and event is TraceEvent.ARRIVED:
            total = nbytes * max(1, _SUM_ITEM_BYTES // (record.cause[3].itemsize if record.cause else _SUM_ITEM_BYTES))
            peak = max(peak, now + total)
            now += total - nbytes
        elif record is not None:
            now += _with_gradients(event, record) * nbytes
            peak = max(peak, now)
    return _Range(peak_bytes=peak, end_bytes=now)


def _forward_range(step: TraceRecorder, segment: int, stop: int) -> _Range:
    """Only what the segment made counts: what older storages give up during it is told by their own
    lifetimes.
    """
    start = next(s.began for s in step.forward if s.call == segment)
    # What is made once for all steps is among what lies there before a step: see `note_made_once`.
    return _range(
        step,
        start,
        stop,
        lambda e, r: _activations(e, r) * (r.segment == segment and not r.is_backward and not r.is_made_once),
    )


class _Unsaved:
    """Peaks of forward segments if autograd is given nothing of what their calls save, or only the
    results that a policy keeps: the rest goes when the program lets go of it.

    Args:
        step: as `summarize` takes it.
        forward_only: likewise: there, what is freed is what the program let go of.
    """

    def __init__(self, step: TraceRecorder, forward_only: TraceRecorder | None) -> None:
        self._run = step if forward_only is None else forward_only
        self._ends = _forward_ends(self._run)
        self._goes = TraceEvent.LET_GO if forward_only is None else TraceEvent.FREED
        self._twin = {} if forward_only is None else _twins(forward_only, step)

    def peak_bytes(self, call: int, saved: Saved | None = None) -> int:
        """Returns the peak of a call's segment; with the results that a policy keeps."""
        gone: set[int] = set()

        def weigh(event: TraceEvent, record: StorageRecord) -> int:
            if record.segment != call or record.is_backward:
                return 0
            own = self._twin.get(id(record), record)
            stays = bool(own.saved_outside) or (own.selected_in == call and saved in own.kept_by)
            if own.is_made_once or (stays and event is not TraceEvent.ALLOCATED):
                return 0
            if event is self._goes:
                gone.add(id(record))
                return -1
            return 0 if id(record) in gone else _activations(event, record)

        start = next(s.began for s in self._run.forward if s.call == call)
        return _range(self._run, start, self._ends[call], weigh).peak_bytes


def _twins(other: TraceRecorder, step: TraceRecorder) -> dict[int, StorageRecord]:
    """By `id` of a record of the other forward: the step's record of the same storage."""
    pairs = zip(_made_in_forward(other), _made_in_forward(step), strict=False)
    return {id(theirs): own for theirs, own in pairs}


def _made_in_forward(run: TraceRecorder) -> list[StorageRecord]:
    return [r for r in run.records if r.role is not Role.INPUT and not r.is_backward]


def _held_results(step: TraceRecorder, call: CallRecord, unsaved: _Unsaved, saved: Saved) -> HeldResults:
    kept = [(record, saves) for record, saves in call.selected.values() if saved in record.kept_by]
    return HeldResults(
        saved=saved,
        nbytes=sum(record.nbytes for record, _ in kept),
        # Made after the last tensor was saved: nobody will ask for it.
        unneeded_bytes=sum(record.nbytes for record, saves in kept if saves == call.saves),
        peak_bytes=_selected_range(step, call, saved).peak_bytes,
        forward_peak_bytes=unsaved.peak_bytes(call.index, saved),
        spared_work=as_work(call.spared.get(saved, {})),
    )


def _selected_range(step: TraceRecorder, call: CallRecord, saved: Saved) -> _Range:
    """The call run again with its selected results at hand: they were there before, and go when the
    call lets go of them.
    """

    def weigh(event: TraceEvent, record: StorageRecord) -> int:
        is_of_call = record.segment == call.index and not record.is_backward
        is_kept = record.selected_in == call.index and saved in record.kept_by
        is_handed_out = is_kept and event is TraceEvent.ALLOCATED
        return 0 if is_handed_out or not is_of_call else _activations(event, record)

    return _range(step, call.began, call.returned, weigh)


def _forward_ends(step: TraceRecorder) -> dict[int, int]:
    begins = [segment.began for segment in [*step.forward, *step.backward[:1]]] + [len(step.events)]
    return {segment.call: begins[i + 1] for i, segment in enumerate(step.forward)}


def _backward_ranges(step: TraceRecorder, weigh: Weigh) -> dict[int, _Range]:
    return _backward_stretches(step, lambda log, start, stop: _range(log, start, stop, weigh))


def _backward_stretches(step: TraceRecorder, measure: Callable[[TraceRecorder, int, int], _Range]) -> dict[int, _Range]:
    stops = [segment.began for segment in step.backward[1:]] + [len(step.events)]
    return {
        segment.call: measure(step, segment.began, stop) for segment, stop in zip(step.backward, stops, strict=True)
    }


def _between_ranges(step: TraceRecorder) -> dict[int, _Range]:
    stops = [segment.began for segment in step.backward[1:]] + [len(step.events)]
    return {
        segment.call: _range(step, segment.left, stop, _activations)
        for segment, stop in zip(step.backward, stops, strict=True)
        if segment.left is not None
    }


def _passed_on_bytes(step: TraceRecorder, call: int) -> int | None:
    """Most bytes above the begin of a call's backward, until it asks for a saved tensor."""
    segments = [s for s in step.backward if s.call == call]
    if not segments or segments[0].asked is None:
        return None
    return _range(step, segments[0].began, segments[0].asked, _with_gradients).peak_bytes


def _held_until(step: TraceRecorder, forward_only: TraceRecorder | None) -> dict[int, int]:
    """By the order in which storages were made: the last segment at whose end the program itself
    still holds it.
    """
    last = len(step.calls) - 1
    made = _made_in_forward(step)
    if forward_only is None:
        return {r.order: last if r.let_go_in is None else r.let_go_in - 1 for r in made}
    other = [r for r in forward_only.records if r.role is not Role.INPUT]
    if [(r.segment, r.cause) for r in made] != [(r.segment, r.cause) for r in other]:
        place = next(
            (a.description for a, b in zip(made, other, strict=False) if a.cause != b.cause),
            f"{len(made)} against {len(other)} storages",
        )
        raise UnsupportedError(
            f"two forwards of the same batch did different things (first at {place}): the loss depends on something "
            "that changes from call to call; draw what is random from a default generator (torch's, NumPy's, Python's), which is put back after the profile, "
            "or make it repeatable"
        )
    return {a.order: last if b.freed_in is None else b.freed_in - 1 for a, b in zip(made, other, strict=True)}


def _storages(step: TraceRecorder, held: Mapping[int, int]) -> tuple[StorageProfile, ...]:
    chosen = [r for r in step.records if r.nbytes and not r.is_backward and _is_worth_a_record(r)]
    return tuple(
        StorageProfile(
            index=index,
            nbytes=record.nbytes,
            segment=record.segment if record.role is not Role.INPUT else -1,
            saved_inside=tuple(sorted(record.saved_inside | _kept_by_function(record))),
            saved_outside=tuple(sorted(record.saved_outside)),
            argument_of=tuple(sorted(record.argument_of)),
            given_apart=tuple(sorted(record.given_apart)),
            last_use=record.last_use,
            uses=tuple((segment, count) for segment, count in sorted(record.uses.items()) if count),
            backward_uses=record.backward_uses,
            held_until=max(record.last_use, -1 if _kept_by_function(record) else held.get(record.order, -1)),
            leaves=leaves(record.nbytes, is_movable=record.is_movable) and not _kept_by_function(record),
            is_unseen=bool(_kept_by_function(record)),
            is_input=record.role is Role.INPUT,
            is_buffer=record.role is Role.INPUT and not record.is_batch,
            is_lasting=record.is_lasting and record.nbytes > _NUMBER_BYTES,
        )
        for index, record in enumerate(chosen)
    )


_NUMBER_BYTES = 8


def _kept_by_function(record: StorageRecord) -> set[int]:
    """The call that made it, if an autograd function keeps it to itself until its backward, past
    the saved-tensor hooks.

    So does a function that makes gradients in its forward: they are freed, or become a parameter's
    gradient, in backward.
    """
    is_unsaved = not record.saved_inside and not record.saved_outside
    outlives_forward = record.role is Role.GRADIENT or record.freed_in_backward
    # The loss itself is one number, held by who asked for its gradient.
    made_in_call = (
        record.role is not Role.INPUT
        and not record.is_backward
        and record.segment >= 0
        and record.nbytes > _NUMBER_BYTES
    )
    return {record.segment} if is_unsaved and outlives_forward and made_in_call else set()


def _is_worth_a_record(record: StorageRecord) -> bool:
    is_noted = bool(record.saved_inside or record.saved_outside or record.argument_of)
    if record.role is Role.INPUT:
        return is_noted or record.is_batch
    outlives_segment = record.freed_in is None or record.freed_in > record.segment
    return is_noted or outlives_segment


def _largest_saved(step: TraceRecorder) -> list[StorageRecord]:
    saved: Iterable[StorageRecord] = (
        r for r in step.records if r.role is Role.MADE and (r.saved_inside or r.saved_outside) and not r.is_backward
    )
    # Those of equal layers are of one kind.
    kinds: dict[tuple[str, str, int], list[StorageRecord]] = {}
    parted: dict[tuple[Any, ...], tuple[str, str]] = {}
    for record in sorted(saved, key=lambda r: -r.nbytes):
        if record.cause not in parted:
            head, _, tail = split_number(record.description)
            parted[record.cause] = head, tail
        kind = (*parted[record.cause], record.nbytes)
        if kind in kinds or len(kinds) < _MOST_CAUSES:
            kinds.setdefault(kind, []).append(record)
    return [record for records in kinds.values() for record in records]
