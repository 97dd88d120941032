"""Puts traces together into a `Profile`, and brings the block map into its order.

In: one `TraceProfile` for each size of microbatch, and what the traces found out about the model as
a whole. Out: `Profile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UsageError
from memfit.core.operators import UntiledAttention
from memfit.core.profile import BlockProfile, Profile, TensorProfile, TraceProfile
from memfit.core.storage_formats import ComputeDtype, stored_dtypes
from memfit.trace.batch import UncuttableError
from memfit.trace.blocks import Block, BlockMap, refine_blocks
from memfit.trace.storage_log import Role, StorageRecord


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


# Finds attention that saves its probabilities: softmax of a product of two activations, multiplied
# with a third.
#
# In: operations of a forward with their storages, as the recorder sees them. Out: for each softmax
# of that kind the storages of its probabilities and of what dropout makes of them. The program's
# own attention is found, and that of `scaled_dot_product_attention` where torch takes it apart
# because no tiled kernel takes its arguments.

aten = torch.ops.aten
_PRODUCTS = {aten.bmm, aten.baddbmm}
_SOFTMAXES = {aten._softmax, aten._safe_softmax}
# Beside pointwise operations: results of the shape of what they read, element by element.
_CARRIERS = {aten._to_copy, aten.native_dropout, aten.empty_like}
_LOG_SUM_BYTES = 4  # the tiled kernel's own saved tensor, a row: a number in fp32


@dataclass(eq=False)
class _Probabilities:
    """Storages of the size of one softmax's result: itself, masks, what dropout leaves of it."""

    rows: int
    made: list[StorageRecord] = field(default_factory=list[StorageRecord])
    is_multiplied: bool = False


class AttentionFollower:
    """Follows products of activations through softmax to the next product.

    Memory: an entry for each storage on the way; the records are the log's.
    """

    def __init__(self) -> None:
        # By `id` of the record, which the log keeps alive.
        self._scores: dict[int, StorageRecord] = {}
        self._probabilities: dict[int, _Probabilities] = {}
        self._found: list[_Probabilities] = []

    def follow(
        self,
        func: Any,
        args: Sequence[Any],
        read: Sequence[tuple[torch.Tensor, StorageRecord]],
        results: Sequence[torch.Tensor],
        made: Sequence[StorageRecord],
    ) -> None:
        """An operation of the forward: what it read and what it gave, with their records."""
        packet = func._overloadpacket
        if packet in _PRODUCTS:
            self._follow_product(read, made)
        elif not self._scores:
            return
        elif packet in _SOFTMAXES:
            tensor, record = read[0]
            if id(record) in self._scores:
                size = tensor.shape[args[1]] if tensor.dim() else 1
                found = _Probabilities(rows=tensor.numel() // max(size, 1))
                self._found.append(found)
                self._join(found, made[0])
        elif torch.Tag.pointwise in func.tags or packet in _CARRIERS:
            self._carry(read, results, made)

    def _follow_product(
        self, read: Sequence[tuple[torch.Tensor, StorageRecord]], made: Sequence[StorageRecord]
    ) -> None:
        factors = [self._probabilities.get(id(record)) for _, record in read]
        for found in factors:
            if found is not None:
                found.is_multiplied = True
        if not any(factors) and all(record.role is not Role.WEIGHT for _, record in read):
            self._scores.update((id(record), record) for record in made)

    def _carry(
        self,
        read: Sequence[tuple[torch.Tensor, StorageRecord]],
        results: Sequence[torch.Tensor],
        made: Sequence[StorageRecord],
    ) -> None:
        for tensor, record in read:
            found = self._probabilities.get(id(record))
            if found is None and id(record) not in self._scores:
                continue
            for result, new in zip(results, made, strict=True):
                if result.numel() != tensor.numel() or new.role is not Role.MADE:
                    continue
                if found is not None:
                    self._join(found, new)
                else:
                    self._scores[id(new)] = new

    def _join(self, found: _Probabilities, record: StorageRecord) -> None:
        if id(record) not in self._probabilities:
            self._probabilities[id(record)] = found
            found.made.append(record)

    def untiled(self) -> tuple[UntiledAttention, ...]:
        """Returns what saves more than a tiled kernel would, in forward order."""
        attentions = (
            UntiledAttention(
                call=found.made[0].segment,
                module=found.made[0].cause[1],
                saved_bytes=sum(record.nbytes for record in found.made if record.is_saved),
                tiled_bytes=_LOG_SUM_BYTES * found.rows,
            )
            for found in self._found
            if found.is_multiplied
        )
        return tuple(one for one in attentions if one.saved_bytes > one.tiled_bytes)
