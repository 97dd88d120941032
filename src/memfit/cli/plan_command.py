"""`memfit plan`: what memfit would do inside a limit, why, and what else there was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from memfit.cli.options import (
    DecisionOptions,
    MachineOptions,
    RanksOption,
    SourceOptions,
    one_of,
    open_console,
    print_json,
    print_table,
    shared,
)
from memfit.cli.source import CommandSource
from memfit.core.documents import PLAN_LIMIT_BYTES, read_document
from memfit.core.errors import UsageError
from memfit.core.hardware import TierSpec
from memfit.core.limits import format_bytes, format_seconds
from memfit.core.plan import Plan, plan_differences
from memfit.core.tiers import TIERS, is_processor

if TYPE_CHECKING:
    from memfit.planner.advise import Advice
    from memfit.planner.explaining import Explanation
    from memfit.planner.extremes import Largest


# Tables that explain a plan, and that compare two.
#
# In: an `Explanation`, or two plans. Out: text on the terminal, and the same as JSON values.

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


# `memfit plan` asked the other way round: --largest and --step-seconds.
#
# In: the subject, its options. Out: a size with its plan, or the smallest limit; as text and as
# JSON values.

AXES = ("batch", "sequence")
_UNITS = {"batch": "rows", "sequence": "tokens a row"}


def check_asked(axis: str | None, step_seconds: float | None, options: Mapping[str, Any], *, compares: bool) -> None:
    """Refuses options that do not go together, before anything is built.

    Args:
        axis: given as --largest.
        step_seconds: given as --step-seconds.
        options: keywords of `advise`.
        compares: --diff is given.

    Raises:
        UsageError: no such axis, or options that --largest or --step-seconds do not go with.
    """
    if axis is None and step_seconds is None:
        return
    if axis is not None and axis not in AXES:
        raise UsageError(f"--largest is {' or '.join(AXES)}, not {axis!r:.80}")
    if options["explains"] or compares:
        raise UsageError(
            "--explain and --diff are for one limit and one batch: give them what --largest or --step-seconds finds"
        )
    if axis is None and options["limit"] is not None:
        raise UsageError(
            "--step-seconds with --limit needs --largest batch or sequence; without --limit it finds the smallest limit"
        )


def search_largest(
    source: CommandSource,
    given: SourceOptions,
    axis: str,
    step_seconds: float | None,
    options: Mapping[str, Any],
) -> Largest:
    """Finds the largest size of a command's subject, from the one that its options give.

    Args:
        source: the subject.
        given: its options, whose --batch and --sequence are what the size is looked for from.
        axis: one of `AXES`.
        step_seconds: a step may take so long.
        options: keywords of `advise`.

    Raises:
        UsageError: sequences of a subject whose batches memfit does not make; a batch whose rows it
            cannot tell.
    """
    from memfit.planner.extremes import find_largest

    if axis == "sequence":
        make, start = _sequences_of(source, given), given.sequence
    else:
        make, start = _batches_of(source, given)
    return find_largest(
        source.model,
        source.optimizer,
        source.loss,
        make,
        step_seconds=step_seconds,
        start=start,
        at_most=source.longest if axis == "sequence" else None,
        **_keywords(options),
    )


def search_smallest_limit(source: CommandSource, step_seconds: float, options: Mapping[str, Any]) -> Advice:
    """Finds the smallest limit whose fastest plan takes at most so many seconds a step.

    Raises:
        UsageError: see `planner.extremes.find_smallest_limit`.
    """
    from memfit.planner.extremes import find_smallest_limit

    return find_smallest_limit(
        source.model, source.optimizer, source.loss, source.sample, step_seconds=step_seconds, **_keywords(options)
    )


def _keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "explains"}


def _sequences_of(source: CommandSource, given: SourceOptions) -> Callable[[int], Any]:
    """Returns what makes a batch of sequences of so many tokens."""
    make = source.sample_of
    if make is None or not source.has_sequences:
        raise UsageError(
            "--largest sequence needs --model of a language model, whose sequences memfit makes; for others give a function that makes them to "
            "memfit.planner.extremes.find_largest"
        )
    return lambda tokens: make(given.batch, tokens)


def _batches_of(source: CommandSource, given: SourceOptions) -> tuple[Callable[[int], Any], int]:
    """Returns what makes a batch of so many rows, and the rows of the sample.

    Where batches are the user's, the sample's rows are taken, and once more where it has fewer.
    """
    make = source.sample_of
    if make is not None:
        return lambda rows: make(rows, given.sequence), given.batch
    from memfit.planner.extremes import batches_like

    return batches_like(source.sample)


# --- what was found -------------------------------------------------------------------------------


def print_found(
    console: Console, axis: str | None, found: Largest | None, advice: Advice, step_seconds: float | None
) -> None:
    """Prints the size, or the limit; nothing where neither was asked for."""
    if found is not None and axis is not None:
        console.print(
            f"the {'largest batch' if axis == 'batch' else 'longest sequence'}: {found.size} {_UNITS[axis]}. Of {found.next_size}: {found.why}",
            markup=False,
        )
    elif step_seconds is not None:
        limit = advice.budget.limit_bytes or 0
        console.print(
            f"the smallest limit with a step of at most {step_seconds:g} s: {format_bytes(limit)} ({limit} bytes)",
            markup=False,
        )


def found_data(axis: str | None, found: Largest | None, advice: Advice, step_seconds: float | None) -> dict[str, Any]:
    """Returns the same as JSON values."""
    if found is not None:
        return {
            "found": {
                "largest": axis,
                "size": found.size,
                "next_size": found.next_size,
                "why": found.why,
                "step_seconds": step_seconds,
            }
        }
    if step_seconds is not None:
        return {"found": {"smallest_limit_bytes": advice.budget.limit_bytes, "step_seconds": step_seconds}}
    return {}


@shared
def plan(
    *,
    source: SourceOptions,
    machine: MachineOptions,
    decisions: DecisionOptions,
    lines: Annotated[bool, typer.Option("--lines", help="Plan for a loop of your own (job.lines()).")] = False,
    durability: Annotated[
        str | None, typer.Option(help="Plan for a run that a store commits: step, a number of steps, or exit.")
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(help="Of that store: generations or journal.", autocompletion=one_of("generations", "journal")),
    ] = None,
    ranks: RanksOption = 1,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Say what each choice saves and costs, and what other limits and permissions would give. Takes as long as some twenty searches.",
        ),
    ] = False,
    largest: Annotated[
        str | None,
        typer.Option(
            metavar="batch|sequence",
            help="Find the largest batch, or the longest sequence, that fits the limit (and --step-seconds). Takes as long as some twenty searches.",
            autocompletion=one_of(*AXES),
        ),
    ] = None,
    step_seconds: Annotated[
        float | None,
        typer.Option(
            help="A step may take so long, as predicted. Without --largest and --limit: find the smallest limit for it. Takes as long as some ten searches.",
        ),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="PLAN PLAN",
            help="Show what two plans decide otherwise, and, for a model that is named, what each takes.",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            help="Write the plan here, for --plan of other commands; - writes it, and nothing else, to standard output."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Write what the tables say here, as JSON; - as with --json.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the schedule of a step.")] = False,
) -> None:
    """Chooses the fastest plan that fits the limit, or finds the largest batch or smallest limit.

    Shows the reason, the front of plans beside it, the schedule. Its options are the keywords of
    `memfit.fit`: the plan that is shown is the one that it would choose.
    """
    console = open_console(on_errors=Path("-") in (json, data))
    options = {
        "limit": machine.limit,
        **machine.keywords(),
        **decisions.keywords(),
        "lines": lines,
        "durability": read_durability(durability),
        "scheme": scheme,
        "explains": explain,
        "ranks": ranks,
    }
    check_asked(largest, step_seconds, options, compares=diff is not None)
    if diff is not None:
        priced: list[Advice] = []
        if source.is_named:
            with console.status("predicting"):
                found = source.build()
                priced = [_advised(found, {**options, "plan": read_plan_file(path)}) for path in diff]
        before, after = map(read_plan_file, diff)
        show_difference(console, diff, before, after, priced, data)
        return
    found_size: Largest | None = None
    with console.status("planning"):
        found = source.build()
        if largest is not None:
            found_size = search_largest(found, source, largest, step_seconds, options)
            advice = found_size.advice
        elif step_seconds is not None:
            advice = search_smallest_limit(found, step_seconds, options)
        else:
            advice = _advised(found, {**options, "compares": ranks == 1})
    if json == Path("-"):
        typer.echo(advice.plan.to_json())
    elif json is not None:
        write_plan(json, advice)
    console.print(found.name, markup=False)
    print_found(console, largest, found_size, advice, step_seconds)
    _show(console, advice)
    if text:
        console.print(advice.schedule.text(), markup=False, soft_wrap=True)
    if data is not None:
        print_json(data, plan_data(advice) | found_data(largest, found_size, advice, step_seconds))
    if json is not None and json != Path("-"):
        console.print(f"the plan is in {json}", markup=False, soft_wrap=True)


def _advised(source: CommandSource, options: Mapping[str, Any]) -> Advice:
    from memfit.planner.advise import advise

    return advise(source.model, source.optimizer, source.loss, source.sample, **options)


def read_durability(given: str | None) -> Any:
    """Reads --durability: a number of steps, or a word that `fit` knows.

    Raises:
        UsageError: it is neither.
    """
    if given is None or given in ("step", "exit"):
        return given
    if given.isdecimal() and int(given) > 0:
        return int(given)
    raise UsageError(f"--durability is step, exit or a number of steps, not {given!r:.80}")


def _show(console: Console, advice: Advice) -> None:
    console.print(f"plan: {advice.reason}", markup=False)
    console.print()
    _print_limit(console, advice)
    print_front(console, advice)
    _print_classics(console, advice)
    if advice.explanation is not None:
        print_explanation(console, advice.explanation)


def write_plan(path: Path, advice: Advice) -> None:
    """Writes a plan as JSON.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(advice.plan.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the plan cannot be written to {path}: {error.strerror}; name another file") from error


def _print_limit(console: Console, advice: Advice) -> None:
    budget, away = advice.budget, advice.hardware.away
    rows = [
        ("device", advice.hardware.device),
        (what_is_held(advice.hardware.device), format_bytes(budget.base_bytes)),
        ("reserve for scratch of kernels", format_bytes(budget.reserve_bytes)),
        ("tensors, predicted peak", format_bytes(advice.timeline.peak_bytes)),
        ("predicted peak", format_bytes(advice.predicted_peak_bytes)),
        ("limit", "none" if budget.limit_bytes is None else format_bytes(budget.limit_bytes)),
        *(
            (f"{tier}, predicted peak", _of_capacity(advice.timeline.peak_in(tier), away.get(tier)))
            for tier in dict.fromkeys([*TIERS, *advice.timeline.peaks])
            if not tier.traits.is_device
        ),
        ("step, predicted", format_seconds(advice.timeline.seconds)),
    ]
    print_table(console, "What it takes", ("what", "predicted"), rows)


def _of_capacity(nbytes: int, tier: TierSpec | None) -> str:
    """A peak, beside what the tier has."""
    return format_bytes(nbytes) if tier is None else f"{format_bytes(nbytes)} of {format_bytes(tier.nbytes)}"


def what_is_held(device: str) -> str:
    """Names the bytes that stand before the job's tensors: an accelerator's limit is for tensors
    alone.
    """
    if is_processor(device):
        return "held before the first tensor (interpreter, libraries)"
    return "alive on the device beside the job"


def print_front(console: Console, advice: Advice) -> None:
    """Prints the plans that stood beside the chosen one, from the fastest to the leanest."""
    rows = [
        (
            "chosen" if point.name == advice.chosen else "fits" if point.fits else "does not fit",
            format_bytes(point.peak_bytes),
            format_seconds(point.seconds),
            point.name,
        )
        for point in advice.front
    ]
    if rows:
        columns = ("", "tensors, predicted", "step, predicted", "plan")
        print_table(console, "Pareto front", columns, rows, left=("plan",))


def _print_classics(console: Console, advice: Advice) -> None:
    """Prints what techniques of the field would take in the chosen plan's place."""
    own_s = advice.timeline.seconds
    rows = [
        (
            point.name,
            "fits" if point.fits else "does not fit",
            format_bytes(point.peak_bytes),
            format_seconds(point.seconds),
            f"{point.seconds / own_s:.2f}x" if own_s else "",
            f"{point.says} ({point.microbatches} microbatches)" if point.microbatches > 1 else point.says,
        )
        for point in advice.classics
    ]
    if rows:
        columns = ("technique (--plan)", "", "tensors, predicted", "step, predicted", "of the chosen", "in words")
        print_table(console, "Techniques of the field", columns, rows, left=("in words",))
