"""Bytes alive on the device at every action, and on the other tiers at most.

In: `Schedule`, `Plan`, `Profile`. Out: `ActionBytes` an action, host and disk peaks.

What is counted, by category: *weight*, flat buffers (`core.layout`) of blocks on the device, the model's buffers and
the batch; *gradient*, of parameters, from the first backward that adds to them to the clear or, for an accumulate, to
the end of the compute action after it; *state*, of the optimizer, and masters, where their home is the device; *activation* and
*transient*, see `lifetimes`, a transient also holds the gradient that is about to be added to another; *staging*, what updates hold
of the pieces that they work on and of what the optimizer makes (`pieces`), from an update to the action that waits for it; pieces of gradients that
are widened or added at home; the disk's bounce buffers. Not modelled: scratch that no trace sees (the reserve of a limit), loss chunking (the trace must
have been taken with it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memfit.core.errors import PlanError
from memfit.core.layout import ALIGNMENT_BYTES, Scheme, flat_layout, spare_room_bytes, split_layout
from memfit.core.plan import Order, Plan, Tier
from memfit.core.profile import BlockProfile, Profile, TraceProfile
from memfit.core.schedule import (
    Accumulate,
    Action,
    Backward,
    Check,
    Clear,
    Commit,
    Drop,
    Fetch,
    Forward,
    Norm,
    Offload,
    Release,
    Reload,
    Scale,
    Schedule,
    Seed,
    Start,
    Unscale,
    Update,
)
from memfit.core.shape import StepShape, describe_step
from memfit.core.units import MIB, round_up
from memfit.prediction.lifetimes import Event, EventCost, Lifetimes
from memfit.prediction.pieces import Line, Pieces, added_bytes, widened_bytes
from memfit.prediction.segments import Arrival, SegmentFacts

# Of the disk's threads, two each way, for what does not begin or end on a block. They are the process's own: with an accelerator they lie beside the device.
STAGING_BYTES = 4 * MIB
# What was not written of a new version is copied by as much at a time (`runtime.homes.disk`).
_COMPLETING_BYTES = 4 * MIB
# An atomic step keeps the version before beside the one that is being written.
ATOMIC_VERSIONS = 2

CATEGORIES = ("weight", "gradient", "state", "activation", "transient", "staging")


@dataclass(frozen=True, kw_only=True)
class ActionBytes:
    """Device bytes of one action: the most alive while it runs, alive after it, and the most by category."""

    peak_bytes: int
    after_bytes: int
    by_category: dict[str, int]


def trace_of(profile: Profile, microbatches: int) -> TraceProfile:
    """The trace of the largest of `microbatches` nearly equal slices of the batch.

    Raises:
        PlanError: there is no trace of that many rows.
    """
    rows = -(-profile.batch_rows // microbatches)
    if rows not in profile.traces:
        raise PlanError(
            f"{microbatches} microbatches of {profile.batch_rows} rows need a trace of {rows} rows; "
            f"traced are {sorted(profile.traces)}: profile that size too"
        )
    return profile.traces[rows]


def flat_weight_bytes(block: BlockProfile) -> int:
    """Bytes of a block's flat buffer of weights."""
    return flat_layout([p.nbytes for p in block.parameters])[1]


def flat_master_bytes(block: BlockProfile) -> int:
    """Bytes of a block's masters; 0 where its weights are their own."""
    return flat_layout([p.master_nbytes for p in block.parameters])[1]


def master_home_bytes(plan: Plan, block: BlockProfile) -> int:
    """Bytes that a block's masters rest in: all of them, what the weights do not say already, or none."""
    if plan.drops_masters:
        return 0
    if not plan.splits_masters:
        return flat_master_bytes(block)
    return split_layout([(p.nbytes, p.master_nbytes) for p in block.parameters])[1]


