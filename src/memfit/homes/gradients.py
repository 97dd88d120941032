"""Gradients on their way home.

In: `.grad` of a block's parameters, from autograd. Out: the step's gradient at its home, its pieces
for the update, and norms for clipping.

Sums are in the order of plain accumulation: each arrival is added to what the home holds (a sum of
two floats does not depend on which is added to which).

[Note: gradients of low-precision weights]
Autograd makes a gradient in the dtype of the weight it meets, and would add microbatches in that
dtype. So where there are masters and several microbatches (or a norm is asked for), each
microbatch's gradient is taken off its leaf as soon as it is whole (`receive`) and added to a *sum*
in the master's dtype, piece by piece: no widened copy of a whole gradient is made. Homes hold sums.
With one microbatch there is nothing to add: the gradient stays on `.grad` in the weight's dtype,
and is widened in pieces by the update or on its way home.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from memfit.core.layout import PIECE_ELEMENTS
from memfit.homes.home import ByteHome, TransferGroup, TransferHandle
from memfit.homes.weights import BlockWeights, ParameterSlot, begin_write_masters
from memfit.tensors.trees import typed_view

# Gradients on the device: on `.grad`, as autograd left them, or in sums of their own.
#
# In: leaves with a gradient from autograd. Out: a parameter's gradient so far, dense if it is read
# in pieces.


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


# Factor by which the gradients of a step are multiplied when a block is updated.
#
# In: loss scales, counts that come late, norms to clip to. Out: one number on the device, and the
# same on the host.


class GradientScale:
    """Product of all factors of a step's gradients.

    Attributes:
        value: 0-d tensor; None: the factor is 1.
    """

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.factor = 1.0
        # The value, and the same number where the host works with it.
        self._on_host: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin_step(self) -> None:
        """Resets the factor to 1."""
        self.value, self.factor = None, 1.0

    def multiply(self, factor: float) -> None:
        """Multiplies the factor by another. Must come before `clip`."""
        self.factor *= factor
        self.value = torch.tensor(self.factor)

    def unscale(self, scale: float) -> None:
        """Divides the factor by the loss scale."""
        self.multiply(_inverse(scale))

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Multiplies the factor by the one that clips gradients of this norm."""
        self.value = clip_factor(norm, max_norm) * self.factor

    def at(self, device: torch.device) -> torch.Tensor:
        """Returns the value on a device, which may not be the one where the norm was computed."""
        value = self.value
        assert value is not None
        if device.type != "cpu" or value.device.type == "cpu":
            return value
        if self._on_host is None or self._on_host[0] is not value:
            # Stops this thread for the device, once a step; an update on the host has waited for
            # the norm already.
            self._on_host = value, value.cpu()
        return self._on_host[1]


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Returns the factor that clips gradients of this norm. Source:
    `torch.nn.utils.clip_grads_with_norm_`.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _inverse(scale: float) -> float:
    """Returns the inverse as `GradScaler` computes it: in double precision, rounded to fp32."""
    return float(torch.tensor(1.0 / scale, dtype=torch.float32))


@dataclass
class GradientPiece:
    """A piece of one parameter's gradient, 1-D: in place (`ready` is None), or on its way to memory
    of its own.
    """

    slot: ParameterSlot
    values: torch.Tensor
    ready: TransferHandle | None = None


