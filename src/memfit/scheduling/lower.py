"""Schedule -> Step: the one place that says what an action does to memory, links and processors.

In: `Schedule`, `Plan`, `Profile`. Out: `core.step.Step`.

What is counted on the device, by category: *weight*, flat buffers (`core.layout`) of blocks, the model's buffers and the batch; *gradient*, see
`gradient_bytes`; *state*, of the optimizer, and masters, where their home is the device; *activation* and *transient*, see `lifetimes`, a transient also holds
the gradient that is about to be added to another; *staging*, what updates hold of the pieces that they work on and of what the optimizer makes (`pieces`), from
an update to the action that waits for it; pieces of gradients that are widened or added at home; the disk's bounce buffers, which beside an accelerator
are host memory. Not modelled: scratch that no trace
sees (the reserve of a limit), loss chunking (the trace must have been taken with it).

What waits for what is `core.schedule`'s [Note: what an action means], as tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from memfit.core.layout import PINNED_STAGING_BYTES
from memfit.core.plan import Plan
from memfit.core.profile import Profile, TraceProfile
from memfit.core.schedule import (
    Accumulate,
    Action,
    Backward,
    Clear,
    Commit,
    Drop,
    Fetch,
    Forward,
    Keep,
    Norm,
    Offload,
    Release,
    Reload,
    Schedule,
    Seed,
    Start,
    Update,
)
from memfit.core.shape import StepShape, describe_step
from memfit.core.step import ByteChange, Operation, Step, Token, Transfer, UpdatePlace, WorkKind
from memfit.core.tiers import Tier, is_processor, updates_in_place
from memfit.core.units import MIB
from memfit.scheduling.gradient_bytes import GradientBytes
from memfit.scheduling.lifetimes import ActivationEvent, EventCost, Lifetimes
from memfit.scheduling.pieces import Line, UpdatePieces, moved_weight_bytes
from memfit.scheduling.references import check_references
from memfit.scheduling.segment_facts import Arrival, SegmentFacts
from memfit.scheduling.sizes import (
    STAGING_BYTES,
    commit_bytes,
    flat_gradient_bytes,
    flat_weight_bytes,
    kept_bytes_of,
    master_home_bytes,
    trace_of,
    update_traffic,
    uses_disk,
)

# What was not written of a new version is copied by as much at a time (`homes.disk`).
_COMPLETING_BYTES = 4 * MIB
_FETCH, _RELOAD, _OFFLOAD, _ACCUMULATE, _UPDATE = "fetch", "reload", "offload", "accumulate", "update"


def lower(
    schedule: Schedule,
    plan: Plan,
    profile: Profile,
    *,
    microbatches: int | None = None,
    staging_bytes: int = STAGING_BYTES,
    adds_apart: bool | None = None,
    commits: float = 0.0,
    device: str = "cpu",
    is_itemized: bool = False,
) -> Step:
    """Gives each action of a legal schedule its meaning under a plan.

    Args:
        schedule: a step or a forward-only pass. One that is not legal is lowered too, so that
            `scheduling.check` can point at the fault; its bytes and tokens mean nothing.
        plan: that it carries out.
        profile: with a trace of the rows that a microbatch has.
        microbatches: into how many slices the batch was cut, if not `plan.microbatches` (a forward-only pass may run
            fewer than that at a time).
        staging_bytes: of the disk's threads, held all the time where something rests on disk or leaves to it: host memory beside an accelerator.
        adds_apart: `Plan.adds_apart` of the job, where its plan was cut for a smaller batch; None: as this plan says.
        commits: to a store, a step: 1 with durability "step", 1 / N with N, 0 without a store.
        device: "cpu" where the processor is the device, which updates what rests in its memory in place; else the accelerator's name, between which and the
            disk all passes through pinned pieces of host memory.
        is_itemized: activations are owned by what made them ("C5"), not by their microbatch ("m0"): for reports, slower.

    Raises:
        PlanError: no trace of that many rows; the schedule is of another model or plan (`scheduling.references`).
    """
    plan_of_pass = replace(plan, microbatches=schedule.microbatches)  # a forward-only pass may have fewer
    shape = describe_step(plan_of_pass, profile)
    check_references(schedule, profile, shape, microbatches=plan.microbatches)
    trace = trace_of(profile, microbatches or plan.microbatches)
    return _Lowering(
        schedule,
        plan_of_pass,
        profile,
        shape,
        trace,
        staging_bytes=staging_bytes,
        adds_apart=adds_apart,
        device=device,
        is_itemized=is_itemized,
    ).step(commits)


def segment_flops(trace: TraceProfile, plan: Plan, shape: StepShape, segment: int, *, is_backward: bool) -> float:
    """Floating point operations of a segment for one microbatch, replay included."""
    first, last = shape.segments[segment]
    calls = trace.calls[first : last + 1]
    forward = sum(c.forward_flops for c in calls)
    if not is_backward:
        return forward
    return sum(c.backward_flops for c in calls) + plan.call(first).saved.policy.replay_share * forward


def update_work(plan: Plan, profile: Profile, block: int) -> tuple[tuple[WorkKind, float], ...]:
    """Elements that a block's update passes, by kind of work."""
    trained = sum(math.prod(p.shape) for p in profile.blocks[block].parameters if p.requires_grad)
    encoded = profile.encoded_elements.get(profile.blocks[block].name, 0)
    work = [(WorkKind.UPDATED, float(trained)), (WorkKind.ENCODED, float(encoded))]
    if plan.splits_masters:
        work.append((WorkKind.SPLIT, float(trained)))
    if plan.drops_masters:
        work.append((WorkKind.ROUNDED, float(trained)))
    return tuple(work)


