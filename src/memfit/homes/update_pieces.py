"""One piece of a block's update: its bytes come, the optimizer computes, the new ones go home.

In: blocks, their gradients and states, the optimizer. Out: new weights and states at their homes, piece by piece. What is updated is the master
(`homes.weights`, [Note: masters]).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.layout import PIECE_ELEMENTS
from memfit.homes.gradients import GradientHomes, GradientPiece
from memfit.homes.home import DONE, ByteHome, TransferHandle, write_tensor
from memfit.homes.optimizer_states import BlockStates, StatePiece
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.optimizers import OptimizerDriver, UpdateKind
from memfit.tensors.noise import RoundingNoise, round_stochastically
from memfit.tensors.trees import typed_view


@dataclass(frozen=True)
class UpdatePiece:
    """A range of a parameter, in its memory order."""

    slot: ParameterSlot
    first: int
    count: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Coming:
    """A piece whose bytes are on their way."""

    piece: UpdatePiece
    weight: torch.Tensor
    ready: TransferHandle
    """The weight is here."""
    gradient: GradientPiece
    state: StatePiece


class PieceUpdates:
    """Updates pieces.

    Memory: of each piece that was begun, what it has of weight, gradient and states that are away; what the optimizer's class takes for one.

    Args:
        driver: the optimizer.
        states: by block index.
        gradients: where gradients are.
        noise: weights are rounded stochastically from what the update made; None: to nearest.
    """

    def __init__(
        self,
        driver: OptimizerDriver,
        states: Mapping[int, BlockStates],
        gradients: GradientHomes,
        *,
        noise: RoundingNoise | None = None,
    ) -> None:
        self._driver = driver
        self.trained = frozenset(driver.names)
        self._states = dict(states)
        self._gradients = gradients
        self._noise = noise

    def cut(self, block: BlockWeights) -> Iterator[UpdatePiece]:
        """The pieces of a block; parameters without a gradient are left alone, as `optimizer.step` leaves them."""
        for slot in block.slots:
            if not self._is_due(slot):
                continue
            size = PIECE_ELEMENTS if self._is_elementwise(slot) else max(slot.numel, 1)
            starts = range(0, max(slot.numel, 1), size)
            for start in starts:
                count = min(size, slot.numel - start)
                yield UpdatePiece(slot, start, count, start == 0, start == starts[-1])

    def _is_due(self, slot: ParameterSlot) -> bool:
        return slot.name in self.trained and self._gradients.has(slot)

    def _is_elementwise(self, slot: ParameterSlot) -> bool:
        return self._driver.verdict(slot.name).kind is UpdateKind.ELEMENTWISE

    def begin(self, block: BlockWeights, piece: UpdatePiece) -> Coming:
        """Begins to bring a piece."""
        slot = piece.slot
        gradient = self._gradients.begin_piece(block, slot, piece.first, piece.count)
        state = self._states[block.index].begin_read(slot, piece.first, piece.count)
        return Coming(piece, *self._begin_weight(block, piece), gradient, state)

    def _begin_weight(self, block: BlockWeights, piece: UpdatePiece) -> tuple[torch.Tensor, TransferHandle]:
        slot = piece.slot
        if block.is_here and not block.has_masters:
            return slot.flat_view(block.storage)[piece.first : piece.first + piece.count], DONE
        home = block.master_home
        assert home is not None
        offset = slot.master_offset_bytes + piece.first * slot.master_dtype.itemsize
        if home.memory is not None:
            return typed_view(home.memory, offset, slot.master_dtype, (piece.count,)), DONE
        weight = torch.empty(piece.count, dtype=slot.master_dtype, device=slot.parameter.device)
        return weight, home.read(offset, piece.count * slot.master_dtype.itemsize, weight.untyped_storage())

    def apply(self, block: BlockWeights, coming: Coming) -> list[TransferHandle]:
        """Updates a piece when it is here, and begins to take it home."""
        piece, weight, state = coming.piece, coming.weight, coming.state
        slot = piece.slot
        states = self._states[block.index]
        gradient = self._gradients.finish_piece(coming.gradient)
        coming.ready.wait()
        state.ready.wait()
        values: dict[str, Any] = {**states.numbers.get(slot.name, {}), **state.values()}
        if not self._is_elementwise(slot):
            weight, gradient = (t.as_strided(slot.shape, slot.stride) for t in (weight, gradient))
            for placed in states.slots[slot.name]:
                if placed.is_like_weight and placed.key in values:
                    values[placed.key] = values[placed.key].as_strided(slot.shape, slot.stride)
        new = self._driver.update(slot.name, weight, gradient, values, first=piece.is_first, last=piece.is_last)
        if not self._is_elementwise(slot):
            new = {
                key: _in_memory_order(value, slot) if _is_like(states, slot, key) else value
                for key, value in new.items()
            }
        leaving = states.write(slot, piece.first, piece.count, new)
        if piece.is_last:
            states.keep_numbers(slot, new)
        if block.has_masters:
            return leaving + _write_masters(block, piece, weight, self._noise)
        return leaving + _write_weight(block, piece, weight)


def _write_weight(block: BlockWeights, piece: UpdatePiece, weight: torch.Tensor) -> list[TransferHandle]:
    """Takes a new piece of a weight home, unless it was changed where it rests."""
    home, slot = block.home, piece.slot
    assert home is not None
    if not block.travels or (home.memory is not None and not block.is_here):
        return []
    return [_write(home, slot.offset_bytes, piece, weight)]


def _write_masters(
    block: BlockWeights, piece: UpdatePiece, master: torch.Tensor, noise: RoundingNoise | None
) -> list[TransferHandle]:
    """Takes a new piece of a master home, and the weight rounded from it to wherever weights are."""
    masters, home, slot = block.master_home, block.home, piece.slot
    assert masters is not None and home is not None
    leaving = [] if masters.memory is not None else [_write(masters, slot.master_offset_bytes, piece, master)]
    flat = master.as_strided((piece.count,), (1,))
    if noise is not None and slot.dtype is torch.bfloat16:
        flat = round_stochastically(flat, noise.bits(f"{slot.name}/weight", piece.first, piece.count, flat.device))
    place = slot.flat_view(block.storage)[piece.first : piece.first + piece.count] if block.is_here else None
    weight = flat.to(slot.dtype) if place is None else place.copy_(flat)
    if block.travels:
        leaving.append(_write(home, slot.offset_bytes, piece, weight))
    return leaving


def _write(home: ByteHome, offset_bytes: int, piece: UpdatePiece, dense: torch.Tensor) -> TransferHandle:
    return write_tensor(home, offset_bytes + piece.first * dense.element_size(), dense)


def _is_like(states: BlockStates, slot: ParameterSlot, key: str) -> bool:
    return any(placed.key == key and placed.is_like_weight for placed in states.slots[slot.name])


def _in_memory_order(value: torch.Tensor, slot: ParameterSlot) -> torch.Tensor:
    if tuple(value.stride()) != slot.stride:
        value = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((slot.numel,), (1,))
