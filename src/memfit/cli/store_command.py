"""`memfit export`: a run's directory, copied out without the program that made it."""

from __future__ import annotations

import json as json_module
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
    from memfit.core.units import format_bytes
    from memfit.job.exporting import export_run

    saved = export_run(directory, out, max_shard_bytes=shard, form=to.value)
    if json:
        told = {"directory": str(saved.directory), "files": dict(saved.files), "seconds": saved.seconds}
        typer.echo(json_module.dumps(told, indent=1))
        return
    for name, nbytes in saved.files.items():
        typer.echo(f"{saved.directory / name}  {format_bytes(nbytes)}")
    typer.echo(f"exported in {saved.seconds:.1f} s")
