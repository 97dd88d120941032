"""The question the other way round: the largest batch, or the longest sequence, whose plan fits
(and is as fast as is asked), and the smallest limit that has a plan as fast as is asked.

In: the user's model, optimizer and loss, batches by their size, keywords of `advise`. Out: the size
or the limit, with the `Advice` for it.

[Note: a size and the next one]
What is told was planned, and so was the next size, which does not do. Sizes are looked for by
doubling, or halving, and then by halves between the last that does and the first that does not. A
plan for more rows is not always slower or larger: rows that cannot be shared out evenly, say, make
microbatches of two sizes. So a still larger size may do although the next one does not; it is not
looked for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit.core.errors import DoesNotFitError, UsageError
from memfit.core.hardware import Hardware
from memfit.core.limits import MIB, format_bytes, format_seconds
from memfit.planner.advise import Advice, Asked, ask
from memfit.planner.choosing import Choice
from memfit.planner.explaining import AskedPlan
from memfit.planner.problem import Loss
from memfit.planner.search.pricing import limit_to_name
from memfit.trace.cutting import ways_of

_ENOUGH = 1 << 62
"""Bytes of a limit that every plan fits."""
_GRAIN = 128
"""The smallest limit is looked for to such a part of it, or a MiB."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest size that does.

    Attributes:
        size: rows or tokens, as `sample_of` takes them.
        advice: the plan for it.
        next_size: the smallest that was asked about and does not do; one more than `size`.
        why: the next one does not do, in words.
    """

    size: int
    advice: Advice
    next_size: int
    why: str


def find_largest(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    sample_of: Callable[[int], Any],
    *,
    step_seconds: float | None = None,
    start: int = 1,
    at_most: int | None = None,
    **keywords: Any,
) -> Largest:
    """Finds the largest batch, or the longest sequence, or whatever size `sample_of` gives batches.

    Nothing is trained. It takes about twice as many searches for a plan as the size has binary
    digits. See [Note: a size and the next one].

    Args:
        model: as in `fit`, like `optimizer` and `loss`.
        optimizer: its states are foretold.
        loss: the user's.
        sample_of: makes a batch of a size: of so many rows, of so many tokens a row.
        step_seconds: a step may take so long, as it is predicted; None: as long as it takes.
        start: size that is asked about first.
        at_most: no larger size is asked about, because the model takes none, say.
        **keywords: of `advise`, such as `limit`, `hardware` and `allow`. `plan` may be the name of
            a technique.

    Raises:
        DoesNotFitError: no plan fits a batch of size 1.
        UsageError: size 1 takes longer than `step_seconds`; neither a limit nor `step_seconds` is
            given; a plan is given. Others as in `advise`.
    """
    _check_seconds(step_seconds)
    are_counts = all(isinstance(count, int) for count in (start, 1 if at_most is None else at_most))
    if not are_counts or start < 1 or (at_most is not None and at_most < start):
        raise UsageError(
            f"start={start} and at_most={at_most}: give integers, a start of at least 1, and at most at_most"
        )
    measured: list[Hardware] = []

    def plan(size: int) -> _Tried:
        asked = _asked(model, optimizer, loss, sample_of(size), keywords, measured[0] if measured else None)
        measured[:] = [asked.hardware]
        if step_seconds is None and asked.planned.machine.limits.device_bytes is None:
            raise UsageError("without a limit every size fits: give limit= or step_seconds=, or both")
        return _tried(asked, step_seconds)

    found: dict[int, _Tried] = {}

    def does(size: int) -> bool:
        if size not in found:
            found[size] = plan(size)
            gc.collect()  # the last size's trace is not held beside the next one's
        return found[size].advice is not None

    good, bad = _enclose(does, start, at_most)
    if good == 0:
        raise found[1].refusal(step_seconds, "a batch of size 1")
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if does(middle) else (good, middle)
    advice = found[good].advice
    assert advice is not None, "the last that does"
    why = found[bad].why(step_seconds) if bad in found else "no more was to be asked about"
    return Largest(size=good, advice=advice, next_size=bad, why=why)


def find_smallest_limit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    sample: Any,
    *,
    step_seconds: float,
    **keywords: Any,
) -> Advice:
    """Finds the smallest limit of the device inside which a step takes no longer than is asked.

    Nothing is trained. It takes about ten searches for a plan. The limit is found to a 128th of
    itself, or a MiB. Of a process 4 MiB are added, by which one differs from the next.

    Args:
        model: as in `fit`, like `optimizer` and `loss`.
        optimizer: its states are foretold.
        loss: the user's.
        sample: a batch.
        step_seconds: a step may take so long, as it is predicted.
        **keywords: of `advise`, but for `limit`. `plan` may be the name of a technique.

    Returns:
        The plan inside that limit, which is `Advice.budget.limit_bytes`.

    Raises:
        DoesNotFitError: no plan fits the machine.
        UsageError: the fastest plan takes longer, a limit or a plan is given, or several ranks are.
            Others as in `advise`.
    """
    _check_seconds(step_seconds)
    if keywords.get("limit") is not None:
        raise UsageError("the smallest limit is looked for: leave limit= out, or ask for the largest size inside it")
    if keywords.get("ranks", 1) > 1:
        raise UsageError("the smallest limit is looked for without ranks=")
    asked = _asked(model, optimizer, loss, sample, keywords, None)
    question = asked.traced()
    budget = question.budget(question.first)
    beside = budget.base_bytes + budget.reserve_bytes
    found: dict[int, Choice | None] = {}

    def does(limit: int) -> bool:
        if limit not in found:
            found[limit] = _within(question, limit, step_seconds)
        return found[limit] is not None

    good, bad = _ends(question, beside, does, step_seconds)
    while good - bad > max(MIB, good // _GRAIN):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if does(middle) else (good, middle)
    # One that a refusal named is one to name already.
    is_named = good == bad
    limit = good if is_named else limit_to_name(good, varies=asked.planned.machine.counts_process)
    choice = found[good]
    assert choice is not None, "the last that does"
    advice = asked.advice_of(choice)
    return replace(advice, budget=replace(advice.budget, limit_bytes=limit))


def batches_like(sample: Any) -> tuple[Callable[[int], Any], int]:
    """Returns what makes batches of so many rows of a sample, and how many it has.

    A larger batch has the sample's rows once more.

    Raises:
        UsageError: what counts the rows of the sample was not found.
    """
    way = next(ways_of(sample), None)
    if way is None or way.grown(sample) is None:
        raise UsageError(
            "what counts the rows of the sample was not found: give find_largest a function that makes batches"
        )
    return lambda rows: way.resized(sample, rows), way.rows(sample)


# --- sizes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """A size that was asked about.

    Attributes:
        advice: the plan, if it does.
        seconds: of the plan that fits; None: none does.
        error: where none does.
    """

    advice: Advice | None
    seconds: float | None = None
    error: DoesNotFitError | None = None

    def why(self, step_seconds: float | None) -> str:
        """Says why it does not do."""
        if self.error is not None:
            return str(self.error).splitlines()[0]
        assert self.seconds is not None, "there is a plan where there is no error"
        return f"the plan for it takes {format_seconds(self.seconds, 4)} a step, more than {step_seconds:g} s"

    def refusal(self, step_seconds: float | None, what: str) -> Exception:
        """Returns the error for a question without an answer."""
        return self.error or UsageError(f"{what}: {self.why(step_seconds)}")


def _tried(asked: Asked, step_seconds: float | None) -> _Tried:
    try:
        advice = asked.answered()
    except DoesNotFitError as error:
        # Its frames hold the search, and with it the trace.
        return _Tried(advice=None, error=error.with_traceback(None))
    seconds = advice.timeline.seconds
    does = step_seconds is None or seconds <= step_seconds
    return _Tried(advice=advice if does else None, seconds=seconds)


def _enclose(does: Callable[[int], bool], start: int, at_most: int | None) -> tuple[int, int]:
    """Returns (the last size that does, the next that does not) of a doubling, or a halving, series
    from the start; 0: none does. The second is one above `at_most` where all do.
    """
    size = start
    if not does(size):
        while size > 1:
            smaller = size // 2
            if does(smaller):
                return smaller, size
            size = smaller
        return 0, 1
    while at_most is None or size < at_most:
        larger = 2 * size if at_most is None else min(2 * size, at_most)
        if not does(larger):
            return size, larger
        size = larger
    return size, size + 1


# --- limits ---------------------------------------------------------------------------------------


def _ends(question: AskedPlan, beside: int, does: Callable[[int], bool], step_seconds: float) -> tuple[int, int]:
    """Returns a limit that does, and the smallest that has any plan, or the first again if that
    does too.
    """
    most = question.machine.limits.device_bytes or _ENOUGH
    if not does(most):
        fastest = question.answer(limit=most).found.timeline
        raise UsageError(
            f"without a limit the plan takes {format_seconds(fastest.seconds, 4)} a step, not {step_seconds:g} s, "
            f"with {format_bytes(fastest.peak_bytes)} of tensors: "
            "no limit makes it faster"
        )
    least = min(most, question.smallest_limit(beside))
    if does(least):
        return least, least
    # Plans are looked for at a series of limits, so that a plan need not be found where it just
    # fits.
    good = 2 * least
    while good < most and not does(good):
        good *= 2
    return min(good, most), least


def _within(question: AskedPlan, limit: int, step_seconds: float) -> Choice | None:
    """Chooses a plan inside a limit; None: it is slower than asked, or there is none."""
    try:
        choice = question.answer(limit=limit)
    except DoesNotFitError:
        return None
    return choice if choice.found.timeline.seconds <= step_seconds else None


# --- what both ask --------------------------------------------------------------------------------


def _check_seconds(step_seconds: float | None) -> None:
    if step_seconds is not None and not (isinstance(step_seconds, int | float) and step_seconds > 0):
        raise UsageError(f"step_seconds={step_seconds}: give the seconds that a step may take, more than 0")


def _asked(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    sample: Any,
    keywords: dict[str, Any],
    measured: Hardware | None,
) -> Asked:
    """Opens the question with a sample, on speeds that were measured once.

    Raises:
        UsageError: a plan is given.
    """
    asked = ask(model, optimizer, loss, sample, measured=measured, **keywords)
    if asked.plan is not None:
        raise UsageError("sizes and limits are looked for with plans that memfit chooses: give no plan, or a technique")
    return asked