def flat_gradient_bytes(block: BlockProfile, *, is_summed: bool = True) -> int:
    """Bytes of a block's gradients.

    Args:
        block: with or without masters.
        is_summed: as they add up and rest at home, in the masters' dtype; else as backward makes them, in that of the weights.
    """
    sizes = [(is_summed and p.master_nbytes) or p.nbytes for p in block.parameters if p.requires_grad]
    return flat_layout(sizes)[1]


class DeviceBytes:
    """Adds up a schedule, action by action.

    Attributes:
        shape: of the step.
        trace: of a microbatch.
        weights, gradients, leaving: device bytes by block; `leaving` are gradients on their way home.
        states: bytes by block that never move.
        live: activations by microbatch.
        away_bytes, away_peaks: activations at rest, by tier: now and at most.
        facts: of the plan's segments.

    `adds_apart` is `Plan.adds_apart` of a job whose plan was cut for this batch; None: as the plan and the schedule say.
    """

    def __init__(
        self,
        schedule: Schedule,
        plan: Plan,
        profile: Profile,
        *,
        microbatches: int,
        staging_bytes: int,
        adds_apart: bool | None = None,
    ) -> None:
        plan = replace(plan, microbatches=schedule.microbatches)  # a forward-only pass may have fewer
        self.plan = plan
        self.profile = profile
        self.shape: StepShape = describe_step(plan, profile)
        self.trace = trace_of(profile, microbatches)
        self.facts = SegmentFacts(self.trace, plan, self.shape, profile)
        self.is_training = any(isinstance(a, Seed) for a in schedule)
        self.weights = {i: flat_weight_bytes(b) for i, b in enumerate(profile.blocks) if i not in self.shape.visiting}
        self.states = {
            i: profile.resting_state_bytes(b.name) + master_home_bytes(plan, b)
            for i, b in enumerate(profile.blocks)
            if plan.block(b.name).state_home is Tier.DEVICE
        }
        # Where there are masters and something to add (or a norm to take), gradients stay on the device as sums in the masters' dtype.
        has_masters = profile.has_masters
        if adds_apart is None:
            has_norm = any(isinstance(a, Norm) for a in schedule)
            adds_apart = plan.adds_apart(has_masters=has_masters, clips_norm=has_norm)
        self._adds_apart = adds_apart
        self._is_summed = self._adds_apart or not has_masters
        self.gradients: dict[int, int] = {}
        self.leaving: dict[int, int] = {}
        self.live = [0] * schedule.microbatches
        self.away_bytes: Counter[Tier] = Counter()
        self.away_peaks: Counter[Tier] = Counter()
        self._from_tail: set[int] = set()
        self._summed: set[int] = set()
        self._segment = {first: i for i, (first, _) in enumerate(self.shape.segments)}
        self._cut_bytes = self._bytes_at_cut()
        self._joint_left = sum(isinstance(a, Backward) and not self._is_of_tail(a) for a in schedule)
        self._crossed: set[int] = set()
        self._held_before: set[int] = set()
        self._arrived_bytes = 0
        self._reliefs: dict[tuple[int, Arrival], int] = {}
        self._done = [0] * schedule.microbatches
        self._events = _split(schedule, self.shape)
        self._costs = self._all_costs()
        self._offloaded: dict[tuple[int, int], tuple[Tier, int]] = {}
        self._input_bytes = profile.buffer_bytes + sum(
            s.nbytes * schedule.microbatches for s in self.trace.storages if s.is_input and not s.is_buffer
        )
        self._line = Line(Pieces(plan, profile, is_summed=self._is_summed))
        self._resident_staging = staging_bytes if uses_disk(plan, self.shape) else 0
        self._at_home: set[int] = set()
        self._waiting: dict[int, int] = {}
        self._totals: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self._totals.update(
            weight=sum(self.weights.values()) + self._input_bytes,
            state=sum(self.states.values()),
            staging=self._resident_staging,
        )

    def events_of(self, microbatch: int) -> tuple[tuple[tuple[Event, int], ...], int]:
        """A microbatch's events, and how many it has been through so far."""
        return self._events[microbatch], self._done[microbatch]

    @property
    def input_bytes(self) -> int:
        """Bytes of the batch and of the model's buffers."""
        return self._input_bytes

    def moved_bytes(self, call: int) -> int:
        """Bytes that an offload or reload of a call moves."""
        return self.facts.copy_bytes(self._segment[call])

    def run(self, schedule: Schedule) -> Iterator[ActionBytes]:
        """Takes the actions one by one; stop early to look at the state in between."""
        for action in schedule:
            yield self._take(action)

    def _take(self, action: Action) -> ActionBytes:
        if self._arrived_bytes and not self._is_of_tail(action):
            self._totals["gradient"] -= self._arrived_bytes
            self._arrived_bytes = 0
        if not self._joint_left:
            self._totals["activation"] -= self._cut_bytes * len(self._crossed)
            self._crossed.clear()
        before = dict(self._totals)
        match action:
            case Start() | Forward() | Backward() | Seed() | Offload() | Drop() | Reload():
                return self._compute_or_move(action)
            case Fetch(block=b):
                self._line.wait(b)
                self.weights[b] = flat_weight_bytes(self.profile.blocks[b])
                self._totals["weight"] += self.weights[b]
            case Release(block=b):
                self._line.wait(b)
                self._totals["weight"] -= self.weights.pop(b, 0)
            case Accumulate(block=b):
                self._flush()
                before["staging"] += self._accumulate(b)
            case Clear(block=b):
                self._line.wait(b)
                self._totals["gradient"] -= self.gradients.pop(b, 0)
            case Update(block=b):
                self._flush()
                self._line.submit(b, is_here=b in self.weights)
            case Commit():
                self._flush()
                self._line.wait_for_all()
                before["staging"] += self._completing_bytes()
            case Norm() | Unscale() | Check():
                self._flush()
            case Scale():
                pass
        self._totals["staging"] = self._resident_staging + self._line.peak_bytes
        return self._moment(before)

    def _accumulate(self, block: int) -> int:
        """A block's gradient goes home; returns what is made of it for that, beside what leaves."""
        profile = self.profile.blocks[block]
        held = self.gradients.pop(block, 0)
        is_narrow = not self._is_summed and held
        leaving, passing = widened_bytes(profile) if is_narrow else (0, 0)
        # The widened pieces take the place of the narrow gradient, which is given up parameter by parameter.
        self.leaving[block] = max(held, leaving)
        self._totals["gradient"] += self.leaving[block] - held
        is_added = block in self._at_home
        self._at_home.add(block)
        return max(leaving + passing, added_bytes(profile) if is_added else 0)

    def _completing_bytes(self) -> int:
        return _COMPLETING_BYTES if self.plan.is_atomic and self._resident_staging else 0

    def _compute_or_move(self, action: Action) -> ActionBytes:
        if isinstance(action, Seed):
            self._held_before = set(self.gradients)
            # Glue after the last call may hand over gradients before the first call's backward begins.
            self._contribute(self.shape.loose)
            microbatches = range(action.first, action.last + 1)
        else:
            assert isinstance(action, Start | Forward | Backward | Offload | Drop | Reload)
            microbatches = range(action.microbatch, action.microbatch + 1)
        added = relief = 0
        if isinstance(action, Backward):
            segment = self._segment[action.first]
            relief = self._relief_bytes(segment, self._arrival(segment))
            contributors = {*self.shape.contributes[segment], *self.shape.loose}
            added = self._contribute(contributors, segment)
        before = dict(self._totals)
        rises: list[int] = []
        for m in microbatches:
            cost = self._costs[m][self._done[m]]
            self._done[m] += 1
            # A seed of several losses goes through them one by one: each rises above what the earlier ones left.
            kept = self._keep_cut(action, m)
            rises.append(self._totals["activation"] - before["activation"] + cost.rise_bytes - relief + kept)
            self._totals["activation"] += kept
            self._totals["activation"] += cost.after_bytes - self.live[m]
            self.live[m] = cost.after_bytes
            self._account_away(action, m, cost)
        rise = max(rises) + added
        # Below zero where activations go while gradients, counted from the begin on, come.
        before["transient"] = max(0, rise)
        before["gradient"] += min(0, rise)
        if isinstance(action, Forward | Backward):
            self._flush()
        if isinstance(action, Backward):
            self._end_waiting(self._segment[action.first])
        return self._moment(before)

    def _bytes_at_cut(self) -> int:
        """Gradients of a microbatch's activations where its tail is cut off."""
        segments, tail = self.shape.segments, self.shape.tail_segment
        return self.facts.gradient_bytes[segments[tail][0]] if tail < len(segments) else 0

    def _keep_cut(self, action: Action, microbatch: int) -> int:
        """The joint backward is given the gradients at all microbatches' cuts, and holds them to its end, beside what it makes of them."""
        if not isinstance(action, Backward) or self._is_of_tail(action):
            return 0
        self._joint_left -= 1
        if microbatch in self._crossed:
            return 0
        self._crossed.add(microbatch)
        return self._cut_bytes

    def _end_waiting(self, segment: int) -> None:
        """All uses of a shared weight in this microbatch are through: their sum is added to what earlier microbatches gave."""
        for b in [b for b in self._waiting if not self.facts.waits_on(self.shape.blocks[b], segment)]:
            self._totals["gradient"] -= self._waiting.pop(b)

    def _arrival(self, segment: int) -> Arrival:
        """How the gradients of a segment's backward come, before they are counted."""
        blocks = self.shape.contributes[segment]
        is_shared = any(self.shape.blocks[b] in self.facts.shared_by for b in blocks)
        # What glue makes of loose ones comes at no known time.
        if is_shared or not blocks or self.shape.loose:
            return Arrival.UNKNOWN
        if not self._adds_apart and not self.gradients.keys() & {*blocks}:
            return Arrival.FRESH
        is_adding = self._adds_apart or self.gradients.keys() >= {*blocks}
        return Arrival.ADDING if is_adding and segment < self.shape.tail_segment else Arrival.UNKNOWN

    def _relief_bytes(self, segment: int, arrival: Arrival) -> int:
        """What a backward rises less by, because gradients come later than they are counted."""
        key = segment, arrival
        if key not in self._reliefs:
            facts = self.facts
            self._reliefs[key] = facts.backward_rise(segment) - facts.backward_rise(segment, arrival)
        return self._reliefs[key]

    def _is_of_tail(self, action: Action) -> bool:
        return isinstance(action, Backward) and self._segment[action.first] >= self.shape.tail_segment

    def _contribute(self, blocks: frozenset[int] | set[int], segment: int | None = None) -> int:
        """Gradients begin; returns the bytes of the largest one that is made beside the one it is added to.

        Where a shared weight's gradient waited in the trace, the traced rise holds the one that is added to it. What the
        tail has made lies on the parameter when the joint backward begins to sum its own part beside it.
        """
        added = 0
        is_tail = segment is not None and segment >= self.shape.tail_segment
        if self._adds_apart:
            return self._contribute_apart(blocks, is_tail=is_tail)
        if is_tail:
            # They are added when the tail is through: until then they lie beside what earlier microbatches gave.
            come = self._held_before & blocks
            self._held_before -= come
            self._arrived_bytes += sum(self._held_bytes(b) for b in come)
            self._totals["gradient"] += sum(self._held_bytes(b) for b in come)
        for b in blocks:
            if is_tail:
                self._from_tail.add(b)
            elif b in self._from_tail:
                self._from_tail.discard(b)
                beside = self._held_bytes(b) if b in self.gradients else 0
                if beside:
                    self.gradients[b] += beside
                    self._totals["gradient"] += beside
                    continue
            if b in self.gradients:
                if segment is not None and self.facts.has_waited(self.shape.blocks[b], segment):
                    continue
                if (
                    segment is not None
                    and self.plan.order is Order.MICROBATCH_MAJOR
                    and self.facts.waits_on(self.shape.blocks[b], segment)
                ):
                    # Autograd sums the uses of a backward apart, and only then adds them to the gradient that is there.
                    self._waiting[b] = self._held_bytes(b)
                    self._totals["gradient"] += self._waiting[b]
                    continue
                added = max(added, 0 if is_tail else self._adding_bytes(b))
            else:
                self.gradients[b] = self._held_bytes(b)
                self._totals["gradient"] += self.gradients[b]
        return added

    def _adding_bytes(self, block: int) -> int:
        """What the largest gradient takes that is added to one of an earlier microbatch.

        One backward for all microbatches holds the first one on its way to the parameter. A view of a product is not added to in place, but into a third tensor,
        once: that is a sum, and no view.
        """
        blocks, profile = self.profile.blocks[block], self.profile
        if self.plan.order is Order.MICROBATCH_MAJOR or block in self._summed:
            return blocks.largest_gradient_bytes
        self._summed.add(block)
        sizes = [p.nbytes * (1 + (p.name in profile.viewed_gradients)) for p in blocks.parameters if p.requires_grad]
        return max(sizes, default=0)

    def _held_bytes(self, block: int) -> int:
        return flat_gradient_bytes(self.profile.blocks[block], is_summed=self._is_summed)

    def _contribute_apart(self, blocks: frozenset[int] | set[int], *, is_tail: bool) -> int:
        """Each arrival, of the weights' dtype, lives beside the sum until it is added; those of a tail come all at once, at its end."""
        profiled = self.profile.blocks
        for b in blocks:
            if b not in self.gradients:
                self.gradients[b] = self._held_bytes(b)
                self._totals["gradient"] += self.gradients[b]
        if is_tail:
            tail = {b for gets in self.shape.contributes[self.shape.tail_segment :] for b in gets}
            arrived = sum(flat_gradient_bytes(profiled[b], is_summed=False) for b in tail)
            return arrived + max((added_bytes(profiled[b]) for b in tail), default=0)
        return max((profiled[b].largest_gradient_bytes + added_bytes(profiled[b]) for b in blocks), default=0)

    def _flush(self) -> None:
        self._totals["gradient"] -= sum(self.leaving.values())
        self.leaving.clear()

    def _account_away(self, action: Action, microbatch: int, cost: EventCost) -> None:
        if isinstance(action, Offload):
            self._offloaded[action.call, microbatch] = (action.tier, cost.moved_bytes)
            self.away_bytes[action.tier] += cost.moved_bytes
            self.away_peaks[action.tier] = max(self.away_peaks[action.tier], self.away_bytes[action.tier])
        elif isinstance(action, Backward):
            tier, nbytes = self._offloaded.pop((action.first, microbatch), (Tier.DISK, 0))
            self.away_bytes[tier] -= nbytes

    def _moment(self, during: dict[str, int]) -> ActionBytes:
        peak, after = sum(during.values()), sum(self._totals.values())
        most = during
        if peak < after:
            most, peak = dict(self._totals), after
        return ActionBytes(peak_bytes=peak, after_bytes=after, by_category=most)

    def _all_costs(self) -> list[tuple[EventCost, ...]]:
        known: dict[tuple[tuple[Event, int], ...], tuple[EventCost, ...]] = {}
        for events in self._events:
            if events not in known:
                known[events] = Lifetimes(self.facts, is_training=self.is_training).follow(events)
        return [known[events] for events in self._events]


