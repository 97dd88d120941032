"""Proof of a phase: what loading, a step, an evaluation, a save or a resume was predicted to take,
and what was measured.

In: filled by a job. Out: `PhaseProof`, for the terminal, JSON and the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memfit.core.units import format_bytes

STEP_PHASES = frozenset({"first step", "steady"})
COLUMNS = ("phase", "times", "predicted", "measured", "limit", "tensors predicted", "measured")


@dataclass(frozen=True, kw_only=True)
class PhasePrediction:
    """Predicted peaks of a phase.

    Attributes:
        whole_bytes: of the process, or of the device.
        tensor_bytes: of all tensors on the device, those of others too; None: not predicted apart.
    """

    whole_bytes: int
    tensor_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseProof:
    """One phase.

    Attributes:
        name: "load" or "resume", "first step", "steady", "evaluate", "save" and others.
        times: how often it was entered.
        predicted_bytes: of the process without a GPU, else of the device; None: this phase is not
            predicted.
        measured_bytes: the same, measured: of a process by the kernel (VmHWM, with its children),
            of a device by its allocator.
        limit_bytes: None: no limit was given.
        predicted_tensor_bytes: of all tensors on the device; None: not predicted.
        measured_tensor_bytes: the same, as the device's allocator counted them.
    """

    name: str
    times: int
    predicted_bytes: int | None
    measured_bytes: int
    limit_bytes: int | None
    predicted_tensor_bytes: int | None
    measured_tensor_bytes: int

    @property
    def holds(self) -> bool:
        """True if the phase stayed within the limit, if there is one."""
        return self.limit_bytes is None or self.measured_bytes <= self.limit_bytes

    def row(self) -> tuple[str, ...]:
        """Returns the cells of `COLUMNS`."""
        return (
            self.name,
            str(self.times),
            _bytes(self.predicted_bytes),
            format_bytes(self.measured_bytes),
            _bytes(self.limit_bytes),
            _bytes(self.predicted_tensor_bytes),
            format_bytes(self.measured_tensor_bytes),
        )

    def data(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self) | {"holds": self.holds}


def phase_table(phases: Sequence[PhaseProof]) -> str:
    """Returns the phases as text of at most 80 columns, a line each under their names."""
    rows = [COLUMNS, *(phase.row() for phase in phases)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def predicted_beside(own: Mapping[str, PhasePrediction], name: str, *, is_behind_step: bool) -> PhasePrediction | None:
    """Returns what a phase is predicted to take; None if it is not predicted.

    Args:
        own: predictions of phases by themselves.
        name: of the phase.
        is_behind_step: a step was made before. Memory that it freed may stay with the process,
            ready for the next step, so that a later phase may hold as much as a step.
    """
    found = own.get(name)
    if found is None or not is_behind_step or name in STEP_PHASES:
        return found
    step = own.get("steady")
    least = 0 if step is None else step.whole_bytes
    return PhasePrediction(whole_bytes=max(found.whole_bytes, least), tensor_bytes=found.tensor_bytes)


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)
