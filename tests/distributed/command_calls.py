"""The command line on ranks that have come together already."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memfit.cli.console import app


def train(rank: int, size: int, steps: int, directory: str, *more: str) -> tuple[int, str, list[str], int]:
    """Trains the smallest recipe; returns the exit code, what was printed, the files of the save, and how often this
    rank had its tokenizer written.
    """
    save = Path(directory) / "saved"
    kept = ("--store", f"{directory}/run", "--save", str(save))
    command = ["train", "--recipe", "gpt-tiny", "--limit", "3GiB", "--steps", str(steps), *kept, *more]
    written = list[object]()
    run = subprocess.run

    def noted(*args: Any, **kwargs: Any) -> Any:
        written.extend(one for one in args if "--save" in one)
        return run(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", noted)
        found = CliRunner().invoke(app, command)
    return found.exit_code, found.output, sorted(path.name for path in save.iterdir()), len(written)


def example(rank: int, size: int, path: str) -> str:
    """Runs an example; returns what it printed."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        runpy.run_path(path, run_name="__main__")
    return told.getvalue()
