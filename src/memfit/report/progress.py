"""Progress of a training run: a live line in a terminal, plain lines elsewhere.

In: one `StepProgress` a step. Out: text with loss, tokens per second, measured memory beside its limit, remaining time.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from memfit.core.errors import UsageError
from memfit.core.units import format_bytes

_BAR_CELLS = 20
_STEPS_REMEMBERED = 20


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """What is told about one finished step."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean loss of the step, in nats a token for language models."""
    tokens: int
    """Tokens (or rows, for other models) that the step trained on."""
    step_s: float
    """Wall-clock seconds of the step."""
    measured_peak_bytes: int
    """Highest memory measured so far, of the kind that the limit counts."""


def format_duration(duration_s: float) -> str:
    """Writes seconds for a person: `"48 s"`, `"4 min 05 s"`, `"2 h 03 min"`."""
    whole_s = round(duration_s)
    if whole_s < 60:
        return f"{whole_s} s"
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60:02d} s"
    return f"{whole_s // 3600} h {whole_s % 3600 // 60:02d} min"


def format_bar(part: int, whole: int, cells: int = _BAR_CELLS) -> str:
    """Draws a share as `[######----]`: a cell is filled only when it is wholly reached, so a full bar means the limit.

    Args:
        part: any number of bytes; more than `whole` fills the bar.
        whole: what a full bar stands for, in the same unit.
        cells: characters between the brackets.

    Returns:
        The bar, `cells + 2` characters.
    """
    filled = min(cells, max(0, part * cells // whole))
    return f"[{'#' * filled}{'-' * (cells - filled)}]"


class TrainingProgress:
    """Shows a run of known length. Use as a context manager, so that the terminal is whole again after an error.

    In a terminal the last line lives (steps done, time elapsed): it is drawn four times a second by a thread of
    rich's, which touches no tensor, so that a long step is seen to be running. Elsewhere (a file, a pipe, continuous
    integration) each step is one line.

    Args:
        total_steps: steps of the run, at least 1.
        limit_bytes: the limit that the memory bar is drawn against.
        console: where to write; standard output by default.

    Raises:
        UsageError: a run of no steps, or a limit of no bytes.
    """

    def __init__(self, *, total_steps: int, limit_bytes: int, console: Console | None = None) -> None:
        if total_steps < 1 or limit_bytes < 1:
            raise UsageError(
                f"progress over {total_steps} steps under a limit of {limit_bytes} bytes: both must be positive"
            )
        self._total_steps = total_steps
        self._limit_bytes = limit_bytes
        self._console = Console() if console is None else console
        self._recent_step_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._live: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        """Takes the terminal's last line, where there is a terminal."""
        if self._console.is_terminal:
            self._live = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
            self._task = self._live.add_task("starting", total=self._total_steps)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives the terminal's last line back; errors pass through."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def go_on(self, *, done: int, total_steps: int) -> None:
        """The run turns out to go on after `done` steps, and to end at `total_steps`.

        Raises:
            UsageError: there is nothing left to do.
        """
        if not 0 <= done < total_steps:
            raise UsageError(f"a run of {total_steps} steps that goes on after {done}: at least one must be left")
        self._total_steps = total_steps
        if self._live is not None:
            self._live.update(self._task, completed=done, total=total_steps)

    def announce(self, text: str) -> None:
        """Writes a line that stays: a plan, a phase, the proof."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def wait_for(self, activity: str) -> None:
        """Says what is going on before the first step and between steps: `"loading the model"`."""
        if self._live is not None:
            self._live.update(self._task, description=activity)
        else:
            self.announce(activity)

    def update(self, progress: StepProgress) -> None:
        """Tells one finished step.

        Args:
            progress: the step's figures.

        Raises:
            UsageError: a step outside of the run.
        """
        if not 1 <= progress.step <= self._total_steps:
            raise UsageError(f"step {progress.step} of a run of {self._total_steps} steps: steps count from 1")
        self._recent_step_s.append(progress.step_s)
        self.announce(self.describe(progress))
        if self._live is not None:
            activity = f"step {progress.step + 1}" if progress.step < self._total_steps else "closing"
            self._live.update(self._task, completed=progress.step, description=activity)

    def describe(self, progress: StepProgress) -> str:
        """Writes the line of one step.

        Remaining time goes by the median of the last 20 steps, so that a slow first step does not weigh on all of them.

        Args:
            progress: the step's figures.

        Returns:
            One line without a line break.
        """
        tokens_per_s = progress.tokens / progress.step_s if progress.step_s > 0 else float("inf")
        recent = self._recent_step_s or [progress.step_s]
        remaining_s = statistics.median(recent) * (self._total_steps - progress.step)
        share = progress.measured_peak_bytes / self._limit_bytes
        width = len(str(self._total_steps))
        bar = format_bar(progress.measured_peak_bytes, self._limit_bytes)
        return (
            f"step {progress.step:>{width}}/{self._total_steps}  loss {progress.loss:.4f}  "
            f"{tokens_per_s:,.0f} tokens/s  memory {bar} measured peak "
            f"{format_bytes(progress.measured_peak_bytes)} of {format_bytes(self._limit_bytes)} ({share:.0%})  "
            f"remaining {format_duration(remaining_s)}"
        )
