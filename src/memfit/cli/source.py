"""Subject of a command: a built-in recipe, a transformers configuration, or a function of the
user's.

In: the options that name it. Out: `CommandSource`: model, optimizer, loss, sample.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.core.errors import UsageError

if TYPE_CHECKING:
    from memfit.integrations.recipes.gpt import Recipe


@dataclass(frozen=True, kw_only=True)
class CommandSource:
    """Arguments that a user would hand to `memfit.fit`; `name` for headings.

    Attributes:
        name: of the subject.
        model: the user's, like `optimizer` and `loss`.
        optimizer: steps its weights.
        loss: model and batch -> loss.
        sample: one batch.
        sample_of: makes a batch of so many rows and tokens a row, where that is known.
        longest: tokens of the longest sequence that the model takes; None: it does not say.
        has_sequences: `sample_of` makes sequences of so many tokens.
    """

    name: str
    model: Any
    optimizer: Any
    loss: Callable[[Any, Any], Any]
    sample: Any
    sample_of: Callable[[int, int], Any] | None = None
    longest: int | None = None
    has_sequences: bool = False


def find_source(
    function: str | None, recipe: str | None, model: Path | None, batch: int, sequence: int
) -> CommandSource:
    """Builds what the options name.

    Raises:
        UsageError: none or several are named, or it cannot be built.
    """
    named = [option for option in (function, recipe, model) if option is not None]
    if len(named) != 1:
        raise UsageError(
            f"name one of MODULE:FUNCTION, --recipe and --model; {len(named) or 'none'} of them {'was' if len(named) < 2 else 'were'} given"
        )
    if recipe is not None:
        return _from_recipe(recipe)
    if model is not None:
        return _from_config(model, batch, sequence)
    assert function is not None
    return _from_function(function)


def _from_recipe(name: str) -> CommandSource:
    from memfit.integrations.recipes.gpt import find_recipe
    from memfit.machine.machine import prepare_process

    recipe = find_recipe(name)
    prepare_process()
    return source_of(recipe)


def source_of(recipe: Recipe) -> CommandSource:
    """Builds the model of a recipe, with weights, its optimizer and its first batch."""
    model = recipe.build_model(0)
    return CommandSource(
        name=recipe.description,
        model=model,
        optimizer=recipe.build_optimizer(model),
        loss=recipe.loss,
        sample=next(recipe.batches(0)),
    )


def _from_config(path: Path, batch: int, sequence: int) -> CommandSource:
    from memfit.integrations.recipes.model_recipe import build_configured
    from memfit.machine.machine import prepare_process

    prepare_process()
    run = build_configured(path, batch_size=batch, sequence_length=sequence)
    return CommandSource(
        name=run.words,
        model=run.model,
        optimizer=run.optimizer,
        loss=run.loss,
        sample=run.sample,
        sample_of=run.sample_of,
        longest=run.longest,
        has_sequences=run.has_sequences,
    )


@dataclass(frozen=True, kw_only=True)
class SourceParts:
    """The result of a user's function; `batches`: where it gave some."""

    model: Any
    optimizer: Any
    loss: Callable[[Any, Any], Any]
    sample: Any
    batches: Any


def _from_function(text: str) -> CommandSource:
    function = find_function(text)
    parts = read_parts(text, function())
    return CommandSource(name=text, model=parts.model, optimizer=parts.optimizer, loss=parts.loss, sample=parts.sample)


def find_function(text: str) -> Callable[[], Any]:
    """The function that MODULE:FUNCTION names; the process is ready for what it builds.

    Raises:
        UsageError: there is none.
    """
    module_name, _, function_name = text.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"{text!r} is not MODULE:FUNCTION, such as my_project.training:build")
    # As `python -m` does: what lies in the working directory can be imported.
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        told = f"there is no module {error.name!r} (from {text!r})"
        if module_name.endswith(".py"):
            plain = module_name.removesuffix(".py").replace("/", ".")
            raise UsageError(f"{told}: write its name, not its file: {plain}:{function_name}") from error
        raise UsageError(f"{told}: run memfit in its directory, or install it") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = difflib.get_close_matches(function_name, [name for name in dir(module) if name[:1] != "_"], n=1)
        guess = f": did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"the module {module_name!r} has no function {function_name!r}{guess}")
    from memfit.machine.machine import prepare_process

    prepare_process()
    return function


def read_parts(text: str, given: Any) -> SourceParts:
    """The parts that a user's function returned.

    Args:
        text: MODULE:FUNCTION, for messages.
        given: what it returned: four things, the last a batch or what gives batches (a loader, or a
            list of batches); or five, a batch and what gives batches.

    Raises:
        UsageError: something else, or no batches come.
    """
    from memfit.machine.limits_of_process import gives_batches
    from memfit.planner.first_batch import first_batch

    if not isinstance(given, tuple) or len(given) not in (4, 5):
        told = f"{type(given).__name__} of {len(given)}" if isinstance(given, tuple) else type(given).__name__
        raise UsageError(f"{text} must return (model, optimizer, loss, sample), not {told}")
    model, optimizer, loss, sample, *rest = given
    batches = rest[0] if rest else None
    if batches is None and (gives_batches(sample) or _is_list_of_batches(sample)):
        batches = sample
        if isinstance(batches, Iterator):
            drawn = list(itertools.islice(batches, 1))
            sample, batches = drawn, itertools.chain(drawn, batches)
        sample = first_batch(sample)  # which is the first step's batch too
    return SourceParts(model=model, optimizer=optimizer, loss=loss, sample=sample, batches=batches)


def _is_list_of_batches(given: Any) -> bool:
    """A list of containers stands for a loader; a list of tensors is a batch.

    Who means a batch of containers returns five things.
    """
    return isinstance(given, list) and bool(given) and all(isinstance(each, tuple | list | Mapping) for each in given)


# Subject of `memfit train`: a recipe, a model's directory, or what a function of the user's gives.
#
# In: options. Out: `Training`, built in the order in which memory comes: batches, then the model.


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
    from memfit.job.fit import empty

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
    from memfit.machine.machine import prepare_process

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
