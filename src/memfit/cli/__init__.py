"""The command line: reading what a person typed, printing what `api` says. Nothing is computed here.

In: arguments. Out: text, exit code 0; 2 with one message for everything that memfit refuses on purpose, 1 for a run that broke its limit, 130 after Ctrl-C.
The heavy libraries are imported inside the commands.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from memfit.cli.doctor import doctor
from memfit.cli.formats import FORMATS_SETTINGS, formats
from memfit.cli.interrupted import INTERRUPTED, leave_at_once
from memfit.cli.plan import plan
from memfit.cli.profile import profile
from memfit.cli.report import report
from memfit.cli.store import export, verify
from memfit.cli.train import train
from memfit.core.errors import MemfitError
from memfit.host import restart_with_settings

# The commands that load torch: their settings have to be there before it.
_RUNS_TORCH = frozenset({"profile", "plan", "train", "report"})


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
        except KeyboardInterrupt:
            leave_at_once()
            typer.echo("interrupted", err=True)
            raise typer.Exit(code=INTERRUPTED) from None


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
app.command()(verify)
app.command()(export)
app.command()(report)
app.command()(doctor)
app.command(context_settings=FORMATS_SETTINGS)(formats)


def main() -> None:
    """The program `memfit`. As that, and only then, it may start itself again, once, with settings that libraries read when they are loaded."""
    if _is_the_program() and _RUNS_TORCH.intersection(sys.argv) and "--help" not in sys.argv:
        restart_with_settings()
    app()


def _is_the_program() -> bool:
    """Whether the interpreter was started for memfit, by `memfit` or `python -m memfit.cli`, and not by a program that calls `main`."""
    started = sys.modules["__main__"]
    module = getattr(getattr(started, "__spec__", None), "name", None)
    return module == "memfit.cli.__main__" or Path(getattr(started, "__file__", None) or "").name == "memfit"


__all__ = ["app", "main"]
