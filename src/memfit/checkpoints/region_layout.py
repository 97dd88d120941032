"""Layout of a run's store: which regions it has, and which tensors lie in them.

In: blocks, optimizer states, buffers. Out: regions by name.

[Note: one layout for all plans]
What lies in the store follows from the model, the optimizer and the formats that bytes rest in, not
from homes and order: for each block its weights (with masters: those too) and its states, and the
model's buffers. So a run can go on under another plan, be it with another limit or after a breach.
What belongs to a plan only (activations, and gradients unless a journal makes them durable) lies in
a temporary directory beside it. Where a block rests in memory, a commit writes its bytes to the
spare slots: one writing of what was updated, no reading. Weights that are rounded from whole
masters are made from them again when they are needed, so with `generations` they are never written
for their own sake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from memfit.core.commits import Masters
from memfit.core.layout import Scheme, flat_layout
from memfit.homes.optimizer_states import BlockStates, StateSlot
from memfit.homes.regions import gradient_region, master_region, state_region, weight_region
from memfit.homes.split_masters import rest_nbytes, rest_tensors
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.store import RegionSpec, TensorPlace, dtype_name
from memfit.store.journal import RECORD, record_region

BUFFERS = "buffers"
"""Name of the region of the model's persistent buffers."""
_RECORD_BYTES = 256 << 10
"""Bytes of a journal's record: random numbers, settings of the groups, losses of the microbatches.
"""
_NUMBER_BYTES = 1 << 10
"""Bytes of it for the counters of one parameter, beside its name."""


def regions_of(
    blocks: Sequence[BlockWeights],
    states: Mapping[int, BlockStates],
    buffers: Sequence[tuple[str, torch.Tensor]],
    *,
    masters: Masters = "whole",
    scheme: Scheme = "generations",
) -> dict[str, RegionSpec]:
    """Returns what the store of a run holds. See [Note: one layout for all plans].

    Args:
        blocks: of the model.
        states: by block index.
        buffers: the model's persistent ones, by name.
        masters: how they rest, where there are any.
        scheme: with a journal, what does not train has one slot, and gradients and the journal's
            record have their room.
    """
    regions: dict[str, RegionSpec] = {}
    for block in blocks:
        slots = 2 if scheme == "generations" or block.index in states else 1
        weights = [_place(s.name, s.dtype, s.shape, s.stride, s.offset_bytes) for s in block.slots]
        regions[weight_region(block.name)] = _spec(block.nbytes, "weight", weights, slots)
        if block.has_masters and masters == "split":
            rest = [_place(name, dtype, (count,), None, at) for name, dtype, count, at in rest_tensors(block)]
            regions[master_region(block.name)] = _spec(rest_nbytes(block), "master", rest, slots)
        elif block.has_masters and masters == "whole":
            whole = [_place(s.name, s.master_dtype, s.shape, s.stride, s.master_offset_bytes) for s in block.slots]
            regions[master_region(block.name)] = _spec(block.master_nbytes, "master", whole, slots)
        own = states.get(block.index)
        if own is not None and own.nbytes:
            tensors = [_state_place(s, t) for s in block.slots for t in own.slots[s.name]]
            regions[state_region(block.name)] = _spec(own.nbytes, "state", tensors)
        if own is not None and scheme == "journal":
            regions[gradient_region(block.name)] = RegionSpec(nbytes=block.master_nbytes, tag="gradient")
    offsets, nbytes = flat_layout([tensor.nbytes for _, tensor in buffers])
    if nbytes:
        placed = zip(buffers, offsets, strict=True)
        tensors = [_place(name, tensor.dtype, tuple(tensor.shape), None, at) for (name, tensor), at in placed]
        regions[BUFFERS] = _spec(nbytes, "buffer", tensors)
    if scheme == "journal":
        trained = [slot.name for block in blocks if block.index in states for slot in block.slots]
        regions[RECORD] = record_region(_RECORD_BYTES + sum(_NUMBER_BYTES + 2 * len(name) for name in trained))
    return regions


def _state_place(slot: ParameterSlot, state: StateSlot) -> TensorPlace:
    name = f"{slot.name}.{state.key}"
    if state.codec is not None:  # bytes, to everybody but the codec
        offset, nbytes = state.span(0, state.numel)
        return _place(name, torch.uint8, (nbytes,), None, offset)
    if state.is_like_weight and state.numel < slot.numel:
        # A rank's share of it.
        return _place(name, state.dtype, (state.numel,), None, state.offset_bytes)
    stride = slot.stride if state.is_like_weight else None
    return _place(name, state.dtype, state.shape, stride, state.offset_bytes)


def _spec(nbytes: int, tag: str, tensors: Sequence[TensorPlace], slots: int = 2) -> RegionSpec:
    return RegionSpec(nbytes=nbytes, slots=slots, tag=tag, tensors=tuple(tensors))


def _place(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None, offset: int
) -> TensorPlace:
    return TensorPlace(name=name, dtype=dtype_name(dtype), shape=in_memory_order(shape, stride), offset=offset)


def in_memory_order(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of a dense tensor's bytes as they lie: dimensions sorted by stride (channels-last
    comes last).
    """
    if stride is None:
        return shape
    order = sorted(range(len(shape)), key=lambda d: (-stride[d], d))
    return tuple(shape[d] for d in order)


def persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that `state_dict` has, each once, in the model's order."""
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        hidden: set[str] = getattr(module, "_non_persistent_buffers_set", set())
        for name, buffer in module.named_buffers(recurse=False):
            if name not in hidden and id(buffer) not in seen:
                seen.add(id(buffer))
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return found