def uses_disk(plan: Plan, shape: StepShape) -> bool:
    """Something rests on disk, or leaves to it."""
    homes = (plan.block(name) for name in shape.blocks)
    rests = any(Tier.DISK in (h.weight_home, h.gradient_home, h.state_home) for h in homes)
    return rests or Tier.DISK in shape.leaves


def home_bytes(plan: Plan, profile: Profile, tier: Tier) -> int:
    """Bytes of weights, gradients and states whose home is a tier; on disk kept ones have a spare slot where steps are atomic."""
    working = sum(
        flat_gradient_bytes(block)
        for block in profile.blocks
        if plan.block(block.name).gradient_home is tier and block.trains
    )
    return kept_bytes(plan, profile, tier) + working


def kept_bytes(plan: Plan, profile: Profile, tier: Tier) -> int:
    """The part of `home_bytes` that outlives a step: weights, masters, states."""
    kept = 0
    for block in profile.blocks:
        homes = plan.block(block.name)
        if homes.weight_home is tier:
            kept += flat_weight_bytes(block)
        if homes.state_home is tier:
            kept += profile.resting_state_bytes(block.name) + master_home_bytes(plan, block)
    return kept * (ATOMIC_VERSIONS if plan.is_atomic and tier is Tier.DISK else 1)


