"""Optimizer states at home.

In: the layout that an optimizer gives to each parameter's state. Out: pieces of it in memory for an update, and back home after.

Tensors of a parameter's size (momentum) and of other sizes (row factors) lie in one byte range a block; single numbers (step counts) are few
and stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.layout import flat_layout
from memfit.runtime.homes.base import ByteHome, Ticket, Tickets
from memfit.runtime.optimizers import StateTensor
from memfit.runtime.trees import typed_view
from memfit.runtime.weights import BlockWeights, Slot


@dataclass(frozen=True, kw_only=True)
class StateSlot:
    """Where one state tensor of one parameter lies in its block's state range."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    offset_bytes: int
    is_like_weight: bool


class BlockStates:
    """One block's optimizer states.

    Memory: `nbytes` at the home; numbers in memory; pieces while an update runs.

    Args:
        block: its weights.
        layout: by parameter name, the tensors of its state ("scalar" ones are kept in memory).
    """

    def __init__(self, block: BlockWeights, layout: Mapping[str, Sequence[StateTensor]]) -> None:
        self.block = block
        placed = [(slot, t) for slot in block.slots for t in layout.get(slot.name, ()) if t.shape_kind != "scalar"]
        offsets, self.nbytes = flat_layout([t.nbytes for _, t in placed])
        self.slots: dict[str, list[StateSlot]] = {slot.name: [] for slot in block.slots}
        for (slot, t), offset in zip(placed, offsets, strict=True):
            self.slots[slot.name].append(
                StateSlot(
                    key=t.key,
                    dtype=t.dtype or torch.float32,
                    shape=tuple(t.shape),
                    numel=t.numel,
                    offset_bytes=offset,
                    is_like_weight=t.shape_kind == "like",
                )
            )
        self.numbers: dict[str, dict[str, Any]] = {}
        self.home: ByteHome | None = None

    def exists(self, name: str) -> bool:
        """The parameter has been updated (or came with a state)."""
        return name in self.numbers

    def begin_read(self, slot: Slot, first: int, count: int) -> StatePiece:
        """Begins to bring elements [first, first + count) of each weight-like state tensor, and other tensors whole."""
        tensors: dict[str, torch.Tensor] = {}
        tickets: list[Ticket] = []
        if self.exists(slot.name):
            for state in self.slots[slot.name]:
                tensor, ticket = self._bring(state, slot, first, count)
                tensors[state.key] = tensor
                tickets.append(ticket)
        return StatePiece(self, slot, first, count, tensors, Tickets(tickets))

    def _bring(self, state: StateSlot, slot: Slot, first: int, count: int) -> tuple[torch.Tensor, Ticket]:
        assert self.home is not None
        offset, shape = _range(state, slot, first, count)
        if self.home.memory is not None:
            return typed_view(self.home.memory, offset, state.dtype, shape), Tickets(())
        tensor = torch.empty(shape, dtype=state.dtype, device=slot.parameter.device)
        nbytes = tensor.numel() * state.dtype.itemsize
        return tensor, self.home.read(offset, nbytes, tensor.untyped_storage())

    def write(self, slot: Slot, first: int, count: int, values: Mapping[str, Any]) -> list[Ticket]:
        """Begins to take a piece of a parameter's state home. Tensors that already lie there (memory homes) are not copied."""
        tickets: list[Ticket] = []
        for state in self.slots[slot.name]:
            value = values.get(state.key)
            if value is None:
                continue
            assert self.home is not None
            offset, shape = _range(state, slot, first, count)
            if self.home.memory is not None:
                resting = typed_view(self.home.memory, offset, state.dtype, shape)
                if resting.data_ptr() != value.data_ptr():
                    resting.copy_(value.reshape(shape))
                continue
            dense = value.contiguous()
            start = dense.storage_offset() * dense.element_size()
            nbytes = dense.numel() * dense.element_size()
            tickets.append(self.home.write(offset, nbytes, dense.untyped_storage(), start))
        return tickets

    def keep_numbers(self, slot: Slot, values: Mapping[str, Any]) -> None:
        """Remembers the numbers of a parameter's state (after its last piece)."""
        placed = {state.key for state in self.slots[slot.name]}
        self.numbers[slot.name] = {key: value for key, value in values.items() if key not in placed}

    def gather(self, slot: Slot) -> dict[str, Any]:
        """The parameter's state as the optimizer would hold it, in memory of its own. Empty before its first update."""
        if not self.exists(slot.name):
            return {}
        piece = self.begin_read(slot, 0, slot.numel)
        values: dict[str, Any] = {}
        piece.ready.wait()
        for state in self.slots[slot.name]:
            tensor = piece.tensors[state.key]
            if state.is_like_weight:
                own = torch.empty_strided(slot.shape, slot.stride, dtype=state.dtype, device=tensor.device)
                own.as_strided((slot.numel,), (1,)).copy_(tensor.reshape(-1))
                values[state.key] = own
            else:
                values[state.key] = tensor.clone()
        for key, value in self.numbers[slot.name].items():
            values[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return values

    def put(self, slot: Slot, values: Mapping[str, Any]) -> None:
        """Takes a whole state (as `gather` gives it) home."""
        if not values:
            self.numbers.pop(slot.name, None)
            return
        flat: dict[str, Any] = {}
        for state in self.slots[slot.name]:
            value = values.get(state.key)
            if value is None:
                continue
            if state.is_like_weight:
                dense = torch.empty_strided(slot.shape, slot.stride, dtype=state.dtype, device=slot.parameter.device)
                flat[state.key] = dense.copy_(value).as_strided((slot.numel,), (1,))
            else:
                flat[state.key] = value
        Tickets(self.write(slot, 0, slot.numel, flat)).wait()
        self.keep_numbers(slot, {k: v for k, v in values.items() if k not in flat})


@dataclass
class StatePiece:
    """A piece of one parameter's state that is on its way or here."""

    states: BlockStates
    slot: Slot
    first: int
    count: int
    tensors: dict[str, torch.Tensor]
    ready: Ticket


def _range(state: StateSlot, slot: Slot, first: int, count: int) -> tuple[int, tuple[int, ...]]:
    if not state.is_like_weight:
        return state.offset_bytes, state.shape
    return state.offset_bytes + first * state.dtype.itemsize, (count,)
