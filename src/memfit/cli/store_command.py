"""`memfit export`: a run's directory, copied out without the program that made it."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.options import (
    DecisionOptions,
    JsonOption,
    MachineOptions,
    SourceOptions,
    open_console,
    print_json,
    shared,
)
from memfit.cli.source import CommandSource, source_of
from memfit.core.errors import UsageError


class ExportForm(StrEnum):
    """Form of an exported run, by who reads it."""

    MEMFIT = "memfit"
    DCP = "dcp"


DirectoryArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory given to fit(store=...) or train --store.")
]


def export(
    directory: DirectoryArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Replaced in one step, when all is written.")],
    shard: Annotated[str, typer.Option(help="Largest file of weights.")] = "5GB",
    to: Annotated[
        ExportForm, typer.Option(help='"memfit": safetensors; "dcp": a checkpoint of torch.distributed.checkpoint.')
    ] = ExportForm.MEMFIT,
    json: Annotated[bool, typer.Option("--json", help="Print the files and their bytes as JSON.")] = False,
) -> None:
    """Copies the last commit of a run, of one process or of several ranks, out: weights that
    from_pretrained and safetensors read, and what continues the run with plain PyTorch.
    """
    from memfit.core.limits import format_bytes
    from memfit.runs.exporting import export_run

    saved = export_run(directory, out, max_shard_bytes=shard, form=to.value)
    if json:
        told = {"directory": str(saved.directory), "files": dict(saved.files), "seconds": saved.seconds}
        typer.echo(json_module.dumps(told, indent=1))
        return
    for name, nbytes in saved.files.items():
        typer.echo(f"{saved.directory / name}  {format_bytes(nbytes)}")
    typer.echo(f"exported in {saved.seconds:.1f} s")


# `memfit verify`: a run's directory against its checksums, or a plan against plain PyTorch.


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
        from memfit.job.equivalence import verify as verify_plan

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
    from memfit.runs.exporting import verify_run

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
    from memfit.integrations.recipes.model_recipe import model_recipe
    from memfit.machine.machine import prepare_process

    prepare_process()
    return source_of(
        model_recipe(source.model, batch_size=source.batch, sequence_length=source.sequence, learning_rate=1e-3)
    )
