"""Activations of one microbatch through its own events: what is alive after each, and how high it
rises meanwhile.

In: `SegmentFacts` and the events of a microbatch (its part of a schedule). Out: `EventCost` an
event. All microbatches have the same trace, so those with the same events share one result.

[Note: what keeps a storage alive]
A storage is alive from the end of the segment that made it until the last of its *keepers* lets go:
- use: operations and the program hold it until the end of segment last_use - 1 (it is freed in the
  segment that uses it last), or of held_until where that is later than last_use; what is held at
  the end of the last segment stays until the microbatch's last backward (in a forward-only pass,
  until its last forward);
- code between calls that saved it: its backward follows that of the next segment that has one, or
  the seed. With one microbatch at a time that is part of it; where microbatches take turns it comes
  apart (`BETWEEN`), right before the backward of the segment in front of the code;
- a kept call that saved it inside, until its backward; an offloaded call, until its drop, or where
  it does not leave (`core.shape`) its backward;
- a recomputed or selective segment of which it is an argument made before the segment, until the
  segment's backward; with a boundary that leaves, until its drop.

What the program still holds when the step is over (`is_lasting`) rests, where there is one
microbatch at a time: the step before has left one like it. In turns each microbatch has its own
beside that, to the step's end. What is reloaded is a new copy, counted from the reload to the end
of the backward, even where the original is alive.
A segment without a backward lets go with the nearest earlier one that has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from memfit.core.profile import StorageProfile
from memfit.step.segment_facts import SEED, SegmentFacts


class ActivationEvent(StrEnum):
    """Events of a microbatch."""

    START = "start"
    FORWARD = "forward"
    BACKWARD = "backward"
    BETWEEN = "between"
    SEED = "seed"
    OFFLOAD = "offload"
    DROP = "drop"
    RELOAD = "reload"


@dataclass(frozen=True, kw_only=True)
class EventCost:
    """Bytes of one microbatch's activations.

    Attributes:
        rise_bytes: most bytes above those alive before the event, while it runs.
        after_bytes: alive after it.
        logits_bytes: of these, logits and what the loss makes of them.
        moved_bytes: leaving or coming back (offload, reload).
        owners: `after_bytes` by what made them, where that was asked for: a call ("C5"), "before
            the first call", a reload ("reload C5"), "gradients of activations", "gradients of
            logits", "selected".
    """

    rise_bytes: int
    after_bytes: int
    logits_bytes: int
    moved_bytes: int = 0
    owners: Mapping[str, int] = field(default_factory=dict[str, int])


class Lifetimes:
    """Follows one microbatch's storages through its events."""

    def __init__(self, facts: SegmentFacts, *, is_training: bool, is_itemized: bool = False) -> None:
        self.facts = facts
        self._is_itemized = is_itemized
        self.is_training = is_training
        self.keepers: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.alive: dict[int, StorageProfile] = {}
        self.alive_bytes = 0
        self.extra_bytes = 0
        self.gradient_bytes = 0
        # Of the alive ones, and of the gradients.
        self.logits_bytes = 0
        self.logits_gradient_bytes = 0
        self._on_forward: dict[int, list[StorageProfile]] = {}
        self._on_backward: dict[int, list[StorageProfile]] = {}
        self._on_drop: dict[int, list[StorageProfile]] = {}
        self._on_between: dict[int, list[StorageProfile]] = {}
        self._apart: set[int] = set()

    def follow(self, events: Sequence[tuple[ActivationEvent, int]]) -> tuple[EventCost, ...]:
        """Costs of the events, in order; indices are segments."""
        final = self._final(events)
        last = max((i for i, (e, _) in enumerate(events) if e is final), default=len(events) - 1)
        moves = {segment for event, segment in events if event is ActivationEvent.OFFLOAD}
        self._apart = {segment for event, segment in events if event is ActivationEvent.BETWEEN}
        costs: list[EventCost] = []
        for index, (event, segment) in enumerate(events):
            rise, moved = self._take(event, segment, moves)
            if index == last:
                self._end()
            after = self.alive_bytes + self.extra_bytes + self.gradient_bytes + sum(self.copies.values())
            logits = self.logits_bytes + self.logits_gradient_bytes
            owners = self._owners() if self._is_itemized else {}
            cost = EventCost(rise_bytes=rise, after_bytes=after, logits_bytes=logits, moved_bytes=moved, owners=owners)
            costs.append(cost)
        return tuple(costs)

    def _is_of_logits(self, s: StorageProfile) -> bool:
        return s.segment >= 0 and self.facts.segment_of[s.segment] == self.facts.logits_segment

    def _owners(self) -> dict[str, int]:
        owners: Counter[str] = Counter()
        for s in self.alive.values():
            owners[f"C{s.segment}" if s.segment >= 0 else "before the first call"] += s.nbytes
        for segment, nbytes in self.copies.items():
            owners[f"reload C{self.facts.shape.segments[segment][0]}"] += nbytes
        owners["gradients of logits"] = self.logits_gradient_bytes
        owners["gradients of activations"] = self.gradient_bytes - self.logits_gradient_bytes
        owners["selected"] = self.extra_bytes
        return dict(owners)

    def _final(self, events: Sequence[tuple[ActivationEvent, int]]) -> ActivationEvent:
        kinds = {event for event, _ in events}
        order = (
            (ActivationEvent.BACKWARD, ActivationEvent.SEED, ActivationEvent.FORWARD)
            if self.is_training
            else (ActivationEvent.FORWARD,)
        )
        return next((kind for kind in order if kind in kinds), ActivationEvent.START)

    def _take(self, event: ActivationEvent, segment: int, moves: set[int]) -> tuple[int, int]:
        facts = self.facts
        match event:
            case ActivationEvent.START:
                self._make(-1, moves)
                return facts.trace.prologue_peak_bytes, 0
            case ActivationEvent.FORWARD:
                self._make(segment, moves)
                for s in self._on_forward.pop(segment, ()):
                    self._let_go(s)
                if self.is_training and facts.shape.has_backward[segment]:
                    self.extra_bytes += facts.extra_held_bytes(segment) + facts.selected_bytes(segment)
                return facts.forward_rise(segment), 0
            case ActivationEvent.BACKWARD:
                return self._back(segment, moves), 0
            case ActivationEvent.BETWEEN:
                let_go = self._on_between.pop(segment, ())
                for s in let_go:
                    self._let_go(s)
                self.gradient_bytes = facts.gradient_bytes[facts.shape.segments[segment][0]]
                code = facts.code_before(segment)
                rise = 0 if code is None else code.between_peak_bytes
                return rise + sum(s.nbytes for s in let_go if s.index in self.alive), 0
            case ActivationEvent.OFFLOAD:
                return 0, facts.copy_bytes(segment)
            case ActivationEvent.DROP:
                for s in self._on_drop.pop(segment, ()):
                    self._let_go(s)
                self.extra_bytes -= facts.extra_held_bytes(segment, leaves=True)
                return 0, 0
            case ActivationEvent.RELOAD:
                self.copies[segment] = facts.copy_bytes(segment)
                return self.copies[segment], self.copies[segment]
            case ActivationEvent.SEED:
                for s in self._on_backward.pop(SEED, ()):
                    self._let_go(s)
                self.gradient_bytes = facts.gradient_bytes[-1]
                self.logits_gradient_bytes = 0 if facts.logits_segment is None else self.gradient_bytes
                count = len(facts.trace.calls)
                held = self._alive_bytes_of(count)
                return facts.trace.seed_peak_bytes + held, 0

    def _make(self, segment: int, moves: set[int]) -> None:
        facts = self.facts
        end = len(facts.trace.calls) - 1
        entered = -1 if segment < 0 else facts.shape.segments[segment][1]
        for s in facts.made_in.get(segment, ()):
            if s.index in self.alive:
                continue  # an illegal schedule, in which the segment runs twice
            if s.is_lasting and facts.shares_lasting:
                continue  # it rests: the step before has left one like it
            count = 0
            until = facts.used_until(s)
            if until >= end:
                count += 1  # only the end lets go
            elif until >= entered:
                count += 1
                self._on_forward.setdefault(self._first_segment_after(until), []).append(s)
            for target, key in self._keepers(s, moves):
                count += 1
                target.setdefault(key, []).append(s)
            if count:
                self.keepers[s.index] = count
                self.alive[s.index] = s
                self.alive_bytes += s.nbytes
                self.logits_bytes += s.nbytes if self._is_of_logits(s) else 0

    def _first_segment_after(self, call: int) -> int:
        """Returns the first segment whose end lies behind the end of `call`: from there on use no
        longer keeps a storage alive.
        """
        return next(i for i, (_, last) in enumerate(self.facts.shape.segments) if last > call)

    def _keepers(self, s: StorageProfile, moves: set[int]) -> list[tuple[dict[int, list[StorageProfile]], int]]:
        facts = self.facts
        if not self.is_training:
            return []
        keepers: list[tuple[dict[int, list[StorageProfile]], int]] = []
        if s.saved_outside:
            # Backward comes to code between calls last to first, so the first to save it lets go
            # last; the seed comes before all.
            release = {facts.release_segment_between(call) for call in s.saved_outside}
            least = min(release - {SEED}, default=SEED)
            is_apart = least in self._apart and any(map(facts.is_between, s.saved_outside))
            keepers.append((self._on_between if is_apart else self._on_backward, least))
        held: set[int] = set()
        stays: set[int] = set()
        for call in s.saved_inside:
            if (
                s.is_unseen
                or facts.plan.call(call).saved.policy.keeps_all
                or not facts.shape.has_backward[facts.segment_of[call]]
            ):
                keepers.append((self._on_backward, facts.release_segment(call)))
            elif facts.plan.call(call).saved.policy.offloads:
                held.add(facts.segment_of[call])
        for call in s.argument_of:
            segment = facts.segment_of[call]
            is_replayed = facts.plan.call(call).saved.policy.recomputes
            if is_replayed and s.segment < facts.shape.segments[segment][0] and facts.shape.has_backward[segment]:
                held.add(segment)
            elif (
                is_replayed
                and facts.is_held_apart(s, *facts.shape.segments[segment])
                and facts.shape.has_backward[segment]
            ):
                # Only the first call's arguments leave.
                stays.add(segment)
        keepers += [(self._on_backward, segment) for segment in sorted(stays)]
        keepers += [
            (self._on_drop if segment in moves and s.leaves else self._on_backward, segment) for segment in sorted(held)
        ]
        return keepers

    def _let_go(self, s: StorageProfile) -> None:
        self.keepers[s.index] -= 1
        if not self.keepers[s.index]:
            del self.keepers[s.index]
            del self.alive[s.index]
            self.alive_bytes -= s.nbytes
            self.logits_bytes -= s.nbytes if self._is_of_logits(s) else 0

    def _back(self, segment: int, moves: set[int]) -> int:
        facts = self.facts
        for s in self._on_backward.pop(segment, ()):
            self._let_go(s)
        first, last = facts.shape.segments[segment]
        still_held = sum(map(self._alive_bytes_of, range(first, last + 1)))
        self.copies.pop(segment, None)
        self.extra_bytes -= facts.selected_bytes(segment)
        self.extra_bytes -= facts.extra_held_bytes(segment, leaves=False if segment in moves else None)
        self.logits_gradient_bytes = 0
        if segment in self._apart:
            self.gradient_bytes = facts.bytes_before_code(segment)
            # Let go of in the traced rise, but behind its highest place where that is the call's.
            still_held -= sum(s.nbytes for s in self._on_between.get(segment, ()))
        else:
            self.gradient_bytes = facts.gradient_bytes[first]
        return facts.backward_rise(segment) + max(0, still_held)

    def _alive_bytes_of(self, call: int) -> int:
        """Sums what is alive of the storages that a call's backward lets go of in the plain run."""
        return sum(s.nbytes for s in self.facts.released_in.get(call, ()) if s.index in self.alive)

    def _end(self) -> None:
        self.keepers.clear()
        self.copies.clear()
        # Of microbatches in turns, each keeps what it left on modules until the step is over.
        self.alive = {index: s for index, s in self.alive.items() if s.is_lasting}
        # Nobody is left to let go of what has died: an illegal schedule may have more events.
        for lists in (self._on_forward, self._on_backward, self._on_drop, self._on_between):
            lists.clear()
        self.alive_bytes = sum(s.nbytes for s in self.alive.values())
        self.logits_bytes = sum(s.nbytes for s in self.alive.values() if self._is_of_logits(s))
        self.extra_bytes = self.gradient_bytes = self.logits_gradient_bytes = 0
