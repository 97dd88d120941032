"""The plans that the rules look at: every combination of a few uniform decisions.

In: `Profile`, the tiers there are. Out: `Candidate`s, simplest first.

| decision     | choices                                                                                                |
|--------------|--------------------------------------------------------------------------------------------------------|
| microbatches | 1, 2, 4, 8, ... up to the rows of the batch                                                            |
| order        | layer-major; with several microbatches also microbatch-major (plain accumulation)                      |
| saved        | keep; select; recompute; recompute with arguments away; offload: the same for all repeated calls       |
| homes        | all on the device; states away; states and gradients away (where gradients wait); everything away      |
| prefetch     | 1; with everything away also 0 and 3                                                                   |
| tail         | with several microbatches, layer-major: the calls after the last repeated one                          |
| update       | in backward, unless the norm of all gradients must be known first, or hooks read others' gradients     |
| updates      | on the device; beside an accelerator, where states and gradients are on the host, also on the host's cores |
| masters      | where there are any: whole, or split (what the bf16 weight does not say), where states go; none, if    |
|              | stochastic rounding is allowed                                                                         |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from memfit.core.errors import PlanError
from memfit.core.limits import KIB, MIB, format_bytes
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier

# Which blocks may rest elsewhere than on the device: the large ones, and small ones where they are
# many.
#
# In: `Profile`. Out: sets of names.

# Moving less than this saves little memory, and a transfer of its own costs more than it. Such a
# block may rest in memory also where a journal is kept, which then has two rooms for it on disk.
SMALL_BLOCK_BYTES = MIB

# What stays on the device has its gradient and states there too: with Adam four times its weights.
_STAYING_SHARE = 4

# Four pages: of less, direct I/O would move more padding than block.
_LEAST_BLOCK_BYTES = 16 * KIB


def movable_sets(profile: Profile) -> tuple[frozenset[str], ...]:
    """Returns sets of blocks that may move together: the large ones; and where the small ones with
    their states hold more in all than the largest block, which is on the device at some time under
    any plan, a set of large and small ones that leaves less than that.

    Args:
        profile: of the model.
    """
    large = frozenset(b.name for b in profile.blocks if b.weight_bytes >= SMALL_BLOCK_BYTES)
    every = movable_blocks(profile)
    return tuple(names for names in dict.fromkeys((large, every)) if names)


def movable_blocks(profile: Profile) -> frozenset[str]:
    """Returns the largest of `movable_sets`; blocks of one size are all in it, or none is."""
    least = _least_bytes([b.weight_bytes for b in profile.blocks])
    return frozenset(b.name for b in profile.blocks if b.weight_bytes >= least)


def _least_bytes(sizes: list[int]) -> int:
    """Returns from which size on blocks may move."""
    small = sorted(size for size in sizes if size < SMALL_BLOCK_BYTES)
    may_stay = max(SMALL_BLOCK_BYTES, max(sizes, default=0) // _STAYING_SHARE)
    over = next(
        (size for size, held in zip(small, accumulate(small), strict=True) if held > may_stay), SMALL_BLOCK_BYTES
    )
    return max(_LEAST_BLOCK_BYTES, over)


# Requirements of a journal on a plan: gradients at home on disk, updates after backward, what is
# large at home on disk.
#
# In: a plan and a profile. Out: the plan with that, or a refusal.


def journaled(plan: Plan, profile: Profile, like: Plan | None = None) -> Plan:
    """Returns the plan with gradients at home on disk and updates after backward.

    Homes of weights and states are left as they are.

    Args:
        plan: any.
        profile: of the model.
        like: the plan of a run that goes on: what rests on disk there, frozen since or not, has no
            other room, and does here.
    """
    blocks = dict(plan.blocks)
    for block in profile.blocks:
        if block.trains:
            blocks[block.name] = replace(plan.block(block.name), gradient_home=Tier.DISK)
        if like is not None and like.block(block.name).rests_on_disk:
            homes = blocks.get(block.name, BlockPlan())
            blocks[block.name] = replace(homes, weight_home=Tier.DISK, state_home=Tier.DISK)
    return replace(plan, blocks=blocks, update=UpdateTime.AFTER_BACKWARD)


def problem_of_journaled(plan: Plan, profile: Profile) -> str | None:
    """Returns what keeps a run with a journal from this plan, and what the plan must say instead;
    None if nothing does.
    """
    if plan.update is not UpdateTime.AFTER_BACKWARD:
        return "updates are made once all gradients are durable: it must say update='after-backward'"
    for block in (b for b in profile.blocks if b.trains):
        homes = plan.block(block.name)
        if homes.gradient_home is not Tier.DISK:
            return f"the gradient of block {block.name!r} must be durable before its update: it must say gradient_home='disk'"
        if not homes.rests_on_disk and block.weight_bytes >= SMALL_BLOCK_BYTES and not block.is_spanning:
            return (
                f"block {block.name!r} ({format_bytes(block.weight_bytes)}) does not rest on disk, where a journal saves room: it must say "
                "weight_home='disk' and state_home='disk'"
            )
    return None


def check_journaled(plan: Plan, profile: Profile) -> None:
    """Refuses a plan under which a journal cannot be kept, or saves no room.

    Raises:
        PlanError: says what to change.
    """
    problem = problem_of_journaled(plan, profile)
    if problem is not None:
        raise PlanError(f"the plan does not go with scheme='journal': {problem}, or take scheme='generations'")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan to look at.

    Attributes:
        name: in a front.
        plan: the decisions.
        classic: name of its technique (`planner.search.classics`); empty where it has no name.
    """

    name: str
    plan: Plan
    classic: str = ""


