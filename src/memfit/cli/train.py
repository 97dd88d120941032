"""`memfit train`: a recipe or a causal language model of transformers, trained inside a limit, with the proof at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli.source import AllowOption, BatchOption, ModelOption, RecipeOption, SequenceOption
from memfit.core.errors import UsageError

if TYPE_CHECKING:
    from memfit.recipes import Recipe


def train(
    *,
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
    plan: Annotated[Path | None, typer.Option(help="Take this plan (JSON) instead of choosing one.")] = None,
    directory: Annotated[Path | None, typer.Option(help="Where homes on disk are made; temporary by default.")] = None,
    save: Annotated[Path | None, typer.Option(help="Save the trained model here.")] = None,
) -> None:
    """Trains a recipe (gpt2-small by default), or --model on text, inside the limit; prints the proof: predicted peak, measured peak, limit.

    A model given by --model is built without its weights, which come from its files, or are initialised, one at a time on their way home.
    """
    from memfit.api import fit
    from memfit.api.machine import prepare_process
    from memfit.api.used import used_settings
    from memfit.core.units import format_bytes, parse_bytes
    from memfit.report.progress import StepProgress, TrainingProgress

    limit_bytes = parse_bytes(limit)
    process = prepare_process()
    chosen = _chosen(recipe, model, data, batch, sequence, rate)
    with TrainingProgress(total_steps=steps, limit_bytes=limit_bytes) as progress:
        progress.wait_for("reading text")
        batches = chosen.batches(seed)
        sample = next(batches)
        progress.wait_for("building the model")
        net = _build(chosen, seed)
        optimizer = chosen.build_optimizer(net)
        scheduler = chosen.build_scheduler(optimizer, steps)
        before_bytes = process.peak_bytes().whole_bytes
        progress.wait_for("planning")
        job = fit(
            net,
            optimizer,
            chosen.loss,
            sample,
            limit=limit_bytes,
            weights=chosen.weights,
            plan=plan,
            allow=frozenset(allow or ()),
            directory=directory,
        )
        progress.announce(chosen.description)
        progress.announce(f"plan: {job.reason}")
        losses: list[float] = []
        began = time.perf_counter()
        for step in range(1, steps + 1):
            result = job.step(sample if step == 1 else next(batches))
            scheduler.step()
            losses.append(result.loss)
            progress.update(
                StepProgress(
                    step=step,
                    loss=result.loss,
                    tokens=chosen.tokens_per_step,
                    step_s=result.seconds,
                    measured_peak_bytes=result.peak_bytes,
                )
            )
        seconds = time.perf_counter() - began
        if save is not None:
            progress.wait_for(f"saving to {save}")
            job.save(save)
    read, written = job.bytes_moved
    per_step = ", ".join(
        f"{what} {format_bytes(sum(moved.values()) // steps)}" for what, moved in (("read", read), ("written", written))
    )
    last = losses[-3:]
    typer.echo(
        f"{steps} steps in {seconds:.0f} s, {steps * chosen.tokens_per_step / seconds:.0f} tokens/s; disk {per_step} a step; "
        f"loss {losses[0]:.2f} -> {sum(last) / len(last):.2f} (mean of the last {len(last)})"
    )
    typer.echo("ran with " + "; ".join(f"{what}: {how}" for what, how in used_settings()))
    proof = job.proof(before_bytes=before_bytes)
    typer.echo(proof.line())
    job.close(restore=False)
    if not proof.holds:
        raise typer.Exit(code=1)


def _build(chosen: Recipe, seed: int) -> Any:
    from memfit.api import empty

    if not chosen.is_large:
        return chosen.build_model(seed)
    return empty(lambda: chosen.build_model(seed), initialises=chosen.weights is None)


def _chosen(
    recipe: str | None, model: Path | None, data: list[Path] | None, batch: int, sequence: int, rate: float
) -> Recipe:
    from memfit.recipes import causal_recipe, find_recipe

    if model is None:
        if data:
            raise UsageError("--data is for --model: a recipe brings its own text")
        return find_recipe(recipe or "gpt2-small")
    if recipe is not None:
        raise UsageError("name --recipe or --model, not both")
    return causal_recipe(model, batch_size=batch, sequence_length=sequence, learning_rate=rate, files=tuple(data or ()))
