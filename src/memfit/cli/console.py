"""The commands, as one program.

In: arguments. Out: what the command does, or one message and an exit code; see the package.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from memfit.cli.doctor_command import doctor, probe
from memfit.cli.formats_command import FORMATS_SETTINGS, formats
from memfit.cli.init_command import init
from memfit.cli.interrupted import INTERRUPTED, leave_at_once
from memfit.cli.plan_command import plan
from memfit.cli.profile_command import profile
from memfit.cli.report_command import report
from memfit.cli.store_command import export, verify
from memfit.cli.train_command import train
from memfit.core.errors import DoesNotFitError, MemfitError


class _Commands(TyperGroup):
    """Turns errors that memfit raises on purpose into a message."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except MemfitError as error:
            if ctx.params.get("traceback"):
                raise
            typer.echo(f"memfit: {error}", err=True)
            if isinstance(error, DoesNotFitError) and error.report:
                typer.echo(error.report, err=True)
            raise typer.Exit(code=2) from None
        except KeyboardInterrupt:
            leave_at_once()
            typer.echo("interrupted", err=True)
            raise typer.Exit(code=INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    name="memfit",
    help="You say how much memory there is; memfit trains your PyTorch model inside it and shows the proof.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from memfit.core.version import VERSION

        typer.echo(f"memfit {VERSION}, torch {version('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """You say how much memory there is.

    Memfit trains your PyTorch model inside it and shows the proof.
    """


def _flowing(command: Callable[..., Any]) -> str:
    """A command's docstring as its help: paragraphs without the line ends of the source, which
    would stand in the middle of a terminal's lines.
    """
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


for _command in (init, profile, plan, train, verify, export, report, doctor, probe):
    app.command(help=_flowing(_command))(_command)
app.command(help=_flowing(formats), context_settings=FORMATS_SETTINGS)(formats)
