"""`memfit train`: a recipe, trained inside a limit, with the proof at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.source import AllowOption


def train(
    recipe: Annotated[str, typer.Option(help="A built-in recipe: model, optimizer, loss, text.")] = "gpt2-small",
    limit: Annotated[
        str, typer.Option(help="Memory of the whole process (or of the GPU), such as 1.25GiB.")
    ] = "1.25GiB",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of the text.")] = 0,
    plan: Annotated[Path | None, typer.Option(help="Take this plan (JSON) instead of choosing one.")] = None,
    allow: AllowOption = None,
    directory: Annotated[Path | None, typer.Option(help="Where homes on disk are made; temporary by default.")] = None,
    save: Annotated[Path | None, typer.Option(help="Save the trained model here.")] = None,
) -> None:
    """Trains a recipe inside the limit and prints the proof: predicted peak, measured peak, limit."""
    from memfit.api import fit
    from memfit.api.machine import prepare_process
    from memfit.core.units import format_bytes, parse_bytes
    from memfit.recipes import find_recipe
    from memfit.report.progress import StepProgress, TrainingProgress

    limit_bytes = parse_bytes(limit)
    process = prepare_process()
    chosen = find_recipe(recipe)
    with TrainingProgress(total_steps=steps, limit_bytes=limit_bytes) as progress:
        progress.wait_for("reading text")
        batches = chosen.batches(seed)
        sample = next(batches)
        progress.wait_for("building the model")
        model = chosen.build_model(seed)
        optimizer = chosen.build_optimizer(model)
        scheduler = chosen.build_scheduler(optimizer, steps)
        before_bytes = process.peak_bytes().whole_bytes
        progress.wait_for("planning")
        job = fit(
            model, optimizer, chosen.loss, sample, limit=limit_bytes, plan=plan, allow=allow or (), directory=directory
        )
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
    proof = job.proof(before_bytes=before_bytes)
    typer.echo(proof.line())
    job.close(restore=False)
    if not proof.holds:
        raise typer.Exit(code=1)
