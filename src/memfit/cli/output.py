"""Tables and lines on the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from memfit.report.written import write_report

# Where there is no terminal (a file, a pipe) nothing is cut at 80 characters.
_WIDTH_ELSEWHERE = 160


class TableList(Console):
    """A console that shows nothing and keeps the tables it is given, for `--json`.

    Attributes:
        tables: of each its title and its rows, by the names of their columns ("note" of one without
            a name).
    """

    def __init__(self) -> None:
        super().__init__(file=StringIO())
        self.tables: list[dict[str, Any]] = []

    def take(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Keeps a table."""
        names = [column or "note" for column in columns]
        self.tables.append({"title": title, "rows": [dict(zip(names, row, strict=True)) for row in rows]})


def open_console(*, on_errors: bool = False) -> Console:
    """A console on standard output, or on that for errors, where standard output is for another
    program.
    """
    console = Console(highlight=False, stderr=on_errors)
    return console if console.is_terminal else Console(highlight=False, stderr=on_errors, width=_WIDTH_ELSEWHERE)


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()
) -> None:
    """Prints a table; the first column and those in `left` are text, the others numbers, aligned
    right.
    """
    if isinstance(console, TableList):
        console.take(title, columns, rows)
        return
    table = Table(header_style="", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        is_text = index == 0 or column in left
        table.add_column(column, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        table.add_row(*row)
    console.print(title, style="bold", markup=False)
    console.print(table, markup=False)
    console.print()


def print_json(path: Path, data: Any) -> None:
    """Writes data as JSON to a file, or to standard output for `-`.

    Raises:
        UsageError: the file cannot be written.
    """
    text = json.dumps(data, indent=1, allow_nan=False)
    if path == Path("-"):
        typer.echo(text)
    else:
        write_report(path, text + "\n")