@dataclass(frozen=True, kw_only=True)
class MasterForms:
    """Which plans with masters may be looked at: those that keep them (whole or split), and those
    that do without.
    """

    kept: bool = True
    dropped: bool = False


@dataclass(frozen=True, kw_only=True)
class _Homes:
    name: str
    tier: Tier = Tier.DEVICE
    moves_gradients: bool = False
    moves_weights: bool = False
    prefetch: int = 1
    updates_on_host: bool = False
    blocks: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class _SavedChoice:
    name: str
    call: CallPlan


def update_time(profile: Profile, *, clips_norm: bool) -> UpdateTime:
    """Returns when blocks are updated: as soon as backward has left them, unless gradients are
    needed together.
    """
    return UpdateTime.AFTER_BACKWARD if clips_norm or profile.read_gradients else UpdateTime.IN_BACKWARD


def list_candidates(
    profile: Profile,
    *,
    microbatches: int,
    tiers: tuple[Tier, ...],
    clips_norm: bool,
    masters: MasterForms | None = None,
    compute: ComputeDtype | None = None,
    has_journal: bool = False,
    like: Plan | None = None,
    may_update_on_host: bool = False,
) -> Iterator[Candidate]:
    """All candidates for one number of microbatches, simplest first.

    Args:
        profile: of the model; any of its traces.
        microbatches: into how many slices the batch is cut.
        tiers: where things may go, besides the device.
        clips_norm: gradients are clipped by their global norm.
        masters: how they may be, where the profile has any; None: kept.
        compute: the dtype that the profile was made for; None: bf16 where it has masters, else as
            given.
        has_journal: the run keeps a journal: only what rests on disk, with gradients there too.
        like: of such a run that goes on, its plan.
        may_update_on_host: the host's cores may run the optimizer, beside an accelerator.
    """
    trace = next(iter(profile.traces.values()))
    chosen = decided_calls(trace)
    given = ComputeDtype.BFLOAT16 if profile.has_masters else ComputeDtype.GIVEN
    chosen_dtype = given if compute is None else compute
    # only bf16's bits are the upper ones of its master, and only its rounding takes the noise
    forms = (masters or MasterForms()) if profile.has_masters and chosen_dtype is ComputeDtype.BFLOAT16 else None
    orders = (Order.LAYER_MAJOR,) if microbatches == 1 else (Order.MICROBATCH_MAJOR, Order.LAYER_MAJOR)
    if profile.keeps_order:
        orders = orders[:1]
    written, movable = profile.written_blocks, movable_sets(profile)
    for order in orders:
        waits = clips_norm or chosen_dtype.scales_losses or (microbatches > 1 and order is Order.MICROBATCH_MAJOR)
        is_layer_major = microbatches > 1 and order is Order.LAYER_MAJOR
        # gradients that hooks read have to stay on the device
        places = _homes(
            tiers,
            gradients_wait=waits and not profile.read_gradients,
            may_update_on_host=may_update_on_host and not profile.read_gradients,
        )
        for choice in _saved_choices(trace, chosen, tiers):
            calls = _calls(choice, trace, chosen, written)
            seen: list[Plan] = []
            for homes in _of_model(places, movable, choice):
                plan = Plan(
                    microbatches=microbatches,
                    order=order,
                    blocks=_blocks(profile, homes),
                    calls=calls,
                    tail=find_tail(trace) if is_layer_major else None,
                    update=update_time(profile, clips_norm=clips_norm),
                    prefetch=homes.prefetch,
                    compute_dtype=chosen_dtype,
                )
                if has_journal:
                    plan = journaled(plan, profile, like)
                    if problem_of_journaled(plan, profile) is not None:
                        continue
                if plan not in seen:
                    seen.append(plan)
                    name = _name(microbatches, is_layer_major=is_layer_major, choice=choice, homes=homes)
                    yield from _with_masters(name, plan, forms)


