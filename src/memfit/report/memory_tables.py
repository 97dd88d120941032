"""Tables of where memory goes: by category, by block, by operation.

In: `ReportSubject`. Out: JSON values; equal blocks stand in one row (`layers.0-31`).
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from memfit.core.numbered_names import joined_names, split_number
from memfit.core.plan import Plan
from memfit.core.profile import BlockProfile, Profile, TraceProfile
from memfit.report.subject import ReportSubject


def memory_tables(subject: ReportSubject) -> dict[str, Any]:
    """Returns the tables.

    Returns:
        "plain": (name, bytes) of plain training; "blocks": rows of `block_rows`; "largest_saved":
        (operation and shape, bytes of one, number of them, line of the program); "holders":
        (category, name, bytes) at the predicted peak; "of_calls": for each call the largest tensor
        that it saves, as (operation and shape, bytes, line), null where none is among the largest
        of the model; "untiled": modules whose attention bypasses
        tiled kernels, with what that costs, or None.
    """
    tables = profile_tables(subject.profile, trace_of(subject), subject.plan)
    return {**tables, "holders": [[holder.category, holder.name, holder.nbytes] for holder in subject.holders]}


def profile_tables(profile: Profile, trace: TraceProfile, plan: Plan) -> dict[str, Any]:
    """Returns the tables that need no prediction: all of `memory_tables` but "holders".

    Args:
        profile: of the batch.
        trace: of a microbatch.
        plan: the decisions that rows of blocks tell.
    """
    whole = profile.traces.get(profile.batch_rows, trace)
    return {
        "rows": trace.rows,
        "plain_rows": whole.rows,
        "plain": [
            ["weights", profile.weight_bytes],
            ["gradients", profile.gradient_bytes],
            ["optimizer states", sum(profile.state_bytes.values())],
            ["buffers", profile.buffer_bytes],
            ["activations at their peak", whole.whole_peak_bytes],
            ["peak", profile.plain_step_bytes(whole)],
        ],
        "blocks": block_rows(profile, trace, plan),
        "largest_saved": _largest_saved(trace),
        "of_calls": [_largest_of(call.site, trace) for call in trace.calls],
        "untiled": _untiled(trace),
    }


def trace_of(subject: ReportSubject) -> TraceProfile:
    """Returns the trace of the plan's microbatch; of the largest one traced where there is none."""
    traces = subject.profile.traces
    rows = -(-subject.profile.batch_rows // subject.plan.microbatches)
    return traces[rows] if rows in traces else traces[max(traces)]


def block_rows(profile: Profile, trace: TraceProfile, plan: Plan) -> list[dict[str, Any]]:
    """Returns a row for each run of equal blocks: neighbours of one kind, with equal figures and
    decisions. Figures are of one block of the run.
    """
    rows = [(block, _figures(block, profile, trace, plan)) for block in profile.blocks]
    grouped: list[dict[str, Any]] = []
    for (_, figures), group in groupby(rows, key=lambda row: (row[0].kind, row[1])):
        names = [block.name for block, _ in group]
        grouped.append(
            {
                "name": joined_names(name or "(model)" for name in names),
                "count": len(names),
                "parameters": figures[0],
                "weight_bytes": figures[1],
                "gradient_bytes": figures[2],
                "state_bytes": figures[3],
                "saved_bytes": figures[4],
                "flops": figures[5],
                "calls": figures[6],
                "homes": figures[7],
                "policy": figures[8],
            }
        )
    return grouped


def _figures(block: BlockProfile, profile: Profile, trace: TraceProfile, plan: Plan) -> tuple[Any, ...]:
    own = [call for call in trace.calls if call.blocks and call.blocks[0] == block.name]
    homes = plan.block(block.name)
    policies = dict.fromkeys(str(plan.call(call.index).saved) for call in own)
    return (
        sum(_elements(parameter.shape) for parameter in block.parameters),
        block.weight_bytes,
        block.gradient_bytes,
        profile.state_bytes.get(block.name, 0),
        sum(trace.saved_bytes(call.index) for call in own),
        sum(call.forward_flops + call.backward_flops for call in own),
        len(own),
        f"{homes.weight_home}, {homes.gradient_home}, {homes.state_home}",
        ", ".join(policies),
    )


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _largest_saved(trace: TraceProfile) -> list[list[Any]]:
    """Returns the largest saved tensors; equal ones of modules that differ in a number in one
    row.
    """
    rows: dict[tuple[int, str, str, str], list[str]] = {}
    for what, nbytes in trace.largest_saved:
        head, _, tail = split_number(what)
        rows.setdefault((nbytes, trace.made_at.get(what, ""), head, tail), []).append(what)
    return [[joined_names(names), nbytes, len(names), line] for (nbytes, line, *_), names in rows.items()]


def _largest_of(site: str, trace: TraceProfile) -> list[Any] | None:
    """Returns the largest of the largest saved tensors that a module inside of a call's made."""
    for what, nbytes in trace.largest_saved:
        module = what.partition(" in ")[2].partition(":")[0]
        if module == site or module.startswith(f"{site}."):
            return [what, nbytes, trace.made_at.get(what, "")]
    return None


def _untiled(trace: TraceProfile) -> dict[str, Any] | None:
    attentions = trace.untiled_attention
    if not attentions:
        return None
    return {
        "modules": joined_names(attention.module for attention in attentions),
        "saved_bytes": sum(attention.saved_bytes for attention in attentions),
        "tiled_bytes": sum(attention.tiled_bytes for attention in attentions),
    }
