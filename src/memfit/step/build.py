"""Plan -> Schedule: one small pass a concern, woven into the order of computing.

In: `Plan` and `Profile`. Out: `Schedule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from memfit.core.errors import PlanError
from memfit.core.layout import Share
from memfit.core.plan import Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.schedule import (
    Accumulate,
    Action,
    Backward,
    Check,
    Clear,
    Commit,
    Decide,
    Drop,
    Fetch,
    Forward,
    Joint,
    Keep,
    Norm,
    Offload,
    Release,
    Reload,
    Scale,
    Schedule,
    ScheduledCall,
    Seed,
    Spread,
    Start,
    Unscale,
    Update,
)
from memfit.core.shape import StepShape, describe_step
from memfit.core.step import Token
from memfit.core.tiers import Tier
from memfit.step.orders import ComputeOrder, GapPhase, Placed, merge, order_forward, order_step
from memfit.step.segment_facts import KnownFacts

# Offloads of saved tensors: what a segment holds for backward may rest on another tier between its
# forward and its backward.
#
# In: `Plan`, `ComputeOrder`. Out: placed offloads, drops and reloads.


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


# Gradients go home or are used up at once; updates overlap the backward of the blocks below.
#
# In: `Plan`, `StepShape`, `ComputeOrder`. Out: placed accumulates, norm, updates, clears and the
# commit.
#
# [Note: when an update's end is waited for]
# `clear` and `release` of a block wait for its update. Placed right after `update` they would stop
# the main thread until the states have been read and written. They therefore come `Plan.backlog`
# compute actions later: for that long the device holds one more gradient, or one more visiting
# block, which takes the place of a block fetched ahead (see below): an update moves
# several times the bytes of a fetch, so hiding it is worth more. Updates of few blocks that take
# long (their states are on disk, say, and others' are not) run beside the backward of several
# others where more than one action is granted. With a backlog of 0 they come directly, and nothing
# extra is held. Inside a tail nothing is updated before all of it has run back, and what waits for
# an update comes then at the earliest. Behind backward there is nothing to run beside: a backlog of
# one lets one block's states come while those of the one before leave.
#
# [Note: when an update on the host begins]
# It reads the gradient at its home, and whoever asks for it waits until the gradient has arrived
# there. Right behind the accumulate that would stop the device for as long as the gradient crosses
# the link. A compute action later the gradient has crossed beside it, so there such an update
# begins. Nothing is held longer for that: the gradient has left, and the update needs no weights of
# the device.
#
# [Note: when a rank's update begins]
# It waits until the gradient was exchanged, which takes a link as long as a fetch. So it begins a
# compute action later as well, beside which the exchange is made; for that long the gradient stays.
# Where ranks cut the weights the update works on the share at home, and the visit ends without
# waiting for it. Whole weights that visit would stay with the gradient: there the update begins at
# once. New weights that go to the other ranks wait for the update another compute action later.


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


# Visits of weights: when a block's bytes come to the device and when they go.
#
# In: `ComputeOrder`. Out: `Visit`s (a block is there from the first to the last of neighbouring
# uses) and the placed fetches and releases.
#
# [Note: how far a fetch is moved forward]
# A *group* is the blocks that one compute action finds missing. Its fetch moves before earlier
# compute actions while, at each of them, at most `prefetch` groups are on the device that this
# action does not use: groups fetched ahead, and groups that only wait for their update. It never
# passes the release of one of its own blocks, and it moves over at most `prefetch` runs
# (`ComputeOrder.runs`), so that a lone visiting block does not sit on the device for half of the
# step.


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


def build_step(plan: Plan, profile: Profile, *, clips_norm: bool, known: KnownFacts | None = None) -> Schedule:
    """Builds a training step.

    In layer-major order each block's weights are fetched at most twice (forward and backward; the
    last segment before backward begins, once), whatever the number of microbatches; a block that
    several calls read, once more for each call and direction that has no neighbour reading it.

    Args:
        plan: the decisions.
        profile: blocks and calls; any of its traces (all have the same calls).
        clips_norm: gradients are clipped by their global norm, so all updates wait for the end of
            backward.
        known: facts about the profile that were found before, and are added to.

    Raises:
        PlanError: the plan does not belong to the model, or contradicts itself.
    """
    known = known or KnownFacts()
    shape = known.shape(plan, profile)
    key = "order", shape.segments, plan.microbatches, plan.order, shape.tail_segment
    # Homes and policies change what is placed around it, not the order of computing itself.
    order = known.found(key, lambda: order_step(plan, shape)).of_shape(shape)
    updates = updates_in_backward(plan, order, clips_norm=clips_norm)
    placed = [
        *place_visits(order, find_visits(order, updates, plan.backlog), plan.prefetch),
        *place_activations(plan, order),
        *place_accumulates(plan, order),
        *place_updates(plan, order, updates, clips_norm=clips_norm),
    ]
    begin: tuple[Action, ...] = (Scale(),) if plan.scales_losses else ()
    actions = (*begin, *merge(order, placed))
    return _schedule(profile, plan.microbatches, order, actions, known)


def build_forward(plan: Plan, profile: Profile, microbatches: int) -> Schedule:
    """Builds a forward-only pass (evaluation): starts, fetches, forwards and releases.

    Args:
        plan: the decisions; those about backward have no effect.
        profile: blocks and calls.
        microbatches: how many run together; 1 for a single one.

    Raises:
        PlanError: as in `build_step`, or `microbatches` below 1.
    """
    if microbatches < 1:
        raise PlanError(f"a forward pass needs at least one microbatch, not {microbatches}")
    plan = replace(plan, microbatches=microbatches)
    order = order_forward(plan, describe_step(plan, profile))
    visits = find_visits(order, {}, plan.backlog)
    actions = merge(order, place_visits(order, visits, plan.prefetch))
    return _schedule(profile, microbatches, order, actions, KnownFacts())


def _schedule(
    profile: Profile, microbatches: int, order: ComputeOrder, actions: tuple[Action, ...], known: KnownFacts
) -> Schedule:
    names = tuple(b.name for b in profile.blocks)
    return Schedule(
        blocks=names,
        calls=known.found("calls", lambda: _calls(profile, names)),
        microbatches=microbatches,
        actions=actions,
        tail=order.tail,
        is_interleaved=order.is_interleaved,
    )


def _calls(profile: Profile, names: Sequence[str]) -> tuple[ScheduledCall, ...]:
    index = {name: i for i, name in enumerate(names)}
    calls = next(iter(profile.traces.values())).calls
    return tuple(ScheduledCall(site=c.site, blocks=tuple(index[b] for b in c.blocks)) for c in calls)


# A step that is committed by a journal: decided once all gradients are durable, then updated and
# committed in turns.
#
# In: a schedule whose updates come after backward, turns of blocks as the store's room allows them.
# Out: the same with `decide`, its updates in the order of the turns, and a `keep` for each.


def place_turns(schedule: Schedule, turns: Sequence[Sequence[int]]) -> Schedule:
    """Puts a journal's actions into a training step.

    All updates are asked for before the first `keep`: what those of later turns read comes while
    earlier ones are committed.

    Args:
        schedule: with all updates behind all backwards, and no gradient at home on the device.
        turns: blocks by index; those of a turn may be written when all before it are kept.

    Raises:
        PlanError: an update in backward, or gradients at home on the device.
    """
    actions = schedule.actions
    updates = [a for a in actions if isinstance(a, Update)]
    if any(isinstance(a, Clear) for a in actions):
        raise PlanError("a journal needs every gradient at home, and some are cleared on the device")
    # Before the commit, where nothing trains: nothing may stand behind it.
    first = next((i for i, a in enumerate(actions) if isinstance(a, Update | Commit)), len(actions))
    if any(isinstance(a, Backward) for a in actions[first:]):
        raise PlanError("a journal's updates come after backward, and some come in it: plan update='after-backward'")
    position = {block: i for i, turn in enumerate(turns) for block in turn}
    ordered = sorted(updates, key=lambda update: position.get(update.block, -1))
    rest = [a for a in actions[first:] if not isinstance(a, Update)]
    in_turns: list[Action] = [Decide(), *ordered, *(Keep(tuple(turn)) for turn in turns)]
    return replace(schedule, actions=(*actions[:first], *in_turns, *rest))


def kept_token(action: Keep) -> Token:
    """Returns the token of a turn's commit."""
    return Token("keep", str(action))


