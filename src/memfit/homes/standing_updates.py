"""Updates of blocks that rest where they are updated: what the optimizer's class is lent stays made
from step to step.

In: blocks, their gradients and states, the optimizer. Out: new weights and states in their places.

[Note: what stands]
Where nothing of a block comes or goes, each step lends the same memory: the same pieces of weights,
the same pieces of states. Leaves over them, which the class takes for its parameters, are made once
and used while that memory is where it was; a step then adds the gradients and copies of the
numbers. One call of the class takes all pieces of a block. It takes them one by one
(`OptimizerDriver.takes_one_by_one`), and what it has made for one is there until the next one's has
been made: so pieces are half as long as those that are updated by themselves, and take no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.layout import PIECE_ELEMENTS
from memfit.homes.device_gradients import flat_gradient
from memfit.homes.gradients import GradientHomes, GradientPiece
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.weights import BlockWeights, ParameterSlot
from memfit.optimizers import OptimizerDriver, StandingPart, UpdateKind

# More than any processor computes at once.
_VECTOR_ELEMENTS = 64


@dataclass(frozen=True, kw_only=True)
class _StandingParameter:
    slot: ParameterSlot
    pieces: tuple[tuple[int, int, StandingPart], ...]
    """First element, count, and what is lent."""


@dataclass(frozen=True, kw_only=True)
class _StandingBlock:
    token: tuple[int, ...]
    parameters: tuple[_StandingParameter, ...]


class StandingUpdates:
    """Updates of whole blocks at once. See [Note: what stands].

    Memory: an object of Python for each piece.

    Args:
        driver: the optimizer.
        states: states by block index.
        gradients: gradients of all blocks.
    """

    def __init__(self, driver: OptimizerDriver, states: Mapping[int, BlockStates], gradients: GradientHomes) -> None:
        self._driver = driver
        self._states = states
        self._gradients = gradients
        self._trained = frozenset(driver.names)
        self._kept: dict[int, _StandingBlock] = {}

    def update(self, block: BlockWeights) -> bool:
        """Updates a block in the caller's thread.

        Returns:
            False where something of it comes or goes, or was never updated: nothing was done.
        """
        # Without states: of no parameter that the optimizer updates, or of none so far.
        kept = self._standing(block) if block.index in self._states else None
        if kept is None:
            return False
        due: list[tuple[_StandingParameter, torch.Tensor]] = []
        for parameter in kept.parameters:
            gradient = self._gradients.here.of(parameter.slot)
            if gradient is not None:
                due.append((parameter, gradient))
            elif self._gradients.has(parameter.slot):
                return False  # it rests elsewhere
        states = self._states[block.index]
        # Before a gradient is scaled: states may have been dropped since, and begin anew.
        if not all(states.exists(parameter.slot.name) for parameter, _ in due):
            del self._kept[block.index]
            return False
        lent: list[tuple[StandingPart, torch.Tensor, Mapping[str, Any]]] = []
        names: list[str] = []
        for parameter, gradient in due:
            slot = parameter.slot
            flat = flat_gradient(self._gradients.here.dense_in_place(slot, gradient))
            flat = self._gradients.finish_piece(GradientPiece(slot, flat))
            numbers = states.numbers[slot.name]
            for first, count, part in parameter.pieces:
                lent.append((part, flat if count == slot.numel else flat[first : first + count], numbers))
                names.append(slot.name)
        # A parameter's last piece comes last: its numbers are those that are kept.
        for name, new in zip(names, self._driver.update_standing(lent), strict=True):
            states.numbers[name] = new
        return True

    def forget(self) -> None:
        """Lets go of all that is lent."""
        self._kept.clear()

    def _standing(self, block: BlockWeights) -> _StandingBlock | None:
        kept = self._kept.get(block.index)
        if kept is not None and kept.token == self._token(block):
            return kept
        self._kept.pop(block.index, None)
        if not self._may_stand(block):
            return None
        states, storage = self._states[block.index], block.storage
        length = _piece_length(block)
        parameters: list[_StandingParameter] = []
        for slot in (slot for slot in block.slots if slot.name in self._trained):
            pieces: list[tuple[int, int, StandingPart]] = []
            for first in range(0, slot.numel, length):
                count = min(length, slot.numel - first)
                weight = slot.flat_view(storage)[first : first + count]
                values = states.begin_read(slot, first, count, block.update_device).values()
                pieces.append((first, count, self._driver.stand(slot.name, weight, values)))
            parameters.append(_StandingParameter(slot=slot, pieces=tuple(pieces)))
        made = _StandingBlock(token=self._token(block), parameters=tuple(parameters))
        self._kept[block.index] = made
        return made

    def _may_stand(self, block: BlockWeights) -> bool:
        states = self._states[block.index]
        trained = [slot for slot in block.slots if slot.name in self._trained]
        return (
            self._driver.takes_one_by_one
            and block.update_device.type == "cpu"
            and not block.has_masters
            and not block.updates_on_host
            and not block.travels
            and block.is_here
            and states.rests_on(block.update_device)
            and all(
                slot.shape != ()
                and slot.numel > 0
                and slot.held == range(slot.numel)
                and states.exists(slot.name)
                and self._driver.verdict(slot.name).kind is UpdateKind.ELEMENTWISE
                # Another tensor than one of the weight's size would be lent to several pieces.
                and all(state.is_like_weight for state in states.slots[slot.name])
                for slot in trained
            )
        )

    def _token(self, block: BlockWeights) -> tuple[int, ...]:
        """Returns where the memory of a block lies: of what was lent, nothing may have moved."""
        home = self._states[block.index].home
        memory = None if home is None else home.memory_at(block.update_device)
        return block.storage.data_ptr(), 0 if memory is None else memory.data_ptr(), id(home)


def _piece_length(block: BlockWeights) -> int:
    """Returns the elements of a piece: half of what a piece by itself has at most in this block.

    Of whole vectors, so that the last elements of a weight alone are computed as ends of one.
    """
    alone = min(PIECE_ELEMENTS, max(slot.numel for slot in block.slots))
    return max(_VECTOR_ELEMENTS, alone // 2 // _VECTOR_ELEMENTS * _VECTOR_ELEMENTS)
