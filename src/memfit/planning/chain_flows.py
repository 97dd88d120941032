"""Flows of a lowered step: what each lane is given to do at which place of the step, and by when it
must be through with it.

In: `Step`, the machine's speeds. Out: `Flows`.

[Note: places of a step]
Whatever a plan moves, its main thread computes the same forwards and backwards in the same order;
those of one call one right after the other (microbatches that go layer by layer) are one *place*.
All that is issued between two places belongs to the later one. It does not begin before the earlier
one has been computed; and where something waits for it, it is through by then. Counted are places:
how many lie between, at most, is the *window* of a queue. A queue is what one lane does of one
category, or all of it: what is behind others in a lane's order cannot be there before it could be
there without them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from memfit.core.schedule import Backward, Forward
from memfit.core.step import Operation, Step, Token, Transfer
from memfit.core.timeline import COMPUTE_LANE, HOST_LANE, UPDATE_LANE, for_updates
from memfit.prediction.pace import Pace


class PlaceInStep(NamedTuple):
    """A run of forwards or backwards of one call; which of its runs, from 0."""

    is_backward: bool
    call: int
    turn: int


class Queue(NamedTuple):
    """Work of one category that one lane does, in order."""

    lane: str
    category: str


COMPUTE = Queue(COMPUTE_LANE, "")
BEFORE = Queue(COMPUTE_LANE, "before")
UPDATES = Queue(UPDATE_LANE, "")
HOST = Queue(HOST_LANE, "")


@dataclass(frozen=True, kw_only=True)
class Flows:
    """Work of a step by place.

    Attributes:
        places: in order; what is issued behind the last one has the number behind it.
        work_s: seconds that a queue is given to do at places, by their number.
        windows: places, at most, from where something is given to a queue to where something waits
            for it, in halves: even to where a place's computing begins, odd to where it ends;
            infinite where nothing ever waits.
        chains_s: seconds that an operation takes at least when it moves one thing after the other,
            by its place and by the halves of places where something waits for it.
    """

    places: tuple[PlaceInStep, ...]
    work_s: Mapping[Queue, Mapping[int, float]]
    windows: Mapping[Queue, float]
    chains_s: Mapping[tuple[int, float], float]


def flows_of(step: Step, pace: Pace) -> Flows:
    """Returns the flows of a step. See [Note: places of a step]."""
    places, at = _places(step)
    ends = _waits(step, at)
    work: dict[Queue, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    windows: dict[Queue, float] = {}
    chains: dict[tuple[int, float], float] = {}

    def give(queue: Queue, place: int, seconds: float, end: float) -> None:
        work[queue][place] += seconds
        windows[queue] = max(windows.get(queue, 0.0), end - 2 * place)

    for index, operation in enumerate(step.operations):
        place, is_first = at[index]
        for transfer in operation.awaited:
            for queue, seconds in _queues(transfer, operation, pace):
                give(queue, place, seconds, 2 * place + (0 if is_first else 1))
        for transfer in operation.transfers:
            for queue, seconds in _queues(transfer, operation, pace):
                give(queue, place, seconds, ends[index])
        if operation.work and operation.update_place and operation.update_place.is_beside:
            give(UPDATES, place, pace.work_s(operation.work), ends[index])
        elif operation.work:
            # What stands in front of the place's own computing may be through before its waits.
            give(BEFORE if is_first else COMPUTE, place, pace.work_s(operation.work), 2 * place + 1)
        if operation.host_work:
            give(HOST, place, pace.host_work_s(operation.host_work), ends[index])
        if operation.gives is not None and operation.is_chain and len(operation.transfers) > 1:
            key = place, ends[index]
            chains[key] = max(chains.get(key, 0.0), sum(_alone_s(t, pace) for t in operation.transfers))
    return Flows(
        places=places,
        work_s={queue: dict(values) for queue, values in work.items()},
        windows=windows,
        chains_s=chains,
    )


def _alone_s(transfer: Transfer, pace: Pace) -> float:
    return transfer.nbytes / pace.lane(transfer.tier, transfer.direction).alone


def _places(step: Step) -> tuple[tuple[PlaceInStep, ...], list[tuple[int, bool]]]:
    """Returns the places, and of each operation the number of its place and whether it stands
    before the place's first computing.
    """
    places: list[PlaceInStep] = []
    turns: dict[tuple[bool, int], int] = {}
    at: list[tuple[int, bool]] = []
    for operation in step.operations:
        action = operation.action
        if isinstance(action, Forward | Backward):
            here = isinstance(action, Backward), action.first
            if not places or places[-1][:2] != here:
                turns[here] = turns.get(here, -1) + 1
                places.append(PlaceInStep(*here, turns[here]))
            at.append((len(places) - 1, False))
        else:
            at.append((len(places), True))
    # What stands inside of a run begins no sooner than the run.
    behind: PlaceInStep | None = None
    following = len(places)
    for index in range(len(at) - 1, -1, -1):
        place, is_gap = at[index]
        if not is_gap:
            behind, following = places[place], place
        elif behind is not None:
            at[index] = (following, place == following)
    return tuple(places), at


def _waits(step: Step, at: list[tuple[int, bool]]) -> list[float]:
    """Returns, of each operation, in halves of places where the main thread first waits for it."""
    ends: list[float] = [math.inf] * len(step.operations)
    given: dict[Token, int] = {}
    for index, operation in enumerate(step.operations):
        place, is_gap = at[index]
        is_inside = is_gap and index > 0 and at[index - 1] == (place, False)
        for token in operation.waits:
            if token in given:
                here = 2 * place + (1 if is_inside or _is_again(step, index, at) else 0)
                ends[given[token]] = min(ends[given[token]], here)
        for token in operation.waits_after:
            if token in given:
                ends[given[token]] = min(ends[given[token]], 2 * place + (0 if is_gap else 1))
        if operation.gives is not None:
            given[operation.gives] = index
    return ends


def _is_again(step: Step, index: int, at: list[tuple[int, bool]]) -> bool:
    """Tells whether the place was computed in before."""
    place, _ = at[index]
    return any(at[other] == (place, False) for other in range(max(0, index - 64), index))


def _queues(transfer: Transfer, operation: Operation, pace: Pace) -> list[tuple[Queue, float]]:
    found: list[tuple[Queue, float]] = []
    for tier in (transfer.tier, transfer.crosses):
        if tier is None or tier not in pace.hardware.tiers:
            continue
        lane = pace.lane(tier, transfer.direction)
        name = for_updates(lane.name) if operation.update_place is not None else lane.name
        found.append((Queue(name, transfer.category), lane.latency_s + transfer.nbytes / lane.alone))
    return found