def turns_before(schedule: Schedule) -> dict[int, list[Token]]:
    """Returns, by block, what is kept before its update changes anything."""
    turns = [action for action in schedule if isinstance(action, Keep)]
    return {b: [kept_token(before)] for before, turn in pairwise(turns) for b in turn.blocks}


# Refuses a schedule that is not of the model and the plan that it is to be lowered for.
#
# In: `Schedule`, `Profile`, `StepShape`. Out: nothing, or `PlanError`. What is left refers to
# blocks, segments and microbatches that exist, and may still be illegal (`step.check`).


def check_references(schedule: Schedule, profile: Profile, shape: StepShape, *, microbatches: int) -> None:
    """Checks that a schedule is of this model and plan, and that all that its actions name exists.

    Args:
        schedule: built, edited or parsed.
        profile: of the model.
        shape: of the plan, with as many microbatches as the schedule.
        microbatches: of the plan; a forward-only pass may have others.

    Raises:
        PlanError: what differs; or the first action that names something unknown, with its index
            and the actions around it.
    """
    if schedule.blocks != shape.blocks:
        raise PlanError(f"the schedule's blocks are not the model's: {schedule.blocks} and {shape.blocks}")
    index = {name: i for i, name in enumerate(shape.blocks)}
    calls = next(iter(profile.traces.values())).calls
    if [(c.site, c.blocks) for c in schedule.calls] != [(c.site, tuple(index[b] for b in c.blocks)) for c in calls]:
        raise PlanError("the schedule's calls are not those of the model's trace; build the schedule again")
    if schedule.microbatches != microbatches and any(isinstance(action, Seed) for action in schedule):
        raise PlanError(f"the schedule has {schedule.microbatches} microbatches, the plan {microbatches}")
    segments = dict(shape.segments)
    for position, action in enumerate(schedule.actions):
        if reason := _unknown(action, len(shape.blocks), segments, schedule.microbatches):
            raise PlanError(point_at(schedule, position, reason))


