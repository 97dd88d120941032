"""`memfit train`: a function's model, a recipe or a causal language model of transformers, trained
inside a limit, with the proof at the end.

With `--store` it is a run that goes on where it was left.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli.interrupted import INTERRUPTED, leave_at_once
from memfit.cli.source import (
    AllowOption,
    BatchOption,
    FunctionArgument,
    ModelOption,
    NumericsOption,
    PlanOption,
    RecipeOption,
    SequenceOption,
    given_plan,
)
from memfit.cli.training import Training, from_function, from_recipe
from memfit.core.errors import UsageError

if TYPE_CHECKING:
    from memfit.api import Job, StepResult
    from memfit.recipes import Recipe
    from memfit.report.progress import TrainingProgress


def train(
    *,
    function: FunctionArgument = None,
    recipe: RecipeOption = None,
    model: ModelOption = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of UTF-8 text to train --model on; may be repeated. By default the source of Python's standard library."
        ),
    ] = None,
    batch: BatchOption = 8,
    sequence: SequenceOption = 512,
    rate: Annotated[float, typer.Option(help="Learning rate of AdamW after warm-up, with --model.")] = 1e-4,
    limit: Annotated[
        str, typer.Option(help="Memory of the whole process (or of the GPU), such as 1.25GiB.")
    ] = "1.25GiB",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of the text.")] = 0,
    allow: AllowOption = None,
    numerics: NumericsOption = "auto",
    plan: PlanOption = None,
    directory: Annotated[Path | None, typer.Option(help="Where homes on disk are made; temporary by default.")] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            help="Commit each step here. A run that is there goes on; one that had its steps makes as many more."
        ),
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="How a new store keeps a step: generations (the default, two of everything) or journal (one, and the gradients)."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove the run that is in the store, and begin anew.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Save the trained model here, with its tokenizer.")] = None,
) -> None:
    """Trains your function's model, a recipe (gpt2-small by default), or --model on text, inside
    the limit; prints the proof.

    The proof is predicted peak, measured peak, limit. A model given by --model is built without its
    weights, which come from its files, or are initialised, one at a time on their way home.
    """
    from memfit.api import fit
    from memfit.core.units import parse_bytes
    from memfit.job.machine import prepare_process
    from memfit.report.progress import TrainingProgress

    limit_bytes = parse_bytes(limit)
    _check_save(save)
    process = prepare_process()
    chosen = _chosen(function, recipe, model, data, batch, sequence, rate)
    store = _open_store(store, fresh=fresh)
    job: Job | None = None
    try:
        with TrainingProgress(total_steps=steps, limit_bytes=limit_bytes) as progress:
            if chosen is not None:
                training = from_recipe(chosen, seed=seed, steps=steps, wait_for=progress.wait_for)
            else:
                assert function is not None
                training = from_function(
                    function, seed=seed, is_committed=store is not None, wait_for=progress.wait_for
                )
            before_bytes = process.peak_bytes().whole_bytes
            progress.wait_for("planning")
            job = fit(
                training.model,
                training.optimizer,
                training.loss,
                training.sample,
                limit=limit_bytes,
                weights=training.weights,
                plan=given_plan(plan),
                allow=frozenset(allow or ()),
                numerics=numerics,  # type: ignore[arg-type]  # its check says what it takes
                directory=directory,
                store=store,
                scheme=scheme,  # type: ignore[arg-type]  # fit says what it takes
            )
            _check_save(save, training.model)
            first = job.steps
            # A run that had its steps is given as many more.
            total = (first // steps + 1) * steps
            if store is not None:
                begun = _Begun(training.name, seed)
                for name, thing in (("recipe", begun), *training.registered.items()):
                    job.register(name, thing)
            progress.announce(training.description)
            if first:
                progress.go_on(done=first, total_steps=total)
                progress.announce(
                    f"goes on: {first} steps are committed in {store}; {total - first} to do, to step {total}"
                )
            progress.announce(f"plan: {job.reason}")
            for note in training.notes:
                progress.announce(note)
            began = time.perf_counter()
            results = _make_steps(job, training, progress, range(first + 1, total + 1))
            if store is not None:
                progress.wait_for("committing the last step")
                job.commit()
            seconds = time.perf_counter() - began
            if save is not None:
                progress.wait_for(f"saving to {save}")
                job.save(save)
                training.keep_tokenizer(save)
        _tell(job, training, results, seconds)
        proof = job.proof(before_bytes=before_bytes)
        typer.echo(proof.line())
        if store is not None:
            typer.echo(f"committed: step {total} in {store}; the same command goes on from there, --fresh begins anew")
        job.close(restore=False)
    except KeyboardInterrupt:
        _leave(job, store)
        raise typer.Exit(code=INTERRUPTED) from None
    except BaseException:
        if job is not None:
            job.close(restore=False, commit=False)
        raise
    if not proof.holds:
        raise typer.Exit(code=1)


def _chosen(
    function: str | None,
    recipe: str | None,
    model: Path | None,
    data: list[Path] | None,
    batch: int,
    sequence: int,
    rate: float,
) -> Recipe | None:
    """The recipe; None for the user's function."""
    if function is not None:
        if recipe is not None or model is not None or data:
            raise UsageError(f"{function} brings its own model and batches: leave --recipe, --model and --data out")
        return None
    from memfit.recipes import causal_recipe, find_recipe

    if model is None:
        if data:
            raise UsageError("--data is for --model: a recipe brings its own text")
        return find_recipe(recipe or "gpt2-small")
    if recipe is not None:
        raise UsageError("name --recipe or --model, not both")
    return causal_recipe(model, batch_size=batch, sequence_length=sequence, learning_rate=rate, files=tuple(data or ()))


