"""Shape of a step: a plan applied to a model's calls, as building, checking and lowering a schedule
read it.

In: `Plan` and `Profile`. Out: `StepShape`. By segment: the blocks whose weights it needs, whether
it has a backward, whose gradients that makes, and the tier that saved tensors leave to. By block:
whether it visits and whether it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memfit.core.errors import UnsupportedError
from memfit.core.layout import Scheme, Share
from memfit.core.limits import KIB
from memfit.core.plan import Order, Plan, UpdateTime
from memfit.core.profile import CallProfile, Profile
from memfit.core.tiers import Tier


@dataclass(frozen=True, kw_only=True)
class SegmentShape:
    """Segments of a plan, whatever is decided of them.

    Attributes:
        segments: (first, last) call of each segment, in forward order.
        has_backward: by segment: gradients flow through one of its calls.
        needs: by segment: indices of blocks whose weights its calls read, ascending.
        contributes: by segment: indices of blocks that get a gradient from its backward,
            ascending.
    """

    segments: tuple[tuple[int, int], ...]
    has_backward: tuple[bool, ...]
    needs: tuple[tuple[int, ...], ...]
    contributes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class CallShape(SegmentShape):
    """A plan's decisions about calls, by segment, wherever weights rest.

    Attributes:
        leaves: by segment: the tier to which the tensors held for backward leave after forward;
            None: they stay.
        tail_segment: index of the first segment of the tail; the number of segments without a tail.
    """

    leaves: tuple[Tier | None, ...]
    tail_segment: int


@dataclass(frozen=True, kw_only=True)
class HomeShape:
    """A plan's decisions about blocks, whatever calls do.

    Attributes:
        visiting: blocks whose weights come to the device for a visit.
        accumulating: blocks whose gradient goes home by an accumulate; those of others stay on the
            device to their update.
        spreading: blocks of which each rank updates a share of its whole weights, so that ranks
            give each other the new ones.
        cut: blocks of whose weights each rank has its share at home, where an update works: it
            needs no visit.
    """

    visiting: frozenset[int]
    accumulating: frozenset[int]
    spreading: frozenset[int]
    cut: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model's blocks, under any plan.

    Attributes:
        blocks: names by index.
        trainable: blocks with a parameter that trains, ascending.
    """

    blocks: tuple[str, ...]
    trainable: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepShape(CallShape, HomeShape, ModelShape):
    """A plan and a profile, resolved to indices.

    Attributes:
        loose: those of them that get a gradient outside of all traced calls (read between calls, or
            by no call with a backward), so that it is complete only when a pass of backward has
            ended.
        ranks: of the plan.
        takes_turns: several microbatches pass a segment before the next segment begins.
        updates_in_backward: a block may be updated while backward of earlier calls goes on.
        scales_losses: losses are scaled, so no update begins before all gradients are known to be
            finite.
    """

    loose: frozenset[int]
    ranks: int
    takes_turns: bool
    updates_in_backward: bool
    scales_losses: bool

    def segment_of(self, call: int) -> int:
        """Returns the index of the segment that holds a call."""
        for index, (first, last) in enumerate(self.segments):
            if first <= call <= last:
                return index
        raise IndexError(call)


