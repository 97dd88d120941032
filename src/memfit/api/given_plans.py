"""Plans that are given to `fit` and `advise`: decided ones, and techniques of the field by name.

In: what `plan=` says. Out: a `Plan`, or the name of a technique whose plans are looked at.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from memfit.core.errors import UsageError
from memfit.core.plan import Plan
from memfit.job.problem import read_plan
from memfit.planning.classics import CLASSICS

_WORD = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True, kw_only=True)
class GivenPlan:
    """Meaning of `plan=`.

    Attributes:
        plan: decided; None: it is to be chosen.
        classic: of this technique only (`planning.classics`); None: of all.
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
