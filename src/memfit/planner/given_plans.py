"""Plans that are given to `fit` and `advise`: decided ones, and techniques of the field by name.

In: what `plan=` says. Out: a `Plan`, or the name of a technique whose plans are looked at.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from memfit.core.errors import PlanError, UnsupportedError, UsageError
from memfit.core.limits import Budget, format_bytes
from memfit.core.numerics import NONADDITIVE
from memfit.core.plan import Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.planner.choosing import Choice, Traces, choose_in_room
from memfit.planner.preparing import prepared_for
from memfit.planner.problem import Problem, read_plan
from memfit.planner.search.candidates import update_time
from memfit.planner.search.classics import CLASSICS
from memfit.planner.search.pricing import Refusal, bytes_of_check
from memfit.planner.setup import Planned, Setup
from memfit.step.bytes import peak_report
from memfit.step.lower import lower
from memfit.trace.batch import ByParts, Parts
from memfit.trace.cutting import Whole
from memfit.trace.splitting import checked_rows

_WORD = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True, kw_only=True)
class GivenPlan:
    """Meaning of `plan=`.

    Attributes:
        plan: decided; None: it is to be chosen.
        classic: of this technique only (`planner.search.classics`); None: of all.
    """

    plan: Plan | None = None
    classic: str | None = None


def read_given(plan: Plan | str | Path | None) -> GivenPlan:
    """Reads what `plan=` says. A technique's name is not a file's: write "./name" for that.

    Raises:
        UsageError: a word that is neither a technique nor a file. Others as `read_plan`.
    """
    if plan is None:
        return GivenPlan()
    if isinstance(plan, str | Path) and str(plan) in CLASSICS:
        return GivenPlan(classic=str(plan))
    if isinstance(plan, str | Path) and _WORD.fullmatch(str(plan)) and not Path(plan).exists():
        near = difflib.get_close_matches(str(plan), list(CLASSICS), n=1)
        guess = f": did you mean {near[0]!r}?" if near else "."
        raise UsageError(
            f"plan={str(plan)[:80]!r} is no file, and no technique{guess} There are {', '.join(map(repr, CLASSICS))}"
        )
    return GivenPlan(plan=read_plan(plan))


# Refusal of a plan that was given and does not fit.
#
# In: a plan, its profile, a budget. Out: nothing, or the refusal with the smallest limit for it.


def cut_for(setup: Setup, batch: Any, plan: Plan) -> Plan:
    """Returns the plan with as many microbatches as the batch can be cut into."""
    return replace(plan, microbatches=setup.problem.cut.most(batch, plan.microbatches))


def checks_split(setup: Setup, plan: Plan, found: Profile) -> bool:
    """Tells whether some rows run whole before the first step, to show that batches may be cut."""
    return plan.microbatches > 1 and not found.own_parts and NONADDITIVE not in setup.allow


def with_check(planned: Planned, sample: Any, found: Profile) -> Planned:
    """Returns the plan, with what that check takes in the prediction of the load."""
    if not checks_split(planned.setup, planned.plan, found):
        return planned
    _, nbytes = _check_bytes(planned.setup, sample, planned.plan, found)
    most = nbytes + planned.beside_bytes
    return replace(
        planned,
        load_bytes=max(planned.load_bytes, most),
        predicted_peak_bytes=max(planned.predicted_peak_bytes, most),
    )


def _check_bytes(setup: Setup, sample: Any, plan: Plan, found: Profile) -> tuple[int, int]:
    """Returns how many rows the check runs, and its predicted peak of tensors."""
    rows = min(checked_rows(setup.problem.cut), found.batch_rows)
    # Real steps stop where there is no room for more rows: their bytes grow in proportion.
    if max(found.traces) < rows and found.source == "fake":
        found = setup.problem.profile_for(replace(plan, microbatches=found.batch_rows // rows), sample)
    return rows, bytes_of_check(plan, found, rows, device=setup.device)


def check_fits(setup: Setup, sample: Any, plan: Plan, found: Profile, budget: Budget) -> None:
    """Refuses a given plan that is predicted to pass the limit.

    Raises:
        DoesNotFitError: with its peak, what stands there, and the smallest limit for it.
    """
    if budget.limit_bytes is None or budget.tensor_bytes is None or not setup.enforces:
        return
    cut, device = cut_for(setup, sample, plan), setup.device
    ready = prepared_for(found, cut, clips_norm=setup.clips_norm, has_lines=setup.has_lines, device=device)
    peak = ready.peak_bytes
    report = peak_report(lower(ready.step.schedule, cut, found, device=device, is_itemized=True), rows=6)
    if checks_split(setup, cut, found):
        rows, checked = _check_bytes(setup, sample, cut, found)
        if checked > peak:
            peak = checked
            report = f"{rows} rows that run whole, to show that the batch may be cut, {format_bytes(checked)}"
    load_bytes = setup.most_load_bytes
    if peak > budget.tensor_bytes or load_bytes > budget.limit_bytes:
        raise Refusal(
            budget=budget,
            peak_bytes=peak,
            plan="the given plan",
            report=report,
            advice=("a plan that keeps less here", "none, so that one is chosen"),
            load_bytes=load_bytes,
            is_given=True,
            varies=setup.machine.counts_process,
        ).error()


# Plans for loops that the user wrote, which run under `job.lines()`.
#
# In: a setup, a batch of the loop. Out: the fastest plan that fits with gradients of earlier
# backwards held; or what `fit` was asked for and lines cannot do.


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


# Plans for `memfit.Parts`: batches that come cut.
#
# In: a setup and a sample of parts. Out: the fastest plan that fits with as many microbatches, and
# in words which way the parts go, and why.


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
