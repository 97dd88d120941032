"""Plans that this model or this machine does not bear.

In: a plan and a profile, or a machine. Out: nothing, or an error that says what would be wrong and
what to do instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

from memfit.core.errors import MemfitWarning, PlanError, UnsupportedError, UsageError
from memfit.core.plan import Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.shape import check_again
from memfit.core.storage_formats import FP16_WEIGHTS, WITHOUT_MASTERS, ComputeDtype
from memfit.core.tiers import Tier
from memfit.machine.machine import Machine
from memfit.planner.problem import STATE_FORMATS, Problem, unfit_for


def check_tiers(plan: Plan, machine: Machine) -> None:
    """Raises `PlanError` where the plan lets something rest in a tier that the machine does not
    have.
    """
    lacking = lacking_tier(plan, machine)
    if lacking is Tier.HOST:
        raise PlanError(
            "the plan names the tier 'host', but without a GPU the device is host memory itself: use 'device' or 'disk', or fit(emulate_device=True)"
        )
    if lacking is not None:
        raise PlanError(
            f"the plan names the tier {str(lacking)!r}, which this job does not have: it has {[*map(str, machine.tiers)]}; name one of these"
        )


def lacking_tier(plan: Plan, machine: Machine) -> Tier | None:
    """The first tier of the plan that the machine does not have; None if it has them all."""
    return next((tier for tier in plan.tiers if tier not in machine.tiers), None)


def _check_updates(plan: Plan, profile: Profile) -> None:
    if profile.host_update_obstacle and any(block.update_on is Tier.HOST for block in plan.blocks.values()):
        raise PlanError(
            f"the plan updates blocks on the host, and {profile.host_update_obstacle}; or say update_on='device'"
        )


def other_sums(before: Plan, after: Plan) -> str | None:
    """Says what a plan that takes the place of another adds up in another order, in words; None if
    nothing.
    """
    changes: list[str] = []
    if after.microbatches != before.microbatches:
        changes.append(f"batches are cut into {after.microbatches}, not {before.microbatches} microbatches")
    if after.loss_chunk_tokens != before.loss_chunk_tokens:
        pieces = "whole" if after.loss_chunk_tokens is None else f"in pieces of {after.loss_chunk_tokens} tokens"
        changes.append(f"the loss is computed {pieces}")
    return f"From here on {' and '.join(changes)}: sums add up in another order." if changes else None


def check_effect(problem: Problem, allow: Collection[str], device: str) -> None:
    """Refuses names in `allow` that no plan could make use of. For a plan that is to be chosen.

    Raises:
        UsageError: says which, and why.
    """
    reasons: dict[str, str | None] = {}
    if {"bf16", WITHOUT_MASTERS} & {*allow}:
        reasons |= dict.fromkeys(("bf16", WITHOUT_MASTERS), unfit_for(ComputeDtype.BFLOAT16, problem.model))
    for name, compute in (("fp16", ComputeDtype.FLOAT16), (FP16_WEIGHTS, ComputeDtype.FLOAT16_WEIGHTS)):
        if name in allow:
            slow = "on a CPU fp16 gains no speed, so that no such plan is looked for; give one by plan="
            reasons[name] = slow if device == "cpu" else unfit_for(compute, problem.model)
    for chosen in STATE_FORMATS:
        if chosen.allowance in allow and not problem.encodes(chosen):
            reasons[chosen.allowance] = (
                "the optimizer keeps no running means, or its parameters are too small (below 4096 elements) or embeddings"
            )
    for name, reason in reasons.items():
        if name in allow and reason is not None:
            raise UsageError(f'allow={{"{name}"}} has no effect: {reason}. Leave it out')


def check_meaning(plan: Plan, profile: Profile, *, is_committed: bool) -> None:
    """Raises `UnsupportedError` where the plan would train another model than the profile is of, or
    `PlanError` where it sends away what must stay.
    """
    # Parts of the user's own, one after the other, are what the user's loop computes on.
    are_own = profile.own_parts and plan.order is Order.MICROBATCH_MAJOR
    if (plan.microbatches > 1 and not are_own) or plan.ranks > 1:
        _check_splits(profile)
    if plan.microbatches > 1:
        _check_order(plan, profile)
        _check_tail(plan, profile)
    _check_written(plan, profile, is_committed=is_committed)
    _check_updates(plan, profile)
    _check_spanning(plan, profile)
    _check_read_gradients(plan, profile)
    for trace in profile.traces.values():
        check_again(plan, trace.calls)


def _check_spanning(plan: Plan, profile: Profile) -> None:
    """Weights that are read where no call of theirs announces it must stay where they are, also
    where calls read them too.
    """
    for block in profile.blocks:
        homes = plan.block(block.name)
        home = homes.weight_home
        if block.is_spanning and not homes.rests_whole_on_device:
            names = ", ".join(repr(p.name) for p in block.parameters[:3]) + (
                ", ..." if len(block.parameters) > 3 else ""
            )
            raise PlanError(
                f"the plan sends the weights of block {block.name!r} away (weight_home={str(home)!r}, weights_over={str(homes.weights_over)!r}), but "
                f"{names} {'is' if len(block.parameters) == 1 else 'are'} "
                "read outside of the calls of their module (by the loss, another module's forward, a hook, or a function that takes the weight): plan "
                "weight_home='device' for it (gradients and states may still rest elsewhere), or let the code call the module"
            )


def _check_read_gradients(plan: Plan, profile: Profile) -> None:
    """Raises `PlanError` where a hook would find a gradient gone that it reads in plain PyTorch."""
    if not profile.read_gradients:
        return
    name, *others = profile.read_gradients
    away = any(plan.accumulates(block.name) for block in profile.blocks)
    follows = plan.microbatches == 1 or plan.order is Order.MICROBATCH_MAJOR
    if away or not follows or plan.update is not UpdateTime.AFTER_BACKWARD:
        raise PlanError(
            f"a hook reads the gradient of {name!r}{f' (and {len(others)} more)' if others else ''} while backward runs, which the plan drops before: plan "
            "update='after-backward', gradients at home on the device and microbatches one after the other, or read gradients after the step (keep_gradients=True)"
        )


def _check_tail(plan: Plan, profile: Profile) -> None:
    """Raises `UnsupportedError` where the tail of each microbatch cannot run back before the layers
    do.
    """
    if plan.tail is None or plan.order is not Order.LAYER_MAJOR:
        return
    shared = next(iter(profile.traces.values())).shared_with_tail(plan.tail)
    if shared is not None:
        raise UnsupportedError(
            f"a weight of block {shared!r} is read before the plan's tail and again in it by code that is not a module's call, so the tail cannot run back on its "
            "own: plan tail=None"
        )


def _check_order(plan: Plan, profile: Profile) -> None:
    """Raises `UnsupportedError` where microbatches go layer by layer and one forward changes what
    the next one computes with.
    """
    if plan.order is not Order.LAYER_MAJOR:
        return
    for call in (call for trace in profile.traces.values() for call in trace.calls):
        if call.is_substituted:
            raise UnsupportedError(
                f"{call.site!r} is called with other tensors in the places of its parameters (torch.func.functional_call, for instance): microbatches that "
                "take turns would get each other's; plan microbatches=1, or order='microbatch-major'"
            )
        if call.changes_itself:
            raise UnsupportedError(
                f"{call.site!r} changes a tensor in place that its module keeps (no buffer), and layer by layer the last microbatch would run first: plan "
                "microbatches=1, or order='microbatch-major'"
            )
    if not profile.carried:
        return
    name, *others = profile.carried
    raise UnsupportedError(
        f"a forward changes {name!r}{f' (and {len(others)} more)' if others else ''}, and the one after it meets that (a counter, a tensor that is read again, an "
        "exchanged module); layer by layer the last microbatch would run first: plan order='microbatch-major' or microbatches=1, or let the forward leave it alone"
    )


def _check_splits(profile: Profile) -> None:
    """Raises `UnsupportedError` where microbatches would not mean the same as the whole batch."""
    if profile.reads_batch_statistics:
        raise UnsupportedError(
            "the model computes statistics over the batch (batch norm in training mode), so that microbatches would not mean the same as the "
            "whole batch: plan microbatches=1, freeze the statistics (module.eval()), or use a norm without them"
        )
    if profile.unsplittable_buffers:
        name, *others = profile.unsplittable_buffers
        told = f"{name!r}" if not others else f"{name!r} (and {len(others)} more)"
        raise UnsupportedError(
            f"the model's forward changes its buffer {told}, and not only to count or to cache: what is in the batch goes into it, or each microbatch would "
            "compute with what another one left there. As with batch statistics, microbatches would not mean the same as the whole batch, and their order "
            "would show: plan microbatches=1, or freeze what changes it (in most modules, module.eval())"
        )


def check_compiled(problem: Problem, plan: Plan) -> None:
    """Tells of compiled code around calls: it would have the calls' hooks compiled into it, and
    meet weights that are away.

    A call that is compiled itself stays so, as does what runs inside one.

    Raises:
        UnsupportedError: the plan sends weights away. Else a `MemfitWarning` tells what to do.
    """
    name = _compiled_around(problem)
    if name is None:
        return
    advice = "compile each layer instead, `layer.compile()`, before memfit.fit"
    if any(not block.rests_whole_on_device for block in plan.blocks.values()):
        raise UnsupportedError(
            f"{name} is compiled with torch.compile around the calls at which weights come and go: {advice}"
        )
    warnings.warn(
        f"{name} is compiled with torch.compile around the calls that memfit follows: its graph breaks at each of them, and may round otherwise than it "
        f"would in one piece; {advice}",
        MemfitWarning,
        stacklevel=2,
    )


def _compiled_around(problem: Problem) -> str | None:
    """Names what is compiled with a call inside it; None if nothing is."""
    if hasattr(problem.loss, "_torchdynamo_orig_callable"):
        return "the loss"
    sites = {id(site.module) for site in problem.block_map.sites}
    for name, module in problem.model.named_modules():
        is_compiled = (
            hasattr(module, "_orig_mod")
            or getattr(module, "_compiled_call_impl", None) is not None
            or hasattr(module.forward, "_torchdynamo_orig_callable")
        )
        if is_compiled and any(id(part) in sites for part in module.modules() if part is not module):
            return repr(name) if name else "the model"
    return None


def _check_written(plan: Plan, profile: Profile, *, is_committed: bool) -> None:
    """Weights that the forward itself changes must stay where they are, and nothing may change them
    twice a step.
    """
    if not profile.written_weights:
        return
    name, *others = profile.written_weights
    blocks = profile.written_blocks
    homes = [plan.block(name).weight_home for name in blocks]
    calls = next(iter(profile.traces.values())).calls
    again = [call for call in calls if plan.call(call.index).saved.policy.recomputes]
    follows = plan.microbatches == 1 or plan.order is Order.MICROBATCH_MAJOR
    runs_once = follows and not any(blocks.intersection(call.blocks) for call in again)
    if (
        any(home is not Tier.DEVICE for home in homes)
        or not runs_once
        or plan.compute_dtype.has_masters
        or is_committed
        or plan.ranks > 1
    ):
        raise UnsupportedError(
            f"the model's forward changes its parameter {name!r}{f' (and {len(others)} more)' if others else ''} in place: that is kept only under a plan that "
            "leaves it on the device in its own dtype, runs its calls once (no recompute) and microbatches one after the other (order='microbatch-major'), and "
            "without store= and on one process. Change it between steps instead, inside `with job.weights():`, or make it a buffer"
        )
