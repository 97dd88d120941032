"""When each action begins and ends: the schedule run on a model of the machine.

In: `Schedule`, `Plan`, `Profile`, `Hardware`. Out: `ActionTime` an action, stalls by cause, bytes moved by category.

[Note: the clock]
One main thread takes the actions in order. Compute takes its time; transfers start at once, or when what they need is
done, and are served by their link in the order they were issued: reading and writing are two queues a tier. The main
thread stops only where core.schedule's [Note: what an action means] says that an action waits; those seconds are
stalls, by what was waited for. An update reads, works and writes as a pipeline: it ends when the slowest of the three
has. Its elements are worked on by the device that computes, wherever they rest, and that time delays compute.
Not modelled: links and compute slowing each other, the cost of a first step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memfit.core.errors import PlanError
from memfit.core.hardware import Hardware, Link
from memfit.core.plan import Plan, Saved, Tier, updates_in_place
from memfit.core.profile import Profile, TraceProfile
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
    Schedule,
    Unscale,
    Update,
)
from memfit.core.shape import StepShape
from memfit.prediction.bytes import flat_gradient_bytes, flat_master_bytes, flat_weight_bytes, master_home_bytes
from memfit.prediction.segments import SegmentFacts

# An assumption, not a measurement: entering a call (hooks, a coroutine switch). It lets fewer microbatches win ties.
CALL_OVERHEAD_S = 1e-4
# Joining a master from its weight and the rest, and splitting it again, parameters a second (measured: 512 Ki in 0.4 ms on one core).
SPLIT_ELEMENTS_PER_S = 1.3e9
# Rounding weights that have no masters stochastically, parameters a second.
ROUNDED_ELEMENTS_PER_S = 7.5e8
# Share of a forward that selective recompute repeats although matrix products and attention are kept (an assumption).
SELECT_REPLAY_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class ActionTime:
    """Seconds from the step's begin; a transfer ends when its bytes are there: later actions may have begun before."""

    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes over links: (tier, category) -> bytes."""

    read: Mapping[tuple[Tier, str], int]
    written: Mapping[tuple[Tier, str], int]


def segment_flops(trace: TraceProfile, plan: Plan, shape: StepShape, segment: int, *, is_backward: bool) -> float:
    """Floating point operations of a segment for one microbatch, replay included."""
    first, last = shape.segments[segment]
    calls = trace.calls[first : last + 1]
    forward = sum(c.forward_flops for c in calls)
    if not is_backward:
        return forward
    share = {Saved.RECOMPUTE: 1.0, Saved.SELECT: SELECT_REPLAY_SHARE}.get(plan.call(first).saved, 0.0)
    return sum(c.backward_flops for c in calls) + share * forward


def compute_seconds(trace: TraceProfile, plan: Plan, shape: StepShape, hardware: Hardware) -> float:
    """Seconds of pure compute of a training step: a lower bound of any schedule's time."""
    flops = calls = 0.0
    for segment, (first, last) in enumerate(shape.segments):
        flops += segment_flops(trace, plan, shape, segment, is_backward=False)
        calls += last - first + 1
        if shape.has_backward[segment]:
            flops += segment_flops(trace, plan, shape, segment, is_backward=True)
            calls += last - first + 1
    return plan.microbatches * (flops / hardware.flops_per_s + calls * CALL_OVERHEAD_S)


def update_traffic(plan: Plan, profile: Profile, block: int, *, is_visiting: bool, device: str = "cpu") -> Traffic:
    """Bytes that an update of a block moves between the device, which computes it, and the homes.

    What is updated where it rests does not move (`core.plan.updates_in_place`). All else is read, and weight, master and states are written back; a weight that
    visits is not read again, nor is one that is rounded from a whole master.
    """
    profiled = profile.blocks[block]
    homes = plan.block(profiled.name)
    place = homes.weight_home
    read: Counter[tuple[Tier, str]] = Counter()
    written: Counter[tuple[Tier, str]] = Counter()
    sizes = {
        "weight": (place, flat_weight_bytes(profiled)),
        "gradient": (homes.gradient_home, flat_gradient_bytes(profiled)),
        "state": (homes.state_home, profile.state_bytes.get(profiled.name, 0)),
    }
    has_masters = flat_master_bytes(profiled) > 0
    # A split master is read together with the weight that says its upper bits; without masters, the weight is all there is.
    reads_weight = not is_visiting and (plan.splits_masters or plan.drops_masters or not has_masters)
    if has_masters:
        sizes["master"] = (homes.state_home, master_home_bytes(plan, profiled))
    for category, (home, nbytes) in sizes.items():
        if updates_in_place(home, device):
            continue
        if category != "weight" or reads_weight:
            read[home, category] += nbytes
        if category != "gradient":
            written[home, category] += nbytes
    return Traffic(read=read, written=written)


