"""Sizes of homes, buffers and transfers: of all that a plan keeps, and that an update or a commit
moves.

In: `Plan`, `Profile`. Out: bytes, the same for prediction and for the runtime's homes
(`core.layout`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from memfit.core.errors import PlanError
from memfit.core.layout import (
    ALIGNMENT_BYTES,
    EXCHANGED_ELEMENTS,
    SPREAD_BYTES,
    BlockCut,
    Scheme,
    Share,
    cut_block,
    flat_layout,
    spare_room_bytes,
    split_layout,
)
from memfit.core.limits import MIB, round_up
from memfit.core.plan import Plan
from memfit.core.profile import (
    BlockProfile,
    CallProfile,
    HeldResults,
    Profile,
    StorageProfile,
    TensorProfile,
    TraceProfile,
)
from memfit.core.shape import StepShape, committed_parts, masters_of
from memfit.core.tiers import Tier, is_processor, updates_in_place
from memfit.core.work_kinds import summed
from memfit.step.segment_facts import KnownFacts

# Bounce buffers of the disk's threads, two each way, for ranges that do not begin and end on pages.
# They are the process's own: beside an accelerator they are host memory.
STAGING_BYTES = 4 * MIB
# Of these, what transfers touch, and so what a process holds: tails, and tensors that are not on
# pages because they are small. Measured: 0 to 0.5 MiB in 13 jobs. Tensors that another allocator
# gave may touch all.
TOUCHED_STAGING_BYTES = 1 * MIB
# Sums of gradients are fp32, or wider.
WIDE_BYTES = 4
# An atomic step keeps the version before beside the one that is being written.
ATOMIC_VERSIONS = 2


@dataclass(frozen=True, kw_only=True)
class UpdateTraffic:
    """Bytes over links: (tier, category) -> bytes."""

    read: Mapping[tuple[Tier, str], int]
    written: Mapping[tuple[Tier, str], int]


def trace_of(profile: Profile, microbatches: int) -> TraceProfile:
    """The trace of the largest of `microbatches` nearly equal slices of the batch.

    Raises:
        PlanError: there is no trace of that many rows.
    """
    rows = -(-profile.batch_rows // microbatches)
    if rows not in profile.traces:
        raise PlanError(
            f"{microbatches} microbatches of {profile.batch_rows} rows need a trace of {rows} rows; "
            f"traced are {sorted(profile.traces)}: profile that size too"
        )
    return profile.traces[rows]


def flat_weight_bytes(block: BlockProfile) -> int:
    """Bytes of a block's flat buffer of weights."""
    return block.flat_bytes[0]


def flat_master_bytes(block: BlockProfile) -> int:
    """Bytes of a block's masters; 0 where its weights are their own."""
    return block.flat_bytes[1]


def master_home_bytes(plan: Plan, block: BlockProfile) -> int:
    """Bytes that a block's masters rest in: all of them, what the weights do not say already, or
    none.
    """
    if plan.drops_masters:
        return 0
    if not plan.splits_masters:
        return flat_master_bytes(block)
    return split_layout([(p.nbytes, p.master_nbytes) for p in block.parameters])[1]


def cut_of(plan: Plan, profile: Profile, block: BlockProfile) -> BlockCut:
    """Places at which ranks cut a block."""
    uncut = {index for index, p in enumerate(block.parameters) if _needs_whole(profile, p)}
    return cut_block([math.prod(p.shape) for p in block.parameters], plan.ranks, uncut)


def needs_whole(profile: Profile, block: BlockProfile) -> bool:
    """Tells whether the optimizer needs all of any parameter of a block at once."""
    return any(_needs_whole(profile, p) for p in block.parameters)


def _needs_whole(profile: Profile, parameter: TensorProfile) -> bool:
    return parameter.name in profile.updates and profile.updates[parameter.name].needs_whole


def weight_home_bytes(plan: Plan, profile: Profile, block: BlockProfile) -> int:
    """Bytes of a block's weights at home: all of them, or a rank's share, the largest. Where some
    rest in few bits, of what they rest in.
    """
    if block.encoded_bytes:
        return block.encoded_bytes
    if plan.block(block.name).weights_over is Share.WHOLE:
        return flat_weight_bytes(block)
    return cut_of(plan, profile, block).largest([p.nbytes for p in block.parameters])