def describe_step(
    plan: Plan,
    profile: Profile,
    calls: CallShape | None = None,
    homes: HomeShape | None = None,
    model: ModelShape | None = None,
) -> StepShape:
    """Resolves a plan against a profile.

    Args:
        plan: the decisions.
        profile: of the model.
        calls: what `describe_calls` gives, where that is known.
        homes: what `describe_homes` gives, where that is known.
        model: what `describe_model` gives, where that is known.

    Raises:
        PlanError: the plan names blocks or calls that the model does not have, or contradicts
            itself.
    """
    homes = describe_homes(plan, profile) if homes is None else homes
    calls = describe_calls(plan, profile) if calls is None else calls
    model = describe_model(profile) if model is None else model
    trains = {*model.trainable}
    called = {b for gets in calls.contributes for b in gets}
    spanning = {i for i, b in enumerate(profile.blocks) if b.is_spanning}
    return StepShape(
        blocks=model.blocks,
        segments=calls.segments,
        has_backward=calls.has_backward,
        needs=calls.needs,
        contributes=calls.contributes,
        leaves=calls.leaves,
        tail_segment=calls.tail_segment,
        visiting=homes.visiting,
        trainable=model.trainable,
        loose=frozenset(trains & spanning | trains - called),
        accumulating=homes.accumulating,
        spreading=homes.spreading,
        cut=homes.cut,
        ranks=plan.ranks,
        takes_turns=plan.microbatches > 1 and plan.order is Order.LAYER_MAJOR,
        updates_in_backward=plan.update is UpdateTime.IN_BACKWARD,
        scales_losses=plan.scales_losses,
    )


def describe_model(profile: Profile) -> ModelShape:
    """Resolves a model's blocks."""
    return ModelShape(
        blocks=tuple(b.name for b in profile.blocks),
        trainable=tuple(i for i, b in enumerate(profile.blocks) if b.trains),
    )


def describe_homes(plan: Plan, profile: Profile) -> HomeShape:
    """Resolves a plan's decisions about blocks.

    Raises:
        PlanError: as `describe_step`.
    """
    names = tuple(b.name for b in profile.blocks)
    plan.check_homes(names)
    homes = [plan.block(name) for name in names]
    return HomeShape(
        visiting=frozenset(
            i
            for i, (b, home) in enumerate(zip(profile.blocks, homes, strict=True))
            if (b.encoded_bytes or not home.rests_whole_on_device) and not b.is_spanning
        ),
        accumulating=frozenset(i for i, name in enumerate(names) if plan.accumulates(name)),
        spreading=frozenset(
            i for i, (b, home) in enumerate(zip(profile.blocks, homes, strict=True)) if b.trains and home.spreads
        ),
        cut=frozenset(i for i, home in enumerate(homes) if home.weights_over is not Share.WHOLE),
    )


def describe_segments(plan: Plan, profile: Profile) -> SegmentShape:
    """Resolves the segments that a plan makes of calls."""
    trace = next(iter(profile.traces.values()))
    index = {block.name: i for i, block in enumerate(profile.blocks)}
    segments = plan.segments(len(trace.calls))
    trains = {i for i, b in enumerate(profile.blocks) if b.trains}
    needs: list[tuple[int, ...]] = []
    contributes: list[tuple[int, ...]] = []
    has_backward: list[bool] = []
    for first, last in segments:
        calls = trace.calls[first : last + 1]
        reads = {index[b] for c in calls for b in c.blocks}
        gets = {index[b] for c in calls if c.has_backward for b in c.blocks}
        needs.append(tuple(sorted(reads)))
        contributes.append(tuple(sorted(gets & trains)))
        has_backward.append(any(c.has_backward for c in calls))
    return SegmentShape(
        segments=segments, has_backward=tuple(has_backward), needs=tuple(needs), contributes=tuple(contributes)
    )


def describe_calls(plan: Plan, profile: Profile, of: SegmentShape | None = None) -> CallShape:
    """Resolves a plan's decisions about calls (`calls`, `cut_tail`).

    Args:
        plan: the decisions.
        profile: of the model.
        of: what `describe_segments` gives, where that is known.

    Raises:
        PlanError: as `describe_step`.
    """
    plan.check_calls(len(next(iter(profile.traces.values())).calls))
    of = describe_segments(plan, profile) if of is None else of
    tail = next((i for i, (first, _) in enumerate(of.segments) if first == plan.cut_tail), len(of.segments))
    return CallShape(
        segments=of.segments,
        has_backward=of.has_backward,
        needs=of.needs,
        contributes=of.contributes,
        leaves=tuple(
            _leaves(plan, first) if has_backward else None
            for (first, _), has_backward in zip(of.segments, of.has_backward, strict=True)
        ),
        tail_segment=tail,
    )


