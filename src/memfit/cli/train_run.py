"""Training of `memfit train`: the job is made, its steps are told, the proof is printed.

In: `TrainSettings`. Out: what a person reads, and a committed run or a save where they are asked
for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from memfit.cli.interrupted import leave_at_once
from memfit.cli.output import open_console, print_json
from memfit.cli.training import Training, from_function, from_recipe

if TYPE_CHECKING:
    from memfit.api import Job, StepResult
    from memfit.core.step_report import StepReport
    from memfit.recipes import Recipe
    from memfit.report.progress import TrainingProgress


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Options of `memfit train`, checked.

    Attributes:
        recipe: to train; None: the user's function.
        function: the user's function, where there is no recipe.
        limit_bytes: of the process, or of the GPU.
        steps: to make in this process.
        seed: of weights and of the order of the batches.
        store: directory of the run; None: nothing is committed.
        save: directory for the trained model; None: it is not saved.
        report: page of the report on its last step; None: there is none.
        json: file for the same as JSON, `-` for standard output; None: there is none.
        fitting: further keywords of `memfit.fit`.
        rank: of this process among those that train together.
        ranks: their number.
    """

    recipe: Recipe | None
    function: str | None
    limit_bytes: int
    steps: int
    seed: int
    store: Path | None
    save: Path | None
    report: Path | None
    json: Path | None
    fitting: Mapping[str, Any]
    rank: int = 0
    ranks: int = 1

    @property
    def tells(self) -> bool:
        """True if this process tells what goes on: the others do the same."""
        return self.rank == 0