class GradientHomes:
    """Gradients of all blocks between their backward and their update.

    Memory: if a block's gradient has a home elsewhere, the gradients on the device live until the
    write is done (at most one block's writes are under way); adding to a home that already holds a
    sum costs one parameter's gradient as staging.

    Args:
        blocks: all blocks.
        homes: by block index; blocks without an entry keep gradients in `.grad`.
        keeps_norms: norms of single gradients are computed when they leave (for clipping).
        keeps_gradients: device gradients outlive `clear` until the next step, for `read`.
        keeps_peaks: the largest magnitudes of single gradients are computed when they leave (for
            the check of fp16).
        adds_apart: gradients come by `here.receive`; see [Note: gradients of low-precision
            weights].

    Attributes:
        here: gradients on the device.
        homes: by block index, where gradients wait elsewhere.
        scaling: factor by which updates multiply gradients.
        is_receiving: a step is under way, so that a gradient on a leaf belongs to it.
        are_exchanged: an accumulate is collective, so that none may come beside the schedule.
    """

    are_exchanged = False

    def __init__(
        self,
        blocks: Sequence[BlockWeights],
        homes: Mapping[int, ByteHome],
        *,
        keeps_norms: bool,
        keeps_gradients: bool = False,
        adds_apart: bool = False,
        keeps_peaks: bool = False,
    ) -> None:
        self.here = DeviceGradients(adds_apart=adds_apart)
        self.scaling = GradientScale()
        self.is_receiving = False
        self._blocks = tuple(blocks)
        self._kept: dict[str, torch.Tensor] | None = {} if keeps_gradients else None
        self.homes = dict(homes)
        self._keeps_norms = keeps_norms
        self._held: set[str] = set()
        self._norms: dict[str, torch.Tensor] = {}
        self._keeps_peaks = keeps_peaks
        self._peaks: dict[str, torch.Tensor] = {}
        # Parameters whose gradient an update has scaled in place.
        self._scaled: set[str] = set()
        # By parameter, what the user's lines multiplied its gradient with, in their order.
        self._factors: dict[str, list[torch.Tensor]] = {}
        self._leaving: TransferHandle | None = None

    def begin_step(self) -> None:
        """Forgets the last step's gradients."""
        self.wait()
        self.here.begin_step()
        self._held.clear()
        self._norms.clear()
        self._peaks.clear()
        self.scaling.begin_step()
        self._scaled.clear()
        self._factors.clear()
        if self._kept is not None:
            self._kept.clear()

    @property
    def arrived(self) -> tuple[str, ...]:
        """Returns the names of the parameters whose gradients are at their homes."""
        return tuple(sorted(self._held))

    def take_up(self, names: Iterable[str], scale: float | None) -> None:
        """Restores the record of a step that a journal decided: the gradients of these parameters
        are at their homes.

        Args:
            names: the result of `arrived` in that step.
            scale: `scaling.value` in that step, or None.
        """
        self.begin_step()
        # What lies at home was made durable before the crash; nothing on the device belongs to it.
        self._held.update(names)
        self.scaling.value = None if scale is None else torch.tensor(scale)

    def awaits_accumulate(self, block: BlockWeights) -> bool:
        """Tells whether a gradient of the block is on the device and an accumulate would move it
        home.
        """
        return block.index in self.homes and self.here.has(block)

    def accumulate(self, block: BlockWeights) -> None:
        """Adds the block's gradient into its home and frees it on the device."""
        home = self.homes.get(block.index)
        if home is None:
            return
        # One block's writes are under way at most: what they read, the block's gradients, is freed
        # when they are done.
        self.wait()
        handles: list[TransferHandle] = []
        for slot in block.slots:
            gradient = self.here.of(slot)
            if gradient is None:
                continue
            # Off the leaf before anything is added: a gradient that comes now belongs to the next
            # accumulate.
            self.here.give_up(slot)
            # Before it is added to the sum: the sum at home is one of sums over all who share it.
            gradient = home.reduce(dense_gradient(gradient, slot))
            if slot.name in self._held:
                gradient = gradient.to(slot.master_dtype)
                # Stops the main thread: the sum is read, and both are added here
                # (`Operation.awaited`).
                _add_home(gradient, home, slot)
            if self._keeps_norms:
                # Of the sum, and before it leaves: each accumulate writes over the norm of the one
                # before.
                self._norms[slot.name] = torch.linalg.vector_norm(gradient)
            if self._keeps_peaks and gradient.numel():
                self._peaks[slot.name] = torch.linalg.vector_norm(gradient, math.inf)
            # The handles keep what they read alive: the loop lets go of the gradient.
            handles += begin_write_masters(home, slot, gradient)
            self._held.add(slot.name)
        self._leaving = TransferGroup(handles)

    def wait(self) -> None:
        """Waits until every gradient that left is home."""
        if self._leaving is not None:
            # Taken off before the wait: where that raises, the next wait must not raise the same
            # again.
            leaving, self._leaving = self._leaving, None
            leaving.wait()

    def norm(self, order: Sequence[str]) -> torch.Tensor:
        """Computes the 2-norm over all gradients, as `torch.nn.utils.clip_grad_norm_` computes it.

        Args:
            order: names of parameters in the model's order.

        Returns:
            0-d tensor; 0 if no parameter has a gradient.
        """
        self.wait()
        norms = dict(self._norms)
        for block in self._blocks:
            if block.index not in self.homes:
                for slot in block.slots:
                    gradient = self.here.of(slot)
                    if gradient is not None:
                        norms[slot.name] = torch.linalg.vector_norm(gradient)
        found = [norms[name] for name in order if name in norms]
        return torch.linalg.vector_norm(torch.stack(found)) * self.scaling.factor if found else torch.tensor(0.0)

    def is_finite(self, names: Collection[str]) -> bool:
        """Tells whether no gradient of these parameters holds an infinity or a NaN."""
        self.wait()
        peaks = [peak for name, peak in self._peaks.items() if name in names]
        for block in self._blocks:
            for slot in block.slots if block.index not in self.homes else ():
                gradient = self.here.of(slot) if slot.name in names else None
                if gradient is not None and gradient.numel():
                    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
                    peaks.append(torch.linalg.vector_norm(dense, math.inf))
        return not peaks or bool(torch.stack(peaks).isfinite().all())

    def has(self, slot: ParameterSlot) -> bool:
        """Tells whether the parameter got a gradient in this step."""
        return slot.name in self._held or self.here.of(slot) is not None

    # --- one parameter's, for the user's own lines -----------------------------------------------

    def rests_apart(self, slot: ParameterSlot) -> bool:
        """Tells whether the parameter's gradient is anywhere but on `.grad`."""
        return slot.name in self._held or self.here.has_sum(slot)

    def norm_of(self, slot: ParameterSlot) -> torch.Tensor:
        """Returns the 2-norm of a gradient that rests apart, before any `multiply`. Needs
        `keeps_norms`.
        """
        if slot.name in self._held:
            return self._norms[slot.name]
        return torch.linalg.vector_norm(self.here.sum_of(slot))

    def multiply(self, slot: ParameterSlot, factor: torch.Tensor) -> None:
        """Multiplies a gradient that rests apart: its update does it, piece by piece."""
        self._factors.setdefault(slot.name, []).append(factor)

    def factors(self, slot: ParameterSlot) -> Sequence[torch.Tensor]:
        """Returns what `multiply` was called with."""
        return self._factors.get(slot.name, ())

    def is_finite_apart(self, block: BlockWeights, slot: ParameterSlot) -> bool:
        """Tells whether a gradient that rests apart has no infinity and no NaN.

        Costs a piece of 2 MiB where its norm is not finite: the sum of squares may have overflowed.
        """
        if bool(self.norm_of(slot).isfinite()):
            return True
        if slot.name not in self._held:
            return bool(torch.linalg.vector_norm(self.here.sum_of(slot), math.inf).isfinite())
        self.wait()
        for first in range(0, slot.numel, PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, slot.numel - first)
            piece = _begin_at_home(self.homes[block.index], slot, first, count, block.update_device)
            if piece.ready is not None:
                piece.ready.wait()
            if not bool(torch.linalg.vector_norm(piece.values, math.inf).isfinite()):
                return False
            del piece  # freed before the next one is read
        return True

    def forget(self, slot: ParameterSlot) -> None:
        """Forgets a gradient that rests apart, as if it had not come."""
        self._held.discard(slot.name)
        for kept in (self._norms, self._peaks, self._factors):
            kept.pop(slot.name, None)
        self.here.give_up_sum(slot)

    def begin_piece(self, block: BlockWeights, slot: ParameterSlot, first: int, count: int) -> GradientPiece:
        """Begins to read elements [first, first + count) of a parameter's gradient, in the
        parameter's memory order, for `finish_piece`.
        """
        gradient = None if block.updates_on_host else self.here.of(slot)
        if gradient is not None:
            return GradientPiece(slot, flat_gradient(self.here.dense_in_place(slot, gradient))[first : first + count])
        return _begin_at_home(self.homes[block.index], slot, first, count, block.update_device)

    def finish_piece(self, piece: GradientPiece) -> torch.Tensor:
        """Waits for the piece; returns it in the master's dtype, unscaled and clipped.

        Gradients in memory are scaled in place: each piece must be asked for once.
        """
        slot = piece.slot
        if piece.ready is None and self.scaling.value is None and slot.name not in self._factors:
            return piece.values.to(slot.master_dtype)
        if piece.ready is not None:
            # In the worker's thread, on its current stream: kernels of the update see the bytes.
            piece.ready.wait()
        device, values = piece.values.device, piece.values.to(slot.master_dtype)
        factors = [] if self.scaling.value is None else [self.scaling.at(device)]
        factors += [factor.to(device) for factor in self._factors.get(slot.name, ())]
        if factors and piece.ready is None and piece.values.dtype == slot.master_dtype:
            # In the update's thread: `read` looks only after the update was waited for.
            self._scaled.add(slot.name)
        for factor in factors:
            # One after the other, each rounded, as the user's lines would have multiplied.
            values = values.mul_(factor)
        return values

    def read(self, block: BlockWeights, slot: ParameterSlot) -> torch.Tensor | None:
        """Returns a copy of a parameter's gradient of the last step, in the master's dtype, clipped
        if the step clipped; None if it got none. Costs its bytes.
        """
        gradient = (self._kept or {}).get(slot.name)
        if gradient is None and slot.name not in self._held:
            # Behind the others: in lines of the user's, a stand-in may be on `.grad`.
            gradient = self.here.sum_of(slot) if self.here.has_sum(slot) else self.here.of(slot)
            if gradient is None:
                return None
        if gradient is not None:
            whole = gradient.to(slot.master_dtype, copy=True)
        else:
            self.wait()
            home = self.homes[block.index]
            whole = torch.empty_strided(slot.shape, slot.stride, dtype=slot.master_dtype, device=slot.parameter.device)
            home.gather(slot.master_offset_bytes, slot.master_nbytes, whole.untyped_storage()).wait()
        if slot.name in self._scaled:
            return whole
        if self.scaling.value is not None:
            whole = whole.mul_(self.scaling.value)
        for factor in self._factors.get(slot.name, ()):
            whole = whole.mul_(factor.to(whole.device))
        return whole

    @property
    def kept(self) -> tuple[torch.Tensor, ...]:
        """Gradients on the device that stay readable until the next step begins."""
        return tuple((self._kept or {}).values())

    def clear(self, block: BlockWeights) -> None:
        """Frees the block's gradients on the device."""
        for slot in block.slots:
            gradient = self.here.of(slot)
            if self._kept is not None and gradient is not None:
                self._kept[slot.name] = gradient
            self.here.give_up(slot)


