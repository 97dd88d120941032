"""Tables of where memory goes: by category, by block, by operation.

In: `ReportSubject`. Out: JSON values; equal blocks stand in one row (`layers.0-31`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from memfit.core.hardware import Hardware
from memfit.core.plan import Plan
from memfit.core.profile import BlockProfile, Profile, StorageProfile, TraceProfile
from memfit.core.step_report import joined_names, split_number
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
        sum(math.prod(parameter.shape) for parameter in block.parameters),
        block.weight_bytes,
        block.gradient_bytes,
        profile.state_bytes.get(block.name, 0),
        sum(trace.saved_bytes(call.index) for call in own),
        sum(call.forward_flops + call.backward_flops for call in own),
        len(own),
        f"{homes.weight_home}, {homes.gradient_home}, {homes.state_home}",
        ", ".join(policies),
    )


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


# Closed forms of a step's memory, by which the page answers what-if questions.
#
# In: `Profile`. Out: `ClosedForms`, in numbers that a page can carry, and the peak that they give.
#
# [Note: closed forms]
# Everything rests on the device, and microbatches are not cut. Bytes of activations are straight
# lines in the number of rows, through the smallest and the largest traced size (through zero where
# one size was traced). Each saved storage belongs to the first call that holds it, and is freed
# with the backward of that call; recomputing a call drops what is no argument of a call and not
# saved between calls. The peak is the largest of: the end of forward with the backward of the loss;
# each call's forward; each call's backward, with the gradients made before it. Sequences scale
# bytes in proportion, and probabilities that attention saves with the square.
# `src/memfit/report/page/page.js` computes the same.


@dataclass(frozen=True, kw_only=True)
class CallForms:
    """Bytes of one call, each as (constant, a row).

    Attributes:
        site: dotted name of its module.
        is_repeated: one of a series of similar modules, which recomputation takes first.
        stays: held until its backward, recomputed or not.
        drops: held until then unless it is recomputed.
        forward_rise, backward_rise: peaks inside of it, above what is alive before; the backward's
            without gradients of parameters.
        probabilities: the part of `drops` that grows with the square of a sequence.
        gradient_bytes: of parameters of the blocks whose backward begins with it.
        forward_flops, backward_flops: floating point operations.
    """

    site: str
    is_repeated: bool
    stays: tuple[float, float]
    drops: tuple[float, float]
    forward_rise: tuple[float, float]
    backward_rise: tuple[float, float]
    probabilities: tuple[float, float]
    gradient_bytes: int
    forward_flops: tuple[float, float]
    backward_flops: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ClosedForms:
    """A model's closed forms. See [Note: closed forms].

    Attributes:
        rows: of the whole batch, as profiled.
        traced_rows: sizes that lines were drawn through.
        elements: parameters; `trainable`: those that train.
        weight_bytes, state_bytes, buffer_bytes: as profiled.
        loss_rise: peak of the backward of the loss, above what is alive at the end of forward.
        calls: in forward order.
        traced_peaks: (rows, bytes) of a plain step's activations and gradients, as traced.
        given_peaks: the same, as the closed forms give them.
        flops_per_s, update_elements_per_s: of the machine; 0: unknown.
    """

    rows: int
    traced_rows: tuple[int, ...]
    elements: int
    trainable: int
    weight_bytes: int
    state_bytes: int
    buffer_bytes: int
    loss_rise: tuple[float, float]
    calls: tuple[CallForms, ...]
    traced_peaks: tuple[tuple[int, int], ...] = ()
    given_peaks: tuple[tuple[int, int], ...] = ()
    flops_per_s: float = 0.0
    update_elements_per_s: float = 0.0

    def peak_bytes(self, rows: int, recomputed: int = 0) -> int:
        """Returns the peak of activations and gradients of a step.

        Args:
            rows: of its one microbatch.
            recomputed: so many repeated calls are recomputed, the first ones.
        """
        chosen = {i for i, call in enumerate(self.calls) if call.is_repeated}
        chosen = set(sorted(chosen)[:recomputed])
        held = peak = 0.0
        for index, call in enumerate(self.calls):
            peak = max(peak, held + _at(call.forward_rise, rows))
            held += _at(call.stays, rows) + (0.0 if index in chosen else _at(call.drops, rows))
        peak = max(peak, held + _at(self.loss_rise, rows))
        gradients = 0
        for index in reversed(range(len(self.calls))):
            call = self.calls[index]
            again = _at(call.drops, rows) if index in chosen else 0.0
            gradients += call.gradient_bytes
            peak = max(peak, held + again + _at(call.backward_rise, rows) + gradients)
            held -= _at(call.stays, rows) + _at(call.drops, rows) - again
        return round(peak)

    def data(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self)


def closed_forms(profile: Profile, hardware: Hardware | None = None) -> ClosedForms:
    """Derives the closed forms of a profile."""
    sizes = sorted(profile.traces)
    small, large = profile.traces[sizes[0]], profile.traces[sizes[-1]]
    held = {trace.rows: _held(trace) for trace in (small, large)}
    gradients = _gradients(profile, large)
    calls = tuple(
        CallForms(
            site=call.site,
            is_repeated=call.is_repeated and not (call.must_keep or call.runs_once),
            stays=_line((small.rows, held[small.rows][0][i]), (large.rows, held[large.rows][0][i])),
            drops=_line((small.rows, held[small.rows][1][i]), (large.rows, held[large.rows][1][i])),
            forward_rise=_line((small.rows, before.forward_peak_bytes), (large.rows, call.forward_peak_bytes)),
            backward_rise=_line((small.rows, before.backward_peak_bytes), (large.rows, call.backward_peak_bytes)),
            probabilities=_line((small.rows, _untiled_form(small, i)), (large.rows, _untiled_form(large, i))),
            gradient_bytes=gradients[i],
            forward_flops=_line((small.rows, before.forward_flops), (large.rows, call.forward_flops)),
            backward_flops=_line((small.rows, before.backward_flops), (large.rows, call.backward_flops)),
        )
        for i, (before, call) in enumerate(zip(small.calls, large.calls, strict=True))
    )
    parameters = [p for block in profile.blocks for p in block.parameters]
    forms = ClosedForms(
        rows=profile.batch_rows,
        traced_rows=tuple(dict.fromkeys((small.rows, large.rows))),
        elements=sum(math.prod(p.shape) for p in parameters),
        trainable=sum(math.prod(p.shape) for p in parameters if p.requires_grad),
        weight_bytes=profile.weight_bytes,
        state_bytes=sum(profile.state_bytes.values()),
        buffer_bytes=profile.buffer_bytes,
        loss_rise=_line((small.rows, small.seed_peak_bytes), (large.rows, large.seed_peak_bytes)),
        calls=calls,
        flops_per_s=0.0 if hardware is None else hardware.flops_per_s,
        update_elements_per_s=0.0 if hardware is None else hardware.update_elements_per_s,
    )
    return ClosedForms(
        **{
            **vars(forms),
            "traced_peaks": tuple((rows, profile.traces[rows].plain_peak_bytes) for rows in sizes),
            "given_peaks": tuple((rows, forms.peak_bytes(rows)) for rows in sizes),
        }
    )


def _held(trace: TraceProfile) -> tuple[list[int], list[int]]:
    """Returns bytes by call that stay and that recomputing drops."""
    stays, drops = [0] * len(trace.calls), [0] * len(trace.calls)
    for storage in trace.storages:
        holders = (*storage.saved_inside, *storage.saved_outside)
        if storage.is_input or not holders:
            continue
        column = stays if _stays(storage) else drops
        column[max(0, min(holders))] += storage.nbytes
    return stays, drops


def _gradients(profile: Profile, trace: TraceProfile) -> list[int]:
    """Returns bytes of gradients by the call whose backward is the first to reach their block; of
    blocks that no call reads, by the first call.
    """
    left = {block.name: block.gradient_bytes for block in profile.blocks}
    made = [sum(left.pop(name, 0) for name in call.blocks) for call in reversed(trace.calls)][::-1]
    if made:
        made[0] += sum(left.values())
    return made


def _stays(storage: StorageProfile) -> bool:
    return bool(storage.saved_outside or storage.argument_of or storage.is_unseen)


def _untiled_form(trace: TraceProfile, call: int) -> int:
    return sum(attention.saved_bytes for attention in trace.untiled_attention if attention.call == call)


def _line(small: tuple[int, int], large: tuple[int, int]) -> tuple[float, float]:
    """Returns (constant, a row) of the line through two points; through zero if they are one."""
    (few, low), (many, high) = small, large
    if few == many:
        return 0.0, high / many if many else 0.0
    slant = (high - low) / (many - few)
    return high - slant * many, slant


def _at(line: tuple[float, float], rows: int) -> float:
    return line[0] + line[1] * rows
