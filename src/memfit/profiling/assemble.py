"""Puts traces together into a `Profile`, and brings the block map into its order.

In: one `TraceProfile` for each size of microbatch, and what the traces found out about the model as
a whole. Out: `Profile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memfit.batches.batch import UncuttableError
from memfit.core.errors import UsageError
from memfit.core.precision import ComputeDtype, stored_dtypes
from memfit.core.profile import BlockProfile, Profile, TensorProfile, TraceProfile
from memfit.profiling.blocks import Block, BlockMap, refine_blocks


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One size: its profile, and what concerns the model as a whole."""

    profile: TraceProfile
    spanning: frozenset[str]
    reads_batch_statistics: bool
    unsplittable_buffers: tuple[str, ...]
    written_weights: tuple[str, ...]
    shared_weights: tuple[str, ...]
    carried: tuple[str, ...]
    viewed_gradients: tuple[str, ...]
    read_gradients: tuple[str, ...] = ()


def assemble_profile(
    model: nn.Module,
    block_map: BlockMap,
    traced: Sequence[Traced],
    *,
    batch_rows: int,
    state_bytes: Mapping[str, int],
    source: str,
    source_reason: str,
    compute_dtype: ComputeDtype = ComputeDtype.GIVEN,
) -> Profile:
    """The profile of a model from its traces.

    Args:
        model: for its buffers and its batch norms.
        block_map: as the traces used it.
        traced: one for each size.
        batch_rows: rows of the whole batch.
        state_bytes: bytes of optimizer state by parameter name.
        source: see `Profile`.
        source_reason: see `Profile`.
        compute_dtype: in which the step was traced.

    Raises:
        UsageError: `state_bytes` names an unknown parameter.
        UncuttableError: the calls differ from size to size.
    """
    traces = _with_kinds([t.profile for t in traced])
    spanning = frozenset[str]().union(*(t.spanning for t in traced))
    calls = next(iter(traces.values())).calls
    # Not of a later batch of a job, which has its blocks in their places.
    called = {} if block_map.is_arranged else dict.fromkeys(name for call in calls for name in call.blocks)
    position = {name: index for index, name in enumerate(called)}
    blocks = [_block_profile(block, spanning, compute_dtype) for block in block_map.blocks]
    states = {block.name: sum(state_bytes.get(parameter.name, 0) for parameter in block.parameters) for block in blocks}
    unknown = set(state_bytes) - {parameter.name for block in blocks for parameter in block.parameters}
    if unknown:
        raise UsageError(f"state_bytes names parameters that the model does not have: {sorted(unknown)}")
    return Profile(
        batch_rows=batch_rows,
        blocks=tuple(sorted(blocks, key=lambda block: position.get(block.name, len(position)))),
        traces=traces,
        state_bytes=states,
        reads_batch_statistics=any(t.reads_batch_statistics for t in traced) or _has_batch_norm(model),
        written_weights=tuple(dict.fromkeys(name for t in traced for name in t.written_weights)),
        shared_weights=tuple(dict.fromkeys(name for t in traced for name in t.shared_weights)),
        carried=tuple(dict.fromkeys(name for t in traced for name in t.carried)),
        viewed_gradients=tuple(dict.fromkeys(name for t in traced for name in t.viewed_gradients)),
        read_gradients=tuple(dict.fromkeys(name for t in traced for name in t.read_gradients)),
        unsplittable_buffers=tuple(dict.fromkeys(name for t in traced for name in t.unsplittable_buffers)),
        buffer_bytes=sum({id(b): b.nbytes for b in model.buffers()}.values()),
        source=source,
        source_reason=source_reason,
    )


def _has_batch_norm(model: nn.Module) -> bool:
    return any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and (m.training or m.running_mean is None)
        for m in model.modules()
    )


def _block_profile(block: Block, spanning: frozenset[str], compute: ComputeDtype) -> BlockProfile:
    parameters = tuple(_tensor_profile(name, parameter, compute) for name, parameter in block.parameters)
    return BlockProfile(
        name=block.name,
        kind=block.kind,
        parameters=parameters,
        is_spanning=block.is_spanning or block.name in spanning,
    )


def _tensor_profile(name: str, parameter: nn.Parameter, compute: ComputeDtype) -> TensorProfile:
    given = str(parameter.dtype).removeprefix("torch.")
    weight, master = stored_dtypes(given, compute)
    has_master = compute.has_masters
    return TensorProfile(
        name=name,
        shape=tuple(parameter.shape),
        dtype=weight,
        nbytes=parameter.numel() * getattr(torch, weight).itemsize,
        requires_grad=parameter.requires_grad,
        master_nbytes=parameter.numel() * getattr(torch, master).itemsize if has_master else 0,
    )


def _with_kinds(profiles: Sequence[TraceProfile]) -> dict[int, TraceProfile]:
    """Calls of equal cost at every size get equal kinds: the class of their module and a number."""
    sites = [[(call.site, call.blocks) for call in profile.calls] for profile in profiles]
    if any(other != sites[0] for other in sites):
        raise UncuttableError(
            "a part of the batch is not computed by the calls that the whole batch is computed by: which layers run, or how often, depends on its rows. "
            "Give fit(split=...), which cuts it, or a plan with microbatches=1"
        )
    numbers: dict[tuple[Any, ...], str] = {}
    counts: dict[str, int] = {}
    kinds: list[str] = []
    for index, first in enumerate(profiles[0].calls):
        costs = tuple(_cost(profile, index) for profile in profiles)
        key = (first.kind, costs)
        if key not in numbers:
            numbers[key] = f"{first.kind}#{counts.setdefault(first.kind, 0)}"
            counts[first.kind] += 1
        kinds.append(numbers[key])
    return {
        profile.rows: replace(profile, calls=tuple(replace(call, kind=kinds[call.index]) for call in profile.calls))
        for profile in profiles
    }


def _cost(profile: TraceProfile, index: int) -> tuple[Any, ...]:
    call = replace(profile.calls[index], index=0, site="", blocks=())
    return call, profile.saved_bytes(index), profile.boundary_bytes(index)


def arrange_blocks(block_map: BlockMap, profile: Profile) -> BlockMap:
    """The block map as the profile has it: order of blocks, spanning blocks, all blocks that a
    site's calls read.
    """
    reads: dict[str, list[str]] = {}
    for traced in profile.traces.values():
        for call in traced.calls:
            reads.setdefault(call.site, []).extend(call.blocks)
    order = [block.name for block in profile.blocks]
    spanning = [block.name for block in profile.blocks if block.is_spanning]
    return refine_blocks(block_map, order=order, spanning=spanning, reads=reads)
