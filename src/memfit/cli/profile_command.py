"""`memfit profile`: what a training step would take, by block and by category."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from memfit.cli.options import JsonOption, MachineOptions, SourceOptions, open_console, print_json, print_table, shared
from memfit.core.errors import UsageError
from memfit.core.limits import format_bytes, format_seconds
from memfit.core.plan import Plan
from memfit.core.step_report import joined_names, split_number
from memfit.report.page import write_report

if TYPE_CHECKING:
    from memfit.core.profile import Profile, TraceProfile
    from memfit.planner.advise import Advice


# Files of the training graph that `memfit profile --graph` writes.

_ENDINGS = (".json", ".dot", ".svg")


def check_graph_file(path: Path | None, module: str | None) -> None:
    """Checks the two options before anything is traced.

    Raises:
        UsageError: the file ends in something else than .json, .dot or .svg, or a module is named
            without a file.
    """
    if path is None and module is not None:
        raise UsageError("--graph-of says which part of the training graph to write: name a file with --graph as well")
    if path is not None and path.suffix not in _ENDINGS:
        raise UsageError(f"--graph {path}: the ending says the form, one of {', '.join(_ENDINGS)}")


def write_graph(path: Path, module: str | None, title: str, profile: Profile) -> None:
    """Writes the graph of a plain step of the whole batch, or of a module's calls in it.

    Raises:
        UsageError: the module is not called, or the file cannot be written.
    """
    from memfit.report.training_graph import chain, draw_graph, training_graph

    trace = profile.traces[profile.batch_rows]
    graph = training_graph(profile, trace)
    if module is not None:
        sites = {call.site for call in trace.calls}
        calls = [call for call in trace.calls if call.site == module]
        if not calls:
            near = difflib.get_close_matches(module, sites, n=3, cutoff=0.3)
            raise UsageError(
                f"--graph-of {module!r}: no call of the step is of that module; there are {near or sorted(sites)[:5]}"
            )
        names = [f"{what} {c.index}" for c in calls for what in ("forward", "backward")]
        known = {node.name for node in graph.nodes}
        graph = graph.around(name for name in names if name in known)
    if path.suffix == ".json":
        write_report(path, graph.to_json() + "\n")
    elif path.suffix == ".dot":
        write_report(path, graph.to_dot())
    else:
        shown = graph if module is not None else chain(graph, trace)
        write_report(path, draw_graph(shown, f"training graph of {title}" + (f", {module}" if module else "")))


@shared
def profile(
    *,
    options: SourceOptions,
    machine: MachineOptions,
    largest: Annotated[int, typer.Option(min=0, help="How many kinds of the largest saved tensors to list.")] = 8,
    json: JsonOption = None,
    graph: Annotated[
        Path | None,
        typer.Option(help="Write the training graph: .json and .dot whole, .svg as a picture with equal calls as one."),
    ] = None,
    graph_of: Annotated[
        str | None, typer.Option(help="Of the graph only this module's calls and all that they are joined to.")
    ] = None,
) -> None:
    """Shows what plain training would take, without training: weights, gradients, states,
    activations, by block.
    """
    console = open_console(on_errors=json == Path("-"))
    check_graph_file(graph, graph_of)
    with console.status("tracing a step"):
        source = options.build()
        from memfit.job.fit import profile as profile_step
        from memfit.planner.advise import advise

        keywords, there = machine.keywords(), None
        asked = source.model, source.optimizer, source.loss, source.sample
        found = profile_step(*asked, hardware=keywords["hardware"])
        if machine.is_named or json is not None:
            there = advise(*asked, limit=machine.limit, plan=Plan(), **keywords)
    trace = found.traces[found.batch_rows]
    console.print(f"{source.name}; one step of {found.batch_rows} rows, plain training, all predicted", markup=False)
    if found.remark:
        console.print(found.remark, markup=False)
    console.print()
    _print_blocks(console, found, trace)
    _print_categories(console, found, trace)
    if there is not None and machine.is_named:
        _print_there(console, there)
    _print_untiled_attention(console, trace)
    if largest:
        lines = trace.made_at
        saved = _shared_rows((what, (lines.get(what, ""), format_bytes(n))) for what, n in trace.largest_saved)
        rows = [(what, line, *_each((size,), count)) for what, (line, size), count in saved[:largest]]
        print_table(console, "Largest tensors saved for backward", ("operation", "line", "bytes"), rows)
    if graph is not None:
        write_graph(graph, graph_of, source.name, found)
        console.print(f"the training graph is in {graph}", markup=False)
    if json is not None:
        print_json(json, _data(source.name, found, trace, there))


def _data(name: str, found: Profile, trace: TraceProfile, there: Advice | None) -> dict[str, Any]:
    """The profile as JSON values; bytes are whole numbers."""
    from memfit.report.memory_tables import closed_forms, profile_tables

    told: dict[str, Any] = {
        "title": name,
        "source": found.source,
        "source_reason": found.source_reason,
        **profile_tables(found, trace, Plan()),
        "closed_forms": closed_forms(found).data(),
    }
    if there is not None:
        told["machine"] = {
            "device": there.hardware.device,
            "peak_bytes": there.predicted_peak_bytes,
            "capacity_bytes": there.hardware.device_bytes,
            "seconds": there.timeline.seconds,
        }
        told["break_even"] = _break_even(there, name)
    return told


def _break_even(there: Advice, name: str) -> list[dict[str, Any]]:
    """Rows of what is saved for backward: what keeping it, moving it away and back, or making it
    again costs on that machine; see `report.timeline_data`, [Note: break-even].
    """
    from memfit.cli.report_command import subject_of_advice
    from memfit.report.timeline_data import lifetime_data

    rows = lifetime_data(subject_of_advice(there, name, clips_norm=False))["storages"]
    return [
        {
            "made_by": row["made_by"],
            "saved_by": row["saved_by"],
            "count": row["count"],
            "nbytes": row["nbytes"],
            "keep": {"idle_s": max(0.0, row["again_s"] - row["used_s"]), "idle_byte_s": row["idle_byte_s"]},
            "reload": {"s": row["reload_s"]},
            "recompute": {"s": row["recompute_s"]},
            "break_even_bytes_per_s": row["break_even_bytes_per_s"],
        }
        for row in rows
    ]


def _print_there(console: Console, there: Advice) -> None:
    """Prints a plain step beside the limit, or on the described machine."""
    limit = there.budget.limit_bytes
    peak, capacity = there.predicted_peak_bytes, there.hardware.device_bytes if limit is None else limit
    missing = peak - capacity
    answer = "yes" if missing <= 0 else f"no, {format_bytes(missing)} more than there is: see memfit plan"
    rows = [
        ("predicted peak, reserve included", format_bytes(peak)),
        ("capacity" if limit is None else "limit", format_bytes(capacity)),
        ("fits", answer),
        ("step, predicted", format_seconds(there.timeline.seconds)),
    ]
    print_table(console, f"A plain step on {there.hardware.device}", ("what", ""), rows)


def _print_blocks(console: Console, found: Profile, trace: TraceProfile) -> None:
    """Prints a row for each block; equal ones, whose names differ in a number, share one."""
    calls: dict[str, list[int]] = {}
    for call in trace.calls:
        calls.setdefault(call.blocks[0] if call.blocks else "", []).append(call.index)
    named: list[tuple[str, tuple[str, ...]]] = []
    for block in found.blocks:
        own = calls.get(block.name, [])
        flops = sum(trace.calls[index].forward_flops + trace.calls[index].backward_flops for index in own)
        figures = (
            str(len(own)),
            format_bytes(block.weight_bytes),
            format_bytes(block.gradient_bytes),
            format_bytes(found.state_bytes.get(block.name, 0)),
            format_bytes(sum(trace.saved_bytes(index) for index in own)),
            f"{flops / 1e9:.3g}",
        )
        named.append((block.name, figures))
    columns = ("block", "calls", "weights", "gradients", "states", "saved inside", "GFLOP")
    rows = [(names or "(model)", *_each(figures, count)) for names, figures, count in _shared_rows(named)]
    print_table(console, "By block, in the order of their first call", columns, rows)


def _shared_rows(
    named: Iterable[tuple[str, tuple[str, ...]]],
) -> list[tuple[str, tuple[str, ...], int]]:
    """(names, figures, number of them) of what has equal figures and names that differ in a number
    only, in the order of the first.
    """
    groups: dict[tuple[tuple[str, ...], str, str, bool], list[str]] = {}
    for name, figures in named:
        head, number, tail = split_number(name)
        groups.setdefault((figures, head, tail, number is None), []).append(name)
    return [(joined_names(names), key[0], len(names)) for key, names in groups.items()]


def _each(figures: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Figures of one of several equal things."""
    return figures if count == 1 else tuple(f"{count} x {figure}" for figure in figures)


