"""A breach of the limit and what was made of it.

In: the error of a step that met the limit. Out: what is said about it, and how much less the next plan may take.

[Note: replanning]
A step that meets the limit under `on_breach="replan"` is given up with everything that its plan made: homes in memory, buffers, hooks. What stays is the
store, whose last commit is the step before. What is still allocated then belongs to others (the user's tensors, a leak), and the next plan must live beside
it; it also gets a margin, larger with each try, for what no trace foresees. It must be predicted to take less than the plan before: so tries end, at the
latest after `TRIES`. The step is then made again with the same batch and the same random numbers.
"""

from __future__ import annotations

import gc
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from memfit.api.assembly import Assembly
from memfit.api.interrupts import Interrupts
from memfit.api.parts import Replan
from memfit.api.passes import check_split
from memfit.core.errors import DoesNotFitError, LimitBreachError, MemfitError
from memfit.core.plan import Plan
from memfit.core.units import MIB

TRIES = 3
"""Plans that one step may be tried under after the one that met the limit."""
_MARGIN_SHARE = 0.04


@dataclass(frozen=True, kw_only=True)
class BreachReport:
    """A breach that a tighter plan answered.

    Attributes:
        step: the step (from 1) that met the limit.
        cause: the error's own words: where, what was asked for, what held memory.
        foreign_bytes: what was allocated on the device beside the job.
        before: the plan that met the limit.
        after: the plan that the run goes on with.
        reason: why this one.
    """

    step: int
    cause: str
    foreign_bytes: int
    before: Plan
    after: Plan
    reason: str

    def in_words(self) -> str:
        """A sentence for people."""
        return f"step {self.step} met the limit and was made again under a tighter plan. Cause: {self.cause} Now: {self.reason}"


def assemble_tighter(
    before: Assembly, error: LimitBreachError, batch: Any, attempt: int, replan: Replan, interrupts: Interrupts
) -> tuple[Assembly, BreachReport]:
    """Gives up everything but the store, and takes the run up again under a plan that needs less.

    Args:
        before: the assembly whose step met the limit; it is no more afterwards.
        error: the breach.
        batch: of that step.
        attempt: from 1.
        replan: makes plans.
        interrupts: of the job.

    Raises:
        LimitBreachError: the breach itself, where no tighter plan fits; nothing is left of the job, the last commit is whole.
    """
    parts, commits = before.parts, before.commits
    assert commits is not None
    limit = before.machine.limits.device_bytes or 0
    peak, step = before.prepare(batch).timeline.peak_bytes, before.steps + 1
    after: Assembly | None = None
    try:
        before.give_up()
        commits.run.go_back()
        clear_frames(error)
        foreign_bytes = before.machine.meter.live_bytes()
        tighter = replan(batch, margin_bytes(limit, attempt))
        if tighter.prepared.timeline.peak_bytes >= peak:
            raise DoesNotFitError(  # noqa: TRY301, answered below like the planner's own
                f"the tightest plan that fits is predicted to take no less: {tighter.reason}"
            )
        before.hand_over()
        after = Assembly(tighter, scaler=before.scaler, interrupts=interrupts, before=commits)
        if tighter.plan.microbatches > 1 and parts.plan.microbatches == 1 and tighter.checks_split:
            check_split(after, batch)
    except BaseException as other:
        for assembly in (before, after):
            if assembly is not None:
                assembly.end(restore=False)
        if not isinstance(other, MemfitError | torch.OutOfMemoryError):
            raise
        error.add_note(
            f"no tighter plan took its place ({type(other).__name__}: {other}). The job is closed; step {commits.run.committed.committed_step} is whole in "
            f"{commits.run.directory}"
        )
        raise error from other
    return after, BreachReport(
        step=step,
        cause=str(error),
        foreign_bytes=foreign_bytes,
        before=parts.plan,
        after=tighter.plan,
        reason=tighter.reason,
    )


def margin_bytes(limit_bytes: int, attempt: int) -> int:
    """What a plan must leave free after so many breaches of one step (from 1)."""
    return attempt * max(int(_MARGIN_SHARE * limit_bytes), MIB)


def clear_frames(error: BaseException) -> None:
    """Lets go of what the frames of an error, and of what caused it, hold: activations and gradients of the step that failed.

    The tracebacks go too: a frame that was cleared still holds its function, and that the arguments in its closure (as `Module.__call__` has them).
    """
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    gc.collect()  # autograd's graph and the frames of the step refer to each other
