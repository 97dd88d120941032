"""`memfit train`: a function's model, a recipe or a model of transformers, trained inside a limit,
with the proof at the end.

With `--store` it is a run that goes on where it was left.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.interrupted import INTERRUPTED
from memfit.cli.options import DecisionOptions, JsonOption, MachineOptions, RanksOption, SourceOptions, one_of, shared
from memfit.cli.train_run import TrainRun, TrainSettings, check_save
from memfit.core.errors import UsageError
from memfit.core.paths import user_path

if TYPE_CHECKING:
    from memfit.recipes import Recipe


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
    from memfit.core.units import parse_bytes
    from memfit.job.machine import prepare_process
    from memfit.job.rank_training import leave_ranks

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
    from memfit.recipes import find_recipe, model_recipe

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
    from memfit.job.exporting import remove_run

    if store is None:
        if fresh:
            raise UsageError("--fresh begins a run anew: name its directory with --store")
        return None
    store = user_path(store).absolute()
    if fresh and removes:
        remove_run(store)
    store.parent.mkdir(parents=True, exist_ok=True)
    return store
