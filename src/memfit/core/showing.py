"""HTML representations of objects in notebooks: a title and a table, in HTML that every front end
knows.

In: text. Out: HTML. Everything is escaped, since names of blocks are the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from html import escape
from itertools import groupby
from typing import Any

_LONGEST_FIGURE = 24


def html_table(title: str, rows: Sequence[Sequence[str]], columns: Sequence[str] = ()) -> str:
    """Returns a table under a bold title.

    Args:
        title: one line.
        rows: cells; the first of each is text, the others figures, aligned right.
        columns: their names.
    """
    head = f"<tr>{''.join(_cell('th', name, index) for index, name in enumerate(columns))}</tr>" if columns else ""
    body = "".join(f"<tr>{''.join(_cell('td', cell, i) for i, cell in enumerate(row))}</tr>" for row in rows)
    return f"<div><b>{escape(title)}</b><table>{head}{body}</table></div>"


def html_bar(words: str, share: float) -> str:
    """Returns a bar that is filled as far as a limit is used, with words behind it.

    Args:
        words: one line.
        share: of the limit; above 1 the bar is full, and red.
    """
    color, width = ("#c33" if share > 1 else "#4a8"), 100 * min(1.0, max(0.0, share))
    outer = "display: inline-block; width: 200px; height: 10px; border: 1px solid; vertical-align: middle"
    bar = f'<div style="{outer}"><div style="width: {width:.0f}%; height: 100%; background: {color}"></div></div>'
    return f"<div>{bar} {escape(words)}</div>"


def _cell(kind: str, text: str, index: int) -> str:
    # Sentences are read from the left, figures compared at the right.
    side = "right" if index and len(text) <= _LONGEST_FIGURE else "left"
    return f'<{kind} style="text-align: {side}">{escape(text)}</{kind}>'


def named_values(made: Any) -> str:
    """Returns a dataclass as the call that makes an equal one, without fields that have their
    default; enums as strings.
    """
    said: list[str] = []
    for each in fields(made):
        value = getattr(made, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if value != default:
            said.append(f"{each.name}={str(value)!r}" if isinstance(value, str) else f"{each.name}={value!r}")
    return f"{type(made).__name__}({', '.join(said)})"


def in_runs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Groups equal neighbours: (indices, word), such as ("0 to 11", "keep")."""
    runs: list[tuple[str, str]] = []
    for word, group in groupby(enumerate(words), key=lambda pair: pair[1]):
        indices = [index for index, _ in group]
        first, last = indices[0], indices[-1]
        runs.append((str(first) if first == last else f"{first} to {last}", word))
    return runs