class _Changes:
    """Changes of bytes of the operation in the making. An object of its own: who tells of changes and who asks for them would hold each other."""

    def __init__(self) -> None:
        self.found: list[ByteChange] = []

    def begin(self) -> list[ByteChange]:
        """The list of another operation."""
        self.found = []
        return self.found

    def add(self, category: str, owner: str, nbytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Notes bytes that come or go; none are no change."""
        if nbytes:
            self.found.append(ByteChange(tier, category, owner, nbytes))

    def add_gradient(self, block: int, nbytes: int) -> None:
        """The same of a block's gradient."""
        self.add("gradient", f"B{block}", nbytes)


class _Draft:
    """An operation in the making."""

    __slots__ = (
        "adds_to",
        "after",
        "awaited",
        "behind",
        "changes",
        "during",
        "gives",
        "host_work",
        "is_chain",
        "needs",
        "transfers",
        "update_place",
        "waits",
        "waits_after",
        "work",
    )

    def __init__(self, changes: list[ByteChange]) -> None:
        self.changes = changes
        self.during: list[ByteChange] = []
        self.transfers: list[Transfer] = []
        self.awaited: list[Transfer] = []
        self.behind: Token | None = None
        self.waits: Sequence[Token] = ()
        self.waits_after: Sequence[Token] = ()
        self.after: Sequence[Token] = ()
        self.is_chain = True
        self.gives: Token | None = None
        self.work: tuple[tuple[WorkKind, float], ...] = ()
        self.host_work: tuple[tuple[WorkKind, float], ...] = ()
        self.update_place: UpdatePlace | None = None
        self.needs: tuple[int, ...] = ()
        self.adds_to: tuple[int, ...] = ()

    def finish(self, action: Action) -> Operation:
        """The operation, which changes no more."""
        return Operation(
            action=action,
            changes=tuple(self.changes),
            during=tuple(self.during),
            waits=tuple(self.waits),
            waits_after=tuple(self.waits_after),
            transfers=tuple(self.transfers),
            awaited=tuple(self.awaited),
            behind=self.behind,
            is_chain=self.is_chain,
            after=tuple(self.after),
            gives=self.gives,
            work=self.work,
            host_work=self.host_work,
            update_place=self.update_place,
            needs=self.needs,
            adds_to=self.adds_to,
        )


class _Lowering:
    """Goes through a schedule once, and keeps what a meaning depends on: what is there, what is under way."""

    def __init__(
        self,
        schedule: Schedule,
        plan: Plan,
        profile: Profile,
        shape: StepShape,
        trace: TraceProfile,
        *,
        staging_bytes: int,
        adds_apart: bool | None,
        device: str,
        is_itemized: bool,
    ) -> None:
        self._schedule = schedule
        self._plan = plan
        self._profile = profile
        self._device = device
        self._shape = shape
        self._facts = SegmentFacts(trace, plan, self._shape, profile)
        self._segment = {first: i for i, (first, _) in enumerate(self._shape.segments)}
        self._staging_bytes = staging_bytes if uses_disk(plan, self._shape) else 0
        if adds_apart is None:
            has_norm = any(isinstance(a, Norm) for a in schedule)
            adds_apart = plan.adds_apart(has_masters=profile.has_masters, clips_norm=has_norm)
        self._changes = _Changes()
        self._gradients = GradientBytes(
            plan, profile, self._facts, adds_apart=adds_apart, change=self._changes.add_gradient
        )
        self._line = Line(UpdatePieces(plan, profile, is_summed=self._gradients.is_summed, device=device))
        self._line_bytes: Mapping[Tier, int] = dict(self._line.peak_bytes)
        self._owner = [f"B{index}" for index in range(len(profile.blocks))]
        self._homes = [plan.block(block.name) for block in profile.blocks]
        self._travels = any(
            not updates_in_place(tier, device)
            for homes in self._homes
            for tier in (homes.weight_home, homes.gradient_home, homes.state_home)
        )
        self._updates_on_host = [homes.updates_on_host(device) for homes in self._homes]
        self._loose = tuple(sorted(shape.loose))
        self._adds_to = [tuple(sorted({*blocks, *shape.loose})) for blocks in shape.contributes]
        self._weight_bytes = [flat_weight_bytes(block) for block in profile.blocks]
        self._visiting: set[int] = set()
        self._is_itemized = is_itemized
        self._events = _events_by_microbatch(schedule, self._shape)
        self._costs = self._all_costs()
        self._done = [0] * schedule.microbatches
        self._cut_bytes = self._bytes_at_cut()
        self._tail_left = 0
        self._joint_left = sum(isinstance(a, Backward) and not self._is_of_tail(a) for a in schedule)
        self._crossed: set[int] = set()
        # In a journal: what is kept before a block's update changes anything.
        self._turn_before = _turns_before(schedule)
        self._live = [0] * schedule.microbatches
        self._away: dict[tuple[int, int], tuple[Tier, int]] = {}
        self._reliefs: dict[tuple[int, Arrival], int] = {}
        self._work: dict[tuple[int, bool], tuple[tuple[WorkKind, float], ...]] = {}
        # Tokens that were given, in order; blocks whose gradient left before the compute action that runs next.
        self._given: dict[Token, None] = {}
        self._leaving: list[int] = []
        # The last update of the pipeline.
        self._pipeline: Token | None = None
        self._draft = _Draft(self._changes.begin())

    def step(self, commits: float) -> Step:
        """The whole step."""
        written = round(commits * commit_bytes(self._plan, self._profile)) if commits else 0
        return Step(
            schedule=self._schedule,
            shape=self._shape,
            resting=tuple(self._resting()),
            operations=tuple(self._lower(action) for action in self._schedule),
            commit=(Transfer(Tier.DISK, "write", "commit", written),) if written else (),
        )

    def _resting(self) -> Iterable[ByteChange]:
        plan, profile = self._plan, self._profile
        inputs = sum(s.nbytes for s in self._facts.trace.storages if s.is_input and not s.is_buffer)
        batch_bytes = profile.buffer_bytes + inputs * self._schedule.microbatches
        if batch_bytes:
            yield ByteChange(Tier.DEVICE, "weight", "batch and buffers", batch_bytes)
        if lasting := self._facts.lasting_bytes:
            yield ByteChange(Tier.DEVICE, "activation", "kept by the program", lasting)
        beside = Tier.DEVICE if is_processor(self._device) else Tier.HOST
        if self._staging_bytes:
            yield ByteChange(beside, "staging", "disk buffers", self._staging_bytes)
        if uses_disk(plan, self._shape) and beside is Tier.HOST:
            yield ByteChange(Tier.HOST, "staging", "pinned pieces", PINNED_STAGING_BYTES)
        if moved := moved_weight_bytes(plan, profile, self._device):
            yield ByteChange(Tier.HOST, "staging", "weights of updates", moved)
        for index, block in enumerate(profile.blocks):
            homes, owner = self._homes[index], self._owner[index]
            states = profile.resting_state_bytes(block.name) + master_home_bytes(plan, block)
            if self._is_here(index):
                yield ByteChange(Tier.DEVICE, "weight", owner, self._weight_bytes[index])
            if homes.state_home is Tier.DEVICE and states:
                yield ByteChange(Tier.DEVICE, "state", owner, states)
            used = dict.fromkeys((homes.weight_home, homes.state_home, homes.gradient_home))
            for tier in (tier for tier in used if not tier.traits.is_device):
                if kept := kept_bytes_of(plan, profile, block, tier):
                    yield ByteChange(tier, "state", owner, kept)
                if homes.gradient_home is tier and block.trains:
                    yield ByteChange(tier, "gradient", owner, flat_gradient_bytes(block))

    # --- one action -------------------------------------------------------------------------------------------------------------

    def _lower(self, action: Action) -> Operation:
        self._draft = draft = _Draft(self._changes.begin())
        if not self._tail_left:
            self._gradients.end_arrivals()
        if not self._joint_left:
            while self._crossed:
                self._change("activation", f"cut of m{self._crossed.pop()}", -self._cut_bytes)
        match action:
            case Start() | Forward() | Backward() | Seed():
                self._compute(action)
            case Offload() | Drop() | Reload():
                self._move(action)
            case _:
                draft.during = list(draft.changes)
                self._settle(action)
                for tier, nbytes in self._line.peak_bytes.items():
                    self._changes.add("staging", "updates", nbytes - self._line_bytes[tier], tier)
                self._line_bytes = dict(self._line.peak_bytes)
        if draft.gives is not None:
            self._given[draft.gives] = None
        return draft.finish(action)

    def _settle(self, action: Action) -> None:
        """Weights, gradients and updates."""
        draft = self._draft
        match action:
            case Fetch(block=b):
                self._line.wait(b)
                self._visiting.add(b)
                size = self._weight_bytes[b]
                self._change("weight", self._owner[b], size)
                draft.after = self._waits(_UPDATE, b)
                self._transfer(self._homes[b].weight_home, "read", "weight", size)
                draft.gives = Token(_FETCH, self._owner[b])
            case Release(block=b):
                self._change("weight", self._owner[b], -self._weight_bytes[b])
                self._visiting.discard(b)
                draft.waits = [*self._waits(_FETCH, b), *self._updated(b)]
            case Accumulate(block=b):
                self._accumulate(b)
            case Clear(block=b):
                self._gradients.clear(b)
                draft.waits = self._updated(b)
            case Update(block=b):
                self._update(b)
            case Keep(blocks=blocks):
                for b in blocks:
                    self._line.wait(b)
                draft.waits = [token for b in blocks for token in self._waits(_UPDATE, b)]
                draft.gives = _kept(action)
            case Commit():
                self._wait_for_kinds(action.waits_for)
                if self._plan.is_atomic and self._staging_bytes:
                    beside = Tier.DEVICE if is_processor(self._device) else Tier.HOST
                    draft.during.append(ByteChange(beside, "staging", "new versions", _COMPLETING_BYTES))
            case _:
                self._wait_for_kinds(getattr(action, "waits_for", ()))

    def _accumulate(self, block: int) -> None:
        draft = self._draft
        draft.waits = self._take_leaving()
        made = self._gradients.accumulate(block)
        if made:
            draft.during.append(ByteChange(Tier.DEVICE, "staging", "gradients going home", made))
        home = self._homes[block].gradient_home
        size = flat_gradient_bytes(self._profile.blocks[block])
        draft.after = self._waits(_ACCUMULATE, block)
        # The first gradient overwrites what is at home. A later one is added: where the sum rests
        # out of the processor's reach, it is read for that, and the main thread waits for it.
        if draft.after and size and not updates_in_place(home, self._device):
            draft.awaited.append(Transfer(home, "read", "gradient", size))
        self._transfer(home, "write", "gradient", size)
        self._leaving.append(block)
        draft.gives = Token(_ACCUMULATE, self._owner[block])

    def _update(self, block: int) -> None:
        """Reads, works and writes as a pipeline: it ends when the slowest of the three has."""
        draft = self._draft
        # A visit that no call waited for still arrives, and would overwrite what is updated.
        draft.waits = [*self._take_leaving(), *(self._waits(_FETCH, block) if block in self._visiting else ())]
        self._line.submit(block, is_here=self._is_here(block))
        traffic = update_traffic(
            self._plan, self._profile, block, is_visiting=block in self._visiting, device=self._device
        )
        draft.after = [*self._waits(_ACCUMULATE, block), *self._turn_before.get(block, ())]
        for direction, moved in (("read", traffic.read), ("write", traffic.written)):
            for (tier, category), nbytes in moved.items():
                draft.transfers.append(Transfer(tier, direction, category, nbytes))
        draft.is_chain = False
        draft.behind, self._pipeline = self._pipeline, Token(_UPDATE, self._owner[block])
        work = update_work(self._plan, self._profile, block)
        if self._updates_on_host[block]:
            draft.host_work = work
            draft.update_place = UpdatePlace.HOST
        else:
            draft.work = work
            # Beside backward there is something to win where updates wait for copies or the disk; else they would only take backward's cores.
            is_beside = self._travels or not is_processor(self._device)
            draft.update_place = UpdatePlace.BESIDE if is_beside else UpdatePlace.AT_ONCE
        draft.gives = Token(_UPDATE, self._owner[block])

    # --- computing --------------------------------------------------------------------------------------------------------------

    def _compute(self, action: Start | Forward | Backward | Seed) -> None:
        added = relief = 0
        if isinstance(action, Seed):
            self._gradients.begin_pass()
            self._draft.adds_to = self._loose
            self._tail_left = sum(self._shape.has_backward[self._shape.tail_segment :])
            microbatches = range(action.first, action.last + 1)
        else:
            microbatches = range(action.microbatch, action.microbatch + 1)
        if isinstance(action, Backward):
            segment = self._segment[action.first]
            self._tail_left -= self._is_of_tail(action)
            relief = self._relief_bytes(segment, self._gradients.arrival(segment))
            self._draft.adds_to = self._adds_to[segment]
            added = self._gradients.contribute(self._adds_to[segment], segment)
        self._rise(action, microbatches, added=added, relief=relief)
        if isinstance(action, Forward | Backward):
            self._work_on(action)
        if isinstance(action, Backward):
            tier, nbytes = self._away.pop((action.first, action.microbatch), (None, 0))
            if tier is not None and nbytes:
                self._draft.changes.append(ByteChange(tier, "activation", f"C{action.first}", -nbytes))
            self._gradients.end_waiting(self._segment[action.first])

    def _work_on(self, action: Forward | Backward) -> None:
        draft, segment = self._draft, self._segment[action.first]
        is_backward = isinstance(action, Backward)
        draft.needs = self._shape.needs[segment]
        draft.waits = [token for b in draft.needs for token in self._waits(_FETCH, b)]
        if is_backward:
            draft.waits += self._given_only(Token(_RELOAD, f"C{action.first} m{action.microbatch}"))
        if (segment, is_backward) not in self._work:
            flops = segment_flops(self._facts.trace, self._plan, self._shape, segment, is_backward=is_backward)
            calls = action.last - action.first + 1
            self._work[segment, is_backward] = ((WorkKind.FLOPS, flops), (WorkKind.CALLS, float(calls)))
        draft.work = self._work[segment, is_backward]
        # The bytes of an accumulate stay no longer than the compute action after it.
        draft.waits_after = self._take_leaving()

    def _move(self, action: Offload | Drop | Reload) -> None:
        draft, key = self._draft, f"C{action.call} m{action.microbatch}"
        moved = self._rise(action, range(action.microbatch, action.microbatch + 1))
        match action:
            case Offload(tier=tier):
                self._transfer(tier, "write", "activation", moved)
                draft.gives = Token(_OFFLOAD, key)
                self._away[action.call, action.microbatch] = (tier, moved)
                if moved:
                    draft.changes.append(ByteChange(tier, "activation", f"C{action.call}", moved))
            case Drop():
                draft.waits = self._given_only(Token(_OFFLOAD, key))
            case Reload():
                # Nothing comes back in an illegal schedule, that offloads nothing before.
                tier, _ = self._away.get((action.call, action.microbatch), (None, 0))
                if tier is not None:
                    self._transfer(tier, "read", "activation", moved)
                draft.gives = Token(_RELOAD, key)

    def _rise(self, action: Action, microbatches: Sequence[int], *, added: int = 0, relief: int = 0) -> int:
        """Takes the activations of microbatches through their next event; returns bytes that it moves.

        Several losses that begin their backward together are gone through one by one: each rises above what the earlier ones left.
        """
        draft = self._draft
        draft.during = list(draft.changes)
        moved = grown = 0
        highest: int | None = None
        for m in microbatches:
            cost = self._costs[m][self._done[m]]
            kept = self._keep_cut(action, m)
            rise = grown + cost.rise_bytes - relief + kept
            highest = rise if highest is None else max(highest, rise)
            self._change_activations(m, cost)
            grown += cost.after_bytes - self._live[m] + kept
            self._live[m] = cost.after_bytes
            self._done[m] += 1
            moved += cost.moved_bytes
        rise = (highest or 0) + added
        if rise > 0:
            draft.during.append(ByteChange(Tier.DEVICE, "transient", str(action), rise))
        elif rise < 0:
            # Activations go while gradients, counted from the begin on, come.
            draft.during.append(ByteChange(Tier.DEVICE, "gradient", "gradients that come later", rise))
        return moved

    def _is_of_tail(self, action: Action) -> bool:
        return isinstance(action, Backward) and self._segment[action.first] >= self._shape.tail_segment

    def _bytes_at_cut(self) -> int:
        """Gradients of a microbatch's activations where its tail is cut off."""
        segments, tail = self._shape.segments, self._shape.tail_segment
        return self._facts.gradient_bytes[segments[tail][0]] if tail < len(segments) else 0

    def _keep_cut(self, action: Action, microbatch: int) -> int:
        """The joint backward is given the gradients at all microbatches' cuts, and holds them to its end, beside what it makes of them."""
        if not isinstance(action, Backward) or self._is_of_tail(action):
            return 0
        self._joint_left -= 1
        if microbatch in self._crossed:
            return 0
        self._crossed.add(microbatch)
        self._change("activation", f"cut of m{microbatch}", self._cut_bytes)
        return self._cut_bytes

    def _change_activations(self, microbatch: int, cost: EventCost) -> None:
        if not self._is_itemized:
            self._change("activation", f"m{microbatch}", cost.after_bytes - self._live[microbatch])
            return
        done = self._done[microbatch]
        before: Mapping[str, int] = self._costs[microbatch][done - 1].owners if done else {}
        for owner in dict.fromkeys([*before, *cost.owners]):
            self._change("activation", owner, cost.owners.get(owner, 0) - before.get(owner, 0))

    def _relief_bytes(self, segment: int, arrival: Arrival) -> int:
        """Bytes that a backward rises less by, because gradients come later than they are counted."""
        key = segment, arrival
        if key not in self._reliefs:
            facts = self._facts
            self._reliefs[key] = facts.backward_rise(segment) - facts.backward_rise(segment, arrival)
        return self._reliefs[key]

    def _all_costs(self) -> list[tuple[EventCost, ...]]:
        is_training = any(isinstance(a, Seed) for a in self._schedule)
        known: dict[tuple[tuple[ActivationEvent, int], ...], tuple[EventCost, ...]] = {}
        for events in self._events:
            if events not in known:
                life = Lifetimes(self._facts, is_training=is_training, is_itemized=self._is_itemized)
                known[events] = life.follow(events)
        return [known[events] for events in self._events]

    def _take_leaving(self) -> list[Token]:
        """Waits for gradients that are on their way home: from here on they have no bytes on the device."""
        tokens = [token for b in self._leaving for token in self._waits(_ACCUMULATE, b)]
        self._leaving = []
        self._gradients.end_leaving()
        return tokens

    def _wait_for_kinds(self, kinds: Sequence[str]) -> None:
        """All work of these kinds that is under way is through."""
        if _ACCUMULATE in kinds:
            self._take_leaving()
        if _UPDATE in kinds:
            self._line.wait_for_all()
        self._draft.waits = [token for kind in kinds for token in self._given if token.kind == kind]

    # --- small ------------------------------------------------------------------------------------------------------------------

    def _is_here(self, block: int) -> bool:
        return block in self._visiting or block not in self._shape.visiting

    def _change(self, category: str, owner: str, nbytes: int) -> None:
        self._changes.add(category, owner, nbytes)

    def _transfer(self, tier: Tier, direction: str, category: str, nbytes: int) -> None:
        if nbytes:
            self._draft.transfers.append(Transfer(tier, direction, category, nbytes))

    def _waits(self, kind: str, block: int) -> list[Token]:
        return self._given_only(Token(kind, self._owner[block]))

    def _given_only(self, token: Token) -> list[Token]:
        return [token] if token in self._given else []

    def _updated(self, block: int) -> list[Token]:
        """Waits for the block's update before its device bytes go. One on the host touches none of them: it goes on."""
        if self._updates_on_host[block]:
            return []
        self._line.wait(block)
        return self._waits(_UPDATE, block)


def _kept(action: Keep) -> Token:
    return Token("keep", str(action))


def _turns_before(schedule: Schedule) -> dict[int, list[Token]]:
    turns = [action for action in schedule if isinstance(action, Keep)]
    return {b: [_kept(before)] for before, turn in pairwise(turns) for b in turn.blocks}


def _events_by_microbatch(schedule: Schedule, shape: StepShape) -> list[tuple[tuple[ActivationEvent, int], ...]]:
    """Each microbatch's part of a schedule, as events on segments."""
    segment = {first: i for i, (first, _) in enumerate(shape.segments)}
    events: list[list[tuple[ActivationEvent, int]]] = [[] for _ in range(schedule.microbatches)]
    for action in schedule:
        match action:
            case Start(microbatch=m):
                events[m].append((ActivationEvent.START, -1))
            case Seed(first=first, last=last):
                for m in range(first, last + 1):
                    events[m].append((ActivationEvent.SEED, -1))
            case Forward(first=call, microbatch=m):
                events[m].append((ActivationEvent.FORWARD, segment[call]))
            case Backward(first=call, microbatch=m):
                events[m].append((ActivationEvent.BACKWARD, segment[call]))
            case Offload(call=call, microbatch=m):
                events[m].append((ActivationEvent.OFFLOAD, segment[call]))
            case Drop(call=call, microbatch=m):
                events[m].append((ActivationEvent.DROP, segment[call]))
            case Reload(call=call, microbatch=m):
                events[m].append((ActivationEvent.RELOAD, segment[call]))
            case _:
                pass
    return [tuple(e) for e in events]
