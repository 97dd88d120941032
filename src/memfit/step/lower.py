"""Schedule -> Step: the one place that says what an action does to memory, links and processors.

In: `Schedule`, `Plan`, `Profile`. Out: `core.step.Step`.

What is counted on the device, by category: *weight*, flat buffers (`core.layout`) of blocks, the
model's buffers and the batch; *gradient*, see `gradient_bytes`; *state*, of the optimizer, and
masters, where their home is the device; *activation* and *transient*, see `lifetimes` (a transient
also holds the gradient that is about to be added to another); *staging*: the pieces that updates
work on and what the optimizer makes (`pieces`), from an update to the action that waits for it,
pieces of gradients that are widened or added at home, and the disk's bounce buffers, which beside
an accelerator are host memory. Not modelled: scratch that no trace sees (the reserve
of a limit), loss chunking (the trace must have been taken with it).

What waits for what is `core.schedule`'s [Note: what an action means], as tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from memfit.core.layout import Share
from memfit.core.limits import MIB
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
    Spread,
    Start,
    Update,
)
from memfit.core.shape import StepShape
from memfit.core.step import ByteChange, Operation, Step, Token, Transfer, UpdatePlace
from memfit.core.tiers import NETWORK, Tier, crossed_tier, is_processor, updates_in_place
from memfit.core.work_kinds import Work
from memfit.step import work_amounts
from memfit.step.activation_bytes import Effect, effects_of_built, follow_activations, relief_bytes
from memfit.step.build import check_references, kept_token, turns_before
from memfit.step.check import GivenTokens, UpdatePipelines
from memfit.step.gradient_bytes import GradientBytes, resting_bytes
from memfit.step.pieces import Line, UpdatePieces
from memfit.step.segment_facts import KnownFacts
from memfit.step.sizes import (
    commit_bytes,
    disk_staging_bytes,
    exchange_bytes,
    flat_gradient_bytes,
    flat_weight_bytes,
    gradient_home_bytes,
    needs_whole,
    received_gradient_bytes,
    received_weight_bytes,
    spread_bytes,
    traces_of,
    update_traffic,
    uses_disk,
    weight_home_bytes,
)

# An operation in the making.
#
# In: what lowering finds out about an action, piece by piece. Out: an `Operation`.


class OperationDraft:
    """Collects what one operation says; `begin` starts the next one.

    One object for a whole step: whoever tells of changes of bytes holds it from the beginning.

    Args:
        device: as `core.tiers.is_processor` takes it.

    Attributes:
        changes: as in `Operation`, like all others.
    """

    changes: list[ByteChange]
    during: list[ByteChange]
    transfers: list[Transfer]
    awaited: Sequence[Transfer]
    waits: Sequence[Token]
    waits_after: Sequence[Token]
    after: Sequence[Token]
    is_chain: bool
    behind: Sequence[Token]
    gives: Token | None
    work: Work
    host_work: Work
    update_place: UpdatePlace | None
    needs: tuple[int, ...]
    adds_to: tuple[int, ...]

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._ended: Sequence[ByteChange] = ()
        self.begin()

    def begin(self) -> None:
        """Empties the draft. The lists that were given out belong to the operation before."""
        self.changes, self.during, self.transfers = list(self._ended), [], []
        self._ended = ()
        self.awaited = self.waits = self.waits_after = self.after = self.behind = ()
        self.is_chain = True
        self.gives = self.update_place = None
        self.work = self.host_work = ()
        self.needs = self.adds_to = ()

    def change(self, category: str, owner: str, nbytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Notes bytes that come or go, if there are any."""
        if nbytes:
            self.changes.append(ByteChange(tier, category, owner, nbytes))

    def change_gradient(self, block: int, nbytes: int) -> None:
        """Notes bytes of a block's gradient on the device that come or go."""
        self.change("gradient", f"B{block}", nbytes)

    def rise(self, tier: Tier, category: str, owner: str, nbytes: int) -> None:
        """Notes bytes that are held while the operation runs, above those before it."""
        self.during.append(ByteChange(tier, category, owner, nbytes))

    def rise_behind(self, gone: Sequence[ByteChange], category: str, owner: str, nbytes: int) -> None:
        """Notes bytes of the device that are held while the operation runs, but not before others
        have gone that it waits for.
        """
        if nbytes + sum(change.nbytes for change in gone) > 0:
            self.during += gone
            self.rise(Tier.DEVICE, category, owner, nbytes)

    def take(self, effect: Effect, highest: int) -> None:
        """Notes what the operation does to activations, which rise so high while it runs, above
        what is there with the changes so far.
        """
        self.during = list(self.changes)
        self.changes += effect.changes
        self._ended = effect.ends
        if highest > 0:
            self.rise(Tier.DEVICE, effect.category, effect.owner, highest)
        elif highest < 0:
            # Activations go while gradients, counted from the begin on, come.
            self.rise(Tier.DEVICE, "gradient", "gradients that come later", highest)

    def transfer(self, tier: Tier, direction: str, category: str, nbytes: int) -> None:
        """Notes a transfer that the operation begins, if it moves anything, to or from the
        device.
        """
        if nbytes:
            self.transfers.append(self.way(tier, direction, category, nbytes))

    def receive(self, category: str, nbytes: int) -> None:
        """Notes bytes that come from other ranks."""
        if nbytes:
            self.transfers.append(Transfer(NETWORK, "read", category, nbytes))

    def way(self, tier: Tier, direction: str, category: str, nbytes: int) -> Transfer:
        """Returns a transfer to or from the device, by all links that it passes."""
        return Transfer(tier, direction, category, nbytes, crossed_tier(tier, self._device))

    def finish(self, action: Action) -> Operation:
        """Returns the operation, which changes no more."""
        # By position: a step of a large model has thousands, and a planner lowers hundreds of them.
        return Operation(
            action,
            tuple(self.changes),
            tuple(self.during),
            tuple(self.waits),
            tuple(self.waits_after),
            tuple(self.transfers),
            tuple(self.awaited),
            self.is_chain,
            tuple(self.after),
            tuple(self.behind),
            self.gives,
            self.work,
            self.host_work,
            self.update_place,
            self.needs,
            self.adds_to,
        )


