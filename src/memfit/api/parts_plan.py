"""Plans for `memfit.Parts`: batches that come cut.

In: a setup and a sample of parts. Out: the fastest plan that fits with as many microbatches, and in
words which way the parts go, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from memfit.api.choosing import Choice, Traces
from memfit.api.choosing_in_room import choose_in_room
from memfit.batches.parts import ByParts, Parts
from memfit.core.errors import UnsupportedError, UsageError
from memfit.core.limits import Budget
from memfit.core.plan import Order, Plan
from memfit.core.profile import Profile
from memfit.job.problem import Problem
from memfit.job.setup import Setup
from memfit.planning.candidates import update_time


def check_parts(setup: Setup, sample: Any) -> None:
    """Refuses what cannot go with a sample of parts; see `check_parts_alone`."""
    check_parts_alone(
        sample, lines=setup.has_lines, split=setup.split, weight=setup.weight, ranks=setup.ranks is not None
    )


def check_parts_alone(sample: Any, *, lines: bool, split: object, weight: object, ranks: bool) -> None:
    """Refuses what cannot go with a sample of parts.

    Raises:
        UsageError: names the argument. UnsupportedError: several ranks.
    """
    if not isinstance(sample, Parts):
        return
    if lines:
        raise UsageError("fit(lines=True) takes one batch of your loop as its sample: memfit.Parts are for job.step")
    for name, given in (("weight", weight), ("split", split)):
        if given is not None:
            raise UsageError(f"memfit.Parts are cut, and say what each counts for by shares=: leave {name}= out")
    if ranks:
        raise UnsupportedError(
            "memfit.Parts are for one process: on several ranks give job.step the rank's whole batch, and fit(split=...)"
        )


def plan_of_parts(
    setup: Setup, sample: Parts, choose: Callable[[Setup, Any, Profile, Budget, Traces], Choice]
) -> tuple[Plan, str, str, Profile]:
    """Chooses a plan with as many microbatches as the sample has parts.

    Args:
        setup: of the job.
        sample: with the most parts that will come.
        choose: takes the fastest plan that fits.

    Returns:
        The plan, why, why sums are regrouped where they are, and the profile that it was decided
        with.
    """
    counts = setup.problem.counts(sample)
    is_free = setup.machine.limits.device_bytes is None and setup.classic is None
    if is_free and setup.resumed_plan is None and not setup.has_journal:
        found = setup.problem.profile(sample, counts, chunk_tokens=None)
        plan = Plan(microbatches=counts[0], order=Order.MICROBATCH_MAJOR, update=update_time(found, clips_norm=False))
        return plan, "no limit was given: everything stays on the device.", "", found
    setup.hardware()  # measured before anything is traced
    found = setup.problem.profile(sample, counts, chunk_tokens=None)
    chosen, _ = choose_in_room(found, partial(setup.budget, sample), partial(choose, setup, sample))
    return chosen.plan, chosen.reason, chosen.why, chosen.profile


def profile_of_parts(problem: Problem, sample: Parts) -> Profile:
    """Traces the largest of the parts."""
    cut = replace(problem, cut=ByParts())
    return cut.profile(sample, cut.counts(sample), chunk_tokens=None)


def told_of_road(plan: Plan, profile: Profile) -> str:
    """Says which way the parts go, and why."""
    if plan.microbatches == 1:
        return ""
    if plan.order is Order.LAYER_MAJOR:
        return f" The {plan.microbatches} parts pass layer by layer: what travels comes once a step and direction."
    after = f" The {plan.microbatches} parts run one after the other, as in plain accumulation: "
    if not profile.keeps_order:
        return after + "layer by layer was not predicted to be faster where it fits."
    if profile.shared_weights:
        return after + f"layer by layer the uses of {profile.shared_weights[0]} would add up in another order."
    if not profile.may_split:
        return after + "a forward changes buffers that the next one meets."
    if any(trace.uses_random for trace in profile.traces.values()):
        return after + "layer by layer they would draw other random numbers."
    if profile.read_gradients:
        return after + "a hook is on a gradient, or reads one, while backward runs."
    return after + "a forward changes what the next one computes with."
