"""Activations of all microbatches through a step, action by action.

In: `SegmentFacts`, a schedule. Out: an `Effect` of each action that runs, moves or drops
activations: what it changes of them, how high it rises, and which bytes it moves. What one
microbatch holds by itself is in `lifetimes`.

Gradients of parameters are not among them: how they come decides only how much less a backward
rises (`Effect.rise`). So plans that differ in homes have the same effects.

[Note: losses in turn]
Losses that begin their backward together are all seeds of one backward pass, which runs the node
that was made last first. The last call ran forward microbatch by microbatch, each followed by its
code behind that call. So what is behind a microbatch's last call is differentiated right before
that call's backward: for the first microbatch in the seed, for each other one at the end of the
backward of the microbatch before, above what that has left. Code between two calls is made and
differentiated likewise: right before the backward of the call in front of it, in the action of the
microbatch before. Where the last call has no backward, its turn through the microbatches lies
behind all calls that have one: the seed goes through all losses, one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memfit.core.schedule import Action, Backward, Drop, Forward, Offload, Reload, Schedule, Seed, Start
from memfit.core.shape import StepShape
from memfit.core.step import ByteChange
from memfit.core.tiers import Tier
from memfit.step.lifetimes import ActivationEvent, EventCost, Lifetimes
from memfit.step.segment_facts import Arrival, KnownFacts, SegmentFacts

_WITH_EFFECT = (Start, Forward, Backward, Seed, Offload, Drop, Reload)


class Effect(NamedTuple):
    """Changes of activations by one action.

    Attributes:
        changes: bytes that come and go.
        ends: bytes that go when the next action begins.
        moved_bytes: leaving or coming back (offload, reload).
        category: of what rises while the action runs.
        owner: of that: the action's text.
        own_rise: how high the segment's own work rises above what was there before; None: none is
            done.
        code_rise: the same of code behind or between calls that is differentiated before it.
        later_rise: the same of what a backward leaves, and of such code that is differentiated
            right behind it; None: it is no backward.
    """

    changes: tuple[ByteChange, ...]
    ends: tuple[ByteChange, ...]
    moved_bytes: int
    category: str
    owner: str
    own_rise: int | None
    code_rise: int | None
    later_rise: int | None

    def rise(self, added: int, relief: int) -> int:
        """Returns how high the action rises above what was there before.

        Args:
            added: bytes held beside the highest of its own work and what comes before that.
            relief: bytes that its own work rises less by, because gradients come later than they
                are counted.
        """
        own, code, later = self.own_rise, self.code_rise, self.later_rise
        highest = 0 if own is None else own - relief
        if code is not None:
            highest = code if own is None else max(highest, code)
        highest += added
        return highest if later is None else max(highest, later)


def follow_activations(schedule: Schedule, facts: Sequence[SegmentFacts], *, is_itemized: bool) -> tuple[Effect, ...]:
    """Follows the activations of one step.

    Args:
        schedule: of the step.
        facts: of the plan's segments, for each microbatch.
        is_itemized: activations are owned by what made them, not by their microbatch.

    Returns:
        One effect for each start, forward, backward, seed, offload, drop and reload, in order.
    """
    followed = _Followed(schedule, facts, is_itemized=is_itemized)
    return tuple(followed.take(action) for action in schedule if isinstance(action, _WITH_EFFECT))


def effects_of_built(
    schedule: Schedule, facts: Sequence[SegmentFacts], *, known: KnownFacts, prefetch: int, is_itemized: bool
) -> tuple[Effect, ...]:
    """Follows the activations of a step as it was built from the plan of the facts: plans that
    differ in homes alone share the result.
    """
    of_plan = facts[0].known
    key = "effects", prefetch, is_itemized, any(isinstance(a, Seed) for a in schedule)
    if key not in of_plan:
        effects = follow_activations(schedule, facts, is_itemized=is_itemized)
        known.keep(of_plan, key, effects, len(effects))
    return of_plan[key]


def relief_bytes(facts: SegmentFacts, segment: int, arrival: Arrival) -> int:
    """Returns the bytes that a segment's backward rises less by, because gradients come later than
    they are counted.
    """
    if arrival is Arrival.UNKNOWN:
        return 0
    key = "relief", segment, arrival
    found = facts.known.get(key)
    if found is None:
        found = facts.known[key] = facts.backward_rise(segment) - facts.backward_rise(segment, arrival)
    return found


class _Followed:
    """Activations of a step up to an action."""

    def __init__(self, schedule: Schedule, facts: Sequence[SegmentFacts], *, is_itemized: bool) -> None:
        self._facts = facts
        self._shape: StepShape = facts[0].shape
        self._is_itemized = is_itemized
        self._segment = {first: i for i, (first, _) in enumerate(self._shape.segments)}
        self._events = _events_by_microbatch(schedule, facts)
        self._costs = self._all_costs(schedule)
        self._done = [0] * schedule.microbatches
        self._live = [0] * schedule.microbatches
        self._live_logits = [0] * schedule.microbatches
        # Backwards of the joint backward that are still to come; microbatches whose cut it has.
        self._joint_left = sum(isinstance(a, Backward) and not self._is_of_tail(a) for a in schedule)
        self._crossed: set[int] = set()
        # Microbatches of backwards that are still to come, last to first; and those whose seed is.
        self._backwards = [a.microbatch for a in reversed(schedule.actions) if isinstance(a, Backward)]
        self._unseeded: set[int] = set()
        self._changes: list[ByteChange] = []

    def take(self, action: Start | Forward | Backward | Seed | Offload | Drop | Reload) -> Effect:
        """Takes the activations of the action's microbatches through their next event.

        See [Note: losses in turn].
        """
        self._changes = []
        microbatches: Sequence[int]
        microbatches = range(action.first, action.last + 1) if isinstance(action, Seed) else (action.microbatch,)
        is_backward = isinstance(action, Backward)
        if isinstance(action, Seed) and _differentiates_in_turn(self._shape):
            microbatches, later = microbatches[:1], microbatches[1:]
            self._unseeded.update(later)
        if is_backward:
            self._backwards.pop()
        # Of an illegal schedule: its own seed is still to come.
        before = [m for m in microbatches if is_backward and self._owes(m)]
        own, code, moved, grown = self._advance(action, [*before, *microbatches])
        later_rise: int | None = None
        if is_backward:
            # What stands before the backward that comes next; behind the last one all that is left.
            owing = [m for m in self._backwards[-1:] or range(len(self._events)) if self._owes(m)]
            further = self._advance(action, owing)[:2]
            later_rise = grown + max((rise for rise in further if rise is not None), default=0)
        return Effect(
            changes=tuple(self._changes),
            ends=self._ended_cuts(),
            moved_bytes=moved,
            category="logits" if self._is_of_logits(action) else "transient",
            owner=str(action),
            own_rise=own,
            code_rise=code,
            later_rise=later_rise,
        )

    def _is_of_tail(self, action: Backward) -> bool:
        return self._segment[action.first] >= self._shape.tail_segment

    def _ended_cuts(self) -> tuple[ByteChange, ...]:
        """Gives up the gradients at the cuts when the joint backward is over."""
        if self._joint_left:
            return ()
        ended = [(m, self._bytes_at_cut(m)) for m in self._crossed]
        self._crossed.clear()
        return tuple(ByteChange(Tier.DEVICE, "activation", f"cut of m{m}", -nbytes) for m, nbytes in ended if nbytes)

    def _advance(self, action: Action, microbatches: Sequence[int]) -> tuple[int | None, int | None, int, int]:
        """Takes microbatches through their next event one by one: each rises above what the earlier
        ones left.

        Returns:
            How high their own work and code rise above what was there before, None where there is
            none; the bytes that are moved, and what there is more behind them.
        """
        moved = grown = 0
        own: int | None = None
        code: int | None = None
        for m in microbatches:
            is_of_code = self._owes(m)
            if is_of_code:
                self._unseeded.discard(m)
            cost = self._costs[m][self._done[m]]
            kept = 0 if is_of_code else self._keep_cut(action, m)
            rise = grown + cost.rise_bytes + kept
            if is_of_code:
                code = rise if code is None else max(code, rise)
            else:
                own = rise if own is None else max(own, rise)
            self._change(m, cost)
            grown += cost.after_bytes - self._live[m] + kept
            self._live[m], self._live_logits[m] = cost.after_bytes, cost.logits_bytes
            self._done[m] += 1
            moved += cost.moved_bytes
        return own, code, moved, grown

    def _owes(self, microbatch: int) -> bool:
        """Tells whether code behind or between calls of a microbatch is differentiated next."""
        done, events = self._done[microbatch], self._events[microbatch]
        following = events[done][0] if done < len(events) else None
        is_seed = following is ActivationEvent.SEED and microbatch in self._unseeded
        return is_seed or following is ActivationEvent.BETWEEN

    def _bytes_at_cut(self, microbatch: int) -> int:
        """Returns the gradients of a microbatch's activations where its tail is cut off."""
        segments, tail = self._shape.segments, self._shape.tail_segment
        return self._facts[microbatch].gradient_bytes[segments[tail][0]] if tail < len(segments) else 0

    def _keep_cut(self, action: Action, microbatch: int) -> int:
        """Counts the gradient at a microbatch's cut from the first joint backward of it on.

        The joint backward is given the gradients at all cuts, and holds them to its end, beside
        what it makes of them.
        """
        if not isinstance(action, Backward) or self._is_of_tail(action):
            return 0
        self._joint_left -= 1
        if microbatch in self._crossed:
            return 0
        self._crossed.add(microbatch)
        nbytes = self._bytes_at_cut(microbatch)
        self._note("activation", f"cut of m{microbatch}", nbytes)
        return nbytes

    def _is_of_logits(self, action: Action) -> bool:
        """Tells whether an action computes logits or the loss."""
        segment = self._facts[0].logits_segment
        if isinstance(action, Forward):
            return self._segment[action.first] == segment
        return isinstance(action, Seed) and segment is not None

    def _change(self, microbatch: int, cost: EventCost) -> None:
        if not self._is_itemized:
            logits = cost.logits_bytes - self._live_logits[microbatch]
            others = cost.after_bytes - self._live[microbatch] - logits
            self._note("activation", f"m{microbatch}", others)
            self._note("logits", f"m{microbatch}", logits)
            return
        done = self._done[microbatch]
        before: Mapping[str, int] = self._costs[microbatch][done - 1].owners if done else {}
        of_logits = self._facts[0].logits_owners
        for owner in dict.fromkeys([*before, *cost.owners]):
            change = cost.owners.get(owner, 0) - before.get(owner, 0)
            self._note("logits" if owner in of_logits else "activation", owner, change)

    def _note(self, category: str, owner: str, nbytes: int) -> None:
        if nbytes:
            self._changes.append(ByteChange(Tier.DEVICE, category, owner, nbytes))

    def _all_costs(self, schedule: Schedule) -> list[tuple[EventCost, ...]]:
        is_training = any(isinstance(a, Seed) for a in schedule)
        costs: list[tuple[EventCost, ...]] = []
        for facts, events in zip(self._facts, self._events, strict=True):
            key = "costs", events, is_training, self._is_itemized
            if key not in facts.known:
                life = Lifetimes(facts, is_training=is_training, is_itemized=self._is_itemized)
                facts.known[key] = life.follow(events)
            costs.append(facts.known[key])
        return costs


