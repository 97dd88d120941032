"""Plans for loops that the user wrote, which run under `job.lines()`.

In: a setup, a batch of the loop. Out: the fastest plan that fits with gradients of earlier
backwards held; or what `fit` was asked for and lines cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from memfit.api.choosing import Choice, Traces
from memfit.api.choosing_in_room import choose_in_room
from memfit.batches.cutting import Whole
from memfit.core.errors import PlanError, UsageError
from memfit.core.limits import Budget
from memfit.core.plan import Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.job.setup import Setup


def check_asked(
    *,
    max_grad_norm: float | None,
    weight: object,
    split: object,
    on_breach: str,
    scheme: str | None,
    plan: Plan | None,
    adapt: bool = False,
) -> None:
    """Refuses arguments of `fit` that lines of the user's own make without effect, or that need
    `job.step`.

    Raises:
        UsageError: says which, and what to do instead.
        PlanError: the given plan is for `job.step`.
    """
    reasons = {
        "max_grad_norm": (max_grad_norm, "clip in your lines, with torch.nn.utils.clip_grad_norm_"),
        "weight": (weight, "your lines scale each loss"),
        "split": (split, "your lines cut the batch"),
        'on_breach="replan"': (on_breach == "replan" or None, "a step of your lines cannot be made again"),
        "adapt=True": (adapt or None, "a plan is exchanged between two calls of job.step"),
        'scheme="journal"': (scheme == "journal" or None, "a journal decides whole steps: leave it out for two slots of every weight"),
    }  # fmt: skip
    for name, (given, why) in reasons.items():
        if given is not None:
            raise UsageError(f"fit(lines=True) goes without {name}: {why}")
    if plan is None:
        return
    if plan.microbatches != 1:
        raise PlanError(
            f"the plan cuts the batch into {plan.microbatches} microbatches, and fit(lines=True) leaves that to your loop: say microbatches=1, and call "
            "loss.backward() for each"
        )
    if plan.loss_chunk_tokens is not None:
        raise PlanError("the plan computes the loss in chunks, and your lines compute it: say loss_chunk_tokens=null")
    if plan.scales_losses:
        raise PlanError(
            f"compute_dtype={str(plan.compute_dtype)!r} scales losses, and fit(lines=True) leaves that to your loop: use torch.autocast and "
            "torch.amp.GradScaler there, or job.step"
        )


def cut_by_lines(setup: Setup) -> Setup:
    """Returns the same, with batches that nobody cuts but the user's loop."""
    return setup.cut_by(whole_by_lines())


def whole_by_lines() -> Whole:
    """Returns the way not to cut batches, because the user's loop does it."""
    return Whole("the loop is the user's own, and cuts batches itself")


def plan_of_one_batch(plan: Plan) -> Plan:
    """Returns a plan that was priced with two batches: each of them is a run of its own."""
    return replace(plan, microbatches=1, order=Order.LAYER_MAJOR)


def plan_of_lines(
    setup: Setup, sample: Any, choose: Callable[[Setup, Any, Profile, Budget, Traces], Choice]
) -> tuple[Plan, str, Profile]:
    """Chooses a plan for lines of the user's own.

    Args:
        setup: of the job.
        sample: a batch of the loop.
        choose: takes the fastest plan that fits.

    Returns:
        The plan, why, and the profile that it was decided with.
    """
    if setup.machine.limits.device_bytes is None and setup.resumed_plan is None:
        found = setup.problem.profile(sample, (1,), chunk_tokens=None)
        return Plan(update=UpdateTime.AFTER_BACKWARD), "no limit was given: everything stays on the device.", found
    setup.hardware()  # measured before anything is traced
    found = setup.problem.profile(sample, (1,), chunk_tokens=None)
    chosen, _ = choose_in_room(found, partial(setup.budget, sample), partial(choose, setup, sample))
    why = f"{chosen.reason} It was priced for a loop that runs two batches back before each update."
    return plan_of_one_batch(chosen.plan), why, chosen.profile
