"""`memfit verify`: a run's directory against its checksums, or a plan against plain PyTorch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.options import DecisionOptions, JsonOption, MachineOptions, SourceOptions, shared
from memfit.cli.output import open_console, print_json
from memfit.cli.source import CommandSource, source_of
from memfit.core.errors import UsageError


@shared
def verify(
    *,
    source: SourceOptions,
    machine: MachineOptions,
    decisions: DecisionOptions,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare with plain PyTorch.")] = 3,
    json: JsonOption = None,
) -> None:
    """Checks a run's directory against its checksums, or a plan against plain PyTorch.

    memfit verify DIR reads all that fit(store=...) or train --store has committed. Otherwise the
    model that is named trains plainly and under the plan, and both are compared bit for bit; it
    takes its memory three times, so name a small one of the same kind. Exit code 1 if something is
    damaged or different.
    """
    named = source.function
    if named is not None and (Path(named).is_dir() or ":" not in named):
        _verify_store(Path(named), json)
        return
    console = open_console(on_errors=json == Path("-"))
    with console.status("training plainly and under the plan"):
        from memfit.api import verify as verify_plan

        built = _build(source)
        found = verify_plan(
            built.model,
            built.optimizer,
            built.loss,
            built.sample,
            steps=steps,
            limit=machine.limit,
            **machine.keywords(),
            **decisions.keywords(),
        )
    console.print(built.name, markup=False, soft_wrap=True)
    console.print(str(found), markup=False, soft_wrap=True)
    if json is not None:
        print_json(json, asdict(found))
    if not found:
        raise typer.Exit(code=1)


def _verify_store(directory: Path, json: Path | None) -> None:
    from memfit.job.exporting import verify_run

    report = verify_run(directory)
    if json != Path("-"):
        typer.echo(report.in_words())
    if json is not None:
        print_json(json, {"directory": str(directory), "is_whole": report.is_whole, "words": report.in_words()})
    if not report.is_whole:
        raise typer.Exit(code=1)


def _build(source: SourceOptions) -> CommandSource:
    """Builds what is named, with weights."""
    if source.model is None:
        return source.build()
    if source.is_ambiguous:
        raise UsageError("name one of MODULE:FUNCTION, --recipe and --model")
    from memfit.job.machine import prepare_process
    from memfit.recipes import model_recipe

    prepare_process()
    return source_of(
        model_recipe(source.model, batch_size=source.batch, sequence_length=source.sequence, learning_rate=1e-3)
    )