def _of_model(places: Sequence[_Homes], movable: Sequence[frozenset[str]], choice: _SavedChoice) -> list[_Homes]:
    """Returns the places of a model's blocks, for each set of these that may move. Where all blocks
    are too small to move, these are all on the device, with as many buffers as the others have for
    what leaves of calls.
    """
    if movable:
        return [
            replace(homes, blocks=names, name=homes.name if names is movable[0] else f"{homes.name}, small blocks too")
            for names in movable
            for homes in places
        ]
    leaves = choice.call.saved.policy.offloads or choice.call.boundary_home is not Tier.DEVICE
    buffers = dict.fromkeys(homes.prefetch for homes in places) if leaves else (places[0].prefetch,)
    return [replace(places[0], prefetch=prefetch) for prefetch in buffers]


def _calls(
    choice: _SavedChoice, trace: TraceProfile, chosen: frozenset[int], written: frozenset[str]
) -> tuple[CallPlan, ...]:
    """Decisions of all calls, the choice for the chosen ones; empty if all are kept."""
    policy = choice.call.saved.policy
    if policy.keeps_all:
        return ()
    # A call that changes what it was given (a key-value cache), a weight or what it keeps cannot
    # be run again.
    return tuple(
        choice.call
        if c.index in chosen
        and not (policy.recomputes and (c.runs_once or not written.isdisjoint(c.blocks)))
        and not c.must_keep
        else CallPlan()
        for c in trace.calls
    )


def _with_masters(name: str, plan: Plan, forms: MasterForms | None) -> Iterator[Candidate]:
    """Yields the plan in each form that its masters may have; as it is if it has none (None)."""
    if forms is None or forms.kept:
        yield Candidate(name=name, plan=plan)
    if forms is not None and forms.kept:
        yield Candidate(name=f"{name}, masters split", plan=replace(plan, splits_masters=True))
    if forms is not None and forms.dropped:
        yield Candidate(name=f"{name}, no masters", plan=replace(plan, drops_masters=True))


def decided_calls(trace: TraceProfile) -> frozenset[int]:
    """Calls whose saved tensors are decided: the repeated ones with a backward.

    All with a backward if none repeats.
    """
    backward = {c.index for c in trace.calls if c.has_backward}
    repeated = {c.index for c in trace.calls if c.is_repeated} & backward
    return frozenset(repeated or backward)


