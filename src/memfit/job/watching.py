"""Watching a job: functions that are told of steps and updates, and the view in a terminal.

In: functions of the user's. Out: handles that take them off again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

from memfit.core.errors import UsageError
from memfit.core.step_report import StepReport
from memfit.homes.update_pieces import UpdateWatcher
from memfit.job.job_facts import JobFacts
from memfit.report.progress import StepProgress, TrainingProgress


class WatchedJob(JobFacts):
    """Callbacks and views of a job."""

    @property
    def action(self) -> str:
        """Text of the action that a step is at now; empty between steps. Other threads may read
        it.
        """
        assembly = self._assembly
        return assembly.engine.at if assembly.is_stepping else ""

    def on_step(self, callback: Callable[[StepReport], object]) -> RemovableHandle:
        """Calls a function after each step, of `job.step` and of `job.lines`.

            writer = SummaryWriter()
            job.on_step(memfit.sinks.tensorboard(writer))

        Args:
            callback: gets a `StepReport`; `report.scalars()` is one flat dictionary of figures. An
                error that it raises is raised where the step ends; the step counts.

        Returns:
            A handle; its `remove()` takes the function off.

        Raises:
            UsageError: the job is closed, or this is no function.
        """
        self._check_open()
        _check_function(callback, "on_step")
        entries = self._runner.watchers.entries
        handle = RemovableHandle(entries)
        entries[handle.id] = callback
        return handle

    def on_update(self, block: str | None, callback: UpdateWatcher) -> RemovableHandle:
        """Calls a function with each piece of a block's weights when it has been updated, before it
        goes home: for averages of weights and norms by layer, without another visit.

            def count(piece):
                squares[piece.name] += piece.weight.double().square().sum()

            job.on_update("layers.3", count)

        It runs in the thread that updates, beside backward, and in no order between blocks. An
        error that it raises fails the step, as one of the optimizer would.

        Args:
            block: a name of `job.block_names`; None: all blocks.
            callback: gets an `UpdatedPiece`.

        Returns:
            A handle; its `remove()` takes the function off.

        Raises:
            UsageError: the job is closed, no block has this name, or this is no function.
        """
        watchers = self._check_open().setup.watchers
        _check_function(callback, "on_update")
        if block is not None and block not in self.block_names:
            raise UsageError(
                f"no block is called {block!r:.80}: job.block_names lists them. To watch all of them, give None instead of a name"
            )
        handle = RemovableHandle(watchers.entries)
        watchers.entries[handle.id] = (block, callback)
        return handle

    @contextmanager
    def live_view(self, total_steps: int | None = None, *, console: Any = None) -> Iterator[TrainingProgress]:
        """Context in which a terminal shows the steps as they are made, drawn again in place: loss,
        speed, each tier against its limit, what compute waits for.

            with job.live_view(total_steps=1000):
                for batch in loader:
                    job.step(batch)

        Where the output is no terminal, each step is one line.

        Args:
            total_steps: number of the run's last step; None: unknown.
            console: a `rich.console.Console`; by default one on standard output.

        Yields:
            The view; `view.announce(text)` writes a line that stays.
        """
        self._check_open()
        # Weak: the thread that draws must not keep a job that was dropped.
        job = weakref.ref(self)
        with TrainingProgress(
            total_steps=total_steps,
            limit_bytes=self._machine.limits.device_bytes,
            console=console,
            now=lambda: "" if (here := job()) is None else here.action,
        ) as view:

            def show(report: StepReport) -> None:
                if total_steps is not None and report.step > total_steps:
                    view.forget_total()
                view.update(progress_of(report))
                if report.step != total_steps:
                    view.begin_step(report.step + 1)

            handle = self.on_step(show)
            view.begin_step(self.steps + 1)
            try:
                yield view
            finally:
                handle.remove()


def _check_function(callback: object, what: str) -> None:
    if not callable(callback):
        raise UsageError(f"job.{what} takes a function, not {type(callback).__name__}")


def progress_of(report: StepReport) -> StepProgress:
    """Returns what a view shows of a step."""
    has_tokens = report.tokens is not None
    return StepProgress(
        step=report.step,
        loss=report.loss,
        tokens=report.tokens if report.tokens is not None else report.rows,
        unit="tokens" if has_tokens else "rows",
        step_s=report.seconds,
        measured_peak_bytes=report.peak_bytes,
        tiers=report.tiers,
        waits_s=report.waits_s,
    )
