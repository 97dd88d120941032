"""Gradients on the device: on `.grad`, as autograd left them, or in sums of their own.

In: leaves with a gradient from autograd. Out: a parameter's gradient so far, dense if it is read in
pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memfit.core.layout import PIECE_ELEMENTS
from memfit.homes.weights import BlockWeights, ParameterSlot


class DeviceGradients:
    """Gradients that are on the device and have not been moved home.

    Memory: the gradients; with `adds_apart`, one sum a parameter in the master's dtype.

    Args:
        adds_apart: gradients come by `receive`; see `homes.gradients`, [Note: gradients of
            low-precision weights].
    """

    def __init__(self, *, adds_apart: bool) -> None:
        self.adds_apart = adds_apart
        self._sums: dict[str, torch.Tensor] = {}

    def begin_step(self) -> None:
        """Forgets the last step's sums."""
        self._sums.clear()

    def receive(self, slot: ParameterSlot, leaf: torch.Tensor) -> None:
        """Takes a leaf's gradient off it and adds it to the parameter's sum.

        Memory: the sum, in the master's dtype, from the first arrival of a step on; a piece of 2
        MiB while it adds.

        Args:
            slot: of the parameter.
            leaf: the parameter, or another leaf over its storage; its `.grad` is None afterwards.
        """
        gradient = leaf.grad
        if gradient is None:
            return
        leaf.grad = None
        gradient = dense_gradient(gradient.detach(), slot)
        total = self._sums.get(slot.name)
        if total is None:
            self._sums[slot.name] = gradient.to(slot.master_dtype, copy=True)
        else:
            _add_in_pieces(total, gradient)

    def has(self, block: BlockWeights) -> bool:
        """Tells whether a parameter of the block has a gradient here."""
        return any(self.of(slot) is not None for slot in block.slots)

    def held_bytes(self, slot: ParameterSlot) -> int:
        """Returns the bytes of the parameter's gradient; 0 if it has none."""
        gradient = self.of(slot)
        return 0 if gradient is None else gradient.nbytes

    def of(self, slot: ParameterSlot) -> torch.Tensor | None:
        """Returns the parameter's gradient. If it was computed from the parameter itself and not
        from a leaf of a microbatch, it is on `.grad` even where sums are made.
        """
        if self.adds_apart and slot.parameter.grad is not None:
            # Also where only `has` asks: the gradient moves to the sum, and `.grad` is None after.
            self.receive(slot, slot.parameter)
        total = self._sums.get(slot.name)
        return slot.parameter.grad if total is None else total

    def dense_in_place(self, slot: ParameterSlot, gradient: torch.Tensor) -> torch.Tensor:
        """Brings the parameter's gradient into the memory order of its slot, and returns it."""
        dense = dense_gradient(gradient, slot)
        if dense is not gradient:  # sums are dense from the first arrival on
            slot.parameter.grad = dense
        return dense

    def has_sum(self, slot: ParameterSlot) -> bool:
        """Tells whether the parameter's gradient is a sum beside `.grad`."""
        return slot.name in self._sums

    def sum_of(self, slot: ParameterSlot) -> torch.Tensor:
        """Returns the sum beside `.grad`, which must be there; `.grad` is not looked at."""
        return self._sums[slot.name]

    def give_up_sum(self, slot: ParameterSlot) -> None:
        """Frees the sum beside `.grad`, if there is one."""
        self._sums.pop(slot.name, None)

    def give_up(self, slot: ParameterSlot) -> None:
        """Frees the parameter's gradient."""
        slot.parameter.grad = None
        self._sums.pop(slot.name, None)

    def drop(self, blocks: Iterable[BlockWeights]) -> None:
        """Frees all gradients of the blocks, after an error."""
        for block in blocks:
            for slot in block.slots:
                self.give_up(slot)


def _add_in_pieces(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Computes `total += gradient`, both dense in the same order, without a widened copy of the
    whole gradient.
    """
    to, new = flat_gradient(total), flat_gradient(gradient)
    for start in range(0, to.numel(), PIECE_ELEMENTS):
        to[start : start + PIECE_ELEMENTS].add_(new[start : start + PIECE_ELEMENTS])


def dense_gradient(gradient: torch.Tensor, slot: ParameterSlot) -> torch.Tensor:
    """Returns the gradient in the memory order of its parameter's slot."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if tuple(gradient.stride()) == slot.stride or gradient.numel() < 2:
        return gradient
    return torch.empty_strided(slot.shape, slot.stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def flat_gradient(dense: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor as 1-D, in memory order, without a copy."""
    return dense.as_strided((dense.numel(),), (1,))