def _print_categories(console: Console, found: Profile, trace: TraceProfile) -> None:
    rows = [
        ("weights", format_bytes(found.weight_bytes)),
        ("gradients", format_bytes(found.gradient_bytes)),
        ("optimizer states", format_bytes(sum(found.state_bytes.values()))),
        ("buffers", format_bytes(found.buffer_bytes)),
        ("activations at their peak", format_bytes(trace.whole_peak_bytes)),
        ("forward and backward at their peak, gradients included", format_bytes(trace.plain_peak_bytes)),
        ("the optimizer's own step beside all that", format_bytes(found.plain_update_bytes)),
        ("predicted peak of a plain step, interpreter not included", format_bytes(found.plain_step_bytes(trace))),
    ]
    print_table(console, "By category", ("what", "bytes"), rows)


def _print_untiled_attention(console: Console, trace: TraceProfile) -> None:
    attentions = trace.untiled_attention
    if not attentions:
        return
    saved, tiled = (sum(sizes) for sizes in zip(*((a.saved_bytes, a.tiled_bytes) for a in attentions), strict=True))
    console.print(
        f"Attention bypasses tiled kernels in {joined_names(a.module for a in attentions)}: it saves "
        f"{format_bytes(saved)} of probabilities, in whose place scaled_dot_product_attention saves "
        f"{format_bytes(tiled)} where it is tiled. Causes: attention written by hand or asked for its weights, "
        "dropout in attention on a CPU.",
        markup=False,
    )
    console.print()