class TrainRun:
    """One training with the settings that the command was given.

    Args:
        settings: of the command.
        read_peak_bytes: tells the most that the process held so far.
    """

    def __init__(self, settings: TrainSettings, read_peak_bytes: Callable[[], int]) -> None:
        self._settings = settings
        self._read_peak_bytes = read_peak_bytes
        self._console = open_console(on_errors=settings.json == Path("-"))
        self._console.quiet = not settings.tells
        self._job: Job | None = None

    def make(self) -> bool:
        """Fits the model, trains it, and prints the proof.

        Returns:
            True if the proof holds.
        """
        from memfit.report.progress import TrainingProgress

        settings = self._settings
        with TrainingProgress(
            total_steps=settings.steps, limit_bytes=settings.limit_bytes, console=self._console
        ) as progress:
            training = self._build(progress)
            before_bytes = self._read_peak_bytes()
            progress.wait_for("planning")
            job = self._job = self._fit(training)
            # A run that had its steps is given as many more.
            total = (job.steps // settings.steps + 1) * settings.steps
            self._begin(job, training, progress, total)
            began = time.perf_counter()
            results = _make_steps(job, training, progress, range(job.steps + 1, total + 1))
            if settings.store is not None:
                progress.wait_for("committing the last step")
                job.commit()
            seconds = time.perf_counter() - began
            if settings.save is not None:
                progress.wait_for(f"saving to {settings.save}")
                job.save(settings.save)
                if settings.tells:  # one writer of its files
                    training.keep_tokenizer(settings.save)
        self._tell(job, training, results, seconds)
        if settings.report is not None and settings.tells:
            job.report(settings.report)
            self._say(f"the report is in {settings.report}")
        proof = job.proof(before_bytes=before_bytes)
        self._say(proof.table())
        self._say(proof.line())
        if settings.store is not None:
            self._say(
                f"committed: step {total} in {settings.store}; the same command goes on from there, --fresh begins anew"
            )
        if settings.json is not None and settings.tells:
            print_json(settings.json, _data(job, training, results, seconds, proof.data()))
        job.close(restore=False)
        return proof.holds

    def _build(self, progress: TrainingProgress) -> Training:
        training = self._build_whole(progress)
        rank, ranks = self._settings.rank, self._settings.ranks
        if ranks == 1:
            return training
        from memfit.job.rank_training import own_rows

        own = own_rows(training.sample, rank, ranks)
        note = f"{ranks} ranks: this is told by rank 0, whose limit, peaks and bytes are its own"
        return replace(
            training, sample=own(training.sample), batches=map(own, training.batches), notes=(*training.notes, note)
        )

    def _build_whole(self, progress: TrainingProgress) -> Training:
        settings = self._settings
        if settings.recipe is not None:
            return from_recipe(settings.recipe, seed=settings.seed, steps=settings.steps, wait_for=progress.wait_for)
        assert settings.function is not None
        return from_function(
            settings.function,
            seed=settings.seed,
            is_committed=settings.store is not None,
            wait_for=progress.wait_for,
        )

    def _fit(self, training: Training) -> Job:
        from memfit.api import fit

        settings = self._settings
        return fit(
            training.model,
            training.optimizer,
            training.loss,
            training.sample,
            limit=settings.limit_bytes,
            weights=training.weights,
            store=settings.store,
            **settings.fitting,
        )

    def _begin(self, job: Job, training: Training, progress: TrainingProgress, total: int) -> None:
        """Registers what belongs to a commit, and tells what is trained and how."""
        settings, first = self._settings, job.steps
        check_save(settings.save, training.model)
        if settings.store is not None:
            begun = _Begun(training.name, settings.seed)
            for name, thing in (("recipe", begun), *training.registered.items()):
                job.register(name, thing)
        progress.announce(training.description)
        if first:
            progress.go_on(done=first, total_steps=total)
            progress.announce(
                f"goes on: {first} steps are committed in {settings.store}; {total - first} to do, to step {total}"
            )
        progress.announce(f"plan: {job.reason}")
        for note in training.notes:
            progress.announce(note)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _tell(self, job: Job, training: Training, results: list[StepResult], seconds: float) -> None:
        """Summary of the steps, and under which settings."""
        from memfit.core.units import format_bytes
        from memfit.job.settings_used import used_settings

        made = len(results)
        amount = self._settings.ranks * sum(training.amount(result.rows) for result in results)
        read, written = job.bytes_moved
        per_step = ", ".join(
            f"{what} {format_bytes(sum(moved.values()) // made)}"
            for what, moved in (("read", read), ("written", written))
        )
        last = [result.loss for result in results[-3:]]
        self._say(
            f"{made} steps in {seconds:.0f} s, {amount / seconds:.0f} {training.unit}/s; disk {per_step} a step; "
            f"loss {results[0].loss:.2f} -> {sum(last) / len(last):.2f} (mean of the last {len(last)})"
        )
        self._say("ran with " + "; ".join(f"{what}: {how}" for what, how in used_settings()))

    def interrupt(self) -> None:
        """Closes the job after Ctrl-C, and says where the run stands.

        A step that was not through with its scheduler is made again by the run that goes on.
        """
        leave_at_once()
        store = self._settings.store
        report = None if self._job is None else self._job.commits
        self.abandon()
        if report is not None:
            typer.echo(
                f"interrupted: step {report.step} is committed in {report.directory}; the same command goes on from there",
                err=True,
            )
        elif store is not None:
            typer.echo(f"interrupted before training began: {store} is as it was", err=True)
        else:
            typer.echo("interrupted; nothing was kept: --store keeps each step", err=True)

    def abandon(self) -> None:
        """Closes the job, if there is one, without a commit."""
        if self._job is not None:
            self._job.close(restore=False, commit=False)


def check_save(save: Path | None, model: Any = None) -> None:
    """Checks before the training that the model, if it is given, can be saved there.

    Raises:
        UsageError: it cannot. See `memfit.job.saving.check_save`.
    """
    from memfit.job import saving

    if save is not None:
        saving.check_save(save, model)


def _data(
    job: Job, training: Training, results: list[StepResult], seconds: float, proof: dict[str, Any]
) -> dict[str, Any]:
    """The run as JSON values."""
    read, written = job.bytes_moved
    return {
        "title": training.description,
        "plan": job.reason,
        "steps": [
            {
                "step": job.steps - len(results) + 1 + index,
                "loss": result.loss if result.is_finite else None,
                "seconds": result.seconds,
                "peak_bytes": result.peak_bytes,
            }
            for index, result in enumerate(results)
        ],
        "seconds": seconds,
        "unit": training.unit,
        "amount": sum(training.amount(result.rows) for result in results),
        "bytes_read": read,
        "bytes_written": written,
        "proof": proof,
    }


def _make_steps(job: Job, training: Training, progress: TrainingProgress, steps: range) -> list[StepResult]:
    """Trains, and tells each step."""
    from memfit.job.watching import progress_of

    def show(report: StepReport) -> None:
        amount = None if report.rows is None else training.amount(report.rows)
        progress.update(replace(progress_of(report), tokens=amount, unit=training.unit))

    results: list[StepResult] = []
    progress.follow(lambda: job.action)
    shown = job.on_step(show)
    for step in steps:
        progress.begin_step(step)
        results.append(job.step(next(training.batches)))
        training.end_step()
    shown.remove()
    return results


class _Begun:
    """Arguments that a run was begun with; it does not go on with something else."""

    def __init__(self, recipe: str, seed: int) -> None:
        self._words = {"recipe": recipe, "seed": seed}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._words)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        different = [key for key, value in self._words.items() if state.get(key) != value]
        if different:
            key = different[0]
            raise ValueError(
                f"the run was begun with {key} {state.get(key)!r:.80}, not {self._words[key]!r}; --fresh begins anew"
            )
