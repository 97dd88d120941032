"""Lower bounds of the bytes and seconds of a plan, without its schedule: for searches that look at
many plans.

In: `Plan`, `Profile`. Out: bytes that no schedule of the plan stays below on the device, as
`step.lower` counts them; seconds that it takes at least.

[Note: why it is a bound]
Whatever the order of actions, at each forward and backward of a segment there are on the device:
what rests there, the weights that the segment needs, what it rises by, and in backward the
gradients that it makes and what was reloaded for it. Each microbatch goes through its forwards and
backwards in the same order, so its own activations are known at each of them, but for those that
leave: no schedule drops them before the end of their forward, or reloads them after the begin of
their backward, so they are taken to be away all the while between. In layer-major order all
microbatches have come to the seed (with a tail: back to its cut) before any of them goes on, so
there they count k times.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from memfit.core.hardware import Hardware
from memfit.core.plan import Order, Plan
from memfit.core.profile import Profile, TraceProfile
from memfit.core.shape import StepShape
from memfit.core.tiers import Tier, is_processor
from memfit.core.work_kinds import Work, summed
from memfit.step.clock import Pace
from memfit.step.lifetimes import ActivationEvent, Lifetimes
from memfit.step.segment_facts import KnownFacts, SegmentFacts
from memfit.step.sizes import (
    commit_bytes,
    flat_gradient_bytes,
    flat_weight_bytes,
    input_bytes,
    master_home_bytes,
    traces_of,
    uses_disk,
)
from memfit.step.work_amounts import SEED_ENTRY, STEP_ITSELF, segment_work, update_work

# In bytes, of what `KnownFacts.keep` counts.
_MOMENTS_AN_ITEM = 32


class _Moment(NamedTuple):
    """Activations at one event: what they take at least, and the segment whose weights are there
    (-1: none in particular).
    """

    least_bytes: int
    segment: int
    is_backward: bool


class _Moments:
    """Many of them, highest first, in a sixth of the memory that they take one by one."""

    def __init__(self, moments: Sequence[_Moment]) -> None:
        self._least_bytes = array("q", (moment.least_bytes for moment in moments))
        self._segments = array("i", (moment.segment for moment in moments))
        self._is_backward = bytes(moment.is_backward for moment in moments)

    def __iter__(self) -> Iterator[_Moment]:
        for one in zip(self._least_bytes, self._segments, self._is_backward, strict=True):
            yield _Moment(one[0], one[1], bool(one[2]))


class PeakBounds:
    """Lower bounds of the device peaks of many plans for one profile.

    Activations are looked at once for all plans that differ only in where weights, gradients and
    states rest.

    Args:
        profile: of the model.
        staging_bytes: as in `step.lower`.
        device: likewise; beside an accelerator the staging is host memory.
        known: facts about the profile that were found before, and are added to.
    """

    def __init__(
        self, profile: Profile, *, staging_bytes: int, device: str = "cpu", known: KnownFacts | None = None
    ) -> None:
        self._profile = profile
        self._staging_bytes = staging_bytes if is_processor(device) else 0
        self._weights = [flat_weight_bytes(block) for block in profile.blocks]
        # What backward makes; where it adds up in another dtype it takes more.
        self._gradients = [flat_gradient_bytes(block, is_summed=False) for block in profile.blocks]
        self._activations: dict[Any, _Moments] = {}
        self._known = known or KnownFacts()

    def of(self, plan: Plan) -> int:
        """Bytes that the step's predicted device peak is not below.

        See [Note: why it is a bound].
        """
        shape = self._known.shape(plan, self._profile)
        known, homes, calls = self._known, self._known.homes_of(plan), self._known.calls_of(plan)
        resting = known.found(("rests", homes), lambda: self._resting_bytes(plan, shape))
        resting += input_bytes(traces_of(self._profile, plan.microbatches, known), known)
        staging = self._staging_bytes if uses_disk(plan, shape) else 0
        visiting = known.found(("visits most", homes, calls), lambda: self._most_visiting(shape))
        highest = 0
        for moment in self._moments(plan, shape):
            if moment.least_bytes + visiting <= highest:
                break  # as are all that follow, which are lower
            highest = max(highest, moment.least_bytes + self._visiting_bytes(moment, shape))
        return resting + staging + highest

    def _resting_bytes(self, plan: Plan, shape: StepShape) -> int:
        profile, total = self._profile, self._profile.buffer_bytes
        for index, block in enumerate(profile.blocks):
            total += 0 if index in shape.visiting else self._weights[index]
            if plan.block(block.name).state_home is Tier.DEVICE:
                total += profile.resting_state_bytes(block.name) + master_home_bytes(plan, block)
        return total

    def _most_visiting(self, shape: StepShape) -> int:
        moments = (_Moment(segment=i, is_backward=True, least_bytes=0) for i in range(len(shape.segments)))
        return max((self._visiting_bytes(moment, shape) for moment in moments), default=0)

    def _visiting_bytes(self, moment: _Moment, shape: StepShape) -> int:
        if moment.segment < 0:
            return 0
        nbytes = sum(self._weights[b] for b in shape.needs[moment.segment] if b in shape.visiting)
        if moment.is_backward:
            nbytes += sum(self._gradients[b] for b in {*shape.contributes[moment.segment], *shape.loose})
        return nbytes

    def _moments(self, plan: Plan, shape: StepShape) -> _Moments:
        key = plan.microbatches, plan.order, self._known.calls_of(plan)
        if key not in self._activations:
            traces = traces_of(self._profile, plan.microbatches, self._known)
            facts = [self._known.segments(trace, plan, shape, self._profile) for trace in traces]
            # Of a segment's forwards, and of its backwards, the highest.
            highest: dict[tuple[int, bool], _Moment] = {}
            for moment in sorted(_lifetimes(facts), key=lambda moment: -moment.least_bytes):
                highest.setdefault((moment.segment, moment.is_backward), moment)
            moments = tuple(highest.values())
            self._known.keep(self._activations, key, _Moments(moments), len(moments) // _MOMENTS_AN_ITEM)
        return self._activations[key]


class _LeastLifetimes(Lifetimes):
    """Storages that somebody else keeps anyhow are not reloaded: they may not have been moved."""

    def _take(self, event: ActivationEvent, segment: int, moves: set[int]) -> tuple[int, int]:
        if event is not ActivationEvent.RELOAD:
            return super()._take(event, segment, moves)
        there = sum(s.nbytes for s in self.facts.movable(segment) if s.leaves and s.index in self.alive)
        copied = self.copies[segment] = self.facts.copy_bytes(segment) - there
        return copied, copied


def _lifetimes(of_microbatches: Sequence[SegmentFacts]) -> tuple[_Moment, ...]:
    """The moments of the largest microbatch, and of all of them where they meet."""
    facts = of_microbatches[0]
    plan = facts.plan
    events, meeting = _events(facts)
    found: list[_Moment] = []
    costs = _LeastLifetimes(facts, is_training=True).follow(events)
    # Microbatches of as many rows share their facts; the last are the smaller ones.
    fewer = of_microbatches[-1]
    others = costs if fewer is facts else _LeastLifetimes(fewer, is_training=True).follow(events)
    larger = sum(one is facts for one in of_microbatches)
    after, other_after, reloaded = 0, 0, 0
    for (event, segment), cost, other in zip(events, costs, others, strict=True):
        # What was reloaded for a backward is there for one microbatch.
        meets = (event, segment) == meeting and plan.order is Order.LAYER_MAJOR
        least = larger * after + (plan.microbatches - larger) * other_after if meets else after
        least += reloaded + cost.rise_bytes
        if event is ActivationEvent.BACKWARD:
            least -= facts.backward_rise(segment) - facts.least_backward_rise(segment)
        if event is ActivationEvent.RELOAD:
            reloaded = cost.moved_bytes
        else:
            after, other_after, reloaded = cost.after_bytes, other.after_bytes, 0
        found.append(_Moment(segment=segment, is_backward=event is ActivationEvent.BACKWARD, least_bytes=least))
    return tuple(found)


def _events(facts: SegmentFacts) -> tuple[list[tuple[ActivationEvent, int]], tuple[ActivationEvent, int] | None]:
    """Events of a microbatch, where what leaves is away for as long as any schedule lets it; and
    in turns the one that all microbatches come to before any of them goes on.
    """
    plan, shape = facts.plan, facts.shape
    count, takes_turns = len(shape.segments), plan.order is Order.LAYER_MAJOR and plan.microbatches > 1
    back = [segment for segment in reversed(range(count)) if shape.has_backward[segment]]
    meeting = (ActivationEvent.SEED, -1)
    if shape.tail_segment < count:
        before = (segment for segment in back if segment < shape.tail_segment)
        meeting = next(((ActivationEvent.BACKWARD, segment) for segment in before), None)
    events = [(ActivationEvent.START, -1)]
    for segment in range(count):
        events.append((ActivationEvent.FORWARD, segment))
        if _leaves(segment, shape):
            events += [(ActivationEvent.OFFLOAD, segment), (ActivationEvent.DROP, segment)]
    events.append((ActivationEvent.SEED, -1))
    for segment in back:
        events += [(ActivationEvent.RELOAD, segment)] if _leaves(segment, shape) else []
        events.append((ActivationEvent.BACKWARD, segment))
        if takes_turns and facts.code_before(segment) is not None:
            events.append((ActivationEvent.BETWEEN, segment))
    return events, meeting


def _leaves(segment: int, shape: StepShape) -> bool:
    return shape.has_backward[segment] and shape.leaves[segment] is not None


def compute_seconds(
    traces: Sequence[TraceProfile], plan: Plan, shape: StepShape, pace: Pace, known: KnownFacts
) -> float:
    """Seconds of pure compute of a training step, from the trace of each microbatch: a lower bound
    of any schedule's time.
    """
    works = {id(trace): _compute_works(trace, plan, shape, known) for trace in traces}
    if pace.adds_up:
        seconds = {trace: sum(map(pace.work_s, of_trace)) for trace, of_trace in works.items()}
        return sum(seconds[id(trace)] for trace in traces) + pace.work_s(STEP_ITSELF)
    summed_up = {trace: summed((work, 1.0) for work in of_trace) for trace, of_trace in works.items()}
    return pace.work_s(summed((summed_up[id(trace)], 1.0) for trace in traces)) + pace.work_s(STEP_ITSELF)


def _compute_works(trace: TraceProfile, plan: Plan, shape: StepShape, known: KnownFacts) -> list[Work]:
    works = [trace.prologue_work, trace.seed_work, SEED_ENTRY]
    for segment, has_backward in enumerate(shape.has_backward):
        first, last = shape.segments[segment]
        for is_backward in (False, True)[: 1 + has_backward]:
            key = "segment", trace.rows, first, last, plan.call(first).saved, is_backward
            works.append(
                known.found(
                    key,
                    lambda: known.shared(segment_work(trace, plan, shape, segment, is_backward=is_backward)),  # noqa: B023, asked at once
                )
            )
    return works


def update_seconds(plan: Plan, profile: Profile, block: int, pace: Pace) -> tuple[float, float]:
    """Seconds for which a block's update delays compute, and for which it keeps the host's cores
    busy: one of the two is zero.
    """
    work = update_work(plan, profile, block)
    if plan.block(profile.blocks[block].name).updates_on_host(pace.hardware.device):
        return 0.0, pace.host_work_s(work)
    return pace.work_s(work), 0.0


def commit_seconds(plan: Plan, profile: Profile, hardware: Hardware, commits: float) -> float:
    """Seconds of a step's share of a commit, which is made when the next step begins, with nothing
    beside it.

    Args:
        plan: the decisions.
        profile: with its states' formats.
        hardware: whose disk is written.
        commits: made a step: 1 with durability "step", 1 / N with N, 0 without a store.
    """
    return commits * commit_bytes(plan, profile) / hardware.link(Tier.DISK).write_bytes_per_s if commits else 0.0
