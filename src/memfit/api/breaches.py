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
