"""Facts that many plans of one profile share, found once: for searches that lower hundreds of
plans.

In: a profile, plans one after the other. Out: `SegmentFacts`, pieces and traffic of updates. What
is found here never depends on more than its key says; a plan that is lowered with these facts has
the same step as without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from memfit.core.plan import CallPlan, Plan
from memfit.core.profile import Profile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.shape import StepShape, describe_step
from memfit.scheduling.segment_facts import SegmentFacts

_FoundT = TypeVar("_FoundT")


class KnownFacts:
    """Facts of one profile; held by whoever lowers many plans of it."""

    def __init__(self) -> None:
        self._of_traces: dict[int, SegmentFacts] = {}
        self._of_plans: dict[Any, SegmentFacts] = {}
        self._found: dict[Any, Any] = {}

    def segments(
        self, trace: TraceProfile, plan: Plan, shape: StepShape, profile: Profile, *, is_training: bool = True
    ) -> SegmentFacts:
        """Returns the facts of a plan's segments, of a step or of a pass without gradients: homes
        do not change them.
        """
        if not is_training:
            plan = _without_saving(plan, trace)
            shape = describe_step(plan, profile)
        key = trace.rows, plan.calls, plan.cut_tail, plan.microbatches, plan.order, plan.ranks
        found = self._of_plans.get(key)
        if found is None:
            found = self._of_plans[key] = SegmentFacts(trace, plan, shape, profile)
            found.take_trace_facts(self._of_traces.setdefault(trace.rows, found))
        return found

    def of_update(self, plan: Plan, name: str, key: Any, find: Callable[[], _FoundT]) -> _FoundT:
        """Returns what is known of a block's update, or finds it.

        Args:
            plan: its decisions about the block, masters and states are part of the key.
            name: of the block.
            key: what else it depends on.
            find: finds it.
        """
        whole = (
            name,
            plan.block(name),
            plan.ranks,
            plan.splits_masters,
            plan.drops_masters,
            plan.state_format,
            plan.frozen_format,
            key,
        )
        return self.found(whole, find)

    def found(self, key: Any, find: Callable[[], _FoundT]) -> _FoundT:
        """Returns what is known under a key, or finds it. The key says all that it depends on."""
        known = self._found.get(key, self)  # what is found may be None
        if known is self:
            known = self._found[key] = find()
        return known


def _without_saving(plan: Plan, trace: TraceProfile) -> Plan:
    """Returns the plan of a pass without gradients: whatever calls would save, autograd keeps
    nothing of it, as in the forward of a recomputed call.
    """
    calls = [*plan.calls, *[CallPlan()] * len(trace.calls)][: len(trace.calls)]
    return replace(
        plan, calls=tuple(CallPlan(saved=Saved.RECOMPUTE, joins_previous=call.joins_previous) for call in calls)
    )
