"""Progress of a training run: some lines that are drawn again in a terminal, plain lines elsewhere.

In: one `StepProgress` a step. Out: text with loss, speed, memory and further tiers beside their
limits, what compute waits for, remaining time.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from memfit.core.errors import UsageError
from memfit.core.limits import format_bytes, format_seconds
from memfit.core.step_report import TierUse

_BAR_CELLS = 20
_STEPS_REMEMBERED = 20
_MOST_WAITS = 3


@dataclass(frozen=True, kw_only=True)
class StepProgress:
    """Report on one finished step."""

    step: int
    """Number of the step, from 1."""
    loss: float | None
    """Mean loss of the step, in nats a token for language models; None: not known."""
    tokens: int | None
    """Tokens (or rows, see `unit`) that the step trained on; None: not known."""
    step_s: float
    """Wall-clock seconds of the step."""
    measured_peak_bytes: int
    """Highest memory measured so far, of the kind that the limit counts."""
    unit: str = "tokens"
    """Unit of `tokens`."""
    tiers: tuple[TierUse, ...] = ()
    """Bytes of each tier beside its limit."""
    waits_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Measured seconds that compute waited, by cause."""


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


def format_tier(tier: TierUse, name_cells: int = 0) -> str:
    """Draws the bytes of a tier beside its limit, as a bar where there is one."""
    if not tier.limit_bytes:
        return f"{tier.name:<{name_cells}} {format_bytes(tier.used_bytes)}, no limit"
    share = f"{tier.used_bytes / tier.limit_bytes:.0%}"
    return f"{tier.name:<{name_cells}} {format_bar(tier.used_bytes, tier.limit_bytes)} {tier.in_words()} ({share})"


def format_waits(waits_s: Mapping[str, float], step_s: float) -> str:
    """Says what part of a step compute waited, by cause: `"fetch 31%, update 4%; computes 65%"`."""
    if step_s <= 0:
        return ""
    parts = sorted(((s / step_s, cause) for cause, s in waits_s.items()), reverse=True)
    shown = [f"{cause} {part:.0%}" for part, cause in parts if part >= 0.005][:_MOST_WAITS]
    if not shown:
        return "nothing"
    return f"{', '.join(shown)}; the rest computes ({max(0.0, 1 - sum(part for part, _ in parts)):.0%})"


