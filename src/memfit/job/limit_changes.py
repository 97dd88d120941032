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

On several ranks each has a limit of its own, and all of them call. Where a rank's plan does not
fit, all take another one, for the rank that has least. What cannot be is refused by all, in the
words of the first rank that finds it.

A proof is of one limit: it begins anew, and that of the limit before is what `set_limit` returns.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

from memfit.core.errors import DoesNotFitError, MemfitError, UsageError
from memfit.core.units import format_bytes
from memfit.distributed.agreement import agree
from memfit.distributed.rank_group import RankGroup
from memfit.job.assembly import Assembly
from memfit.job.breaches import BreachReport, assemble_faster
from memfit.job.interrupts import Interrupts
from memfit.job.setup import Prepared, Replan
from memfit.job.together import first_told, prepare_together
from memfit.tensors.trees import tensors_in

_CALL = "job.set_limit"


@dataclass(frozen=True, kw_only=True)
class LimitChange:
    """A change of the limit that no step has been made under.

    Attributes:
        before_bytes: limit before it.
        after_bytes: limit now.
        rank: on several ranks the first whose limit was changed.
        is_lowered: on several ranks, one of them has less than before.
    """

    before_bytes: int
    after_bytes: int
    rank: int | None = None
    is_lowered: bool = False

    @property
    def is_raised(self) -> bool:
        """There is more memory than before."""
        return self.after_bytes > self.before_bytes and not self.is_lowered

    def in_words(self) -> str:
        """Tells both limits."""
        whose = "" if self.rank is None else f" of rank {self.rank}"
        return f"the limit{whose} is {format_bytes(self.after_bytes)} now, and was {format_bytes(self.before_bytes)}"

    def behind(self, earlier: LimitChange | None) -> LimitChange:
        """Returns this change with an earlier one that no step was made under either."""
        if earlier is None or earlier.rank != self.rank:
            return self
        return replace(self, before_bytes=earlier.before_bytes)

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
        DoesNotFitError: the job's plan does not fit, and it cannot take another one; the limit is
            what it was, on all ranks.
        PeerError: the limit of another rank cannot be changed; likewise.
    """
    machine, planned = assembly.machine, assembly.planned
    ranks = planned.setup.ranks
    before = machine.limits.device_bytes
    if before is None or not planned.setup.enforces:
        raise UsageError(
            "the job was made without a limit that is enforced, so there is none to change: give memfit.fit a limit="
        )
    if limit_bytes == before and ranks is None:
        return None
    prepare_together(ranks, _CALL, lambda: machine.change_limit(limit_bytes))
    try:
        change = _agreed(ranks, LimitChange(before_bytes=before, after_bytes=limit_bytes))
        if planned.replan is None or planned.setup.has_lines:
            # Else the next step asks, which has its batch.
            _check_plan(assembly, before, limit_bytes)
    except (MemfitError, ValueError):
        machine.change_limit(before)
        raise
    if change is None:
        return None
    if planned.replan is None or planned.setup.has_lines:
        machine.hard_limit.follow()
    assembly.shapes.forget()
    machine.phases.begin_anew()
    return change


def _agreed(ranks: RankGroup | None, own: LimitChange) -> LimitChange | None:
    """Returns the change as all ranks tell it: of the first rank that has one; None if none has."""
    if ranks is None:
        return own
    said = agree(ranks, _CALL, values=[float(own.before_bytes), float(own.after_bytes)])
    limits = [(int(before), int(after)) for before, after, *_ in said]
    changed = [rank for rank, (before, after) in enumerate(limits) if before != after]
    if not changed:
        return None
    before, after = limits[changed[0]]
    is_lowered = any(after < before for before, after in limits)
    return LimitChange(before_bytes=before, after_bytes=after, rank=changed[0], is_lowered=is_lowered)


def _check_plan(assembly: Assembly, before: int, limit_bytes: int) -> None:
    """Raises `DoesNotFitError` where the job's plan does not fit, with the same text on all
    ranks.
    """
    largest = max(assembly.shapes.known, key=lambda prepared: prepared.peak_bytes)
    excess = limit_excess(assembly, largest, ())
    told = first_told(
        assembly.setup.ranks,
        _CALL,
        None
        if excess is None
        else f"the job's plan does not fit {format_bytes(limit_bytes)}: {excess}. The limit is still {format_bytes(before)}",
    )
    if told is not None:
        raise DoesNotFitError(
            f'{told}. A job of memfit.fit(store=..., on_breach="replan") takes another plan; here, save the job and fit again with resume=',
            smallest_limit_bytes=None,
        )


def limit_excess(assembly: Assembly, prepared: Prepared, batch: Any) -> str | None:
    """Says why a step does not fit beside what is held now; None if it does.

    Args:
        assembly: of the job.
        prepared: the step.
        batch: of the step, whose bytes its peak has.
    """
    machine, model, peak_bytes = assembly.machine, assembly.model, prepared.peak_bytes

    def room() -> int | None:
        return machine.budget(beside=[*assembly.held(), *tensors_in(batch), *model.buffers()]).tensor_bytes

    left = room()
    if left is not None and peak_bytes > left:
        gc.collect()  # what is in cycles is nobody's
        left = room()
    if left is None or peak_bytes <= left:
        return machine.hard_limit.excess(peak_bytes, lambda: assembly.others_bytes(prepared, batch))
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