def _differentiates_in_turn(shape: StepShape) -> bool:
    """Tells whether joint losses are differentiated one by one. See [Note: losses in turn]."""
    return shape.has_backward[-1:] == (True,)


def _give_turn(
    microbatch: int,
    events: Sequence[list[tuple[ActivationEvent, int]]],
    unseeded: set[int],
    owed: dict[int, int],
) -> None:
    """Appends the code that a microbatch's next backward comes behind: of its loss, or between
    calls.
    """
    if microbatch in unseeded:
        unseeded.discard(microbatch)
        events[microbatch].append((ActivationEvent.SEED, -1))
    elif microbatch in owed:
        events[microbatch].append((ActivationEvent.BETWEEN, owed.pop(microbatch)))


def _events_by_microbatch(
    schedule: Schedule, facts: Sequence[SegmentFacts]
) -> list[tuple[tuple[ActivationEvent, int], ...]]:
    """Lists each microbatch's part of a schedule, as events on segments."""
    segment = {first: i for i, (first, _) in enumerate(facts[0].shape.segments)}
    takes_turns = schedule.is_interleaved and schedule.microbatches > 1
    are_in_turn = _differentiates_in_turn(facts[0].shape)
    backwards = [a.microbatch for a in reversed(schedule.actions) if isinstance(a, Backward)]
    # By microbatch: the segment whose backward is over, and that of the code in front of it is not.
    owed: dict[int, int] = {}
    # Microbatches whose losses are seeds that began, and are differentiated later.
    unseeded: set[int] = set()
    events: list[list[tuple[ActivationEvent, int]]] = [[] for _ in range(schedule.microbatches)]
    for action in schedule:
        match action:
            case Start(microbatch=m):
                events[m].append((ActivationEvent.START, -1))
            case Seed(first=first, last=last):
                # A reload may come between the seed and a later microbatch's turn.
                now = first if are_in_turn else last
                unseeded.update(range(now + 1, last + 1))
                for m in range(first, now + 1):
                    events[m].append((ActivationEvent.SEED, -1))
            case Forward(first=call, microbatch=m):
                events[m].append((ActivationEvent.FORWARD, segment[call]))
            case Backward(first=call, microbatch=m):
                _give_turn(m, events, unseeded, owed)
                events[m].append((ActivationEvent.BACKWARD, segment[call]))
                backwards.pop()
                if takes_turns and facts[m].code_before(segment[call]) is not None:
                    owed[m] = segment[call]
                for later in backwards[-1:] or sorted({*owed, *unseeded}):
                    _give_turn(later, events, unseeded, owed)
            case Offload(call=call, microbatch=m):
                events[m].append((ActivationEvent.OFFLOAD, segment[call]))
            case Drop(call=call, microbatch=m):
                events[m].append((ActivationEvent.DROP, segment[call]))
            case Reload(call=call, microbatch=m):
                events[m].append((ActivationEvent.RELOAD, segment[call]))
            case _:
                pass
    return [tuple(e) for e in events]
