"""A limit that changes while a job runs, and the plan that follows it.

In: a running assembly, a new limit. Out: the limit in force, or a refusal that leaves the old one;
before the next step another plan, where the old one does not fit or a faster one does.

[Note: a limit that changes]
A neighbour comes or goes, and the memory there is for a job is another. `job.set_limit` takes
effect between two steps. A plan that fits the new limit goes on. One that does not is exchanged
when the next step begins, as for a batch that does not fit ([Note: replanning] in `job.breaches`):
the run goes on from its last commit, with the same bits where sums are the same. Until then the
process holds what the old plan holds. Under a larger limit a plan is looked for that is predicted
to be a tenth faster with the same bits. A job that cannot exchange its plan (no store, or
`on_breach` and `adapt` as they are by default) is refused a limit that its plan does not fit.

A proof is of one limit: it begins anew, and that of the limit before is what `set_limit` returns.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

from memfit.core.errors import DoesNotFitError, UnsupportedError, UsageError
from memfit.core.units import format_bytes
from memfit.job.assembly import Assembly
from memfit.job.breaches import BreachReport, assemble_faster
from memfit.job.interrupts import Interrupts
from memfit.job.setup import Replan
from memfit.tensors.trees import tensors_in


@dataclass(frozen=True, kw_only=True)
class LimitChange:
    """A change of the limit that no step has been made under.

    Attributes:
        before_bytes: limit before it.
        after_bytes: limit now.
    """

    before_bytes: int
    after_bytes: int

    @property
    def is_raised(self) -> bool:
        """There is more memory than before."""
        return self.after_bytes > self.before_bytes

    def in_words(self) -> str:
        """Tells both limits."""
        return f"the limit is {format_bytes(self.after_bytes)} now, and was {format_bytes(self.before_bytes)}"

    def told(self, report: BreachReport) -> BreachReport:
        """Returns the report of an exchanged plan with this change as its cause."""
        if report.is_measured:
            return replace(report, cause=f"{self.in_words()}; another plan is predicted to be faster under it")
        return replace(report, cause=f"{self.in_words()}; {report.cause}", is_of_limit=True)


def change_limit(assembly: Assembly, limit_bytes: int) -> LimitChange | None:
    """Changes the limit of a job's device between two steps. See [Note: a limit that changes].

    Args:
        assembly: of the job.
        limit_bytes: new limit.

    Returns:
        What was changed; None where the limit is the same.

    Raises:
        UsageError: the job has no limit.
        UnsupportedError: the job runs on several ranks.
        DoesNotFitError: the job's plan does not fit, and it cannot take another one; the limit is
            what it was.
    """
    machine, planned = assembly.machine, assembly.planned
    if planned.setup.ranks is not None:
        raise UnsupportedError("limits of several ranks are those of memfit.fit: save the job, and fit again")
    before = machine.limits.device_bytes
    if before is None or not planned.setup.enforces:
        raise UsageError(
            "the job was made without a limit that is enforced, so there is none to change: give memfit.fit a limit="
        )
    if limit_bytes == before:
        return None
    machine.change_limit(limit_bytes)
    if planned.replan is None or planned.setup.has_lines:
        # Else the next step asks, which has its batch.
        excess = limit_excess(assembly, max(prepared.peak_bytes for prepared in assembly.shapes.known), ())
        if excess is not None:
            machine.change_limit(before)
            raise DoesNotFitError(
                f"the job's plan does not fit {format_bytes(limit_bytes)}: {excess}. The limit is still {format_bytes(before)}. "
                'A job of memfit.fit(store=..., on_breach="replan") takes another plan; here, save the job and fit again with resume=',
                smallest_limit_bytes=None,
            )
        machine.hard_limit.follow()
    assembly.shapes.forget()
    machine.phases.begin_anew()
    return LimitChange(before_bytes=before, after_bytes=limit_bytes)


def limit_excess(assembly: Assembly, peak_bytes: int, batch: Any) -> str | None:
    """Says why a step of that predicted peak does not fit beside what is held now; None if it does.

    Args:
        assembly: of the job.
        peak_bytes: of tensors.
        batch: of the step, whose bytes the peak has.
    """
    machine, model = assembly.machine, assembly.model

    def room() -> int | None:
        return machine.budget(beside=[*assembly.held(), *tensors_in(batch), *model.buffers()]).tensor_bytes

    left = room()
    if left is not None and peak_bytes > left:
        gc.collect()  # what is in cycles is nobody's
        left = room()
    if left is None or peak_bytes <= left:
        return machine.hard_limit.excess(peak_bytes)
    return (
        f"a step is predicted to take {format_bytes(peak_bytes)} of tensors, and {format_bytes(max(0, left))} are left"
    )


def follow_limit(
    assembly: Assembly, change: LimitChange, batch: Any, replan: Replan, interrupts: Interrupts
) -> tuple[Assembly, BreachReport | None]:
    """Looks for a faster plan under a limit that was raised.

    Args:
        assembly: whose plan fits.
        change: of the limit.
        batch: of the step that is to be made.
        replan: makes plans.
        interrupts: of the job.

    Returns:
        As `breaches.assemble_faster`.
    """
    if not change.is_raised:
        return assembly, None
    hardware = assembly.setup.hardware()
    now, report = assemble_faster(assembly, hardware, batch, replan, interrupts)
    return now, None if report is None else change.told(report)