# What was not written of a new version is copied by as much at a time (`homes.disk`).
_COMPLETING_BYTES = 4 * MIB
_FETCH, _RELOAD, _OFFLOAD = "fetch", "reload", "offload"
_ACCUMULATE, _UPDATE, _SPREAD = "accumulate", "update", "spread"


def lower(
    schedule: Schedule,
    plan: Plan,
    profile: Profile,
    *,
    microbatches: int | None = None,
    staging_bytes: int | None = None,
    adds_apart: bool | None = None,
    commits: float = 0.0,
    device: str = "cpu",
    is_itemized: bool = False,
    known: KnownFacts | None = None,
    is_built: bool = False,
) -> Step:
    """Gives each action of a legal schedule its meaning under a plan.

    Args:
        schedule: a step or a forward-only pass. One that is not legal is lowered too, so that
            `step.check` can point at the fault; its bytes and tokens mean nothing.
        plan: that it carries out.
        profile: with a trace of the rows that a microbatch has.
        microbatches: into how many slices the batch was cut, if not `plan.microbatches` (a
            forward-only pass may run fewer than that at a time).
        staging_bytes: of the disk's threads, held all the time where something rests on disk or
            leaves to it: host memory beside an accelerator; None: `sizes.disk_staging_bytes`.
        adds_apart: `Plan.adds_apart` of the job, where its plan was cut for a smaller batch; None:
            as this plan says.
        commits: to a store, a step: 1 with durability "step", 1 / N with N, 0 without a store.
        device: "cpu" where the processor is the device, which updates what rests in its memory in
            place; else the accelerator's name, between which and the disk all passes through pinned
            pieces of host memory.
        is_itemized: activations are owned by what made them ("C5"), not by their microbatch ("m0"):
            for reports, slower.
        known: facts about the profile that were found before, and are added to.
        is_built: the schedule was built from this plan, so that all that it names is there.

    Raises:
        PlanError: no trace of that many rows; the schedule is of another model or plan
            (`step.build`).
    """
    # A forward-only pass may have fewer.
    is_whole = schedule.microbatches == plan.microbatches
    plan_of_pass = plan if is_whole else replace(plan, microbatches=schedule.microbatches)
    known = known or KnownFacts()
    shape = known.shape(plan_of_pass, profile)
    if not is_built:
        check_references(schedule, profile, shape, microbatches=plan.microbatches)
    traces = traces_of(profile, microbatches or plan.microbatches, known)
    if len(traces) != schedule.microbatches:
        # A pass over a part of the batch: it may be the larger microbatches.
        traces = traces[:1] * schedule.microbatches
    return _Lowering(
        schedule,
        plan_of_pass,
        profile,
        shape,
        traces,
        staging_bytes=disk_staging_bytes(device) if staging_bytes is None else staging_bytes,
        adds_apart=adds_apart,
        device=device,
        is_itemized=is_itemized,
        known=known,
        is_built=is_built,
    ).step(commits)