def _leaves(plan: Plan, first: int) -> Tier | None:
    call = plan.call(first)
    policy = call.saved.policy
    if policy.offloads:
        return call.saved_home
    if policy.keeps_all or call.boundary_home is Tier.DEVICE:
        return None
    return call.boundary_home


# Parts of a block that a commit to a store writes: one rule for the price and for what is done.
#
# In: the form of masters, the store's scheme. Out: names of parts, which `step.sizes` turns into
# bytes and `runs.schemes` into regions.

Masters = Literal["whole", "split", "none"]
"""How masters rest: whole, as what they differ from the weights by, or not at all."""
Part = Literal["weight", "master", "state"]


def masters_of(plan: Plan) -> Masters:
    """Names the form in which a plan's masters rest."""
    if plan.drops_masters:
        return "none"
    return "split" if plan.splits_masters else "whole"


def committed_parts(masters: Masters, *, has_masters: bool, scheme: Scheme = "generations") -> tuple[Part, ...]:
    """Lists the parts of a block that belong to a commit; those at home in the store are there
    already.

    Weights are left out where a whole master says them: they are rounded from it again when the run
    goes on. A split master is only what its weight does not say, so both are needed. A journal
    keeps one version of a block, all parts of which are written together.

    Args:
        masters: how they rest.
        has_masters: the block has any.
        scheme: of the store.
    """
    is_said = has_masters and masters == "whole" and scheme == "generations"
    return ("master", "state") if is_said else ("weight", "master", "state")


# Rule by which storages leave the device when a plan offloads activations, shared by profile,
# prediction and engine.

MINIMUM_LEAVING_BYTES = 64 * KIB
"""Smaller storages stay: a transfer of fewer bytes costs more in latency than the memory is worth.
"""


def leaves(nbytes: int, *, is_movable: bool, minimum_bytes: int = MINIMUM_LEAVING_BYTES) -> bool:
    """Tells whether a storage leaves.

    Args:
        nbytes: size of the whole storage.
        is_movable: all tensors over the storage are movable; see `is_movable`.
        minimum_bytes: smaller ones stay.
    """
    return is_movable and nbytes >= minimum_bytes


def is_movable(tensor: Any, kinds: tuple[type, ...]) -> bool:
    """Tells whether a tensor can be rebuilt as a view of bytes that were offloaded and came back.

    Args:
        tensor: a torch tensor, dense.
        kinds: classes of ordinary tensors; bytes of other classes need not be one range.
    """
    return type(tensor) in kinds and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())


# Check for calls that cannot be recomputed: running them twice would compute something else.
#
# In: a plan and the calls of a trace. Out: nothing, or an error.


def check_again(plan: Plan, calls: Sequence[CallProfile]) -> None:
    """Checks that the plan recomputes no call that would then compute something else. Raises
    `UnsupportedError`.
    """
    for call in calls:
        if call.runs_once and plan.call(call.index).saved.policy.recomputes:
            why, way_out = _why(call)
            raise UnsupportedError(
                f"call {call.index} ({call.site}) {why}: plan saved='keep' or 'offload' for it{way_out}"
            )


def _why(call: CallProfile) -> tuple[str, str]:
    if call.changes_arguments:
        return (
            "puts tensors into an object that it was given (a key-value cache), so running it again would be wrong",
            ", or switch the cache off (use_cache=False)",
        )
    if call.is_substituted:
        return (
            "is called with other tensors in the places of its parameters (torch.func.functional_call, for instance), and run again it would compute with its own",
            "",
        )
    return (
        "changes a tensor in place that its module keeps (no buffer), and run again it would meet what it left there",
        ", or make it a buffer (register_buffer)",
    )
