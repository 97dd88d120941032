"""`memfit report`: a plan's step, action by action: where the memory and the time go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from memfit.cli.options import (
    DecisionOptions,
    JsonOption,
    MachineOptions,
    SourceOptions,
    open_console,
    print_json,
    print_table,
    shared,
)
from memfit.core.limits import format_bytes, format_seconds

if TYPE_CHECKING:
    from memfit.core.step import Timeline
    from memfit.planner.advise import Advice
    from memfit.report.subject import ReportSubject


@shared
def report(
    *,
    options: SourceOptions,
    machine: MachineOptions,
    decisions: DecisionOptions,
    largest: Annotated[int, typer.Option(min=1, help="How many of the largest moments to list.")] = 10,
    html: Annotated[
        Path | None, typer.Option(help="Write the report here as a page: one file, which needs no network.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write the step here as a trace that ui.perfetto.dev opens.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Shows what a step under a plan is predicted to hold and to wait for."""
    console = open_console(on_errors=json == Path("-"))
    with console.status("predicting"):
        source = options.build()
        from memfit.planner.advise import advise

        advice = advise(
            source.model,
            source.optimizer,
            source.loss,
            source.sample,
            limit=machine.limit,
            **machine.keywords(),
            **decisions.keywords(),
        )
    _print_tables(console, source.name, advice, largest)
    if html is not None or perfetto is not None or json is not None:
        with console.status("drawing"):
            _write_files(
                subject_of_advice(advice, source.name, clips_norm=decisions.clip is not None), html, perfetto, json
            )
    if html is not None:
        console.print(f"the page is in {html}", markup=False, soft_wrap=True)
    if perfetto is not None:
        console.print(f"the trace is in {perfetto}: open it at ui.perfetto.dev", markup=False, soft_wrap=True)


def _print_tables(console: Console, name: str, advice: Advice, largest: int) -> None:
    timeline = advice.timeline
    console.print(name, markup=False)
    console.print(f"plan: {advice.reason}", markup=False)
    console.print(
        f"predicted peak of tensors {format_bytes(timeline.peak_bytes)}, of everything "
        f"{format_bytes(advice.predicted_peak_bytes)}; predicted step {format_seconds(timeline.seconds)}, {len(timeline.moments)} actions",
        markup=False,
    )
    console.print()
    _print_peak(console, timeline)
    _print_moments(console, timeline, largest)
    _print_links(console, timeline)


def _write_files(subject: ReportSubject, html: Path | None, perfetto: Path | None, json: Path | None) -> None:
    """Writes what was asked for.

    Raises:
        UsageError: a file cannot be written.
    """
    from memfit.report.page import page_data, page_of, write_report
    from memfit.report.perfetto import render_perfetto

    data = page_data(subject)
    if html is not None:
        write_report(html, page_of(data))
    if perfetto is not None:
        write_report(perfetto, render_perfetto(subject))
    if json is not None:
        print_json(json, data)


def subject_of_advice(advice: Advice, title: str, *, clips_norm: bool) -> ReportSubject:
    """Puts together what files about a plan say."""
    from memfit.job.reporting import report_subject
    from memfit.report.subject import PlanPoint

    front = [
        PlanPoint(
            name=point.name,
            peak_bytes=point.peak_bytes,
            seconds=point.seconds,
            note="chosen" if point.name == advice.chosen else "fits" if point.fits else "does not fit",
        )
        for point in advice.front
    ]
    return report_subject(
        title=title,
        reason=advice.reason,
        plan=advice.plan,
        profile=advice.profile,
        schedule=advice.schedule,
        predicted=advice.timeline,
        budget=advice.budget,
        hardware=advice.hardware,
        clips_norm=clips_norm,
        front=front,
    )


def _print_peak(console: Console, timeline: Timeline) -> None:
    peak = timeline.peak
    if peak is not None:
        rows = [(name, format_bytes(nbytes)) for name, nbytes in peak.by_category.items() if nbytes]
        print_table(console, f"Predicted peak, at {peak.action}", ("category", "bytes"), rows)


def _print_moments(console: Console, timeline: Timeline, largest: int) -> None:
    ranked = sorted(range(len(timeline.moments)), key=lambda i: -timeline.moments[i].peak_bytes)[:largest]
    rows = [
        (
            moment.action,
            str(index),
            format_bytes(moment.peak_bytes),
            format_bytes(moment.after_bytes),
            format_seconds(moment.end_s - moment.start_s),
        )
        for index, moment in ((i, timeline.moments[i]) for i in sorted(ranked))
    ]
    print_table(console, "Largest moments, in order", ("action", "number", "peak", "after", "takes"), rows)


def _print_links(console: Console, timeline: Timeline) -> None:
    moved = sorted(set(timeline.bytes_read) | set(timeline.bytes_written))
    if moved:
        rows = [
            (name, format_bytes(timeline.bytes_read.get(name, 0)), format_bytes(timeline.bytes_written.get(name, 0)))
            for name in moved
        ]
        print_table(console, "Moved in a step", ("what", "read", "written"), rows)
    stalls = [(cause, format_seconds(s)) for cause, s in sorted(timeline.stalls_s.items()) if s > 0]
    if stalls:
        print_table(console, "Compute waits for", ("cause", "seconds"), stalls)
