"""The report page: one HTML file that needs no network.

In: `ReportSubject`. Out: the file's text. Template, style and script lie in `report/page`.

[Note: hostile names]
Names of blocks, calls and devices are the user's. In the page's markup they are escaped; as data
they stand in a JSON block in which no `<`, `>` or `&` is left, so that none can end it; the script
puts them into the page as text nodes alone. A policy in the page's head forbids every request.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from memfit.report.page_data import page_data
from memfit.report.subject import ReportSubject

_DIRECTORY = Path(__file__).with_name("page")
# Characters that could end the block, or that older scripts take for line ends.
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render_page(subject: ReportSubject) -> str:
    """Returns the page of a report."""
    return page_of(page_data(subject))


def page_of(data: dict[str, Any]) -> str:
    """Returns the page that shows this data (`page_data`)."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)
    return Template(_read("page.html")).substitute(
        title=escape(f"memfit report: {data['title']}"),
        style=_read("page.css"),
        script=f"{_read('closed_forms.js')}\n{_read('page.js')}",
        data=text,
    )


def _read(name: str) -> str:
    return (_DIRECTORY / name).read_text(encoding="utf-8")
