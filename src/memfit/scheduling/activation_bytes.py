"""Activations of all microbatches through a step, action by action.

In: `SegmentFacts`, a schedule. Out: what each action changes of them, how high it rises, and which
bytes it moves, in an `OperationDraft`. What one microbatch holds by itself is in `lifetimes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memfit.core.schedule import Action, Backward, Drop, Forward, Offload, Reload, Schedule, Seed, Start
from memfit.core.shape import StepShape
from memfit.core.tiers import Tier
from memfit.scheduling.lifetimes import ActivationEvent, EventCost, Lifetimes
from memfit.scheduling.operation_draft import OperationDraft
from memfit.scheduling.segment_facts import Arrival, SegmentFacts


class ActivationBytes:
    """Follows the activations of one step.

    Args:
        schedule: of the step.
        facts: of the plan's segments, for each microbatch.
        draft: takes what an action changes.
        is_itemized: activations are owned by what made them, not by their microbatch.
    """

    def __init__(
        self, schedule: Schedule, facts: Sequence[SegmentFacts], draft: OperationDraft, *, is_itemized: bool
    ) -> None:
        self._facts = facts
        self._shape: StepShape = facts[0].shape
        self._draft = draft
        self._is_itemized = is_itemized
        self._segment = {first: i for i, (first, _) in enumerate(self._shape.segments)}
        self._costs = self._all_costs(schedule)
        self._done = [0] * schedule.microbatches
        self._live = [0] * schedule.microbatches
        self._live_logits = [0] * schedule.microbatches
        # Backwards of the joint backward that are still to come; microbatches whose cut it has.
        self._joint_left = sum(isinstance(a, Backward) and not self.is_of_tail(a) for a in schedule)
        self._crossed: set[int] = set()

    def is_of_tail(self, action: Action) -> bool:
        """Returns True for a backward of the tail."""
        return isinstance(action, Backward) and self._segment[action.first] >= self._shape.tail_segment

    def end_cuts(self) -> None:
        """Gives up the gradients at the cuts when the joint backward is over."""
        if not self._joint_left:
            while self._crossed:
                m = self._crossed.pop()
                self._draft.change("activation", f"cut of m{m}", -self._bytes_at_cut(m))

    def advance(self, action: Action, microbatches: Sequence[int], *, added: int = 0, relief: int = 0) -> int:
        """Takes the activations of microbatches through their next event.

        Several losses that begin their backward together are gone through one by one: each rises
        above what the earlier ones left.

        Args:
            action: that does it.
            microbatches: whose event it is.
            added: bytes held beside the highest of them.
            relief: bytes that each rises less by; see `relief_bytes`.

        Returns:
            The bytes that it moves.
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
            self._change(m, cost)
            grown += cost.after_bytes - self._live[m] + kept
            self._live[m], self._live_logits[m] = cost.after_bytes, cost.logits_bytes
            self._done[m] += 1
            moved += cost.moved_bytes
        rise = (highest or 0) + added
        if rise > 0:
            draft.rise(Tier.DEVICE, "logits" if self._is_of_logits(action) else "transient", str(action), rise)
        elif rise < 0:
            # Activations go while gradients, counted from the begin on, come.
            draft.rise(Tier.DEVICE, "gradient", "gradients that come later", rise)
        return moved

    def relief_bytes(self, segment: int, microbatch: int, arrival: Arrival) -> int:
        """Returns the bytes that a backward rises less by, because gradients come later than they
        are counted.
        """
        facts = self._facts[microbatch]
        return facts.backward_rise(segment) - facts.backward_rise(segment, arrival)

    def _bytes_at_cut(self, microbatch: int) -> int:
        """Returns the gradients of a microbatch's activations where its tail is cut off."""
        segments, tail = self._shape.segments, self._shape.tail_segment
        return self._facts[microbatch].gradient_bytes[segments[tail][0]] if tail < len(segments) else 0

    def _keep_cut(self, action: Action, microbatch: int) -> int:
        """Counts the gradient at a microbatch's cut from the first joint backward of it on.

        The joint backward is given the gradients at all cuts, and holds them to its end, beside
        what it makes of them.
        """
        if not isinstance(action, Backward) or self.is_of_tail(action):
            return 0
        self._joint_left -= 1
        if microbatch in self._crossed:
            return 0
        self._crossed.add(microbatch)
        nbytes = self._bytes_at_cut(microbatch)
        self._draft.change("activation", f"cut of m{microbatch}", nbytes)
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
            self._draft.change("activation", f"m{microbatch}", others)
            self._draft.change("logits", f"m{microbatch}", logits)
            return
        done = self._done[microbatch]
        last = self._costs[microbatch][done - 1] if done else None
        before: Mapping[str, int] = last.owners if last else {}
        of_logits = cost.logits_owners | (last.logits_owners if last else cost.logits_owners)
        for owner in dict.fromkeys([*before, *cost.owners]):
            change = cost.owners.get(owner, 0) - before.get(owner, 0)
            self._draft.change("logits" if owner in of_logits else "activation", owner, change)

    def _all_costs(self, schedule: Schedule) -> list[tuple[EventCost, ...]]:
        is_training = any(isinstance(a, Seed) for a in schedule)
        costs: list[tuple[EventCost, ...]] = []
        for facts, events in zip(self._facts, _events_by_microbatch(schedule, self._shape), strict=True):
            key = events, is_training, self._is_itemized
            if key not in facts.costs:
                life = Lifetimes(facts, is_training=is_training, is_itemized=self._is_itemized)
                facts.costs[key] = life.follow(events)
            costs.append(facts.costs[key])
        return costs


def _events_by_microbatch(schedule: Schedule, shape: StepShape) -> list[tuple[tuple[ActivationEvent, int], ...]]:
    """Lists each microbatch's part of a schedule, as events on segments."""
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
