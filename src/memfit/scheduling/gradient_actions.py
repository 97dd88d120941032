"""Gradients go home or are used up at once; updates overlap the backward of the blocks below.

In: `Plan`, `StepShape`, `ComputeOrder`. Out: placed accumulates, norm, updates, clears and the
commit.

[Note: when an update's end is waited for]
`clear` and `release` of a block wait for its update. Placed right after `update` they would stop
the main thread until the states have been read and written. They therefore come `Plan.backlog`
compute actions later: for that long the device holds one more gradient, or one more visiting block,
which takes the place of a block fetched ahead (see `visit_actions`): an update moves several times
the bytes of a fetch, so hiding it is worth more. Updates of few blocks that take long (their states
are on disk, say, and others' are not) run beside the backward of several others where more than one
action is granted. With a backlog of 0 they come directly, and nothing extra is held. Inside a tail
nothing is updated before all of it has run back, and what waits for an update comes then at the
earliest. Behind backward there is nothing to run beside: a backlog of one lets one block's states
come while those of the one before leave.

[Note: when an update on the host begins]
It reads the gradient at its home, and whoever asks for it waits until the gradient has arrived
there. Right behind the accumulate that would stop the device for as long as the gradient crosses
the link. A compute action later the gradient has crossed beside it, so there such an update begins.
Nothing is held longer for that: the gradient has left, and the update needs no weights of the
device.

[Note: when a rank's update begins]
It waits until the gradient was exchanged, which takes a link as long as a fetch. So it begins a
compute action later as well, beside which the exchange is made; for that long the gradient stays.
Where ranks cut the weights the update works on the share at home, and the visit ends without
waiting for it. Whole weights that visit would stay with the gradient: there the update begins at
once. New weights that go to the other ranks wait for the update another compute action later.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.core.plan import Plan, UpdateTime
from memfit.core.schedule import Accumulate, Action, Check, Clear, Commit, Norm, Spread, Unscale, Update
from memfit.core.shares import Share
from memfit.core.tiers import Tier
from memfit.scheduling.orders import ComputeOrder, GapPhase, Placed


def place_accumulates(plan: Plan, order: ComputeOrder) -> list[Placed]:
    """Places an accumulate after the last backward of a stage that adds to a block's gradient,
    where the gradient's home is not the device.
    """
    shape = order.shape
    contributors = {c.position: shape.contributes[c.segment] for c in order.computes if c.is_backward}
    whole = {c.position: order.gap_whole(ordinal) for ordinal, c in enumerate(order.computes)}
    placed: list[Placed] = []
    for stage in order.stages:
        last: dict[int, int] = {}
        for position in stage:
            last.update(dict.fromkeys(contributors.get(position, ()), position))
        last.update(dict.fromkeys(shape.loose, stage[-1]))
        placed += [
            Placed(gap=whole.get(position, position + 1), phase=GapPhase.ACCUMULATE, action=Accumulate(block))
            for block, position in sorted(last.items())
            if block in shape.accumulating
        ]
    return placed


def updates_in_backward(plan: Plan, order: ComputeOrder, *, clips_norm: bool) -> Mapping[int, int]:
    """Returns, by block, the position of the computing action after which its update starts; empty
    if updates wait for the end.

    That is the last backward that reads its weights, not only the last that adds to its gradient: a
    recompute that followed the update would see new weights.
    """
    if clips_norm or plan.scales_losses or plan.update is UpdateTime.AFTER_BACKWARD:
        return {}
    shape = order.shape
    last = dict.fromkeys(shape.loose, order.stages[-1][-1])
    for compute in order.computes:
        if compute.is_backward:
            for block in shape.needs[compute.segment]:
                if block not in shape.loose and block in shape.trainable:
                    last[block] = compute.position
    return last


def place_updates(plan: Plan, order: ComputeOrder, updates: Mapping[int, int], *, clips_norm: bool) -> list[Placed]:
    """Places updates, clears and what ends the step.

    See [Note: when an update's end is waited for], [Note: when an update on the host begins],
    [Note: when a rank's update begins].
    """
    end = len(order.actions)
    ordinals = {c.position: i for i, c in enumerate(order.computes)}
    placed: list[Placed] = []
    for block, position in sorted(updates.items()):
        ordinal = ordinals.get(position)  # None: of a seed
        begin = position + 1 if ordinal is None else order.gap_whole(ordinal)
        late = begin if ordinal is None else waiting_gap(order, ordinal, min(plan.backlog, 1))
        gap = begin if ordinal is None else waiting_gap(order, ordinal, plan.backlog)
        if late > begin and begins_late(plan, order.shape.blocks[block]):
            placed.append(Placed(gap=late, phase=GapPhase.LATE_UPDATE, action=Update(block)))
            if ordinal is not None and block in order.shape.spreading:
                gap = waiting_gap(order, min(ordinal + 1, len(order.computes) - 1), plan.backlog)
        else:
            placed.append(Placed(gap=begin, phase=GapPhase.UPDATE, action=Update(block)))
        placed += [Placed(gap=gap, phase=GapPhase.CLEAR, action=action) for action in _behind_update(order, block)]
    last: list[Action] = [Unscale(), Check()] if plan.scales_losses else []
    last += [Norm()] if clips_norm else []
    backlog: list[int] = []
    for block in (b for b in order.shape.trainable if b not in updates):
        last.append(Update(block))
        backlog.append(block)
        if len(backlog) > min(plan.backlog, 1):
            last += _behind_update(order, backlog.pop(0))
    for block in backlog:
        last += _behind_update(order, block)
    last.append(Commit())
    return placed + [Placed(gap=end, phase=GapPhase.END, action=action) for action in last]


def begins_late(plan: Plan, block: str) -> bool:
    """Tells whether a block's update begins a compute action behind its accumulate."""
    homes = plan.block(block)
    is_cut = homes.weights_over is not Share.WHOLE
    return homes.update_on is Tier.HOST or (plan.ranks > 1 and (is_cut or homes.weight_home is Tier.DEVICE))


def waiting_gap(order: ComputeOrder, ordinal: int, backlog: int) -> int:
    """The gap where the end of an update that began after `ordinal` is waited for."""
    last = min(ordinal + backlog, len(order.computes) - 1)
    return max(order.gap_after(last), order.gap_whole(ordinal))


def _behind_update(order: ComputeOrder, block: int) -> list[Action]:
    """Returns what waits for a block's update: its clear, unless its accumulate has taken the
    gradient away already; and where ranks update shares of whole weights, their spread.
    """
    shape = order.shape
    found: list[Action] = [Spread(block)] if block in shape.spreading else []
    return found if block in shape.accumulating else [*found, Clear(block)]
