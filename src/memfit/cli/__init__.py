"""The command line: reading what a person typed, printing what `api` says.

Nothing is computed here.

In: arguments. Out: text, exit code 0; 2 with one message for everything that memfit refuses on
purpose, 1 for a run that broke its limit, 130 after Ctrl-C. The commands are loaded inside of
`main` (and by `memfit.cli.app`), the heavy libraries inside of the commands: Ctrl-C while they load
is answered too.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli.interrupted import INTERRUPTED, hear_again, leave_at_once

if TYPE_CHECKING:
    from memfit.cli.console import app

# The commands that load torch: their settings have to be there before it.
_RUNS_TORCH = frozenset({"profile", "plan", "train", "report", "probe", "verify"})


def main() -> None:
    """The program `memfit`.

    As that, and only then, it may start itself again, once, with settings that libraries read when
    they are loaded.
    """
    is_program = _is_the_program()
    try:
        if is_program:
            hear_again()
        if is_program and _RUNS_TORCH.intersection(sys.argv) and "--help" not in sys.argv:
            from memfit.machine.host.settings import restart_with_settings

            restart_with_settings()
        from memfit.cli.console import app

        app()
    except KeyboardInterrupt:  # before or after the commands, which answer themselves
        leave_at_once()
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        # All is done and said. What libraries do while the interpreter shuts down would answer
        # Ctrl-C with their tracebacks.
        if is_program:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            leave_at_once()


def _is_the_program() -> bool:
    """Tells whether the interpreter was started for memfit, by `memfit` or `python -m memfit`, and
    not by a program that calls `main`.
    """
    started = sys.modules["__main__"]
    module = getattr(getattr(started, "__spec__", None), "name", None)
    return (
        module in ("memfit.__main__", "memfit.cli.__main__")
        or Path(getattr(started, "__file__", None) or "").name == "memfit"
    )


def __getattr__(name: str) -> Any:
    """Loads the commands when they are asked for. Source: PEP 562."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from memfit.cli.console import app

    return app


__all__ = ["app", "main"]
