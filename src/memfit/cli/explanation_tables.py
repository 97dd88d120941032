"""Tables that explain a plan, and that compare two.

In: an `Explanation`, or two plans. Out: text on the terminal, and the same as JSON values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from memfit.cli.output import print_json, print_table
from memfit.core.documents import PLAN_LIMIT_BYTES, read_document
from memfit.core.errors import UsageError
from memfit.core.plan import Plan
from memfit.core.plan_difference import plan_differences
from memfit.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memfit.api.advise import Advice
    from memfit.api.explaining import Explanation

DATA_FORMAT = 1


def read_plan_file(path: Path) -> Plan:
    """Reads a plan.

    Raises:
        UsageError: the file cannot be read. PlanError: it is no plan.
    """
    try:
        content = read_document(path, limit_bytes=PLAN_LIMIT_BYTES)
    except (OSError, ValueError) as error:
        raise UsageError(f"the plan {path} cannot be read: {error}") from error
    return Plan.from_json(content)


# --- one plan -------------------------------------------------------------------------------------


def print_explanation(console: Console, explanation: Explanation) -> None:
    """Prints why a plan is what it is."""
    _print_increments(console, explanation)
    _print_choices(console, explanation)
    _print_phases(console, explanation)
    _print_curve(console, explanation)
    columns = ("", "step, predicted", "that is", "tensors, predicted", "plan")
    for title, answers in (
        ("One more, one less", explanation.tiers),
        ("What else could be allowed, and what it would bring", explanation.allowances),
    ):
        rows = [
            (
                answer.question,
                "" if answer.seconds is None else format_seconds(answer.seconds),
                "" if answer.faster_s is None else _compared(answer.faster_s),
                "" if answer.peak_bytes is None else format_bytes(answer.peak_bytes),
                answer.plan,
            )
            for answer in answers
        ]
        if rows:
            print_table(console, title, columns, rows, left=("plan",))


def _print_increments(console: Console, explanation: Explanation) -> None:
    if not explanation.increments:
        return
    console.print(
        "From plain training to this plan. Each line takes one more of its decisions: what the step then holds at most, and takes, "
        "and what the decision saved and cost.",
        markup=False,
    )
    rows = [
        (
            increment.adds,
            format_bytes(increment.peak_bytes),
            format_seconds(increment.seconds),
            _bytes_saved(increment.saves_bytes),
            _seconds_paid(increment.costs_s),
        )
        for increment in explanation.increments
    ]
    print_table(console, "One decision more at a time", ("with", "tensors", "step", "saves", "costs"), rows)
    console.print("Why each, and why in this order:", markup=False)
    for increment in explanation.increments:
        console.print(f"  {increment.adds}: {increment.why}", markup=False)


def _print_choices(console: Console, explanation: Explanation) -> None:
    if not explanation.choices:
        return
    console.print(
        "What each choice saves and costs if it alone is taken back. Savings do not add up: a choice whose bytes lie at another moment "
        "than the peak saves nothing of it.",
        markup=False,
    )
    rows = [
        (
            note.members if note.count == 1 else f"{note.members} ({note.count})",
            note.choice,
            "needed" if note.saves_bytes is None else _bytes_saved(note.saves_bytes),
            "" if note.costs_s is None else _seconds_paid(note.costs_s),
            note.meaning,
        )
        for note in explanation.choices
    ]
    columns = ("of", "choice", "saves", "costs", "in words")
    print_table(console, "Choices", columns, rows, left=("choice", "in words"))


def _print_phases(console: Console, explanation: Explanation) -> None:
    rows: list[tuple[str, ...]] = []
    for phase in explanation.phases:
        lane, busy_s = next(iter(phase.busy_s.items()), ("", 0.0))
        stalls = ", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in phase.stalls_s.items())
        share = busy_s / phase.seconds if phase.seconds else 0.0
        rows.append((phase.name, format_seconds(phase.seconds), lane, f"{share:.0%}", stalls or "nothing"))
    if rows:
        columns = ("part of the step", "takes", "busiest", "of the time", "compute waits for")
        print_table(console, "What holds the step up", columns, rows, left=("busiest", "compute waits for"))


def _print_curve(console: Console, explanation: Explanation) -> None:
    if not explanation.curve:
        return
    slowest = max(point.seconds for point in explanation.curve)
    rows = [
        (
            format_bytes(point.limit_bytes),
            format_seconds(point.seconds),
            "#" * max(1, round(24 * point.seconds / slowest)),
            ", ".join(word for word, holds in (("asked", point.is_asked), ("knee", point.is_knee)) if holds),
            point.name,
        )
        for point in explanation.curve
    ]
    console.print(
        "The price of memory: the fastest plan for each limit. At a knee less memory begins to cost at least twice as much as just above it.",
        markup=False,
    )
    columns = ("limit", "step, predicted", "", " ", "plan")
    print_table(console, "Price of memory", columns, rows, left=("", " ", "plan"))


def _bytes_saved(saved: int) -> str:
    return "" if not saved else format_bytes(saved) if saved > 0 else f"-{format_bytes(-saved)}"


def _seconds_paid(seconds: float) -> str:
    sign = "+" if seconds > 0 else ""
    return f"{sign}{format_seconds(seconds, 2)}" if abs(seconds) > 1e-9 else ""


def _compared(faster_s: float) -> str:
    if abs(faster_s) < 1e-9:
        return "the same"
    return f"{format_seconds(abs(faster_s), 2)} {'less' if faster_s > 0 else 'more'}"


def plan_data(advice: Advice) -> dict[str, Any]:
    """Returns what the tables of a plan say, as JSON values: bytes are whole numbers, times
    seconds.
    """
    budget, timeline, explanation = advice.budget, advice.timeline, advice.explanation
    return {
        "format": DATA_FORMAT,
        "reason": advice.reason,
        "device": advice.hardware.device,
        "limit_bytes": budget.limit_bytes,
        "base_bytes": budget.base_bytes,
        "reserve_bytes": budget.reserve_bytes,
        "predicted_peak_bytes": advice.predicted_peak_bytes,
        "peaks": {str(tier): nbytes for tier, nbytes in timeline.peaks.items()},
        "seconds": timeline.seconds,
        "stalls_s": dict(timeline.stalls_s),
        "chosen": advice.chosen,
        "front": [asdict(point) for point in advice.front],
        "techniques": [asdict(point) for point in advice.classics],
        "explanation": None if explanation is None else explanation.data(),
    }


# --- two plans ------------------------------------------------------------------------------------


def show_difference(
    console: Console, paths: tuple[Path, Path], before: Plan, after: Plan, priced: Sequence[Advice], data: Path | None
) -> None:
    """Prints what two plans decide otherwise.

    Args:
        console: to print on.
        paths: of their files.
        before: the first plan.
        after: the second.
        priced: what each takes; empty: no model was named.
        data: file for the same as JSON.

    Raises:
        UsageError: it cannot be written.
    """
    differences = plan_differences(before, after)
    rows = [(one.where, one.before, one.after) for one in differences]
    first, second = map(str, paths)
    if first == second:
        second += " (again)"
    if rows:
        columns = ("what", first, second)
        print_table(console, "Differences", columns, rows, left=columns[1:])
    else:
        console.print("the plans decide the same", markup=False)
    costs = [
        {
            "plan": str(path),
            "peaks": {str(tier): nbytes for tier, nbytes in advice.timeline.peaks.items()},
            "seconds": advice.timeline.seconds,
        }
        for path, advice in zip(paths, priced, strict=False)
    ]
    if priced:
        told = [
            (
                str(path),
                format_bytes(advice.timeline.peak_bytes),
                format_seconds(advice.timeline.seconds),
                _stalled(advice),
            )
            for path, advice in zip(paths, priced, strict=True)
        ]
        columns = ("plan", "tensors, predicted", "step, predicted", "compute waits for")
        print_table(console, "What they take", columns, told, left=("compute waits for",))
    if data is not None:
        print_json(
            data, {"format": DATA_FORMAT, "differences": [asdict(one) for one in differences], "predicted": costs}
        )


def _stalled(advice: Advice) -> str:
    return ", ".join(f"{cause} {format_seconds(s)}" for cause, s in sorted(advice.timeline.stalls_s.items()) if s > 0)
