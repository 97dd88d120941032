"""`memfit plan` asked the other way round: --largest and --step-seconds.

In: the subject, its options. Out: a size with its plan, or the smallest limit; as text and as JSON
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from memfit.cli.options import SourceOptions
from memfit.cli.source import CommandSource
from memfit.core.errors import UsageError
from memfit.core.units import format_bytes

if TYPE_CHECKING:
    from memfit.api.advise import Advice
    from memfit.api.extremes import Largest

AXES = ("batch", "sequence")
_UNITS = {"batch": "rows", "sequence": "tokens a row"}


def check_asked(axis: str | None, step_seconds: float | None, options: Mapping[str, Any], *, compares: bool) -> None:
    """Refuses options that do not go together, before anything is built.

    Args:
        axis: given as --largest.
        step_seconds: given as --step-seconds.
        options: keywords of `advise`.
        compares: --diff is given.

    Raises:
        UsageError: no such axis, or options that --largest or --step-seconds do not go with.
    """
    if axis is None and step_seconds is None:
        return
    if axis is not None and axis not in AXES:
        raise UsageError(f"--largest is {' or '.join(AXES)}, not {axis!r:.80}")
    if options["explains"] or compares:
        raise UsageError(
            "--explain and --diff are for one limit and one batch: give them what --largest or --step-seconds finds"
        )
    if axis is None and options["limit"] is not None:
        raise UsageError(
            "--step-seconds with --limit needs --largest batch or sequence; without --limit it finds the smallest limit"
        )


def search_largest(
    source: CommandSource,
    given: SourceOptions,
    axis: str,
    step_seconds: float | None,
    options: Mapping[str, Any],
) -> Largest:
    """Finds the largest size of a command's subject, from the one that its options give.

    Args:
        source: the subject.
        given: its options, whose --batch and --sequence are what the size is looked for from.
        axis: one of `AXES`.
        step_seconds: a step may take so long.
        options: keywords of `advise`.

    Raises:
        UsageError: sequences of a subject whose batches memfit does not make; a batch whose rows it
            cannot tell.
    """
    from memfit.api.extremes import find_largest

    if axis == "sequence":
        make, start = _sequences_of(source, given), given.sequence
    else:
        make, start = _batches_of(source, given)
    return find_largest(
        source.model,
        source.optimizer,
        source.loss,
        make,
        step_seconds=step_seconds,
        start=start,
        at_most=source.longest if axis == "sequence" else None,
        **_keywords(options),
    )


def search_smallest_limit(source: CommandSource, step_seconds: float, options: Mapping[str, Any]) -> Advice:
    """Finds the smallest limit whose fastest plan takes at most so many seconds a step.

    Raises:
        UsageError: see `api.extremes.find_smallest_limit`.
    """
    from memfit.api.extremes import find_smallest_limit

    return find_smallest_limit(
        source.model, source.optimizer, source.loss, source.sample, step_seconds=step_seconds, **_keywords(options)
    )


def _keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "explains"}


def _sequences_of(source: CommandSource, given: SourceOptions) -> Callable[[int], Any]:
    """Returns what makes a batch of sequences of so many tokens."""
    make = source.sample_of
    if make is None or not source.has_sequences:
        raise UsageError(
            "--largest sequence needs --model of a language model, whose sequences memfit makes; for others give a function that makes them to "
            "memfit.api.extremes.find_largest"
        )
    return lambda tokens: make(given.batch, tokens)


def _batches_of(source: CommandSource, given: SourceOptions) -> tuple[Callable[[int], Any], int]:
    """Returns what makes a batch of so many rows, and the rows of the sample.

    Where batches are the user's, the sample's rows are taken, and once more where it has fewer.
    """
    make = source.sample_of
    if make is not None:
        return lambda rows: make(rows, given.sequence), given.batch
    from memfit.api.extremes import batches_like

    return batches_like(source.sample)


# --- what was found -------------------------------------------------------------------------------


def print_found(
    console: Console, axis: str | None, found: Largest | None, advice: Advice, step_seconds: float | None
) -> None:
    """Prints the size, or the limit; nothing where neither was asked for."""
    if found is not None and axis is not None:
        console.print(
            f"the {'largest batch' if axis == 'batch' else 'longest sequence'}: {found.size} {_UNITS[axis]}. Of {found.next_size}: {found.why}",
            markup=False,
        )
    elif step_seconds is not None:
        limit = advice.budget.limit_bytes or 0
        console.print(
            f"the smallest limit with a step of at most {step_seconds:g} s: {format_bytes(limit)} ({limit} bytes)",
            markup=False,
        )


def found_data(axis: str | None, found: Largest | None, advice: Advice, step_seconds: float | None) -> dict[str, Any]:
    """Returns the same as JSON values."""
    if found is not None:
        return {
            "found": {
                "largest": axis,
                "size": found.size,
                "next_size": found.next_size,
                "why": found.why,
                "step_seconds": step_seconds,
            }
        }
    if step_seconds is not None:
        return {"found": {"smallest_limit_bytes": advice.budget.limit_bytes, "step_seconds": step_seconds}}
    return {}
