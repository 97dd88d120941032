"""Gradients on their way home.

In: the `.grad` that autograd left on a block's parameters. Out: the step's gradient at its home, in pieces for the update and in norms
for clipping.

Sums are in the order of plain accumulation: each arrival is added to what the home holds (a sum of two floats does not depend on
which is added to which).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from memfit.runtime.homes.base import ByteHome, Ticket, Tickets
from memfit.runtime.trees import typed_view
from memfit.runtime.weights import BlockWeights, Slot


class GradientHomes:
    """Where each block's gradient rests between its backward and its update.

    Memory: for a block whose gradient goes home, the gradients on the device live until the write is done (at most one block's writes
    are under way); adding to a home that already holds a part costs one parameter's gradient as staging.

    Args:
        blocks: all blocks.
        homes: by block index; blocks without an entry keep gradients in `.grad`.
        keeps_norms: norms of single gradients are taken on the way (for clipping).
        keeps_gradients: device gradients outlive `clear` until the next step, for `read`.
    """

    def __init__(
        self,
        blocks: Sequence[BlockWeights],
        homes: Mapping[int, ByteHome],
        *,
        keeps_norms: bool,
        keeps_gradients: bool = False,
    ) -> None:
        self._blocks = tuple(blocks)
        self._kept: dict[str, torch.Tensor] | None = {} if keeps_gradients else None
        self._homes = dict(homes)
        self._keeps_norms = keeps_norms
        self._held: set[str] = set()
        self._norms: dict[str, torch.Tensor] = {}
        self._clipped: set[str] = set()
        self._leaving: Ticket | None = None
        self.scale: torch.Tensor | None = None

    def begin_step(self) -> None:
        """Forgets the last step's gradients."""
        self.wait()
        self._held.clear()
        self._norms.clear()
        self._clipped.clear()
        if self._kept is not None:
            self._kept.clear()
        self.scale = None

    def accumulate(self, block: BlockWeights) -> None:
        """Adds the block's `.grad` into its home and takes it off the device."""
        home = self._homes.get(block.index)
        if home is None:
            return
        self.wait()
        tickets: list[Ticket] = []
        for slot in block.slots:
            gradient = slot.parameter.grad
            if gradient is None:
                continue
            slot.parameter.grad = None
            gradient = _dense(gradient, slot)
            if slot.name in self._held:
                staged = torch.empty(slot.numel, dtype=gradient.dtype, device=gradient.device)
                home.read(slot.offset_bytes, slot.nbytes, staged.untyped_storage()).wait()
                _flat(gradient).add_(staged)
                del staged
            if self._keeps_norms:
                self._norms[slot.name] = torch.linalg.vector_norm(gradient)
            first = int(gradient.storage_offset()) * gradient.element_size()
            tickets.append(home.write(slot.offset_bytes, slot.nbytes, gradient.untyped_storage(), first))
            self._held.add(slot.name)
        self._leaving = Tickets(tickets)

    def wait(self) -> None:
        """Returns when every gradient that left is home."""
        if self._leaving is not None:
            leaving, self._leaving = self._leaving, None
            leaving.wait()

    def norm(self, order: Sequence[str]) -> torch.Tensor:
        """The 2-norm over all gradients, as `torch.nn.utils.clip_grad_norm_` computes it.

        Args:
            order: names of parameters in the model's order.

        Returns:
            0-d tensor; 0 if no parameter has a gradient.
        """
        self.wait()
        norms = dict(self._norms)
        for block in self._blocks:
            if block.index not in self._homes:
                for slot in block.slots:
                    if slot.parameter.grad is not None:
                        norms[slot.name] = torch.linalg.vector_norm(slot.parameter.grad)
        found = [norms[name] for name in order if name in norms]
        return torch.linalg.vector_norm(torch.stack(found)) if found else torch.tensor(0.0)

    def set_clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """From now on the update multiplies gradients with the clip factor (`clip_grads_with_norm_`'s formula)."""
        self.scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def has(self, slot: Slot) -> bool:
        """The parameter received a gradient in this step."""
        return slot.name in self._held or slot.parameter.grad is not None

    def piece(self, block: BlockWeights, slot: Slot, first: int, count: int) -> torch.Tensor:
        """Elements [first, first + count) of a parameter's gradient, in the parameter's memory order, clipped.

        Device gradients are scaled in place: each piece must be asked for once.
        """
        gradient = slot.parameter.grad
        home = self._homes.get(block.index)
        if self.scale is not None and (gradient is not None or (home is not None and home.memory is not None)):
            self._clipped.add(slot.name)  # in place, where it lies
        if gradient is not None:
            piece = _flat(_dense_in_place(slot, gradient))[first : first + count]
        else:
            assert home is not None
            size = slot.dtype.itemsize
            if home.memory is not None:
                piece = typed_view(home.memory, slot.offset_bytes + first * size, slot.dtype, (count,))
            else:
                piece = torch.empty(count, dtype=slot.dtype, device=slot.parameter.device)
                home.read(slot.offset_bytes + first * size, count * size, piece.untyped_storage()).wait()
        return piece if self.scale is None else piece.mul_(self.scale)

    def read(self, block: BlockWeights, slot: Slot) -> torch.Tensor | None:
        """A copy of a parameter's gradient of the last step, clipped if the step clipped; None if it received none. Costs its bytes."""
        gradient = slot.parameter.grad
        if gradient is None and self._kept is not None:
            gradient = self._kept.get(slot.name)
        if gradient is None and slot.name not in self._held:
            return None
        if gradient is not None:
            whole = gradient.clone()
            return whole if self.scale is None or slot.name in self._clipped else whole.mul_(self.scale)
        self.wait()
        home = self._homes[block.index]
        whole = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=slot.parameter.device)
        home.read(slot.offset_bytes, slot.nbytes, whole.untyped_storage()).wait()
        return whole if self.scale is None or slot.name in self._clipped else whole.mul_(self.scale)

    def clear(self, block: BlockWeights) -> None:
        """Gives up the block's gradients on the device."""
        for slot in block.slots:
            if self._kept is not None and slot.parameter.grad is not None:
                self._kept[slot.name] = slot.parameter.grad
            slot.parameter.grad = None


def _dense(gradient: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The gradient in the memory order of its parameter's slot."""
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    if tuple(gradient.stride()) == slot.stride or gradient.numel() < 2:
        return gradient
    return torch.empty_strided(slot.shape, slot.stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _dense_in_place(slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
    dense = _dense(gradient, slot)
    if dense is not gradient:
        slot.parameter.grad = dense
    return dense


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """A dense tensor as 1-D, in memory order, without a copy."""
    return dense.as_strided((dense.numel(),), (1,))