def find_tail(trace: TraceProfile) -> int | None:
    """First of the calls after the last repeated one.

    The last call if none repeats; None if nothing follows, or it cannot run back on its own.
    """
    repeated = [c.index for c in trace.calls if c.is_repeated]
    first = repeated[-1] + 1 if repeated else len(trace.calls) - 1
    is_there = 0 < first < len(trace.calls)
    return first if is_there and trace.shared_with_tail(first) is None else None


def _saved_choices(trace: TraceProfile, chosen: frozenset[int], tiers: tuple[Tier, ...]) -> list[_SavedChoice]:
    choices = [_SavedChoice(name="keep", call=CallPlan())]
    again = [saved for saved in Saved if saved.policy.recomputes] if chosen else []
    # Those that repeat least first. A policy whose results were not traced is priced as holding
    # everything: no better than keeping.
    choices += [
        _SavedChoice(name=str(saved), call=CallPlan(saved=saved))
        for saved in sorted(again, key=lambda s: s.policy.replay_share)
        if not saved.policy.kept_operators or all(trace.calls[i].held(saved) is not None for i in chosen)
    ]
    for tier in tiers if chosen else ():
        away = CallPlan(saved=Saved.RECOMPUTE, boundary_home=tier)
        choices.append(_SavedChoice(name=f"recompute, arguments on {tier}", call=away))
        choices.append(_SavedChoice(name=f"offload to {tier}", call=CallPlan(saved=Saved.OFFLOAD, saved_home=tier)))
    return choices


def _homes(tiers: tuple[Tier, ...], *, gradients_wait: bool, may_update_on_host: bool = False) -> list[_Homes]:
    homes = [_Homes(name="all on the device")]
    for tier in tiers:
        homes.append(_Homes(name=f"states on {tier}", tier=tier))
        if gradients_wait:
            homes.append(_Homes(name=f"states and gradients on {tier}", tier=tier, moves_gradients=True))
        everything = _Homes(name=f"everything on {tier}", tier=tier, moves_gradients=gradients_wait, moves_weights=True)
        homes += [everything] + [replace(everything, prefetch=prefetch) for prefetch in (3, 0)]
        if tier is Tier.HOST and may_update_on_host:
            states = _Homes(
                name=f"states and gradients on {tier}, updated there",
                tier=tier,
                moves_gradients=True,
                updates_on_host=True,
            )
            there = replace(
                everything, name=f"everything on {tier}, updated there", moves_gradients=True, updates_on_host=True
            )
            homes += [states, there] + [replace(there, prefetch=prefetch) for prefetch in (3, 0)]
    return homes


def _blocks(profile: Profile, homes: _Homes) -> dict[str, BlockPlan]:
    if homes.tier is Tier.DEVICE:
        return {}
    # Few differ: blocks share them.
    of_kinds = {
        (is_spanning, trains): BlockPlan(
            weight_home=homes.tier if homes.moves_weights and not is_spanning else Tier.DEVICE,
            gradient_home=homes.tier if homes.moves_gradients else Tier.DEVICE,
            state_home=homes.tier,
            update_on=Tier.HOST if homes.updates_on_host and trains else Tier.DEVICE,
        )
        for is_spanning, trains in itertools.product((False, True), repeat=2)
    }
    return {b.name: of_kinds[b.is_spanning, b.trains] for b in profile.blocks if b.name in homes.blocks}


def _name(microbatches: int, *, is_layer_major: bool, choice: _SavedChoice, homes: _Homes) -> str:
    count = "1 microbatch" if microbatches == 1 else f"{microbatches} microbatches"
    order = " layer by layer" if is_layer_major else ""
    return f"{count}{order}; {choice.name}; {homes.name}{_buffers(homes.prefetch)}"


def _buffers(prefetch: int) -> str:
    """Words for any number of buffers but the usual two."""
    return {0: ", one buffer", 1: ""}.get(prefetch, f", {prefetch + 1} buffers")
