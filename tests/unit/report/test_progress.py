from __future__ import annotations

import io

import pytest
from rich.console import Console

from memfit.core.errors import UsageError
from memfit.core.units import GIB, MIB
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


def test_in_a_terminal_the_lines_stay_and_the_cursor_comes_back_after_an_error() -> None:
    stream, console = record(terminal=True)

    def run_and_fail() -> None:
        with TrainingProgress(total_steps=3, limit_bytes=GIB, console=console) as progress:
            progress.wait_for("loading the model")
            for step in (1, 2):
                progress.update(make_step(step))
            raise RuntimeError("the run ended early")

    with pytest.raises(RuntimeError, match="ended early"):
        run_and_fail()
    text = stream.getvalue()
    assert text.count("loss 9.8765") == 2
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden and shown again


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
