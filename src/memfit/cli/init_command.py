"""`memfit init`: a starter script that runs as it is, to be filled with the user's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.options import one_of
from memfit.core.errors import UsageError

_STARTERS = Path(__file__).with_name("starters")
TASKS = ("text", "seq2seq", "images")


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The script to write.")] = Path("train_memfit.py"),
    task: Annotated[
        str,
        typer.Option(
            help="text, seq2seq or images: what the script's own small model does.", autocompletion=one_of(*TASKS)
        ),
    ] = "text",
    limit: Annotated[str, typer.Option(help="The limit that it trains in, unless told another.")] = "2GiB",
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Writes a starter script that runs, to put your own model in.

    A small model, its loss, its batches, and the lines that train it inside a limit.
    """
    from memfit.core.limits import parse_bytes

    if task not in TASKS:
        raise UsageError(f"--task is one of {', '.join(TASKS)}, not {task!r:.80}")
    parse_bytes(limit)
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise UsageError(f"{str(file)!r:.200} is no name that Python imports: such as train_memfit.py")
    if file.exists() and not force:
        raise UsageError(f"{file} is there already: name another file, or write over it with --force")
    text = (_STARTERS / f"{task}.txt").read_text(encoding="utf-8") + (_STARTERS / "ending.txt").read_text(
        encoding="utf-8"
    )
    for word, value in (("FILE_NAME", file.name), ("MODULE_NAME", file.stem), ("LIMIT", limit)):
        text = text.replace(word, value)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}; name another") from error
    typer.echo(f"{file} is written. Train it:   python {file}")
    typer.echo(f"Look at the plan:  memfit plan {file.stem}:build --limit {limit}")