def _begin_at_home(home: ByteHome, slot: ParameterSlot, first: int, count: int, device: torch.device) -> GradientPiece:
    size = slot.master_dtype.itemsize
    offset = slot.master_offset_bytes + first * size
    if (resting := home.memory_at(device)) is not None:
        return GradientPiece(slot, typed_view(resting, home.place(offset), slot.master_dtype, (count,)))
    # Nobody else holds it: the piece does, until it was updated.
    own = torch.empty(count, dtype=slot.master_dtype, device=device)
    return GradientPiece(slot, own, home.read(offset, count * size, own.untyped_storage()))


def _add_home(gradient: torch.Tensor, home: ByteHome, slot: ParameterSlot) -> None:
    """Adds the home's content to a dense gradient of the master's dtype. Costs a piece of 2
    MiB.
    """
    flat, size = flat_gradient(gradient), slot.master_dtype.itemsize
    for start in range(0, slot.numel, PIECE_ELEMENTS):
        piece = flat[start : start + PIECE_ELEMENTS]
        staged = torch.empty_like(piece)
        offset = slot.master_offset_bytes + start * size
        # Waited for piece by piece: one piece of 2 MiB is staged, never a whole gradient.
        home.read(offset, piece.numel() * size, staged.untyped_storage()).wait()
        piece.add_(staged)