class TrainingProgress:
    """Shows a run.

    Use as a context manager, so that the terminal is whole again after an error.

    In a terminal some lines tell the step made last, each tier against its limit, what compute
    waited for and what is going on, as much of it as the terminal is wide; they are drawn four
    times a second by a thread of rich's, which touches no tensor, so that a long step is seen to be
    running. The last step's line stays. Elsewhere (a file, a pipe, continuous integration) each
    step is one line.

    Args:
        total_steps: number of the run's last step, at least 1; None: unknown.
        limit_bytes: the limit that the memory bar is drawn against; None: there is none.
        console: where to write; standard output by default.
        now: tells what a step does at this moment, in a few words; called from the thread that
            draws.

    Raises:
        UsageError: a run of no steps, or a limit of no bytes.
    """

    def __init__(
        self,
        *,
        total_steps: int | None,
        limit_bytes: int | None,
        console: Console | None = None,
        now: Callable[[], str] = lambda: "",
    ) -> None:
        if (total_steps is not None and total_steps < 1) or (limit_bytes is not None and limit_bytes < 1):
            raise UsageError(
                f"progress over {total_steps} steps under a limit of {limit_bytes} bytes: both must be positive"
            )
        self._total_steps = total_steps
        self._limit_bytes = limit_bytes
        self._console = Console() if console is None else console
        self._now = now
        self._recent_step_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._activity = "starting"
        self._last: StepProgress | None = None
        self._since_s = time.monotonic()

    def __enter__(self) -> Self:
        """Takes the terminal's last lines, where there is a terminal."""
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives the terminal's last lines back; errors pass through."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._last is not None:
                self.announce(self._fitted(self._last, self._console.width - 1))

    def _draw(self) -> Table:
        """Returns the live lines, behind a spinner."""
        lines = Table.grid(padding=(0, 1, 0, 0))
        for index, row in enumerate(self._rows()):
            lines.add_row("" if index else self._spinner, Text(row, no_wrap=True, overflow="crop"))
        return lines

    def _rows(self) -> list[str]:
        """The last step and how long the present activity has taken; below it tiers and waits."""
        last = self._last  # another thread replaces it
        elapsed = format_duration(time.monotonic() - self._since_s)
        # the spinner, a blank, and the last column, which some terminals wrap at
        width = max(0, self._console.width - 3)
        at = self._now()
        now = f"{self._activity} {elapsed}" + (f", {at}" if at else "")
        if last is None:
            rows = [now]
        elif not last.tiers:
            rows = [f"{self._fitted(last, max(0, width - cell_len(now) - 2))}  {now}"]
        else:
            names = max(len("waits for"), *(len(tier.name) for tier in last.tiers))
            rows = [self._fitted(last, width, has_memory=False)]
            rows += [format_tier(tier, names) for tier in last.tiers]
            if last.waits_s:
                rows.append(f"{'waits for':<{names}} {format_waits(last.waits_s, last.step_s)}")
            rows.append(f"{'now':<{names}} {now}")
        return [row[:width] for row in rows]

    def go_on(self, *, done: int, total_steps: int) -> None:
        """The run turns out to go on after `done` steps, and to end at `total_steps`.

        Raises:
            UsageError: there is nothing left to do.
        """
        if not 0 <= done < total_steps:
            raise UsageError(f"a run of {total_steps} steps that goes on after {done}: at least one must be left")
        self._total_steps = total_steps

    def forget_total(self) -> None:
        """The run turns out to have more steps than was said; how many is not known."""
        self._total_steps = None

    def follow(self, now: Callable[[], str]) -> None:
        """From here on the view asks this function what a step does at this moment."""
        self._now = now

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
        total = self._total_steps
        if progress.step < 1 or (total is not None and progress.step > total):
            raise UsageError(f"step {progress.step} of a run of {total} steps: steps count from 1")
        self._recent_step_s.append(progress.step_s)
        self._last = progress
        if self._live is None:
            self.announce(self.describe(progress))
        if progress.step == total:
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

    def _fitted(self, progress: StepProgress, width: int, *, has_memory: bool = True) -> str:
        """The line of one step, as much of it as there is room for."""
        forms = self._forms(progress) if has_memory else self._short_forms(progress)
        return next((form for form in forms if cell_len(form) <= width), forms[-1])

    def _parts(self, progress: StepProgress) -> tuple[str, str, str]:
        """Step with its loss, speed, remaining time; the last two may be empty."""
        total = self._total_steps
        speed = remaining = ""
        if progress.tokens is not None:
            per_s = progress.tokens / progress.step_s if progress.step_s > 0 else float("inf")
            speed = f"{per_s:,.0f} {progress.unit}/s"
        elif progress.step_s > 0:
            speed = f"{format_seconds(progress.step_s)} a step"
        if total is not None:
            recent = self._recent_step_s or [progress.step_s]
            remaining = format_duration(statistics.median(recent) * (total - progress.step))
        number = f"{progress.step}" if total is None else f"{progress.step:>{len(str(total))}}/{total}"
        loss = "" if progress.loss is None else f"  loss {progress.loss:.4f}"
        return f"step {number}{loss}", speed, remaining

    def _forms(self, progress: StepProgress) -> tuple[str, ...]:
        """From the longest to the shortest."""
        step, speed, remaining = self._parts(progress)
        left = remaining and f"{remaining} left"
        remaining = remaining and f"remaining {remaining}"
        peak = format_bytes(progress.measured_peak_bytes)
        if self._limit_bytes is None:
            memory = (f"measured peak {peak}",) * 2 + (peak,) * 2
        else:
            share, limit = f"{progress.measured_peak_bytes / self._limit_bytes:.0%}", format_bytes(self._limit_bytes)
            bar = format_bar(progress.measured_peak_bytes, self._limit_bytes)
            told = f"measured peak {peak} of {limit} ({share})"
            memory = (f"memory {bar} {told}", told, f"{peak} of {limit} ({share})", f"{share} of {limit}")
        return (
            _joined(step, speed, memory[0], remaining),
            _joined(step, speed, memory[1], remaining),
            _joined(step, speed, memory[2], left),
            _joined(step, speed, memory[3], left),
            _joined(step, memory[3], left),
            step,
            f"step {progress.step}" + ("" if self._total_steps is None else f"/{self._total_steps}"),
        )

    def _short_forms(self, progress: StepProgress) -> tuple[str, ...]:
        """Forms without memory, which has lines of its own."""
        step, speed, remaining = self._parts(progress)
        left = remaining and f"{remaining} left"
        return _joined(step, speed, left), _joined(step, left), step


def _joined(*parts: str) -> str:
    return "  ".join(part for part in parts if part)
