"""`memfit train`: a function's model, a recipe or a model of transformers, trained inside a limit,
with the proof at the end.

With `--store` it is a run that goes on where it was left.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli.interrupted import INTERRUPTED, leave_at_once
from memfit.cli.options import (
    DecisionOptions,
    JsonOption,
    MachineOptions,
    RanksOption,
    SourceOptions,
    one_of,
    open_console,
    print_json,
    shared,
)
from memfit.cli.source import Training, from_function, from_recipe
from memfit.core.documents import user_path
from memfit.core.errors import UsageError

if TYPE_CHECKING:
    from memfit.core.step_report import StepReport
    from memfit.integrations.recipes.gpt import Recipe
    from memfit.job.job import Job
    from memfit.job.results import StepResult
    from memfit.report.progress import TrainingProgress


# Training of `memfit train`: the job is made, its steps are told, the proof is printed.
#
# In: `TrainSettings`. Out: what a person reads, and a committed run or a save where they are asked
# for.


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
        from memfit.job.fit import fit

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
        from memfit.core.limits import format_bytes
        from memfit.machine.limits_of_process import used_settings

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
        UsageError: it cannot. See `memfit.runs.saving.check_save`.
    """
    from memfit.runs import saving

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


DataOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="For --model: files of UTF-8 text, or a safetensors file of images and labels. By default Python's own source, or drawn images."
    ),
]
RateOption = Annotated[float, typer.Option(help="Learning rate of AdamW after warm-up, with --model.")]
DEFAULT_LIMIT = "1.25GiB"
StoreOption = Annotated[
    Path | None,
    typer.Option(help="Commit each step here. A run that is there goes on; one that had its steps makes as many more."),
]
SchemeOption = Annotated[
    str | None,
    typer.Option(
        help="How a new store keeps a step: generations (the default, two of everything) or journal (one, and the gradients).",
        autocompletion=one_of("generations", "journal"),
    ),
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Remove the run that is in the store, and begin anew.")]
SaveOption = Annotated[Path | None, typer.Option(help="Save the trained model here, with its tokenizer.")]


@shared
def train(
    *,
    source: SourceOptions,
    machine: MachineOptions,
    decisions: DecisionOptions,
    data: DataOption = None,
    rate: RateOption = 1e-4,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of the text.")] = 0,
    store: StoreOption = None,
    scheme: SchemeOption = None,
    fresh: FreshOption = False,
    save: SaveOption = None,
    ranks: RanksOption = 1,
    report: Annotated[
        Path | None, typer.Option(help="Write a page about the last step here: measured beside predicted.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Trains your function's model, a recipe (gpt2-small by default), or --model on text or images,
    inside the limit (1.25GiB if none is named); prints the proof.

    Under `torchrun -m memfit train`, or with --ranks, several processes train together: each takes
    its rows of every batch, and the limit is of each. The proof is predicted peak, measured peak,
    limit. A model given by --model is built without its
    weights, which come from its files, or are initialised, one at a time on their way home.
    """
    from memfit.core.limits import parse_bytes
    from memfit.job.rank_training import leave_ranks
    from memfit.machine.machine import prepare_process

    rank, count = _join(ranks)
    limit_bytes = parse_bytes(DEFAULT_LIMIT if machine.limit is None else machine.limit)
    check_save(save)
    if report is not None and not report.absolute().parent.is_dir():
        raise UsageError(
            f"the report cannot be written to {report}: there is no directory {report.parent}; make it, or name another"
        )
    process = prepare_process()
    settings = TrainSettings(
        recipe=_chosen(source, data, rate),
        function=source.function,
        limit_bytes=limit_bytes,
        steps=steps,
        seed=seed,
        # Rank 0 alone looks at the directory first, and so removes what is there.
        store=_open_store(store, fresh=fresh, removes=rank == 0),
        save=save,
        report=report,
        json=json,
        rank=rank,
        ranks=count,
        fitting={**machine.keywords(), **decisions.keywords(), "scheme": scheme},
    )
    run = TrainRun(settings, lambda: process.peak_bytes().whole_bytes)
    try:
        holds = run.make()
    except KeyboardInterrupt:
        run.interrupt()
        raise typer.Exit(code=INTERRUPTED) from None
    except BaseException:
        run.abandon()
        raise
    leave_ranks()
    if not holds:
        raise typer.Exit(code=1)


def _join(ranks: int) -> tuple[int, int]:
    """Starts the ranks, and ends with them; or joins those that were started.

    Returns:
        This process's rank, and the number of ranks.
    """
    from memfit.job.rank_training import join_ranks, launch

    if ranks > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        raise typer.Exit(code=launch(ranks, sys.argv[1:]))
    return join_ranks()


def _chosen(source: SourceOptions, data: list[Path] | None, rate: float) -> Recipe | None:
    """The recipe; None for the user's function."""
    function, recipe, model = source.function, source.recipe, source.model
    if function is not None:
        if recipe is not None or model is not None or data:
            raise UsageError(f"{function} brings its own model and batches: leave --recipe, --model and --data out")
        return None
    from memfit.integrations.recipes.gpt import find_recipe
    from memfit.integrations.recipes.model_recipe import model_recipe

    if model is None:
        if data:
            raise UsageError("--data is for --model: a recipe brings its own text")
        return find_recipe(recipe or "gpt2-small")
    if recipe is not None:
        raise UsageError("name --recipe or --model, not both")
    return model_recipe(
        model,
        batch_size=source.batch,
        sequence_length=source.sequence,
        learning_rate=rate,
        files=tuple(data or ()),
    )


def _open_store(store: Path | None, *, fresh: bool, removes: bool) -> Path | None:
    """The store's directory, with room for it to be made.

    An older run is removed if that is wanted.
    """
    from memfit.runs.exporting import remove_run

    if store is None:
        if fresh:
            raise UsageError("--fresh begins a run anew: name its directory with --store")
        return None
    store = user_path(store).absolute()
    if fresh and removes:
        remove_run(store)
    store.parent.mkdir(parents=True, exist_ok=True)
    return store
