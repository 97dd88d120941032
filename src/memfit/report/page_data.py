"""Data of the report page: everything that it shows, as JSON values.

In: `ReportSubject`. Out: a dictionary, which `report.page` writes into the page and
`memfit report --json` into a file. Bytes are whole numbers, times seconds; the timeline's columns
are those of [Note: small columns] in `report.timeline_data`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memfit.core.tiers import Tier
from memfit.core.version import VERSION
from memfit.report.closed_forms import closed_forms
from memfit.report.lifetime_data import lifetime_data
from memfit.report.memory_tables import memory_tables
from memfit.report.subject import ReportSubject
from memfit.report.timeline_data import timeline_data

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
