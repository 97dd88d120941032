"""Answers to "what if": the chosen plan with another limit, another tier's limit, or something more
that is allowed; and all that explains a plan together.

In: made by `api.explaining`. Out: data for people.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from memfit.planning.choice_notes import ChoiceNote
from memfit.planning.price_curve import CurvePoint
from memfit.prediction.bottlenecks import Phase


@dataclass(frozen=True, kw_only=True)
class IncrementNote:
    """A decision on the way from plain training to the plan.

    Attributes:
        adds: the decision that is added.
        peak_bytes: predicted device bytes of tensors with it and all before it.
        seconds: of a step, likewise.
        saves_bytes: less than without it.
        costs_s: more than without it.
        why: it helps (which bytes), and stands before the next.
    """

    adds: str
    peak_bytes: int
    seconds: float
    saves_bytes: int
    costs_s: float
    why: str


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Answer to one question.

    Attributes:
        question: in words, such as "1 GiB more of the device".
        seconds: of the plan that would be chosen; None: none fits, or it has no effect.
        peak_bytes: its device bytes of tensors; None likewise.
        faster_s: seconds that it takes less than the plan that is explained; negative: more; None
            likewise.
        plan: it in words; or why there is none.
    """

    question: str
    seconds: float | None
    peak_bytes: int | None
    faster_s: float | None
    plan: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan is what it is.

    Attributes:
        choices: what each choice saves and costs, alone.
        increments: from plain training to the plan, one kind of decision more each.
        phases: who works, and who waits, in each part of the step.
        curve: seconds by the limit, from the smallest that works to where more does not help;
            empty: not asked for.
        tiers: one more and one less of each tier's memory; empty likewise.
        allowances: what each `allow=` would bring; empty likewise.
    """

    choices: tuple[ChoiceNote, ...] = ()
    increments: tuple[IncrementNote, ...] = ()
    phases: tuple[Phase, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    tiers: tuple[WhatIf, ...] = ()
    allowances: tuple[WhatIf, ...] = ()

    def data(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return asdict(self)