def resting_master_bytes(plan: Plan, profile: Profile, block: BlockProfile) -> int:
    """Bytes of a block's masters at home: of all of them, or of a rank's share, the largest."""
    if plan.drops_masters or plan.block(block.name).states_over is Share.WHOLE:
        return master_home_bytes(plan, block)
    return cut_of(plan, profile, block).largest([p.master_nbytes for p in block.parameters])


def gradient_home_bytes(plan: Plan, profile: Profile, block: BlockProfile) -> int:
    """Bytes of a block's gradients at home: of all of them, or of a rank's share, the largest."""
    if plan.ranks == 1:
        return flat_gradient_bytes(block)
    # What ranks reduce lies as the masters do, beside parameters that do not train.
    sizes = [p.master_nbytes or p.nbytes for p in block.parameters]
    if plan.block(block.name).gradients_over is Share.WHOLE:
        return flat_layout(sizes)[1]
    return cut_of(plan, profile, block).largest(sizes)


def state_home_bytes(plan: Plan, profile: Profile, block: BlockProfile) -> int:
    """Bytes of a block's optimizer states at home: of all of them, or of a rank's share, the
    largest.
    """
    whole = profile.resting_state_bytes(block.name)
    if plan.block(block.name).states_over is Share.WHOLE:
        return whole
    cut = cut_of(plan, profile, block)
    return min(whole, max(_held_state_bytes(profile, block, cut.held(rank)) for rank in range(plan.ranks)))


