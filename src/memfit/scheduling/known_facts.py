"""Facts that many plans of one profile share, found once: for searches that lower hundreds of
plans.

In: a profile, plans one after the other. Out: `SegmentFacts`, pieces and traffic of updates. What
is found here never depends on more than its key says; a plan that is lowered with these facts has
the same step as without.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from memfit.core.plan import CallPlan, Plan
from memfit.core.profile import Profile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.shape import (
    CallShape,
    StepShape,
    describe_calls,
    describe_homes,
    describe_model,
    describe_segments,
    describe_step,
)
from memfit.scheduling.segment_facts import SegmentFacts

_FoundT = TypeVar("_FoundT")

# Traces of a plan's microbatches, of a training step and of a pass without gradients.
_FACTS_OF_A_PLAN = 4


class KnownFacts:
    """Facts of one profile; held by whoever lowers many plans of it. Steps and passes without
    gradients have each their own: what is found first of a trace says what later ones share.

    Args:
        most_kept: items of what is kept as long as there is room (`keep`): a plan of many
            microbatches has thousands, of some 0.5 KiB each; as many segments of plans whose facts
            are known.
    """

    def __init__(self, most_kept: float = math.inf) -> None:
        self._most_kept = most_kept
        self._kept: deque[tuple[dict[Any, Any], Any, int]] = deque()
        self._kept_items = 0
        self._of_traces: dict[int, SegmentFacts] = {}
        # The ones that were asked for last come last.
        self._of_plans: dict[Any, SegmentFacts] = {}
        self._segments = 0
        self._found: dict[Any, Any] = {}
        self._alike: dict[str, str] = {}
        # A plan is looked at by several in turn: the last one is known.
        self._described: tuple[Plan, StepShape] | None = None
        self._numbered: tuple[Plan, int, int] | None = None
        self._numbers: dict[Any, int] = {}

    def shape(self, plan: Plan, profile: Profile) -> StepShape:
        """Returns the shape of a plan's step."""
        if self._described is None or self._described[0] is not plan:
            homes, calls = self.homes_of(plan), self.calls_of(plan)
            of_homes = self.found(("shape of homes", homes), lambda: describe_homes(plan, profile))
            of_calls = self.found(("shape of calls", calls), lambda: self._describe_calls(plan, profile))
            of_model = self.found("shape of model", lambda: describe_model(profile))
            key = "shape", homes, calls, plan.microbatches, plan.order, plan.scales_losses
            self._described = plan, self.found(key, lambda: describe_step(plan, profile, of_calls, of_homes, of_model))
        return self._described[1]

    def _describe_calls(self, plan: Plan, profile: Profile) -> CallShape:
        joined = tuple(index for index, call in enumerate(plan.calls) if call.joins_previous)
        key = "segments", joined, plan.cut_tail
        return describe_calls(plan, profile, self.found(key, lambda: describe_segments(plan, profile)))

    def homes_of(self, plan: Plan) -> int:
        """Returns the number of a plan's decisions about blocks: homes, masters, formats, ranks.
        Plans that decide the same share it.
        """
        return self._numbers_of(plan)[1]

    def calls_of(self, plan: Plan) -> int:
        """Returns the number of a plan's decisions about calls, the tail among them."""
        return self._numbers_of(plan)[2]

    def _numbers_of(self, plan: Plan) -> tuple[Plan, int, int]:
        if self._numbered is None or self._numbered[0] is not plan:
            homes = (
                "homes",
                *plan.blocks.items(),
                plan.ranks,
                plan.is_atomic,
                plan.update,
                plan.splits_masters,
                plan.drops_masters,
                plan.state_format,
                plan.frozen_format,
            )
            calls = "calls", plan.calls, plan.tail, plan.cut_tail
            numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in (homes, calls)]
            self._numbered = plan, numbers[0], numbers[1]
        return self._numbered

    def segments(
        self, trace: TraceProfile, plan: Plan, shape: StepShape, profile: Profile, *, is_training: bool = True
    ) -> SegmentFacts:
        """Returns the facts of a plan's segments, of a step or of a pass without gradients: homes
        do not change them.
        """
        if not is_training:
            plan = _without_saving(plan, trace)
            shape = describe_step(plan, profile)
        key = trace.rows, self.calls_of(plan), plan.microbatches, plan.order, plan.ranks
        found = self._of_plans.pop(key, None)
        if found is None:
            first = self._of_traces.get(trace.rows)
            found = SegmentFacts(trace, plan, shape, profile, None if first is None else first.storages)
            found.take_trace_facts(self._of_traces.setdefault(trace.rows, found))
            self._segments += len(shape.segments)
        self._of_plans[key] = found
        while self._segments > self._most_kept and len(self._of_plans) > _FACTS_OF_A_PLAN:
            self._segments -= len(self._of_plans.pop(next(iter(self._of_plans))).shape.segments)
        return found

    def alike(self, profile: Profile, name: str) -> str:
        """Returns the name of the first block that is equal to this one in all that an update does
        with it: parameters, gradients, states.
        """
        if not self._alike:
            first: dict[Any, str] = {}
            for block in profile.blocks:
                role = (
                    tuple((p.shape, p.dtype, p.nbytes, p.requires_grad, p.master_nbytes) for p in block.parameters),
                    tuple(profile.updates.get(p.name) for p in block.parameters),
                    profile.state_bytes.get(block.name),
                    profile.resting_state_bytes(block.name),
                    profile.encoded_elements.get(block.name),
                    block.encoded_bytes,
                )
                self._alike[block.name] = first.setdefault(role, block.name)
        return self._alike[name]

    def of_update(
        self, plan: Plan, name: str, key: Any, find: Callable[[], _FoundT], *, like: str | None = None
    ) -> _FoundT:
        """Returns what is known of a block's update, or finds it.

        Args:
            plan: its decisions about the block, masters and states are part of the key.
            name: of the block.
            key: what else it depends on.
            find: finds it.
            like: name of a block of which it would be the same (`alike`).
        """
        whole = (
            name if like is None else like,
            plan.block(name),
            plan.ranks,
            plan.splits_masters,
            plan.drops_masters,
            plan.state_format,
            plan.frozen_format,
            key,
        )
        return self.found(whole, find)

    def keep(self, where: dict[Any, Any], key: Any, kept: Any, items: int) -> None:
        """Keeps what has so many items under a key of a dict, until newer ones need the room."""
        where[key] = kept
        self._kept.append((where, key, items))
        self._kept_items += items
        while self._kept_items > self._most_kept and len(self._kept) > 1:
            oldest, its_key, count = self._kept.popleft()
            oldest.pop(its_key, None)
            self._kept_items -= count

    def found(self, key: Any, find: Callable[[], _FoundT]) -> _FoundT:
        """Returns what is known under a key, or finds it. The key says all that it depends on."""
        known = self._found.get(key, self)  # what is found may be None
        if known is self:
            known = self._found[key] = find()
        return known

    def shared(self, made: _FoundT) -> _FoundT:
        """Returns the first of all that are equal to this one: many are, of equal layers."""
        return self._found.setdefault(("shared", made), made)


def _without_saving(plan: Plan, trace: TraceProfile) -> Plan:
    """Returns the plan of a pass without gradients: whatever calls would save, autograd keeps
    nothing of it, as in the forward of a recomputed call.
    """
    calls = [*plan.calls, *[CallPlan()] * len(trace.calls)][: len(trace.calls)]
    return replace(
        plan, calls=tuple(CallPlan(saved=Saved.RECOMPUTE, joins_previous=call.joins_previous) for call in calls)
    )
