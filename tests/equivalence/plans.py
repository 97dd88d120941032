"""The plans that every model is trained under, made from a profile alone.

In: a profile and the name of a variant. Out: a `Plan`. Nothing here asks the planner: these are decisions by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier

ON_DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train.

    Attributes:
        name: as it stands in test names.
        plan: makes the plan.
        microbatches: how many it uses; the reference accumulates over as many.
        order: of these microbatches.
        max_grad_norm: clip to this norm.
    """

    name: str
    plan: Callable[[Profile], Plan]
    microbatches: int = 1
    order: Order = Order.LAYER_MAJOR
    max_grad_norm: float | None = None

    @property
    def reorders(self) -> bool:
        """Weights that several calls use get their gradients summed in another order than by plain accumulation."""
        return self.microbatches > 1 and self.order is Order.LAYER_MAJOR


def _calls(profile: Profile) -> tuple[bool, ...]:
    trace = next(iter(profile.traces.values()))
    return tuple(call.is_repeated and call.has_backward for call in trace.calls)


def fates(profile: Profile, fate: CallPlan) -> tuple[CallPlan, ...]:
    """The fate for each repeated call that has a backward; the others are kept."""
    return tuple(fate if is_repeated else CallPlan() for is_repeated in _calls(profile))


def pairs(profile: Profile) -> tuple[CallPlan, ...]:
    """Recompute in segments of two neighbouring repeated calls of the same kind."""
    trace = next(iter(profile.traces.values()))
    calls: list[CallPlan] = []
    is_open = False
    for index, is_repeated in enumerate(_calls(profile)):
        joins = is_repeated and is_open and trace.calls[index - 1].kind == trace.calls[index].kind
        calls.append(CallPlan(saved=Saved.RECOMPUTE, joins_previous=joins) if is_repeated else CallPlan())
        is_open = is_repeated and not joins
    return tuple(calls)


def on_disk(profile: Profile) -> dict[str, BlockPlan]:
    """Weights, gradients and states of every block that may leave the device, on disk."""
    return {block.name: ON_DISK for block in profile.blocks if not block.is_spanning}


def tail(profile: Profile) -> int | None:
    """The first call behind the last repeated one; None where nothing comes behind it."""
    repeated = [index for index, is_repeated in enumerate(_calls(profile)) if is_repeated]
    behind = repeated[-1] + 1 if repeated else len(_calls(profile)) - 1
    return behind if behind < len(_calls(profile)) else None


RECOMPUTE = CallPlan(saved=Saved.RECOMPUTE)
OFFLOAD = CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK)


VARIANTS = (
    Variant(name="resident", plan=lambda profile: Plan()),
    Variant(name="recompute", plan=lambda profile: Plan(calls=fates(profile, RECOMPUTE))),
    Variant(name="disk", plan=lambda profile: Plan(blocks=on_disk(profile))),
    Variant(
        name="disk-recompute-4",
        microbatches=4,
        plan=lambda profile: Plan(
            microbatches=4, blocks=on_disk(profile), calls=fates(profile, RECOMPUTE), tail=tail(profile)
        ),
    ),
    Variant(name="offload", plan=lambda profile: Plan(calls=fates(profile, OFFLOAD))),
    Variant(name="select", plan=lambda profile: Plan(calls=fates(profile, CallPlan(saved=Saved.SELECT)))),
    Variant(name="pairs", plan=lambda profile: Plan(calls=pairs(profile), blocks=on_disk(profile))),
    Variant(
        name="microbatch-major-4",
        microbatches=4,
        order=Order.MICROBATCH_MAJOR,
        plan=lambda profile: Plan(microbatches=4, order=Order.MICROBATCH_MAJOR, blocks=on_disk(profile)),
    ),
    Variant(
        name="clipped",
        max_grad_norm=0.05,
        plan=lambda profile: Plan(blocks=on_disk(profile), update=UpdateTime.AFTER_BACKWARD),
    ),
    Variant(name="atomic", plan=lambda profile: Plan(blocks=on_disk(profile), is_atomic=True)),
    Variant(name="resident-3", microbatches=3, plan=lambda profile: Plan(microbatches=3)),
    Variant(
        name="everything",
        microbatches=3,
        max_grad_norm=0.05,
        plan=lambda profile: Plan(
            microbatches=3,
            blocks=on_disk(profile),
            calls=fates(profile, CallPlan(saved=Saved.RECOMPUTE, boundary_home=Tier.DISK)),
            tail=tail(profile),
            update=UpdateTime.AFTER_BACKWARD,
            is_atomic=True,
            prefetch=2,
        ),
    ),
    Variant(
        name="disk-offload-2",
        microbatches=2,
        plan=lambda profile: Plan(microbatches=2, blocks=on_disk(profile), calls=fates(profile, OFFLOAD)),
    ),
)
"""The plans that the project promises by name come first."""

BY_NAME = {variant.name: variant for variant in VARIANTS}
PROMISED = ("resident", "recompute", "disk", "disk-recompute-4", "offload", "select")
OTHERS = tuple(variant.name for variant in VARIANTS if variant.name not in PROMISED)