class _Lowering:
    """Goes through a schedule once, and keeps what a meaning depends on: weights that are there,
    transfers and updates that are under way.
    """

    def __init__(
        self,
        schedule: Schedule,
        plan: Plan,
        profile: Profile,
        shape: StepShape,
        traces: Sequence[TraceProfile],
        *,
        staging_bytes: int,
        adds_apart: bool | None,
        device: str,
        is_itemized: bool,
        known: KnownFacts,
        is_built: bool,
    ) -> None:
        self._schedule = schedule
        self._plan = plan
        self._profile = profile
        self._device = device
        self._shape = shape
        self._known = known
        self._traces = traces
        trains = any(isinstance(a, Seed) for a in schedule)
        self._facts = [known.segments(trace, plan, shape, profile, is_training=trains) for trace in traces]
        self._segment = {first: i for i, (first, _) in enumerate(shape.segments)}
        self._staging_bytes = staging_bytes if uses_disk(plan, shape) else 0
        if adds_apart is None:
            has_norm = any(isinstance(a, Norm) for a in schedule)
            adds_apart = plan.adds_apart(has_masters=profile.has_masters, clips_norm=has_norm)
        self._draft = OperationDraft(device)
        self._gradients = GradientBytes(
            plan, profile, self._facts[0], adds_apart=adds_apart, change=self._draft.change_gradient
        )
        follow = partial(effects_of_built, known=known, prefetch=plan.prefetch) if is_built else follow_activations
        self._effects = iter(follow(schedule, self._facts, is_itemized=is_itemized))
        self._line = Line(UpdatePieces(plan, profile, known, is_summed=self._gradients.is_summed, device=device))
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
        # Encoded bytes that come from elsewhere are there until they are decoded: counted with the
        # visit.
        self._weight_bytes = [
            flat_weight_bytes(block) + (0 if homes.weight_home is Tier.DEVICE else block.encoded_bytes)
            for block, homes in zip(profile.blocks, self._homes, strict=True)
        ]
        self._visiting: set[int] = set()
        # Backwards of the running tail that are still to come.
        self._tail_left = 0
        # In a journal: what is kept before a block's update changes anything.
        self._turn_before = turns_before(schedule)
        self._away: dict[tuple[int, int], tuple[Tier, int]] = {}
        self._reloads: dict[tuple[int, int], Token] = {}
        self._tokens = GivenTokens(self._owner)
        # Blocks whose gradient left before the compute action that runs next.
        self._leaving: list[int] = []
        self._spread_bytes = 0
        self._pipelines = UpdatePipelines()

    def step(self, commits: float) -> Step:
        """Returns the whole step."""
        written = round(commits * commit_bytes(self._plan, self._profile)) if commits else 0
        return Step(
            schedule=self._schedule,
            shape=self._shape,
            resting=tuple(
                resting_bytes(
                    self._plan,
                    self._profile,
                    self._shape,
                    self._facts[0],
                    staging_bytes=self._staging_bytes,
                    traces=self._traces,
                    device=self._device,
                    known=self._known,
                )
            ),
            operations=tuple(self._lower(action) for action in self._schedule),
            commit=(Transfer(Tier.DISK, "write", "commit", written),) if written else (),
        )

    # --- one action

    def _lower(self, action: Action) -> Operation:
        draft = self._draft
        draft.begin()
        # Before the action: what these give up is gone at its peak (`during` begins with them).
        if not self._tail_left:
            self._gradients.end_arrivals()
        if draft.changes:
            draft.during = list(draft.changes)
        self._HANDLERS.get(type(action), _Lowering._wait_for_kinds)(self, action)
        line_bytes = self._line.peak_bytes
        if line_bytes != self._line_bytes:
            for tier, nbytes in line_bytes.items():
                draft.change("staging", "updates", nbytes - self._line_bytes[tier], tier)
            self._line_bytes = dict(line_bytes)
        if draft.gives is not None:
            self._tokens.give(draft.gives)
        return draft.finish(action)

    # --- weights, gradients and updates

    def _fetch(self, action: Fetch) -> None:
        draft, b = self._draft, action.block
        self._line.wait(b)
        self._visiting.add(b)
        draft.change("weight", self._owner[b], self._weight_bytes[b])
        draft.after = self._tokens.waits(_UPDATE, b)
        self._fetch_from(b)
        draft.work = work_amounts.visit_work(self._profile.blocks[b]) if is_processor(self._device) else ()
        draft.gives = self._tokens.of_block(_FETCH, b)

    def _release(self, action: Release) -> None:
        b = action.block
        self._draft.change("weight", self._owner[b], -self._weight_bytes[b])
        self._visiting.discard(b)
        self._draft.waits = [*self._tokens.waits(_FETCH, b), *self._updated(b)]

    def _clear(self, action: Clear) -> None:
        self._gradients.clear(action.block)
        self._draft.waits = self._updated(action.block)

    def _spread(self, action: Spread) -> None:
        draft, b = self._draft, action.block
        draft.waits = self._updated(b)
        # One after the other: the largest one's staging, until all are waited for.
        size = spread_bytes(self._plan, self._profile, self._profile.blocks[b])
        draft.change("staging", "weights among ranks", max(size - self._spread_bytes, 0))
        self._spread_bytes = max(size, self._spread_bytes)
        draft.after = self._tokens.waits(_UPDATE, b)
        draft.receive("weight", received_weight_bytes(self._plan, self._profile.blocks[b]))
        draft.gives = self._tokens.of_block(_SPREAD, b)

    def _keep(self, action: Keep) -> None:
        for b in action.blocks:
            self._line.wait(b)
        self._draft.waits = [token for b in action.blocks for token in self._tokens.waits(_UPDATE, b)]
        self._draft.gives = kept_token(action)

    def _commit(self, action: Commit) -> None:
        self._wait_for_kinds(action)
        if self._plan.is_atomic and self._staging_bytes:
            beside = Tier.DEVICE if is_processor(self._device) else Tier.HOST
            self._draft.rise(beside, "staging", "new versions", _COMPLETING_BYTES)

    def _fetch_from(self, block: int) -> None:
        """Lowers a visit's reads: from home, or a rank's share there and the other ranks."""
        home, profiled = self._homes[block], self._profile.blocks[block]
        if home.weight_home is not Tier.DEVICE:
            here = weight_home_bytes(self._plan, self._profile, profiled)
            self._draft.transfer(home.weight_home, "read", "weight", min(here, self._weight_bytes[block]))
        if home.weights_over is Share.DATA:
            self._draft.receive("weight", received_weight_bytes(self._plan, profiled))

    def _accumulate(self, action: Accumulate) -> None:
        draft, block = self._draft, action.block
        draft.waits = self._take_leaving()
        if made := self._gradients.accumulate(block):
            draft.rise(Tier.DEVICE, "staging", "gradients going home", made)
        home = self._homes[block].gradient_home
        profiled = self._profile.blocks[block]
        if self._plan.ranks > 1:
            size = gradient_home_bytes(self._plan, self._profile, profiled)
            draft.change("staging", "gradients among ranks", exchange_bytes(self._plan, self._profile, profiled))
            draft.receive("gradient", received_gradient_bytes(self._plan, profiled))
        else:
            size = flat_gradient_bytes(profiled)
        draft.after = self._tokens.waits(_ACCUMULATE, block)
        # The first gradient overwrites what is at home. A later one is added: where the sum rests
        # out of the processor's reach, it is read for that, and the main thread waits for it.
        if draft.after and size and not updates_in_place(home, self._device):
            draft.awaited = (draft.way(home, "read", "gradient", size),)
        if home is not Tier.DEVICE:
            draft.transfer(home, "write", "gradient", size)
        draft.work = work_amounts.leaving_work(profiled, home) if is_processor(self._device) else ()
        self._leaving.append(block)
        draft.gives = self._tokens.of_block(_ACCUMULATE, block)

    def _update(self, action: Update) -> None:
        """Lowers an update: a pipeline of reads, work and writes, which ends with the slowest."""
        draft, block, on_host = self._draft, action.block, self._updates_on_host[action.block]
        left, gone = self._take_leaving(), list(draft.changes)
        # A visit that no call waited for still arrives, and would overwrite what is updated.
        draft.waits = [*left, *(self._tokens.waits(_FETCH, block) if block in self._visiting else ())]
        self._line.submit(block, is_here=self._is_here(block))
        plan, profile, name = self._plan, self._profile, self._shape.blocks[block]
        known = partial(self._known.of_update, plan, name, like=self._known.alike(profile, name))
        is_visiting = block in self._visiting
        traffic = known(
            ("traffic", is_visiting, self._device),
            lambda: update_traffic(plan, profile, block, is_visiting=is_visiting, device=self._device),
        )
        draft.after = (*self._tokens.waits(_ACCUMULATE, block), *self._turn_before.get(block, ()))
        # What the host's cores work on comes to host memory and goes no further.
        way = Transfer if on_host else draft.way
        for direction, moved in (("read", traffic.read), ("write", traffic.written)):
            for (tier, category), nbytes in moved.items():
                draft.transfers.append(way(tier, direction, category, nbytes))
        draft.is_chain, draft.gives = False, self._tokens.of_block(_UPDATE, block)
        takes_turns = self._line.pieces.takes_turns(block)
        draft.behind, ended = self._pipelines.join(draft.gives, takes_turns=takes_turns, on_host=on_host)
        draft.after += ended
        work = known("work", lambda: work_amounts.update_work(plan, profile, block))
        if on_host:
            draft.host_work = work
            draft.update_place = UpdatePlace.HOST
        else:
            draft.work = work
            # Beside backward there is something to win where updates wait for copies or the disk;
            # else they would only take its cores, and hold their pieces for longer.
            if not is_processor(self._device):
                draft.update_place = (
                    UpdatePlace.IN_ORDER if needs_whole(profile, profile.blocks[block]) else UpdatePlace.BESIDE
                )
            elif self._travels:
                draft.update_place = UpdatePlace.BESIDE
            else:
                draft.update_place = UpdatePlace.AT_ONCE
                # Gradients on their way home are there before the first piece is made.
                draft.rise_behind(gone, "staging", "updates", self._line.peak_bytes[Tier.DEVICE])
                self._line.wait(block)

    # --- computing

    def _compute(self, action: Start | Forward | Backward | Seed) -> None:
        draft, effect = self._draft, next(self._effects)
        if isinstance(action, Backward):
            segment = self._segment[action.first]
            self._tail_left -= segment >= self._shape.tail_segment
            arrival = self._gradients.arrival(segment)
            relief = relief_bytes(self._facts[action.microbatch], segment, arrival)
            draft.adds_to = self._adds_to[segment]
            is_adding = self._gradients.holds(self._shape.contributes[segment])
            added = self._gradients.contribute(self._adds_to[segment], segment, arrival)
            draft.take(effect, effect.rise(added, relief))
            self._work_on(action, is_adding=is_adding)
            tier, nbytes = self._away.pop((action.first, action.microbatch), (None, 0))
            if tier is not None:
                draft.change("activation", f"C{action.first}", -nbytes, tier)
            self._gradients.end_waiting(segment)
            return
        if isinstance(action, Seed):
            self._gradients.begin_pass()
            draft.adds_to = self._loose
            self._tail_left = sum(self._shape.has_backward[self._shape.tail_segment :])
            cuts_tail = self._schedule.tail is not None and self._schedule.microbatches > 1
            draft.work = work_amounts.seed_work(self._traces[action.first : action.last + 1], cuts_tail=cuts_tail)
        elif isinstance(action, Start):
            draft.work = work_amounts.start_work(self._traces[action.microbatch], is_first=action.microbatch == 0)
        draft.take(effect, effect.rise(0, 0))
        if isinstance(action, Forward):
            self._work_on(action, is_adding=False)

    def _work_on(self, action: Forward | Backward, *, is_adding: bool) -> None:
        draft, segment, facts = self._draft, self._segment[action.first], self._facts[action.microbatch]
        is_backward = isinstance(action, Backward)
        draft.needs = self._shape.needs[segment]
        draft.waits = [token for b in draft.needs for token in self._tokens.waits(_FETCH, b)]
        reloaded = self._reloads.get((action.first, action.microbatch)) if is_backward else None
        if reloaded is not None:
            draft.waits = [*draft.waits, reloaded]
        is_switch = self._schedule.is_interleaved and not is_backward
        draft.work = work_amounts.computed_work(
            facts, segment, is_backward=is_backward, is_adding=is_adding, is_switch=is_switch
        )
        # The bytes of an accumulate stay no longer than the compute action after it.
        draft.waits_after = self._take_leaving()

    def _move(self, action: Offload | Drop | Reload) -> None:
        draft, key = self._draft, f"C{action.call} m{action.microbatch}"
        effect = next(self._effects)
        moved = effect.moved_bytes
        draft.take(effect, effect.rise(0, 0))
        match action:
            case Offload(tier=tier):
                draft.transfer(tier, "write", "activation", moved)
                draft.gives = Token(_OFFLOAD, key)
                self._away[action.call, action.microbatch] = (tier, moved)
                draft.change("activation", f"C{action.call}", moved, tier)
            case Drop():
                draft.waits = self._tokens.only(Token(_OFFLOAD, key))
            case Reload():
                # Nothing comes back in an illegal schedule, that offloads nothing before.
                tier, _ = self._away.get((action.call, action.microbatch), (None, 0))
                if tier is not None:
                    draft.transfer(tier, "read", "activation", moved)
                draft.gives = self._reloads[action.call, action.microbatch] = Token(_RELOAD, key)

    def _take_leaving(self) -> list[Token]:
        """Waits for gradients on their way home: from here on they have no bytes on the device."""
        tokens = [token for b in self._leaving for token in self._tokens.waits(_ACCUMULATE, b)]
        for b in self._leaving if self._plan.ranks > 1 else ():
            nbytes = exchange_bytes(self._plan, self._profile, self._profile.blocks[b])
            self._draft.change("staging", "gradients among ranks", -nbytes)
        self._leaving = []
        self._gradients.end_leaving()
        return tokens

    def _wait_for_kinds(self, action: Action) -> None:
        """Waits for all work under way of the kinds that an action names."""
        kinds: Sequence[str] = getattr(action, "waits_for", ())
        if _ACCUMULATE in kinds:
            self._take_leaving()
        if _UPDATE in kinds:
            self._line.wait_for_all()
        if _SPREAD in kinds and self._spread_bytes:
            self._draft.change("staging", "weights among ranks", -self._spread_bytes)
            self._spread_bytes = 0
        self._draft.waits = self._tokens.of_kinds(kinds)

    def _is_here(self, block: int) -> bool:
        is_at_home = self._homes[block].weight_home is Tier.DEVICE and not self._profile.blocks[block].encoded_bytes
        return block in self._visiting or block not in self._shape.visiting or is_at_home

    def _updated(self, block: int) -> list[Token]:
        """Waits for the block's update before its bytes go; one on the host touches none."""
        if self._updates_on_host[block]:
            return []
        self._line.wait(block)
        return self._tokens.waits(_UPDATE, block)

    # By class, not by patterns: every action of every candidate of a planner passes here.
    # Functions: a lowering that held its bound methods would wait for the collector of cycles.
    _HANDLERS: ClassVar[Mapping[type, Callable[..., None]]] = {
        **dict.fromkeys((Start, Forward, Backward, Seed), _compute),
        **dict.fromkeys((Offload, Drop, Reload), _move),
        Fetch: _fetch,
        Release: _release,
        Accumulate: _accumulate,
        Clear: _clear,
        Update: _update,
        Spread: _spread,
        Keep: _keep,
        Commit: _commit,
    }
