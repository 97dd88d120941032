"""Subject of `memfit train`: a recipe, a model's directory, or what a function of the user's gives.

In: options. Out: `Training`, built in the order in which memory comes: batches, then the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.cli.source import find_function, read_parts
from memfit.core.errors import UsageError

if TYPE_CHECKING:
    from memfit.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Training:
    """Ordinary objects to train, and how they are told of.

    Attributes:
        name: a run that goes on compares it with the one it was begun with.
        description: one line.
        model: the model, perhaps without its weights.
        optimizer: the optimizer.
        loss: the loss function.
        batches: endless.
        sample: the first of them.
        end_step: after each step: a scheduler's, say.
        registered: by name, what belongs to every commit.
        weights: files that the model's weights come from.
        keep_tokenizer: puts the tokenizer beside a save.
        tokens_per_row: where rows are text.
        notes: what a person should know before the steps.
    """

    name: str
    description: str
    model: Any
    optimizer: Any
    loss: Callable[[Any, Any], Any]
    batches: Iterator[Any]
    sample: Any
    end_step: Callable[[], object] = lambda: None
    registered: dict[str, Any] = field(default_factory=dict[str, Any])
    weights: Path | None = None
    keep_tokenizer: Callable[[Path], None] = lambda _: None
    tokens_per_row: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """Unit of a step's speed."""
        return "rows" if self.tokens_per_row is None else "tokens"

    def amount(self, rows: int) -> int:
        """Rows in that unit."""
        return rows if self.tokens_per_row is None else rows * self.tokens_per_row


def from_recipe(chosen: Recipe, *, seed: int, steps: int, wait_for: Callable[[str], None]) -> Training:
    """A recipe's own text, model, AdamW and warm-up."""
    wait_for("reading text")
    batches = chosen.batches(seed)
    position = batches.state_dict()
    sample = next(batches)
    batches.load_state_dict(position)  # the sample is the first step's batch too
    wait_for("building the model")
    model = _build(chosen, seed)
    optimizer = chosen.build_optimizer(model)
    scheduler = chosen.build_scheduler(optimizer, steps)
    return Training(
        name=chosen.name,
        description=chosen.description,
        model=model,
        optimizer=optimizer,
        loss=chosen.loss,
        batches=batches,
        sample=sample,
        end_step=scheduler.step,
        registered={"batches": batches, "scheduler": scheduler},
        weights=chosen.weights,
        keep_tokenizer=chosen.keep_tokenizer,
        tokens_per_row=chosen.sequence_length,
    )


def _build(chosen: Recipe, seed: int) -> Any:
    from memfit.api import empty

    if not chosen.is_large:
        return chosen.build_model(seed)
    return empty(lambda: chosen.build_model(seed), initialises=chosen.weights is None)


def from_function(text: str, *, seed: int, is_committed: bool, wait_for: Callable[[str], None]) -> Training:
    """Calls the user's function, which gives (model, optimizer, loss, sample), or with what gives
    batches in the sample's place or behind it.

    Args:
        text: MODULE:FUNCTION.
        seed: of torch's default generator, before the function is called.
        is_committed: the run is to go on.
        wait_for: tells what is going on.

    Raises:
        UsageError: there is no such function, it gives something else, or its batches cannot go on
            where they were.
    """
    from memfit.job.machine import prepare_process

    function = find_function(text)
    wait_for(f"calling {text}")
    prepare_process(seed=seed)
    parts = read_parts(text, function())
    notes: tuple[str, ...] = ()
    registered: dict[str, Any] = {}
    batches: Iterator[Any]
    if parts.batches is None:
        notes = (
            f"every step is made on the one sample: let {text} return what gives batches (a DataLoader) in its place",
        )
        batches = _again_and_again([parts.sample])
    else:
        if is_committed:
            if not (hasattr(parts.batches, "state_dict") and hasattr(parts.batches, "load_state_dict")):
                raise UsageError(
                    f"--store goes on where a run was, and the {type(parts.batches).__name__} of {text} cannot say where it is: return a "
                    "memfit.ResumableLoader, or torchdata's StatefulDataLoader"
                )
            registered["batches"] = parts.batches
        batches = _again_and_again(parts.batches)
    return Training(
        name=text,
        description=text,
        model=parts.model,
        optimizer=parts.optimizer,
        loss=parts.loss,
        batches=batches,
        sample=parts.sample,
        registered=registered,
        notes=notes,
    )


def _again_and_again(batches: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch. A loader that goes on at the end of an epoch gives an empty one first."""
    empty = 0
    while empty < 2:
        empty += 1
        for batch in batches:
            empty = 0
            yield batch
    raise UsageError(f"the {type(batches).__name__} gives no more batches: return a loader that can be iterated again")