def _held_state_bytes(profile: Profile, block: BlockProfile, held: Sequence[range]) -> int:
    total = 0
    for parameter, elements in zip(block.parameters, held, strict=True):
        update, numel = profile.updates.get(parameter.name), math.prod(parameter.shape)
        if update is None or not elements:
            continue
        # As many tensors as take that many bytes, each on pages of its own.
        count = max(1, round(update.state_bytes / max(parameter.master_nbytes or parameter.nbytes, 1)))
        each = -(-update.state_bytes * len(elements) // (numel * count))
        total += count * round_up(each, ALIGNMENT_BYTES)
    return total


def exchange_bytes(plan: Plan, profile: Profile, block: BlockProfile) -> int:
    """Bytes by which ranks exchange a block's gradient, on the rank that needs most: a piece for
    each rank goes, and one from each comes.
    """
    if plan.ranks == 1:
        return 0
    cut, found = cut_of(plan, profile, block), 0
    trained = [(i, _summed_itemsize(p)) for i, p in enumerate(block.parameters) if p.requires_grad]
    for itemsize in {size for _, size in trained}:
        runs = [sum(len(cut.held(r)[i]) for i, size in trained if size == itemsize) for r in range(plan.ranks)]
        pieces = [min(run, EXCHANGED_ELEMENTS) for run in runs]
        found = max(found, itemsize * (sum(pieces) + plan.ranks * max(pieces)))
    # Which parameters have a gradient: a byte each, of every rank, and what is made of these.
    return found + (plan.ranks + 2) * len(block.parameters)


def _summed_itemsize(parameter: TensorProfile) -> int:
    """Bytes of an element of a parameter's summed gradient."""
    return (parameter.master_nbytes or parameter.nbytes) // max(math.prod(parameter.shape), 1)


def spread_bytes(plan: Plan, profile: Profile, block: BlockProfile) -> int:
    """Bytes by which a block's new weights go to all ranks, each of which has updated its share: a
    piece of each rank's share, where the weights rest in no processor's memory.
    """
    homes = plan.block(block.name)
    if not homes.spreads or homes.weight_home.traits.is_device or homes.weight_home.traits.is_addressable:
        return 0
    cut = cut_of(plan, profile, block)
    return plan.ranks * min(SPREAD_BYTES, cut.largest([p.nbytes for p in block.parameters]))


def received_weight_bytes(plan: Plan, block: BlockProfile) -> int:
    """Bytes of a block's weights that a rank receives where all ranks give it their shares: the
    mean over ranks.
    """
    return flat_weight_bytes(block) * (plan.ranks - 1) // plan.ranks


def received_gradient_bytes(plan: Plan, block: BlockProfile) -> int:
    """Bytes that a rank receives when a block's gradient is summed over ranks: the mean over
    ranks.
    """
    sizes = [p.master_nbytes or p.nbytes for p in block.parameters if p.requires_grad]
    # To the share of each, and from there to all, where all have the whole sum.
    ways = 2 if plan.block(block.name).gradients_over is Share.WHOLE else 1
    return ways * sum(sizes) * (plan.ranks - 1) // plan.ranks


def update_share(plan: Plan, profile: Profile, block: BlockProfile) -> float:
    """Part of a block's elements that a rank updates, the largest."""
    numel = sum(math.prod(p.shape) for p in block.parameters)
    if plan.block(block.name).states_over is Share.WHOLE or not numel:
        return 1.0
    cut = cut_of(plan, profile, block)
    return max(sum(map(len, cut.held(rank))) for rank in range(plan.ranks)) / numel


def flat_gradient_bytes(block: BlockProfile, *, is_summed: bool = True) -> int:
    """Bytes of a block's gradients.

    Args:
        block: with or without masters.
        is_summed: as they add up and rest at home, in the masters' dtype; else as backward makes
            them, in that of the weights.
    """
    return block.flat_bytes[3] if is_summed else block.flat_bytes[2]


def disk_staging_bytes(device: str) -> int:
    """Bytes of the disk's bounce buffers that are counted where something rests in files: those
    that are usually touched where the device is this process, all of them in host memory.
    """
    return TOUCHED_STAGING_BYTES if is_processor(device) else STAGING_BYTES


def uses_disk(plan: Plan, shape: StepShape) -> bool:
    """Tells whether something rests in files, or leaves to them."""
    homes = (plan.block(name) for name in shape.blocks)
    used = {tier for h in homes for tier in (h.weight_home, h.gradient_home, h.state_home)}
    return any(tier.traits.is_files for tier in (*used, *(tier for tier in shape.leaves if tier is not None)))


def home_bytes(plan: Plan, profile: Profile, tier: Tier) -> int:
    """Bytes of weights, gradients and states whose home is a tier. In files, weights, masters and
    states count twice where steps are atomic: each has a spare slot.
    """
    working = sum(
        gradient_home_bytes(plan, profile, block)
        for block in profile.blocks
        if plan.block(block.name).gradient_home is tier and block.trains
    )
    return kept_bytes(plan, profile, tier) + working


def kept_bytes(plan: Plan, profile: Profile, tier: Tier) -> int:
    """The part of `home_bytes` that outlives a step: weights, masters, states."""
    return sum(kept_bytes_of(plan, profile, block, tier) for block in profile.blocks)


def kept_bytes_of(plan: Plan, profile: Profile, block: BlockProfile, tier: Tier) -> int:
    """The part of `kept_bytes` that is one block's."""
    homes, kept = plan.block(block.name), 0
    if homes.weight_home is tier:
        kept += weight_home_bytes(plan, profile, block)
    if homes.state_home is tier:
        kept += state_home_bytes(plan, profile, block) + resting_master_bytes(plan, profile, block)
    return kept * (ATOMIC_VERSIONS if plan.is_atomic and tier.traits.is_files else 1)


def loaded_bytes(plan: Plan, profile: Profile, tier: Tier) -> int:
    """The part of `kept_bytes` that is filled before the first step: weights, masters."""
    weights = (weight_home_bytes(plan, profile, b) for b in profile.blocks if plan.block(b.name).weight_home is tier)
    masters = (resting_master_bytes(plan, profile, b) for b in profile.blocks if plan.block(b.name).state_home is tier)
    return sum(weights) + sum(masters)


def store_bytes(plan: Plan, profile: Profile, scheme: Scheme = "generations") -> int:
    """Disk that a store claims for a run.

    With generations: two slots of every weight, master and state, wherever they rest, and of the
    buffers. With a journal: one slot of what rests on disk and its spare room, the gradients; two
    slots of what rests in memory, and of the buffers.

    Not counted: a journal's record (some 256 KiB and 1 KiB a parameter, twice).
    """
    moving: list[int] = []
    total = 2 * round_up(profile.buffer_bytes, ALIGNMENT_BYTES)
    for block in profile.blocks:
        parts = (
            weight_home_bytes(plan, profile, block),
            state_home_bytes(plan, profile, block),
            resting_master_bytes(plan, profile, block),
        )
        size = sum(round_up(nbytes, ALIGNMENT_BYTES) for nbytes in parts)
        if scheme == "generations":
            total += 2 * size
        elif not block.trains:
            total += size
        else:
            total += flat_gradient_bytes(block)
            if plan.block(block.name).rests_on_disk:
                moving.append(size)
            else:
                total += 2 * size
    return total + (sum(moving) + spare_room_bytes(moving) if moving else 0)


def disk_bytes_with_store(plan: Plan, profile: Profile, disk_bytes: int, scheme: Scheme = "generations") -> int:
    """Bytes of disk that a plan takes where its run is committed to a store: homes on disk lie
    inside of that, with a journal gradients too.

    Args:
        plan: the decisions.
        profile: with its states' formats.
        disk_bytes: predicted peak without a store.
        scheme: of the store.
    """
    inside = (home_bytes if scheme == "journal" else kept_bytes)(plan, profile, Tier.DISK)
    return store_bytes(plan, profile, scheme) + disk_bytes - inside


def update_traffic(
    plan: Plan, profile: Profile, block: int, *, is_visiting: bool, device: str = "cpu"
) -> UpdateTraffic:
    """Bytes that an update of a block moves between the processor that computes it and the homes.

    What is updated where it rests does not move (`core.tiers.updates_in_place`). All else is read,
    and weight, master and states are written back; a weight that visits is not read again, nor is
    one that is rounded from a whole master. On the host nothing visits: what rests there does not
    move, and a weight at home on the device comes down, unless a whole master says it, and goes up
    again.
    """
    profiled = profile.blocks[block]
    homes = plan.block(profiled.name)
    on_host = homes.updates_on_host(device)
    place = homes.weight_home
    read: Counter[tuple[Tier, str]] = Counter()
    written: Counter[tuple[Tier, str]] = Counter()
    sizes = {
        "weight": (place, flat_weight_bytes(profiled)),
        "gradient": (homes.gradient_home, flat_gradient_bytes(profiled)),
        "state": (homes.state_home, profile.state_bytes.get(profiled.name, 0)),
    }
    has_masters = flat_master_bytes(profiled) > 0
    # A split master is read together with the weight that says its upper bits; without masters, the
    # weight is all there is.
    reads_weight = (on_host or not is_visiting) and (plan.splits_masters or plan.drops_masters or not has_masters)
    if has_masters:
        sizes["master"] = (homes.state_home, master_home_bytes(plan, profiled))
    share = update_share(plan, profile, profiled)
    for category, (home, whole) in sizes.items():
        nbytes = round(whole * share)
        if home is Tier.HOST if on_host else updates_in_place(home, device):
            continue
        if home is Tier.DEVICE:
            # The weight alone, over the link to the host: what is read of it leaves the device.
            read[Tier.HOST, category] += nbytes
            written[Tier.HOST, category] += nbytes if reads_weight else 0
            continue
        if category != "weight" or reads_weight:
            read[home, category] += nbytes
        if category != "gradient":
            written[home, category] += nbytes
    return UpdateTraffic(read=read, written=written)


def commit_bytes(plan: Plan, profile: Profile) -> int:
    """Bytes that a commit writes of what the step changed in memory (`core.shape`), and of
    buffers.

    What rests on disk was written by the step itself.
    """
    total = profile.buffer_bytes
    for block in profile.blocks:
        if not block.trains:
            continue
        homes = plan.block(block.name)
        sizes = {
            "weight": (homes.weight_home, weight_home_bytes(plan, profile, block)),
            "master": (homes.state_home, resting_master_bytes(plan, profile, block)),
            "state": (homes.state_home, state_home_bytes(plan, profile, block)),
        }
        for part in committed_parts(masters_of(plan), has_masters=flat_master_bytes(block) > 0):
            home, nbytes = sizes[part]
            total += 0 if home is Tier.DISK else nbytes
    return total


# Traces of the microbatches of a step: a batch of 41 rows in two makes one of 21 and one of 20.
#
# In: `Profile`. Out: a `TraceProfile` for each microbatch, in order.
#
# [Note: a row fewer]
# Plans are looked for with the traces of a few sizes, of which the smaller microbatch's need not be
# one. Then each figure of it is taken from the straight line between its two neighbours. What is a
# maximum of sums, each of which grows by as much with each row, lies on or below that line, so that
# a peak is not predicted too low. Where no smaller size was traced, or another one made other
# storages, the smaller microbatch counts as the larger one.

_RecordT = TypeVar("_RecordT", CallProfile, HeldResults, StorageProfile, TraceProfile)
# What changes with the rows of a microbatch; `rows` and structure do not.
_BYTES = ("bytes", "flops")


def traces_of(profile: Profile, microbatches: int, known: KnownFacts | None = None) -> tuple[TraceProfile, ...]:
    """Returns the trace of each microbatch, the larger ones first.

    Args:
        profile: with a trace of the larger ones.
        microbatches: into how many the batch is cut.
        known: facts about the profile that were found before, and are added to.

    Raises:
        PlanError: there is no trace of the larger ones.
    """
    larger = trace_of(profile, microbatches)
    rows, more = divmod(profile.batch_rows, microbatches)
    if not more or not profile.rows_are_alike:
        return (larger,) * microbatches
    smaller = (known or KnownFacts()).found(("trace", rows), lambda: _trace_with(profile, rows, larger))
    return (larger,) * more + (smaller,) * (microbatches - more)


def input_bytes(traces: Sequence[TraceProfile], known: KnownFacts) -> int:
    """Returns the bytes of the batch: of all microbatches' parts."""

    def found() -> int:
        return sum(s.nbytes for trace in traces for s in trace.storages if s.is_input and not s.is_buffer)

    return known.found(("inputs", *(trace.rows for trace in traces)), found)


def _trace_with(profile: Profile, rows: int, larger: TraceProfile) -> TraceProfile:
    if rows in profile.traces:
        found = profile.traces[rows]
        return found if _is_alike(found, larger) else larger
    below = max((size for size in profile.traces if size < rows), default=0)
    if not below or not _is_alike(profile.traces[below], larger):
        return larger
    return _between(profile.traces[below], larger, rows)


def _is_alike(small: TraceProfile, large: TraceProfile) -> bool:
    """Tells whether both traces made the same storages for the same calls."""
    return [_role(s) for s in small.storages] == [_role(s) for s in large.storages] and [
        (c.site, c.has_backward) for c in small.calls
    ] == [(c.site, c.has_backward) for c in large.calls]


def _role(s: StorageProfile) -> tuple[Any, ...]:
    return s.segment, s.saved_inside, s.saved_outside, s.argument_of, s.last_use, s.held_until, s.is_input


def scaled(profile: Profile, rows: int, microbatches: int, growth: float) -> Profile:
    """Profile for a batch that was not traced: all sizes of the largest trace times a factor.

    Args:
        profile: of another batch of the same program.
        rows: of the batch.
        microbatches: into how many the batch is cut.
        growth: bound of bytes and work of a microbatch, relative to the largest one that was
            traced; at least 1, since gradients of parameters do not shrink with the batch.
    """
    largest = profile.traces[max(profile.traces)]
    size = -(-rows // microbatches)
    return replace(profile, batch_rows=rows, traces={size: _mixed_trace(largest, largest, size, growth, base=0)})


def _between(small: TraceProfile, large: TraceProfile, rows: int) -> TraceProfile:
    return _mixed_trace(small, large, rows, (rows - small.rows) / (large.rows - small.rows))


def _mixed_trace(small: TraceProfile, large: TraceProfile, rows: int, share: float, *, base: int = 1) -> TraceProfile:
    """A trace on the line that begins at the small one (base 1) or at nothing (base 0)."""

    def mix(low: float, high: float) -> int:
        return math.ceil(base * low + share * (high - base * low))

    def mixed(low: _RecordT, high: _RecordT) -> _RecordT:
        found: dict[str, Any] = {}
        for name in (field.name for field in fields(high)):
            parts: list[Any] = [getattr(low, name), getattr(high, name)]
            if name.endswith(_BYTES) and None not in parts:
                found[name] = mix(*parts)
            elif name.endswith("work"):
                found[name] = summed(zip(parts, (base * (1.0 - share), share), strict=True))
        return replace(high, **found)

    calls = [
        replace(
            mixed(low, high),
            held_results=tuple(
                mixed(a, b) if a.saved is b.saved else b
                for a, b in zip(low.held_results, high.held_results, strict=True)
            ),
        )
        for low, high in zip(small.calls, large.calls, strict=True)
    ]
    storages = [mixed(low, high) for low, high in zip(small.storages, large.storages, strict=True)]
    return replace(mixed(small, large), rows=rows, calls=tuple(calls), storages=tuple(storages))
