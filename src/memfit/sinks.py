"""Sinks: functions for `job.on_step` that hand a step's figures to a tracker of experiments.

    writer = SummaryWriter()
    job.on_step(memfit.sinks.tensorboard(writer))

In: the tracker's own object, which the program has made; no tracker is imported here. Out: a
function of a `StepReport`. Figures have names with a slash, such as `memfit/peak_bytes`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from memfit.core.step_report import StepReport

Sink = Callable[[StepReport], None]


class ScalarWriter(Protocol):
    """A writer of TensorBoard's events, such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> Any:
        """Writes one figure."""
        ...


class LoggingRun(Protocol):
    """A run that logs dictionaries, such as `wandb.init()` gives, or the module `wandb`."""

    def log(self, data: dict[str, Any], *, step: int | None = None) -> Any:
        """Logs the figures of a step."""
        ...


class MetricsLogger(Protocol):
    """The module `mlflow`, or what logs metrics as it does."""

    def log_metrics(self, metrics: dict[str, float], *, step: int | None = None) -> Any:
        """Logs the figures of a step."""
        ...


def tensorboard(writer: ScalarWriter) -> Sink:
    """Returns a sink for TensorBoard.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
    """

    def write(report: StepReport) -> None:
        for name, value in report.scalars().items():
            writer.add_scalar(name, value, report.step)

    return write


def wandb(run: LoggingRun) -> Sink:
    """Returns a sink for Weights & Biases.

    Args:
        run: a run (`wandb.init(...)`), or the module `wandb` with one.
    """
    return lambda report: run.log(report.scalars(), step=report.step)


def mlflow(logger: MetricsLogger) -> Sink:
    """Returns a sink for MLflow.

    Args:
        logger: the module `mlflow`, with an active run.
    """
    return lambda report: logger.log_metrics(report.scalars(), step=report.step)


def json_lines(file: TextIO) -> Sink:
    """Returns a sink that writes one line of JSON a step.

    Args:
        file: open for text. Each line is flushed. A figure that is not a number (a loss of NaN) is
            written as null.
    """

    def write(report: StepReport) -> None:
        found: Mapping[str, float | None] = {
            name: value if value - value == 0.0 else None for name, value in report.scalars().items()
        }
        file.write(json.dumps({"step": report.step, **found}, allow_nan=False) + "\n")
        file.flush()

    return write


__all__ = ["Sink", "json_lines", "mlflow", "tensorboard", "wandb"]