def commit_bytes(plan: Plan, profile: Profile) -> int:
    """Bytes that a commit writes of what the step changed in memory: masters and states, weights without masters, buffers.

    What rests on disk was written by the step itself; a weight that is rounded from a master is made again from it (docs/store.md).
    """
    total = profile.buffer_bytes
    for block in profile.blocks:
        if not block.trains:
            continue
        homes = plan.block(block.name)
        master = master_home_bytes(plan, block)
        if homes.weight_home is not Tier.DISK and not master:
            total += flat_weight_bytes(block)
        if homes.state_home is not Tier.DISK:
            total += profile.state_bytes.get(block.name, 0) + master
    return total


def commit_seconds(plan: Plan, profile: Profile, hardware: Hardware, commits: float) -> float:
    """Seconds of a step's share of a commit, which is made when the next step begins, with nothing beside it.

    Args:
        plan: the decisions.
        profile: with its states' formats.
        hardware: whose disk is written.
        commits: made a step: 1 with durability "step", 1 / N with N, 0 without a store.
    """
    return commits * commit_bytes(plan, profile) / hardware.disk.write_bytes_per_s if commits else 0.0


def update_compute_seconds(plan: Plan, profile: Profile, block: int, hardware: Hardware) -> float:
    """Seconds for which a block's update delays compute: the device does it, wherever the bytes rest."""
    trained = sum(math.prod(p.shape) for p in profile.blocks[block].parameters if p.requires_grad)
    encoded = profile.encoded_elements.get(profile.blocks[block].name, 0)
    seconds = trained / hardware.update_elements_per_s + encoded / hardware.codec_elements_per_s
    if plan.splits_masters:
        seconds += trained / SPLIT_ELEMENTS_PER_S
    return seconds + (trained / ROUNDED_ELEMENTS_PER_S if plan.drops_masters else 0.0)


