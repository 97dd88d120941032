"""The command line: reading what a person typed, printing what `api` says. Nothing is computed here.

In: arguments. Out: text, exit code 0; 2 with one message for everything that memfit refuses on purpose, 1 for a run that broke its limit.
The heavy libraries are imported inside the commands.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from memfit.cli.formats import FORMATS_SETTINGS, formats
from memfit.cli.plan import plan
from memfit.cli.profile import profile
from memfit.cli.report import report
from memfit.cli.train import train
from memfit.core.errors import MemfitError


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
            raise typer.Exit(code=2) from None


app = typer.Typer(
    cls=_Commands,
    name="memfit",
    help="You say how much memory there is; memfit trains your PyTorch model inside it and shows the proof.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """You say how much memory there is; memfit trains your PyTorch model inside it and shows the proof."""


app.command()(profile)
app.command()(plan)
app.command()(train)
app.command()(report)
app.command(context_settings=FORMATS_SETTINGS)(formats)


def main() -> None:
    """The program `memfit`."""
    app()


__all__ = ["app", "main"]