def _open_store(store: Path | None, *, fresh: bool) -> Path | None:
    """The store's directory, with room for it to be made.

    An older run is removed if that is wanted.
    """
    from memfit.job.exporting import remove_run

    if store is None:
        if fresh:
            raise UsageError("--fresh begins a run anew: name its directory with --store")
        return None
    store = store.expanduser().absolute()
    if fresh:
        remove_run(store)
    store.parent.mkdir(parents=True, exist_ok=True)
    return store


def _check_save(save: Path | None, model: Any = None) -> None:
    """Refuses a place that nothing, or that not this model, can be saved to, now and not when all
    is trained.
    """
    from memfit.job.saving import check_save

    if save is not None:
        check_save(save, model)


def _tell(job: Job, training: Training, results: list[StepResult], seconds: float) -> None:
    """Summary of the steps, and under which settings."""
    from memfit.core.units import format_bytes
    from memfit.job.used import used_settings

    made = len(results)
    amount = sum(training.amount(result.rows) for result in results)
    read, written = job.bytes_moved
    per_step = ", ".join(
        f"{what} {format_bytes(sum(moved.values()) // made)}" for what, moved in (("read", read), ("written", written))
    )
    last = [result.loss for result in results[-3:]]
    typer.echo(
        f"{made} steps in {seconds:.0f} s, {amount / seconds:.0f} {training.unit}/s; disk {per_step} a step; "
        f"loss {results[0].loss:.2f} -> {sum(last) / len(last):.2f} (mean of the last {len(last)})"
    )
    typer.echo("ran with " + "; ".join(f"{what}: {how}" for what, how in used_settings()))


def _make_steps(job: Job, training: Training, progress: TrainingProgress, steps: range) -> list[StepResult]:
    """Trains, and tells each step."""
    from memfit.report.progress import StepProgress

    results: list[StepResult] = []
    for step in steps:
        progress.begin_step(step)
        result = job.step(next(training.batches))
        training.end_step()
        results.append(result)
        progress.update(
            StepProgress(
                step=step,
                loss=result.loss,
                tokens=training.amount(result.rows),
                unit=training.unit,
                step_s=result.seconds,
                measured_peak_bytes=result.peak_bytes,
            )
        )
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


def _leave(job: Job | None, store: Path | None) -> None:
    """After Ctrl-C: says where the run stands.

    A step that was not through with its scheduler is made again by the run that goes on.
    """
    leave_at_once()
    report = None if job is None else job.commits
    if job is not None:
        job.close(restore=False, commit=False)
    if report is not None:
        typer.echo(
            f"interrupted: step {report.step} is committed in {report.directory}; the same command goes on from there",
            err=True,
        )
    elif store is not None:
        typer.echo(f"interrupted before training began: {store} is as it was", err=True)
    else:
        typer.echo("interrupted; nothing was kept: --store keeps each step", err=True)
