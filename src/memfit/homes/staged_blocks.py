"""A block's values on the host for a moment, where the device has no room for them and for the home
that they move into.

In: a block that has not moved in. Out: its values in host memory; its parameters without bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from memfit.homes.weights import BlockWeights
from memfit.tensors.guard import is_away


class StagedBlock:
    """The values of a block's parameters, each in the memory order that it has at home.

    Memory: the block's bytes on the host; those on the device are freed.

    Args:
        block: its parameters are whole on the device.
        ledger: context in which host memory is allocated.

    Attributes:
        values: by slot.
    """

    def __init__(self, block: BlockWeights, ledger: Callable[[], AbstractContextManager[None]]) -> None:
        self._block = block
        with ledger(), torch.no_grad():
            self.values = [
                torch.empty_strided(slot.shape, slot.stride, dtype=slot.given_dtype).copy_(slot.parameter.data)
                for slot in block.slots
            ]
        # Only when the host has all of them: a failure before leaves the block as it was.
        for slot in block.slots:
            slot.parameter.data = torch.empty(0, dtype=slot.given_dtype, device=slot.parameter.device)

    def give_back(self) -> None:
        """Makes the parameters whole again, when the move has failed and its homes are given up."""
        for slot, value in zip(self._block.slots, self.values, strict=True):
            own = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=slot.parameter.device)
            slot.parameter.data = own.copy_(value)


def is_whole(block: BlockWeights) -> bool:
    """Tells whether all values of a block are in memory: none is deferred or put aside."""
    parameters = [slot.parameter for slot in block.slots]
    # One that was put aside has its shape still, and a storage without bytes.
    return all(not is_away(p) and p.untyped_storage().nbytes() >= p.numel() * p.element_size() for p in parameters)
