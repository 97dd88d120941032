"""Progress of a training run: one line that is drawn again in a terminal, plain lines elsewhere.

In: one `StepProgress` a step. Out: text with loss, tokens per second, measured memory beside its
limit, remaining time.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from memfit.core.errors import UsageError
from memfit.core.units import format_bytes

_BAR_CELLS = 20
_STEPS_REMEMBERED = 20


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """Report on one finished step."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean loss of the step, in nats a token for language models."""
    tokens: int
    """Tokens (or rows, see `unit`) that the step trained on."""
    step_s: float
    """Wall-clock seconds of the step."""
    measured_peak_bytes: int
    """Highest memory measured so far, of the kind that the limit counts."""
    unit: str = "tokens"
    """Unit of `tokens`."""


def format_duration(duration_s: float) -> str:
    """Writes seconds for a person: `"48 s"`, `"4 min 05 s"`, `"2 h 03 min"`."""
    whole_s = round(duration_s)
    if whole_s < 60:
        return f"{whole_s} s"
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60:02d} s"
    return f"{whole_s // 3600} h {whole_s % 3600 // 60:02d} min"


def format_bar(part: int, whole: int, cells: int = _BAR_CELLS) -> str:
    """Draws a share as `[######----]`: a cell is filled only when it is wholly reached, so a full
    bar means the limit.

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
    """Shows a run of known length.

    Use as a context manager, so that the terminal is whole again after an error.

    In a terminal one line tells the step made last and what is going on, as much of it as the
    terminal is wide; it is drawn four times a second by a thread of rich's, which touches no
    tensor, so that a long step is seen to be running. The last step's line stays. Elsewhere (a
    file, a pipe, continuous integration) each step is one line.

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
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._activity = "starting"
        self._last: StepProgress | None = None
        self._since_s = time.monotonic()

    def __enter__(self) -> Self:
        """Takes the terminal's last line, where there is a terminal."""
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives the terminal's last line back; errors pass through."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._last is not None:
                self.announce(self._fitted(self._last, self._console.width - 1))

    def _draw(self) -> Table:
        """Returns the live line: a spinner, the last step, and how long the present activity has
        taken.
        """
        elapsed = format_duration(time.monotonic() - self._since_s)
        # the spinner, a blank, and the last column, which some terminals wrap at
        width = self._console.width - 3
        now = f"{self._activity} {elapsed}"
        text = now
        if self._last is not None:
            # The activity that a next step is needs no words of its own: the step's number has
            # them.
            text = f"{self._fitted(self._last, max(0, width - cell_len(now) - 2))}  {now}"
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(self._spinner, Text(text[: max(0, width)], no_wrap=True, overflow="crop"))
        return line

    def go_on(self, *, done: int, total_steps: int) -> None:
        """The run turns out to go on after `done` steps, and to end at `total_steps`.

        Raises:
            UsageError: there is nothing left to do.
        """
        if not 0 <= done < total_steps:
            raise UsageError(f"a run of {total_steps} steps that goes on after {done}: at least one must be left")
        self._total_steps = total_steps

    def announce(self, text: str) -> None:
        """Writes a line that stays: a plan, a phase, the proof."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def wait_for(self, activity: str) -> None:
        """Says what is going on before the first step and between steps: `"loading the model"`."""
        self._begin(activity)
        if self._live is None:
            self.announce(activity)

    def begin_step(self, step: int) -> None:
        """A step begins now; told where a terminal shows what is going on."""
        self._begin(f"step {step}")

    def _begin(self, activity: str) -> None:
        self._activity, self._since_s = activity, time.monotonic()

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
        self._last = progress
        if self._live is None:
            self.announce(self.describe(progress))
        if progress.step == self._total_steps:
            self._begin("closing")

    def describe(self, progress: StepProgress) -> str:
        """Writes the line of one step.

        Remaining time goes by the median of the last 20 steps, so that a slow first step does not
        weigh on all of them.

        Args:
            progress: the step's figures.

        Returns:
            One line without a line break.
        """
        return self._forms(progress)[0]

    def _fitted(self, progress: StepProgress, width: int) -> str:
        """The line of one step, as much of it as there is room for."""
        forms = self._forms(progress)
        return next((form for form in forms if cell_len(form) <= width), forms[-1])

    def _forms(self, progress: StepProgress) -> tuple[str, ...]:
        """From the longest to the shortest."""
        per_s = progress.tokens / progress.step_s if progress.step_s > 0 else float("inf")
        recent = self._recent_step_s or [progress.step_s]
        remaining = format_duration(statistics.median(recent) * (self._total_steps - progress.step))
        share = f"{progress.measured_peak_bytes / self._limit_bytes:.0%}"
        width = len(str(self._total_steps))
        bar = format_bar(progress.measured_peak_bytes, self._limit_bytes)
        peak, limit = format_bytes(progress.measured_peak_bytes), format_bytes(self._limit_bytes)
        step = f"step {progress.step:>{width}}/{self._total_steps}  loss {progress.loss:.4f}"
        speed = f"{per_s:,.0f} {progress.unit}/s"
        return (
            f"{step}  {speed}  memory {bar} measured peak {peak} of {limit} ({share})  remaining {remaining}",
            f"{step}  {speed}  measured peak {peak} of {limit} ({share})  remaining {remaining}",
            f"{step}  {speed}  {peak} of {limit} ({share})  {remaining} left",
            f"{step}  {speed}  {share} of {limit}  {remaining} left",
            f"{step}  {share} of {limit}  {remaining} left",
            step,
            f"step {progress.step}/{self._total_steps}",
        )
