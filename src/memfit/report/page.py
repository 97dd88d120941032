"""The report page: one HTML file that needs no network.

In: `ReportSubject`. Out: the file's text. Template, style and script lie in `report/page`.

[Note: hostile names]
Names of blocks, calls and devices are the user's. In the page's markup they are escaped; as data
they stand in a JSON block in which no `<`, `>` or `&` is left, so that none can end it; the script
puts them into the page as text nodes alone. A policy in the page's head forbids every request.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from memfit.core.errors import UsageError
from memfit.core.tiers import Tier
from memfit.core.version import VERSION
from memfit.report.memory_tables import closed_forms, memory_tables
from memfit.report.subject import ReportSubject
from memfit.report.timeline_data import lifetime_data, timeline_data

# Data of the report page: everything that it shows, as JSON values.
#
# In: `ReportSubject`. Out: a dictionary, which `report.page` writes into the page and `memfit
# report --json` into a file. Bytes are whole numbers, times seconds; the timeline's columns are
# those of [Note: small columns] in `report.timeline_data`.

REPORT_FORMAT = 1


def page_data(subject: ReportSubject) -> dict[str, Any]:
    """Returns the data of a page."""
    budget, schedule = subject.budget, subject.schedule
    hardware = subject.hardware
    measured = subject.measured
    return {
        "format": REPORT_FORMAT,
        "version": VERSION,
        "title": subject.title,
        "reason": subject.reason,
        "facts": [list(fact) for fact in subject.facts],
        "device": "" if hardware is None else hardware.device,
        "limit_bytes": budget.limit_bytes,
        "base_bytes": budget.base_bytes,
        "reserve_bytes": budget.reserve_bytes,
        "capacities": {} if hardware is None else {str(tier): spec.nbytes for tier, spec in hardware.tiers.items()},
        "microbatches": schedule.microbatches,
        "batch_rows": subject.profile.batch_rows,
        "blocks": list(schedule.blocks),
        "calls": [call.site for call in schedule.calls],
        "predicted": timeline_data(
            subject.predicted,
            tiers=[(str(tier), column) for tier, column in subject.tiers.items() if tier is not Tier.DEVICE],
        ),
        "measured": None if measured is None else timeline_data(measured),
        "memory": memory_tables(subject),
        "lifetimes": lifetime_data(subject),
        "from_plain": [asdict(point) for point in subject.from_plain],
        "front": [asdict(point) for point in subject.front],
        "phases": [phase.data() for phase in subject.phases],
        "what_if": closed_forms(subject.profile, hardware).data(),
    }


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


# Files of reports.
#
# In: text. Out: the file, or an error in words.


def write_report(path: str | Path, text: str) -> None:
    """Writes a file of a report, in the place of an older one.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; name another file") from error
