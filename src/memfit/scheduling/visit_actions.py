"""Visits of weights: when a block's bytes come to the device and when they go.

In: `ComputeOrder`. Out: `Visit`s (a block is there from the first to the last of neighbouring uses)
and the placed fetches and releases.

[Note: how far a fetch is moved forward]
A *group* is the blocks that one compute action finds missing. Its fetch moves before earlier
compute actions while, at each of them, at most `prefetch` groups are on the device that this action
does not use: groups fetched ahead, and groups that only wait for their update. It never passes the
release of one of its own blocks, and it moves over at most `prefetch` runs (`ComputeOrder.runs`),
so that a lone visiting block does not sit on the device for half of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memfit.core.schedule import Fetch, Release
from memfit.scheduling.gradient_actions import waiting_gap
from memfit.scheduling.orders import ComputeOrder, GapPhase, Placed


class Visit(NamedTuple):
    """A block is used by the compute actions `first` to `last` (ordinals); released in
    `release_gap`.
    """

    block: int
    first: int
    last: int
    release_gap: int


def find_visits(order: ComputeOrder, updates: Mapping[int, int], backlog: int) -> list[Visit]:
    """Joins neighbouring uses into visits, ordered by their first use.

    Args:
        order: of computing.
        updates: by block, the position after which it is updated in backward; such a visit ends
            when the update has.
        backlog: of the plan.
    """
    uses: dict[int, list[int]] = {}
    for ordinal, compute in enumerate(order.computes):
        for block in order.shape.needs[compute.segment]:
            if block in order.shape.visiting:
                uses.setdefault(block, []).append(ordinal)
    visits: list[Visit] = []
    for block, ordinals in uses.items():
        first = ordinals[0]
        for ordinal, following in zip(ordinals, [*ordinals[1:], None], strict=True):
            if following is not None and order.stays(ordinal, following):
                continue
            # Of cut weights the share at home is updated.
            is_updated = updates.get(block) == order.computes[ordinal].position and block not in order.shape.cut
            gap = waiting_gap(order, ordinal, backlog) if is_updated else order.gap_whole(ordinal)
            visits.append(Visit(block=block, first=first, last=ordinal, release_gap=gap))
            first = following if following is not None else first
    return sorted(visits, key=lambda v: (v.first, v.block))


def place_visits(order: ComputeOrder, visits: Sequence[Visit], prefetch: int) -> list[Placed]:
    """Places fetches and releases. See [Note: how far a fetch is moved forward]."""
    placed = [Placed(gap=v.release_gap, phase=GapPhase.RELEASE, action=Release(v.block)) for v in visits]
    runs = order.runs
    # Groups on the device at a compute action that does not use them, by its ordinal; a group's
    # name is its first use.
    unused: list[set[tuple[int, bool]]] = [set() for _ in order.computes]
    for visit in visits:
        # Blocks of a tail stay in it anyway.
        whole = order.gap_whole(visit.last)
        for ordinal in range(visit.last + 1, len(order.computes)):
            if order.gap_before(ordinal) >= visit.release_gap:
                break
            if order.gap_before(ordinal) >= whole:
                unused[ordinal].add((visit.first, True))
    released: dict[int, int] = {}
    groups: dict[int, list[Visit]] = {}
    for visit in visits:
        groups.setdefault(visit.first, []).append(visit)
    for first, group in groups.items():
        free_gap = max(released.get(v.block, 0) for v in group)
        earliest = first
        while earliest > 0 and (
            runs[earliest - 1] >= runs[first] - prefetch
            and order.gap_before(earliest - 1) >= free_gap
            and len(unused[earliest - 1]) < prefetch
        ):
            earliest -= 1
            unused[earliest].add((first, False))
        phase = GapPhase.FETCH if earliest == first else GapPhase.PREFETCH
        placed += [Placed(gap=order.gap_before(earliest), phase=phase, action=Fetch(v.block)) for v in group]
        released.update({v.block: v.release_gap for v in group})
    return placed
