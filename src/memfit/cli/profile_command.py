"""`memfit profile`: what a training step would take, by block and by category."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from memfit.cli.output import open_console, print_table
from memfit.cli.source import (
    BatchOption,
    FunctionArgument,
    HardwareOption,
    ModelOption,
    RecipeOption,
    SequenceOption,
    TiersOption,
    find_source,
    given_hardware,
)
from memfit.core.plan import Plan
from memfit.core.units import format_bytes

if TYPE_CHECKING:
    from memfit.api.advise import Advice
    from memfit.core.profile import Profile, TraceProfile


def profile(
    *,
    function: FunctionArgument = None,
    recipe: RecipeOption = None,
    model: ModelOption = None,
    batch: BatchOption = 8,
    sequence: SequenceOption = 512,
    hardware: HardwareOption = None,
    tiers: TiersOption = None,
    largest: Annotated[int, typer.Option(min=0, help="How many of the largest saved tensors to list.")] = 8,
) -> None:
    """Shows what plain training would take, without training: weights, gradients, states,
    activations, by block.
    """
    console = open_console()
    with console.status("tracing a step"):
        machine = given_hardware(hardware, tiers)
        source = find_source(function, recipe, model, batch, sequence)
        from memfit.api import profile as profile_step
        from memfit.api.advise import advise

        found = profile_step(source.model, source.optimizer, source.loss, source.sample)
        there = None
        if machine is not None:
            plain = Plan()
            there = advise(source.model, source.optimizer, source.loss, source.sample, plan=plain, hardware=machine)
    trace = found.traces[found.batch_rows]
    console.print(f"{source.name}; one step of {found.batch_rows} rows, plain training, all predicted", markup=False)
    console.print()
    _print_blocks(console, found, trace)
    _print_categories(console, found, trace)
    if there is not None:
        _print_there(console, there)
    _print_untiled_attention(console, trace)
    if largest:
        rows = [(what, format_bytes(nbytes)) for what, nbytes in trace.largest_saved[:largest]]
        print_table(console, "Largest tensors saved for backward", ("operation", "bytes"), rows)


def _print_there(console: Console, there: Advice) -> None:
    """Prints a plain step on the described machine."""
    peak, capacity = there.predicted_peak_bytes, there.hardware.device_bytes
    missing = peak - capacity
    answer = "yes" if missing <= 0 else f"no, {format_bytes(missing)} more than there is: see memfit plan"
    rows = [
        ("predicted peak, reserve included", format_bytes(peak)),
        ("capacity", format_bytes(capacity)),
        ("fits", answer),
        ("step, predicted", f"{there.timeline.seconds:.3g} s"),
    ]
    print_table(console, f"A plain step on {there.hardware.device}", ("what", ""), rows)


def _print_blocks(console: Console, found: Profile, trace: TraceProfile) -> None:
    rows: list[tuple[str, ...]] = []
    for block in found.blocks:
        own = [call for call in trace.calls if call.blocks and call.blocks[0] == block.name]
        rows.append(
            (
                block.name or "(model)",
                str(len(own)),
                format_bytes(block.weight_bytes),
                format_bytes(block.gradient_bytes),
                format_bytes(found.state_bytes.get(block.name, 0)),
                format_bytes(sum(trace.saved_bytes(call.index) for call in own)),
                f"{sum(call.forward_flops + call.backward_flops for call in own) / 1e9:.3g}",
            )
        )
    columns = ("block", "calls", "weights", "gradients", "states", "saved inside", "GFLOP")
    print_table(console, "By block, in the order of their first call", columns, rows)


def _print_categories(console: Console, found: Profile, trace: TraceProfile) -> None:
    weights = found.weight_bytes
    gradients = sum(block.gradient_bytes for block in found.blocks)
    states = sum(found.state_bytes.values())
    peak = weights + states + found.buffer_bytes + trace.plain_peak_bytes
    rows = [
        ("weights", format_bytes(weights)),
        ("gradients", format_bytes(gradients)),
        ("optimizer states", format_bytes(states)),
        ("buffers", format_bytes(found.buffer_bytes)),
        ("activations at their peak", format_bytes(trace.whole_peak_bytes)),
        ("forward and backward at their peak, gradients included", format_bytes(trace.plain_peak_bytes)),
        ("predicted peak of a plain step, interpreter not included", format_bytes(peak)),
    ]
    print_table(console, "By category", ("what", "bytes"), rows)


def _print_untiled_attention(console: Console, trace: TraceProfile) -> None:
    attentions = trace.untiled_attention
    if not attentions:
        return
    saved, tiled = (sum(sizes) for sizes in zip(*((a.saved_bytes, a.tiled_bytes) for a in attentions), strict=True))
    console.print(
        f"Attention bypasses tiled kernels in {_joined_names(a.module for a in attentions)}: it saves "
        f"{format_bytes(saved)} of probabilities, in whose place scaled_dot_product_attention saves "
        f"{format_bytes(tiled)} where it is tiled. Causes: attention written by hand or asked for its weights, "
        "dropout in attention on a CPU.",
        markup=False,
    )
    console.print()


def _joined_names(names: Iterable[str]) -> str:
    """Names, each once; those that differ only in their first number as ranges (`layers.0-31`)."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in dict.fromkeys(names):
        head, number, tail = (*re.split(r"(?:(?<=\.)|^)(\d+)(?=\.|$)", name, maxsplit=1), "", "")[:3]
        numbers.setdefault((head, tail), []).extend([int(number)] if number else [])
    joined: list[str] = []
    for (head, tail), found in numbers.items():
        # A run of consecutive numbers keeps its distance to their positions.
        runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(found)), key=lambda pair: pair[1] - pair[0])]
        shown = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        joined.append(f"{head}{shown}{tail}")
    return ", ".join(joined)
