"""Tells a person why a plan was chosen and what each point of the front costs.

In: `PlanChoice`, `Budget`. Out: text.
"""

from __future__ import annotations

from memfit.core.limits import Budget
from memfit.core.units import format_bytes
from memfit.planning.rules import PlanChoice


def explain(choice: PlanChoice, budget: Budget) -> str:
    """The reason, where the time goes, and the front with predicted bytes and seconds a point.

    Bytes in the front are of tensors; the limit also holds what the process takes before
    (`budget.base_bytes`) and a reserve.
    """
    timeline = choice.timeline
    lines = [choice.reason]
    if budget.limit_bytes is not None:
        lines.append(
            f"Limit {format_bytes(budget.limit_bytes)} = base {format_bytes(budget.base_bytes)} + reserve "
            f"{format_bytes(budget.reserve_bytes)} + {format_bytes(budget.tensor_bytes or 0)} for tensors."
        )
    peak = timeline.peak
    if peak is not None:
        parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in peak.by_category.items() if n)
        lines.append(f"The predicted peak stands at {peak.action}: {parts}.")
    moved = sum(timeline.bytes_read.values()) + sum(timeline.bytes_written.values())
    if moved:
        stalls = ", ".join(f"{cause} {s:.3g} s" for cause, s in sorted(timeline.stalls_s.items()) if s > 0)
        lines.append(f"{format_bytes(moved)} move a step; compute waits for: {stalls or 'nothing'}.")
    lines.append("")
    lines.append(f"{'':2}{'predicted peak':>16}{'predicted step':>16}  plan")
    for point in choice.front:
        mark = ">" if point.name == choice.name else " " if point.fits else "x"
        lines.append(f"{mark:2}{format_bytes(point.peak_bytes):>16}{point.seconds:>14.3g} s  {point.name}")
    lines.append("(> chosen, x does not fit)")
    return "\n".join(lines)
