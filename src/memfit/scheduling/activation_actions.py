"""Offloads of saved tensors: what a segment holds for backward may rest on another tier between its
forward and its backward.

In: `Plan`, `ComputeOrder`. Out: placed offloads, drops and reloads.
"""

from __future__ import annotations

from memfit.core.plan import Plan
from memfit.core.schedule import Drop, Offload, Reload
from memfit.scheduling.orders import ComputeOrder, GapPhase, Placed


def place_activations(plan: Plan, order: ComputeOrder) -> list[Placed]:
    """Offloads right after forward, drops a compute action later (a backlog of one), reloads
    `prefetch` actions ahead.

    What would be away for no compute action at all stays: writing and reading it would free
    nothing.
    """
    shape = order.shape
    placed: list[Placed] = []
    for backward, compute in enumerate(order.computes):
        tier = shape.leaves[compute.segment]
        if not compute.is_backward or tier is None:
            continue
        call, m = shape.segments[compute.segment][0], compute.microbatch
        forward = order.forwards[compute.segment, m]
        # Dropped before ordinal forward + 2: it is away only if a compute action stands between
        # that and the reload.
        reload = max(backward - plan.prefetch, forward + 3)
        if reload > backward - min(plan.prefetch, 1):
            continue
        placed += [
            Placed(gap=order.gap_after(forward), phase=GapPhase.OFFLOAD, action=Offload(call, m, tier)),
            Placed(gap=order.gap_after(forward + 1), phase=GapPhase.DROP, action=Drop(call, m)),
            Placed(gap=order.gap_before(reload), phase=GapPhase.RELOAD, action=Reload(call, m)),
        ]
    return placed