def point_at(schedule: Schedule, index: int, reason: str) -> str:
    """Says what is wrong with an action, and shows the actions around it."""
    shown = range(max(0, index - 2), min(len(schedule.actions), index + 3))
    context = [f"  {'>' if i == index else ' '} {i:5d}  {schedule.actions[i]}" for i in shown]
    return "\n".join([f"action {index}, {schedule.actions[index]}: {reason}", *context])


def _unknown(action: Action, blocks: int, segments: dict[int, int], microbatches: int) -> str | None:
    # Told apart by class, not by patterns: every action of every candidate of a planner passes
    # here.
    if isinstance(action, Forward | Backward):
        if segments.get(action.first) != action.last:
            return "this is not a segment of the plan"
    elif isinstance(action, Offload | Drop | Reload):
        if action.call not in segments:
            return "no segment begins with this call"
    elif isinstance(action, Fetch | Release | Accumulate | Update | Spread | Clear):
        return None if action.block < blocks else "there is no such block"
    elif isinstance(action, Keep):
        return None if max(action.blocks, default=0) < blocks else "there is no such block"
    elif not isinstance(action, Start | Seed):
        return None
    last = action.last if isinstance(action, Seed) else action.microbatch
    return None if last < microbatches else "there is no such microbatch"


# The legal order of forwards and backwards: what autograd will do, whatever a schedule says.
#
# In: starts, forwards, seeds, the joint and backwards one by one. Out: why one is out of order;
# what is still to come.


