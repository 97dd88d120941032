from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from memfit.core.errors import UsageError
from memfit.core.limits import GIB, MIB
from memfit.report.progress import StepProgress, TrainingProgress, format_bar, format_duration


def make_step(step: int, *, step_s: float = 2.0, peak_bytes: int = 3 * GIB // 4, loss: float = 9.8765) -> StepProgress:
    return StepProgress(step=step, loss=loss, tokens=4096, step_s=step_s, measured_peak_bytes=peak_bytes)


def record(*, terminal: bool) -> tuple[io.StringIO, Console]:
    stream = io.StringIO()
    return stream, Console(file=stream, force_terminal=terminal, width=200)


def test_without_a_terminal_each_step_is_one_plain_line_with_all_figures() -> None:
    stream, console = record(terminal=False)
    with TrainingProgress(total_steps=12, limit_bytes=GIB, console=console) as progress:
        progress.wait_for("loading the model")
        progress.update(make_step(1))
        progress.announce("proof: [bold]kept as it is[/bold]")
    memory = "memory [###############-----] measured peak 768.0 MiB of 1.00 GiB (75%)"
    assert stream.getvalue().splitlines() == [
        "loading the model",
        f"step  1/12  loss 9.8765  2,048 tokens/s  {memory}  remaining 22 s",
        "proof: [bold]kept as it is[/bold]",
    ]


def test_a_narrow_output_does_not_break_lines() -> None:
    stream = io.StringIO()
    with TrainingProgress(total_steps=2, limit_bytes=GIB, console=Console(file=stream, width=40)) as progress:
        progress.update(make_step(1))
    assert len(stream.getvalue().splitlines()) == 1


class Screen:
    """A terminal of a given width, as far as the progress line uses one: it wraps what is too long."""

    def __init__(self, width: int) -> None:
        self.rows: list[str] = [""]
        self.wraps = 0
        self._width, self._row, self._column = width, 0, 0

    def feed(self, text: str) -> None:
        for control, plain in re.findall(r"(\x1b\[[?0-9;]*[A-Za-z]|\r|\n)|([^\x1b\r\n])", text):
            if plain:
                self._put(plain)
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._down()
            elif control.endswith("K"):
                self.rows[self._row] = ""
            elif control.endswith("A"):
                self._row -= int(control[2:-1] or 1)

    def _put(self, sign: str) -> None:
        if self._column == self._width:
            self.wraps += 1
            self._down()
            self._column = 0
        row = self.rows[self._row].ljust(self._column)
        self.rows[self._row] = row[: self._column] + sign + row[self._column + 1 :]
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        self._column = 0
        while len(self.rows) <= self._row:
            self.rows.append("")


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_in_a_terminal_steps_are_one_line_drawn_again_that_never_wraps_and_the_last_stays_after_an_error(
    width: int,
) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width)

    def run_and_fail() -> None:
        with TrainingProgress(total_steps=1000, limit_bytes=GIB, console=console) as progress:
            progress.wait_for("loading the model")
            for step in range(1, 6):
                progress.begin_step(step)
                progress.update(make_step(step, step_s=123.4, loss=10.9876))
                assert progress._live is not None
                progress._live.refresh()
            raise RuntimeError("the run ended early")

    with pytest.raises(RuntimeError, match="ended early"):
        run_and_fail()
    text = stream.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden and shown again
    screen = Screen(width)
    screen.feed(text)
    assert screen.wraps == 0
    # Each was seen while it was the last; one line is left.
    drawn = re.findall(r"step +([0-9]+)/1000", text)
    assert set(drawn) == {"1", "2", "3", "4", "5"}
    (left,) = [row for row in screen.rows if row.strip()]
    assert left.startswith("step    5/1000  loss 10.9876")
    if width >= 80:
        assert "75%" in left and "of 1.00 GiB" in left
        assert "34 h 06 min" in left  # 995 steps of 123.4 s


def test_a_line_that_stays_is_written_above_the_line_that_is_drawn_again() -> None:
    stream = io.StringIO()
    with TrainingProgress(
        total_steps=2, limit_bytes=GIB, console=Console(file=stream, force_terminal=True, width=80)
    ) as progress:
        progress.update(make_step(1))
        progress.announce("plan: [bold]kept as it is[/bold]")
        progress.update(make_step(2))
    screen = Screen(80)
    screen.feed(stream.getvalue())
    rows = [row.rstrip() for row in screen.rows if row.strip()]
    assert rows[0] == "plan: [bold]kept as it is[/bold]"
    assert rows[1].startswith("step 2/2")
    assert len(rows) == 2


def test_remaining_time_goes_by_the_median_so_that_a_slow_first_step_does_not_last() -> None:
    stream, console = record(terminal=False)
    with TrainingProgress(total_steps=10, limit_bytes=GIB, console=console) as progress:
        for step, step_s in enumerate((100.0, 10.0, 10.0), start=1):
            progress.update(make_step(step, step_s=step_s))
    endings = [line.rsplit("  ", 1)[1] for line in stream.getvalue().splitlines()]
    assert endings == ["remaining 15 min 00 s", "remaining 7 min 20 s", "remaining 1 min 10 s"]


def test_a_loss_that_is_not_a_number_is_shown_as_such() -> None:
    progress = TrainingProgress(total_steps=1, limit_bytes=GIB, console=record(terminal=False)[1])
    assert "loss nan" in progress.describe(make_step(1, loss=float("nan")))


def test_a_bar_is_full_only_at_the_limit() -> None:
    assert format_bar(0, GIB, 10) == "[----------]"
    assert format_bar(GIB - 1, GIB, 10) == "[#########-]"
    assert format_bar(GIB, GIB, 10) == "[##########]"
    assert format_bar(GIB + MIB, GIB, 10) == "[##########]"


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7380, "2 h 03 min"),
    ],
)
def test_durations_are_written_for_a_person(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


def test_a_step_outside_of_the_run_and_an_empty_run_are_refused() -> None:
    progress = TrainingProgress(total_steps=2, limit_bytes=GIB, console=record(terminal=False)[1])
    for step in (0, 3):
        with pytest.raises(UsageError, match="steps count from 1"):
            progress.update(make_step(step))
    with pytest.raises(UsageError, match="must be positive"):
        TrainingProgress(total_steps=0, limit_bytes=GIB)
