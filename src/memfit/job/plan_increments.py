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
    points: list[PlanPoint] = []
    names: list[str] = []
    for name, part in increments(plan, profile):
        names.append(name)
        try:
            step = lower(build_step(part, profile, clips_norm=clips_norm), part, profile, device=hardware.device)
        except PlanError:
            if part == plan:
                raise
            continue  # told with the next one, which makes it possible
        cost = appraise(step, hardware)
        points.append(PlanPoint(name=" + ".join(names), peak_bytes=cost.peak_bytes, seconds=cost.seconds))
        names = []
    return tuple(points)


def increments(plan: Plan, profile: Profile) -> Iterator[tuple[str, Plan]]:
    """Yields plans from plain training to `plan`, each with the name of what it adds."""
    part = Plan(
        update=UpdateTime.AFTER_BACKWARD,
        compute_dtype=plan.compute_dtype,
        splits_masters=plan.splits_masters,
        drops_masters=plan.drops_masters,
        state_format=plan.state_format,
        loss_chunk_tokens=plan.loss_chunk_tokens,
    )
    yield "plain training", part
    if plan.update is not part.update:
        part = replace(part, update=plan.update)
        yield "updates in backward", part
    if plan.microbatches > 1:
        part = replace(part, microbatches=plan.microbatches, order=plan.order, tail=plan.tail)
        yield f"{plan.microbatches} microbatches, {plan.order}", part
    for policy in dict.fromkeys(call.saved for call in plan.calls if not call.saved.policy.keeps_all):
        chosen = [call.saved is policy for call in plan.calls]
        earlier = {call.saved for call in part.calls}
        calls = tuple(each if each.saved is policy or each.saved in earlier else CallPlan() for each in plan.calls)
        part = replace(part, calls=calls)
        yield f"{policy} {sum(chosen)} of {_calls(profile)} calls", part
    for what, field in (("optimizer states", "state_home"), ("gradients", "gradient_home"), ("weights", "weight_home")):
        homes: dict[str, Tier] = {name: getattr(block, field) for name, block in plan.blocks.items()}
        away = [home for home in homes.values() if home is not Tier.DEVICE]
        if away:
            blocks = {name: replace(part.block(name), **{field: home}) for name, home in homes.items()}
            part = replace(part, blocks=blocks)
            yield f"{what} of {len(away)} blocks on {', '.join(dict.fromkeys(away))}", part
    if part != plan:
        on_host = sum(block.update_on is Tier.HOST for block in plan.blocks.values())
        yield f"updates of {on_host} blocks on the host" if on_host else "prefetch and other settings", plan


def _calls(profile: Profile) -> int:
    return len(next(iter(profile.traces.values())).calls)
