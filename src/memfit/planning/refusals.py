"""The words of a refusal: what does not fit, the one number that would, what stands in its way.

In: a budget and a plan's predicted peak. Out: `DoesNotFitError`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.core.errors import DoesNotFitError
from memfit.core.limits import Budget
from memfit.core.units import MIB, format_bytes, round_up

# Resident bytes of equal processes at the same line of the same script: up to 1 MiB apart seen, by
# address layout and timing of threads.
BASE_VARIATION_BYTES = 4 * MIB
"""Bytes by which processes that hold the same may differ, and more."""
OTHERS = "is alive on the device beside the job (other models, data, results of yours)"
"""Names the base of a device's limit."""


def limit_to_name(nbytes: int, *, varies: bool) -> int:
    """Returns the limit that is told to a person who needs so many bytes.

    Args:
        nbytes: needed as this process is.
        varies: the limit is for a process, which holds a little more or less each time.
    """
    return round_up(nbytes + BASE_VARIATION_BYTES, MIB) if varies else nbytes


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a limit is refused, and which one would not be.

    Attributes:
        budget: with the limit.
        peak_bytes: of tensors, that the leanest plan (or the given one) is predicted to take.
        plan: its name.
        report: the residents at its peak, line by line.
        advice: what else could help.
        load_bytes: held until the weights have moved home.
        is_given: the plan is the user's, and others may do with less.
        varies: the limit is for a process, which holds a little more or less each time; the number
            that is named is above that.
        kind: of plan that was asked for, in words that follow "no plan".
        is_of_uniform: the plan treats all layers alike; mixed ones, which were looked for at this
            limit only, may do with less than it.
    """

    budget: Budget
    peak_bytes: int
    plan: str
    report: str
    advice: tuple[str, ...]
    load_bytes: int = 0
    is_given: bool = False
    varies: bool = False
    kind: str = ""
    is_of_uniform: bool = False

    @property
    def smallest_limit_bytes(self) -> int:
        """The smallest limit that holds from the load on; of a process, in the next one as well."""
        found = max(self.peak_bytes + self.budget.base_bytes + self.budget.reserve_bytes, self.load_bytes)
        return limit_to_name(found, varies=self.varies)

    def error(self, remark: str = "") -> DoesNotFitError:
        """Makes the error to be raised; its message ends with the remark."""
        message = f"{self}{remark}"
        return DoesNotFitError(
            message, smallest_limit_bytes=self.smallest_limit_bytes, report=self.report, refusal=self
        )

    @property
    def in_its_way(self) -> str:
        """The report in one line: where the peak is, and the three largest of what is there."""
        head, *rows = [" ".join(line.split()) for line in self.report.splitlines()] or [self.plan]
        return f"{head}: {', '.join(rows[:3])}" if rows else head

    def __str__(self) -> str:
        budget, smallest = self.budget, self.smallest_limit_bytes
        what = "the plan does not fit" if self.is_given else f"no plan{self.kind} fits"
        with_what = "it" if self.is_given else self.plan
        works = "works" if not self.is_of_uniform else "works for all layers alike"
        parts = [f"{format_bytes(self.peak_bytes)} are tensors"]
        if budget.base_bytes:
            # An accelerator's limit, and an emulated one's, is for tensors alone.
            whose = "the process holds before them (interpreter, libraries)" if self.varies else OTHERS
            parts.append(f"{format_bytes(budget.base_bytes)} what {whose}")
        if budget.reserve_bytes:
            parts.append(f"{format_bytes(budget.reserve_bytes)} kept for scratch of kernels")
        if self.load_bytes > self.peak_bytes + budget.base_bytes + budget.reserve_bytes:
            parts.append(
                f"and {format_bytes(self.load_bytes)} are there at first: the model as it was built, until its weights have moved home"
            )
        return (
            f"{what} the limit of {format_bytes(budget.limit_bytes or 0)}: the smallest limit that {works} is {format_bytes(smallest)} ({smallest} bytes), "
            f"with {with_what}.\n"
            f"Of that {', '.join(parts)}.\n"
            f"{self._way_out()}"
        )

    def _way_out(self) -> str:
        """Names what is in the way, and what to try."""
        budget = self.budget
        if self.varies and budget.limit_bytes is not None and budget.base_bytes >= budget.limit_bytes:
            return (
                f"Below {format_bytes(budget.base_bytes)} there is no room: Python, what is imported and the search for a plan take that. Raise the limit, "
                "or import less before memfit.fit."
            )
        return f"In its way: {self.in_its_way}. Try {'; '.join(self.advice)}."
