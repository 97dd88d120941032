"""The proof of a run: its limit, what was predicted, what was measured, phase by phase.

In: a job's phases and predictions. Out: `Proof`: a line, a table, JSON; an error where the limit
was passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.core.errors import LimitBreachError, UsageError
from memfit.core.limits import format_bytes
from memfit.core.numerics import Numerics
from memfit.core.step_report import (
    COLUMNS,
    PhasePrediction,
    PhaseProof,
    html_bar,
    html_table,
    phase_table,
    predicted_beside,
)
from memfit.machine.meters import PhaseRecord


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The limit, what was predicted, and what was measured.

    Attributes:
        limit_bytes: the user's limit on the tier; None: no limit was given.
        predicted_peak_bytes: what the plan said.
        measured_peak_bytes: the most that was measured, over all phases.
        phases: where it was measured, phase by phase.
        numerics: what the plan did to the numbers.
        predicted: what phases were predicted to take by themselves, by name.
        counts_process: the limit is of the process, as the kernel counts it; else of a device.
    """

    limit_bytes: int | None
    predicted_peak_bytes: int
    measured_peak_bytes: int
    phases: tuple[PhaseRecord, ...] = ()
    numerics: Numerics | None = None
    predicted: Mapping[str, PhasePrediction] = field(default_factory=dict[str, PhasePrediction])
    counts_process: bool = True

    @property
    def holds(self) -> bool:
        """Tells whether the measured peak stayed within the limit, if there is one."""
        return self.limit_bytes is None or self.measured_peak_bytes <= self.limit_bytes

    def __repr__(self) -> str:
        return f"<Proof: {self.line().removeprefix('proof: ')}>"

    def _repr_html_(self) -> str:
        """In a notebook: the three figures, and each phase, predicted and measured."""
        table = html_table(self.line(), [phase.row() for phase in self.by_phase()], COLUMNS)
        if not self.limit_bytes:
            return table
        share = self.measured_peak_bytes / self.limit_bytes
        return html_bar(f"measured peak, {share:.0%} of the limit", share) + table

    def by_phase(self) -> tuple[PhaseProof, ...]:
        """Returns the phases in the order in which they first ended, each with its prediction."""
        return tuple(self._of(record) for record in self.phases)

    def _of(self, record: PhaseRecord) -> PhaseProof:
        predicted = predicted_beside(self.predicted, record.name, is_behind_step=record.is_behind_step)
        process = record.process_peak_bytes if self.counts_process else None
        return PhaseProof(
            name=record.name,
            times=record.times,
            predicted_bytes=None if predicted is None else predicted.whole_bytes,
            measured_bytes=record.held_peak_bytes if process is None else process,
            limit_bytes=self.limit_bytes,
            predicted_tensor_bytes=None if predicted is None else predicted.tensor_bytes,
            measured_tensor_bytes=record.peak_bytes,
        )

    def table(self) -> str:
        """Returns the phases as text: predicted and measured peaks beside the limit."""
        return phase_table(self.by_phase())

    def data(self) -> dict[str, Any]:
        """Returns the proof as JSON values, in bytes."""
        return {
            "limit_bytes": self.limit_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "holds": self.holds,
            "numerics": None if self.numerics is None else self.numerics.short(),
            "counts": "process" if self.counts_process else "device",
            "phases": [phase.data() for phase in self.by_phase()],
        }

    @property
    def error(self) -> float:
        """How far the measured peak is above the prediction, as a share of it.

        Below 0 when it stayed under.
        """
        if self.predicted_peak_bytes == 0:
            raise UsageError("a prediction of 0 bytes has no relative error")
        return self.measured_peak_bytes / self.predicted_peak_bytes - 1

    def line(self) -> str:
        """One line for a person: "proof: predicted peak 1.10 GiB, measured peak 1.08 GiB, limit
        1.25 GiB; numerics exact".
        """
        limit = "no limit was given" if self.limit_bytes is None else f"limit {format_bytes(self.limit_bytes)}"
        verdict = "" if self.holds else ": BREACHED"
        if self.numerics is not None:
            verdict += f"; numerics {self.numerics.short()}"
        return (
            f"proof: predicted peak {format_bytes(self.predicted_peak_bytes)}, measured peak "
            f"{format_bytes(self.measured_peak_bytes)}, {limit}{verdict}"
        )

    def check(self, *, is_torn: bool = False) -> None:
        """Turns a breach into an error that names the phase with the largest peak.

        Raises:
            LimitBreachError: the measured peak passed the limit.
        """
        if not self.holds:
            worst = max(self.phases, key=lambda phase: phase.peak_bytes, default=None)
            phase = worst.name if worst else "run"
            raise LimitBreachError(
                f"{self.line()}, in phase {phase!r}; plan with a larger reserve or a larger limit",
                phase=phase,
                where="device",
                torn=is_torn,
            )