class Clock:
    """Runs a schedule on a `Hardware`. See [Note: the clock]."""

    def __init__(self, plan: Plan, profile: Profile, facts: SegmentFacts, hardware: Hardware | None) -> None:
        self.plan = plan
        self.profile = profile
        self.facts = facts
        self.shape = facts.shape
        self.hardware = hardware
        self.now_s = 0.0
        self.stalls_s: dict[str, float] = {}
        self.bytes_read: Counter[str] = Counter()
        self.bytes_written: Counter[str] = Counter()
        self._segment = {first: i for i, (first, _) in enumerate(facts.shape.segments)}
        self._flops: dict[tuple[int, bool], float] = {}
        # When each queue is free again, and when the last thing of a kind about a key is done.
        self._free_s: dict[tuple[Tier, str], float] = {}
        self._done_s: dict[tuple[str, object], float] = {}
        self._accumulated: set[int] = set()
        self._leaving: list[int] = []
        self._present: set[int] = set()

    def run(self, schedule: Schedule) -> list[ActionTime]:
        """Times of all actions, in order."""
        return [self._take(action) for action in schedule]

    def _take(self, action: Action) -> ActionTime:
        start = self.now_s
        match action:
            case Forward() | Backward():
                return self._compute(action)
            case Fetch(block=b):
                self._present.add(b)
                home = self.plan.block(self.shape.blocks[b]).weight_home
                begin = max(start, self._done_s.get(("update", b), 0.0))
                size = flat_weight_bytes(self.profile.blocks[b])
                return self._transfer("fetch", b, home, "weight", begin, read=size)
            case Offload(call=call, microbatch=m, tier=tier):
                size = self.facts.copy_bytes(self._segment[call])
                return self._transfer("offload", (call, m), tier, "activation", start, written=size)
            case Reload(call=call, microbatch=m):
                tier = self.shape.leaves[self._segment[call]]
                assert tier is not None, f"{action} in a plan that keeps it"
                size = self.facts.copy_bytes(self._segment[call])
                return self._transfer("reload", (call, m), tier, "activation", start, read=size)
            case Accumulate(block=b):
                return self._accumulate(b)
            case Update(block=b):
                return self._update(b)
            case Drop(call=call, microbatch=m):
                self._wait("offload", [(call, m)])
            case Release(block=b):
                self._present.discard(b)
                self._wait("fetch", [b])
                self._wait("update", [b])
            case Clear(block=b):
                self._wait("update", [b])
            case Norm() | Unscale() | Check():
                self._wait_all("accumulate")
            case Commit():
                self._wait_all("accumulate")
                self._wait_all("update")
            case _:
                pass
        return ActionTime(start_s=start, end_s=self.now_s)

    def _compute(self, action: Forward | Backward) -> ActionTime:
        segment = self._segment[action.first]
        self._wait("fetch", self.shape.needs[segment])
        is_backward = isinstance(action, Backward)
        if is_backward:
            self._wait("reload", [(action.first, action.microbatch)])
        start = self.now_s
        if (segment, is_backward) not in self._flops:
            flops = segment_flops(self.facts.trace, self.plan, self.shape, segment, is_backward=is_backward)
            self._flops[segment, is_backward] = flops
        flops = self._flops[segment, is_backward]
        if self.hardware is not None:
            self.now_s += flops / self.hardware.flops_per_s + CALL_OVERHEAD_S * (action.last - action.first + 1)
        end = self.now_s
        # The bytes of an accumulate stay no longer than the compute action after it.
        self._wait("accumulate", self._leaving)
        self._leaving = []
        return ActionTime(start_s=start, end_s=end)

    def _accumulate(self, block: int) -> ActionTime:
        home = self.plan.block(self.shape.blocks[block]).gradient_home
        size = flat_gradient_bytes(self.profile.blocks[block])
        # The first gradient overwrites what is at home. A later one is added: on disk that reads the sum back first.
        reads = size if home is Tier.DISK and block in self._accumulated else 0
        self._accumulated.add(block)
        self._leaving.append(block)
        begin = max(self.now_s, self._done_s.get(("accumulate", block), 0.0))
        return self._transfer("accumulate", block, home, "gradient", begin, read=reads, written=size)

    def _update(self, block: int) -> ActionTime:
        device = "cpu" if self.hardware is None else self.hardware.device
        traffic = update_traffic(self.plan, self.profile, block, is_visiting=block in self._present, device=device)
        begin = max(self.now_s, self._done_s.get(("accumulate", block), 0.0))
        end = self.now_s
        for direction, moved in (("read", traffic.read), ("write", traffic.written)):
            for (tier, category), nbytes in moved.items():
                counter = self.bytes_read if direction == "read" else self.bytes_written
                counter[category] += nbytes
                end = max(end, self._serve(tier, direction, begin, nbytes))
        if self.hardware is not None:
            self.now_s += update_compute_seconds(self.plan, self.profile, block, self.hardware)
            end = max(end, self.now_s)
        self._done_s["update", block] = end
        return ActionTime(start_s=begin, end_s=end)

    def _transfer(
        self, kind: str, key: object, tier: Tier, category: str, begin: float, *, read: int = 0, written: int = 0
    ) -> ActionTime:
        end = begin
        if read:
            self.bytes_read[category] += read
            end = self._serve(tier, "read", begin, read)
        if written:
            self.bytes_written[category] += written
            end = self._serve(tier, "write", end, written)
        self._done_s[kind, key] = end
        return ActionTime(start_s=begin, end_s=end)

    def _serve(self, tier: Tier, direction: str, begin: float, nbytes: int) -> float:
        if self.hardware is None:
            return begin
        link = link_of(self.hardware, tier)
        speed = link.read_bytes_per_s if direction == "read" else link.write_bytes_per_s
        end = max(begin, self._free_s.get((tier, direction), 0.0)) + nbytes / speed
        self._free_s[tier, direction] = end
        return end

    def _wait(self, kind: str, keys: Iterable[object]) -> None:
        for key in keys:
            done = self._done_s.get((kind, key), 0.0)
            if done > self.now_s:
                self.stalls_s[kind] = self.stalls_s.get(kind, 0.0) + done - self.now_s
                self.now_s = done

    def _wait_all(self, kind: str) -> None:
        self._wait(kind, [key for k, key in self._done_s if k == kind])


def link_of(hardware: Hardware, tier: Tier) -> Link:
    """The link between the device and a tier.

    Raises:
        PlanError: the machine has no such tier.
    """
    link = hardware.host if tier is Tier.HOST else hardware.disk
    if link is None:
        raise PlanError(
            "the plan uses host memory as a tier, but on this machine the device is the host; use device or disk"
        )
    return link