class Passes:
    """Follows forwards and backwards.

    Autograd runs the latest-made node first, so within one backward (of one loss or of a sum)
    segments come back in the exact reverse of the order in which they went forward, over all its
    microbatches.

    Attributes:
        segment_index: by first call: the segment.
    """

    def __init__(self, shape: StepShape, microbatches: int) -> None:
        self.segment_index = {first: i for i, (first, _) in enumerate(shape.segments)}
        self._shape = shape
        self._microbatches = microbatches
        self._has_tail = shape.tail_segment < len(shape.segments)
        self._started: set[int] = set()
        self._seeded: set[int] = set()
        self._forwards: list[tuple[int, int]] = []
        self._progress: dict[int, int] = {}
        self._returned: set[tuple[int, int]] = set()
        self._has_joined = False
        # Backwards of the pass that runs, next one last.
        self._pending: list[tuple[int, int]] = []
        # Backwards of the whole step that contribute to a block and have not run, by block.
        self._remaining: dict[int, int] = {}
        for segment in range(len(shape.segments)):
            for block in {*shape.contributes[segment]}:
                if shape.has_backward[segment]:
                    self._remaining[block] = self._remaining.get(block, 0) + microbatches

    @property
    def is_over(self) -> bool:
        """All backwards of the step have run."""
        return len(self._seeded) == self._microbatches and not self._pending and not self._joint_backwards()

    @property
    def has_seeded(self) -> bool:
        """A backward has begun."""
        return bool(self._seeded)

    @property
    def is_in_tail(self) -> bool:
        """The tail of a microbatch is running back: what it makes is not whole before its last
        backward.
        """
        return self._has_tail and bool(self._pending) and self._pending[0][0] >= self._shape.tail_segment

    def has_run(self, segment: int, microbatch: int) -> bool:
        """Tells whether the segment went forward for this microbatch."""
        return self._progress.get(microbatch, 0) > segment

    def has_returned(self, segment: int, microbatch: int) -> bool:
        """Tells whether the segment came back for this microbatch."""
        return (segment, microbatch) in self._returned

    def contributes_later(self, block: int) -> bool:
        """Tells whether a backward still to come in this step adds to the gradient."""
        if block in self._shape.loose:
            return not self.is_over
        return self._remaining.get(block, 0) > 0

    def contributes_in_stage(self, block: int) -> bool:
        """Tells whether a backward still to come in the running pass adds to the gradient."""
        if block in self._shape.loose:
            return bool(self._pending)
        return any(block in self._shape.contributes[segment] for segment, _ in self._pending)

    def refuse(self, action: Start | Forward | Seed | Joint | Backward) -> str | None:
        """Returns why an action is out of order; None if it is not."""
        match action:
            case Start(microbatch=m):
                return None if m in range(self._microbatches) and m not in self._started else "it cannot start (again)"
            case Forward():
                return self._refuse_forward(action)
            case Seed():
                return self._refuse_seed(action)
            case Joint():
                return self._refuse_joint(action)
            case Backward():
                return self._refuse_backward(action)

    def take(self, action: Start | Forward | Seed | Joint | Backward) -> None:
        """Takes the effect of an action that was not refused."""
        match action:
            case Start(microbatch=m):
                self._started.add(m)
            case Forward(first=first, microbatch=m):
                self._forwards.append((self.segment_index[first], m))
                self._progress[m] = self.segment_index[first] + 1
            case Seed(first=first, last=last):
                self._seeded.update(range(first, last + 1))
                begin = self._shape.tail_segment if self._has_tail else 0
                self._pending = self._backwards(range(first, last + 1), begin, len(self._shape.segments))
            case Joint():
                self._pending = self._joint_backwards()
                self._has_joined = True
            case Backward(first=first, microbatch=m):
                segment, _ = self._pending.pop()
                self._returned.add((segment, m))
                for block in self._shape.contributes[segment]:
                    self._remaining[block] -= 1

    def missing(self, *, is_training: bool) -> str | None:
        """Names what is still to come before the end of the step; None if nothing is."""
        for m in range(self._microbatches):
            if self._progress.get(m, 0) < len(self._shape.segments):
                return f"microbatch {m} has not run forward to its end"
        return None if self.is_over or not is_training else "backwards are still to come"

    def _refuse_forward(self, action: Forward) -> str | None:
        m = action.microbatch
        if m not in self._started:
            return f"microbatch {m} has not started"
        segment = self.segment_index.get(action.first)
        if segment is None or self._shape.segments[segment] != (action.first, action.last):
            return "this is not a segment of the plan"
        if self._progress.get(m, 0) != segment:
            return f"microbatch {m} is at segment {self._progress.get(m, 0)}, not at {segment}"
        if self._pending:
            return "a backward is running"
        return None

    def _refuse_seed(self, action: Seed) -> str | None:
        chosen = range(action.first, action.last + 1)
        if not chosen or chosen[-1] >= self._microbatches or self._seeded & set(chosen):
            return "these microbatches cannot be seeded (again)"
        if self._pending:
            return "a backward is running"
        if any(self._progress.get(m, 0) < len(self._shape.segments) for m in chosen):
            return "their forwards have not all run"
        is_whole = len(chosen) == self._microbatches
        is_together = self._shape.takes_turns and not self._has_tail
        if not is_together and len(chosen) > 1:
            return "in this order each microbatch is seeded alone"
        if is_together and not is_whole:
            return "in layer-major order without a tail all microbatches are seeded together"
        return None

    def _refuse_joint(self, action: Joint) -> str | None:
        if not self._has_tail:
            return "there is no tail, so the seeds run through all backwards"
        if self._pending:
            return "a backward is running"
        if (action.first, action.last) != (0, self._microbatches - 1):
            return "it takes all microbatches"
        if len(self._seeded) < self._microbatches:
            return "the tails of all microbatches have not run back"
        return None if self._joint_backwards() else "no backward is left for it"

    def _refuse_backward(self, action: Backward) -> str | None:
        if not self._pending:
            return "no backward is running that it belongs to"
        segment, m = self._pending[-1]
        first, last = self._shape.segments[segment]
        if (action.first, action.last, action.microbatch) != (first, last, m):
            return f"autograd comes to {Backward(first, last, m)} next"
        return None

    def _joint_backwards(self) -> list[tuple[int, int]]:
        """Backwards of the pass from the tail's cut, if it is still to come."""
        if not self._has_tail or self._has_joined:
            return []
        return self._backwards(range(self._microbatches), 0, self._shape.tail_segment)

    def _backwards(self, microbatches: range, begin: int, end: int) -> list[tuple[int, int]]:
        """Lists backwards in the order of their forwards, so that the next one stands last."""
        return [
            (segment, m)
            for segment, m in self._forwards
            if m in microbatches and begin <= segment < end and self._shape.has_backward[segment]
        ]
