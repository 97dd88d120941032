"""`memfit plan`: what memfit would do inside a limit, why, and what else there was."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from memfit.cli.explanation_tables import plan_data, print_explanation, read_plan_file, show_difference
from memfit.cli.found_extremes import AXES, check_asked, found_data, print_found, search_largest, search_smallest_limit
from memfit.cli.options import DecisionOptions, MachineOptions, RanksOption, SourceOptions, one_of, shared
from memfit.cli.output import open_console, print_json, print_table
from memfit.cli.source import CommandSource
from memfit.core.errors import UsageError
from memfit.core.hardware import TierSpec
from memfit.core.tiers import TIERS, is_processor
from memfit.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memfit.api.advise import Advice
    from memfit.api.extremes import Largest


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
    from memfit.api.advise import advise

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
