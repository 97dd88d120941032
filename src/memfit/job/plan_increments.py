"""The way from plain training to a plan, one kind of decision more at a time, each priced.

In: `Plan`, `Profile`, `Hardware`. Out: `PlanPoint`s, from plain training to the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.core.errors import PlanError
from memfit.core.hardware import Hardware
from memfit.core.plan import CallPlan, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.tiers import Tier
from memfit.prediction.predict import appraise
from memfit.report.subject import PlanPoint
from memfit.scheduling.build import build_step
from memfit.scheduling.lower import lower

# Why a decision helps, and why it stands before the next: dearer by the byte from line to line.
_PLAIN = "Weights, gradients, optimizer states and all that forward keeps are there together."
_FUSED = (
    "Gradients: each block's goes into its update as soon as it is whole. First, since nothing is computed or moved "
    "for it."
)
_PARTS = (
    "Activations: forward keeps those of one part of the batch at a time; weights and states are as large as before. "
    "Ahead of recompute, since nothing is computed twice."
)
_RECOMPUTED = (
    "Activations: calls keep what they were given, and compute the rest again in backward. Ahead of what moves bytes, "
    "since it takes arithmetic and no link."
)
_OFFLOADED = (
    "Activations: what calls save leaves after forward and comes back for backward. It takes a link, twice for each "
    "byte, and no arithmetic."
)
_ON_HOST = "Optimizer states: the host's cores update beside them, so that gradients travel and states do not."
_AHEAD = "Speed: what is fetched ahead takes memory, and is waited for less."
_HOMES = (
    (
        "optimizer states", "state_home",
        "Weights' side: states are used once a step, by the update alone; forward and backward wait for none of them.",
    ),
    (
        "gradients", "gradient_home",
        "Weights' side: written once in backward, read once by the update. Ahead of weights, which come twice.",
    ),
    (
        "weights", "weight_home",
        "Weights' side: only the blocks that compute are there. Last, since each comes for forward and for backward.",
    ),
)  # fmt: skip


def points_from_plain(plan: Plan, profile: Profile, hardware: Hardware, *, clips_norm: bool) -> tuple[PlanPoint, ...]:
    """Prices plain training, then the plan's decisions as they are added one kind after the other.

    Formats of numbers and the loss are the plan's from the beginning, since the profile was traced
    with them. A decision that is impossible without the next one (an atomic step whose states are
    not on disk, a size of microbatches that was not traced) is priced together with it.

    Args:
        plan: all decisions.
        profile: with a trace of the plan's microbatch; with one of the whole batch, plain training
            is priced too.
        hardware: that seconds are predicted for.
        clips_norm: gradients are clipped by their global norm.
    """
    return tuple(point for point, _ in points_and_reasons(plan, profile, hardware, clips_norm=clips_norm))


def points_and_reasons(
    plan: Plan, profile: Profile, hardware: Hardware, *, clips_norm: bool
) -> tuple[tuple[PlanPoint, str], ...]:
    """Prices as `points_from_plain` does, with why each decision helps and stands where it does.

    Args:
        plan: all decisions.
        profile: of its microbatch.
        hardware: that seconds are predicted for.
        clips_norm: gradients are clipped by their global norm.
    """
    points: list[tuple[PlanPoint, str]] = []
    names: list[str] = []
    reasons: list[str] = []
    for name, reason, part in increments(plan, profile):
        names.append(name)
        reasons.append(reason)
        try:
            step = lower(build_step(part, profile, clips_norm=clips_norm), part, profile, device=hardware.device)
        except PlanError:
            if part == plan:
                raise
            continue  # told with the next one, which makes it possible
        cost = appraise(step, hardware)
        point = PlanPoint(name=" + ".join(names), peak_bytes=cost.peak_bytes, seconds=cost.seconds)
        points.append((point, " ".join(reasons)))
        names, reasons = [], []
    return tuple(points)


def increments(plan: Plan, profile: Profile) -> Iterator[tuple[str, str, Plan]]:
    """Yields plans from plain training to `plan`, each with the name of what it adds and why that
    helps and stands there.
    """
    part = Plan(
        update=UpdateTime.AFTER_BACKWARD,
        compute_dtype=plan.compute_dtype,
        splits_masters=plan.splits_masters,
        drops_masters=plan.drops_masters,
        state_format=plan.state_format,
        loss_chunk_tokens=plan.loss_chunk_tokens,
    )
    yield "plain training", _PLAIN, part
    if plan.update is not part.update:
        part = replace(part, update=plan.update)
        yield "updates in backward", _FUSED, part
    if plan.microbatches > 1:
        part = replace(part, microbatches=plan.microbatches, order=plan.order, tail=plan.tail)
        yield f"{plan.microbatches} microbatches, {plan.order}", _PARTS, part
    policies = dict.fromkeys(call.saved for call in plan.calls if not call.saved.policy.keeps_all)
    for policy in sorted(policies, key=lambda one: one.policy.offloads):
        chosen = [call.saved is policy for call in plan.calls]
        earlier = {call.saved for call in part.calls}
        calls = tuple(each if each.saved is policy or each.saved in earlier else CallPlan() for each in plan.calls)
        part = replace(part, calls=calls)
        reason = _OFFLOADED if policy.policy.offloads else _RECOMPUTED
        yield f"{policy} {sum(chosen)} of {_calls(profile)} calls", reason, part
    for what, field, reason in _HOMES:
        homes: dict[str, Tier] = {name: getattr(block, field) for name, block in plan.blocks.items()}
        away = [home for home in homes.values() if home is not Tier.DEVICE]
        if away:
            blocks = {name: replace(part.block(name), **{field: home}) for name, home in homes.items()}
            part = replace(part, blocks=blocks)
            yield f"{what} of {len(away)} blocks on {', '.join(dict.fromkeys(away))}", reason, part
    if part != plan:
        on_host = sum(block.update_on is Tier.HOST for block in plan.blocks.values())
        if on_host:
            yield f"updates of {on_host} blocks on the host", _ON_HOST, plan
        else:
            yield "prefetch and other settings", _AHEAD, plan


def _calls(profile: Profile) -> int:
    return len(next(iter(profile.traces.values())).calls)