def store_bytes(plan: Plan, profile: Profile, scheme: Scheme = "generations") -> int:
    """Disk that a store claims for a run.

    With generations: two slots of every weight, master and state, wherever they rest, and of the buffers. With a journal: one slot of what rests on disk and
    its spare room, the gradients; two slots of what rests in memory, and of the buffers.

    Not counted: a journal's record (some 256 KiB and 1 KiB a parameter, twice).
    """
    moving: list[int] = []
    total = 2 * round_up(profile.buffer_bytes, ALIGNMENT_BYTES)
    for block in profile.blocks:
        parts = (flat_weight_bytes(block), profile.resting_state_bytes(block.name), master_home_bytes(plan, block))
        size = sum(round_up(nbytes, ALIGNMENT_BYTES) for nbytes in parts)
        if scheme == "generations":
            total += 2 * size
        elif not block.trains:
            total += size
        else:
            total += flat_gradient_bytes(block)
            if plan.block(block.name).rests_on_disk:
                moving.append(size)
            else:
                total += 2 * size
    return total + (sum(moving) + spare_room_bytes(moving) if moving else 0)


def disk_bytes_with_store(plan: Plan, profile: Profile, disk_bytes: int, scheme: Scheme = "generations") -> int:
    """What a plan's disk comes to where its run is committed to a store: homes on disk lie inside of that, with a journal gradients too.

    Args:
        plan: the decisions.
        profile: with its states' formats.
        disk_bytes: predicted peak without a store.
        scheme: of the store.
    """
    inside = (home_bytes if scheme == "journal" else kept_bytes)(plan, profile, Tier.DISK)
    return store_bytes(plan, profile, scheme) + disk_bytes - inside


def _split(schedule: Schedule, shape: StepShape) -> list[tuple[tuple[Event, int], ...]]:
    """Each microbatch's part of a schedule, as events on segments."""
    segment = {first: i for i, (first, _) in enumerate(shape.segments)}
    events: list[list[tuple[Event, int]]] = [[] for _ in range(schedule.microbatches)]
    for action in schedule:
        match action:
            case Start(microbatch=m):
                events[m].append((Event.START, -1))
            case Seed(first=first, last=last):
                for m in range(first, last + 1):
                    events[m].append((Event.SEED, -1))
            case Forward(first=call, microbatch=m):
                events[m].append((Event.FORWARD, segment[call]))
            case Backward(first=call, microbatch=m):
                events[m].append((Event.BACKWARD, segment[call]))
            case Offload(call=call, microbatch=m):
                events[m].append((Event.OFFLOAD, segment[call]))
            case Drop(call=call, microbatch=m):
                events[m].append((Event.DROP, segment[call]))
            case Reload(call=call, microbatch=m):
                events[m].append((Event.RELOAD, segment[call]))
            case _:
                pass
    return [tuple(e) for e in events]
