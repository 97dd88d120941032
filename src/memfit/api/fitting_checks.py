"""Refusal of a plan that was given and does not fit.

In: a plan, its profile, a budget. Out: nothing, or the refusal with the smallest limit for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.batches.splitting import checked_rows
from memfit.core.limits import Budget
from memfit.core.numerics import NONADDITIVE
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.units import format_bytes
from memfit.job.preparing import prepared_for
from memfit.job.setup import Planned, Setup
from memfit.planning.pricing import bytes_of_check
from memfit.planning.refusals import Refusal
from memfit.prediction.residents import peak_report
from memfit.scheduling.lower import lower


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
