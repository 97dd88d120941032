"""Temporary memory of one step of an optimizer's class, beside the memory that it is lent.

In: an optimizer, one of its parameters, the layout of its states. Out: bytes an element of what is
updated at once, and bytes that its operations move for an element, by which its speed is foretold.

The class itself runs for a few steps (`shape_trials.py`) while every storage that an operation
gives is counted until it dies. Elementwise classes run on a flat vector, where a step holds a
multiple of what it updates; others run at the parameter's own size. Of what kernels take for
themselves only that of products in half precision is counted (`tensors.product_scratch`), by which
Muon makes a gradient orthogonal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from memfit.optimizers.kinds import UpdateKind
from memfit.optimizers.shadow import State
from memfit.optimizers.shape_trials import run_trial
from memfit.optimizers.state_tensors import StateTensor
from memfit.optimizers.validation import Entry
from memfit.tensors.product_scratch import update_product_bytes

_ADAMW_LENT_BYTES = 28.0
# Measured on one core, ten optimizers on 2^18 and on 5e6 elements: within a fifth of that, but for
# Adafactor.
_MEMORY_SHARE = 0.1
_ADAMW_MOVED_BYTES = {True: 84.0, False: 104.0}
"""Bytes that torch's AdamW in fp32 moves for an element: on a processor, where it takes tensors one
by one, and elsewhere, where it takes them together. Counted as others are.
"""
_FLAT_ELEMENTS = 4096
# Of a class that cannot be counted (its states are made in its __init__, or its step is compiled):
# as many copies as the hungriest of torch's own makes.
_UNKNOWN_COPIES = 4


class UpdateCost(NamedTuple):
    """Bytes for each element that is updated at once.

    Attributes:
        scratch_bytes: most that a step has alive of its own: no weight, gradient or state.
        moved_bytes: read and written by its operations; 0: not counted.
        lent_bytes: of weight, gradient and states, read once and, but for the gradient, written
            once: what comes from memory and goes there, however well caches hold a piece.
        device: type of the device where it was counted.
        product_dtype: of products of matrices in half precision that it makes; None: it makes none.
    """

    scratch_bytes: float
    moved_bytes: float = 0.0
    lent_bytes: float = 0.0
    device: str = "cpu"
    product_dtype: torch.dtype | None = None

    def scratch_of(self, elements: int) -> int:
        """Returns the bytes that an update of some elements allocates."""
        found = math.ceil(self.scratch_bytes * elements)
        if self.product_dtype is None or self.device != "cpu":
            return found
        return found + update_product_bytes(elements, self.product_dtype)

    @property
    def work_share(self) -> float:
        """Work of an element as a multiple of AdamW's; 1 where it is not known. Bytes of memory and
        bytes of operations weigh what AdamW's took in caches and beyond them.
        """
        if not self.moved_bytes:
            return 1.0
        operations = self.moved_bytes / _ADAMW_MOVED_BYTES[self.device == "cpu"]
        return _MEMORY_SHARE * self.lent_bytes / _ADAMW_LENT_BYTES + (1 - _MEMORY_SHARE) * operations


def update_cost(
    optimizer: Optimizer,
    entry: Entry,
    kind: UpdateKind,
    dtype: torch.dtype,
    layout: Sequence[StateTensor],
    device: torch.device,
) -> UpdateCost:
    """Counts what a step of the class takes for each element.

    Args:
        optimizer: the live optimizer; only read.
        entry: the parameter; its bytes are not touched.
        kind: how far its group may be cut.
        dtype: of the weight that is updated.
        layout: of the parameter's states.
        device: where it is updated; the class may take another way there.
    """
    shape = tuple(entry.parameter.shape)
    if not math.prod(shape):
        return UpdateCost(0.0)
    size = (_FLAT_ELEMENTS,) if kind is UpdateKind.ELEMENTWISE else shape
    states: State = {}
    if optimizer.state.get(entry.parameter):
        states = {tensor.key: _as_state(tensor, shape, size) for tensor in layout}
    trial = run_trial(optimizer, entry, size, dtype, device=device, states=states)
    if trial.operations is None:
        return UpdateCost(float(_UNKNOWN_COPIES * dtype.itemsize))
    counts = (trial.scratch_bytes, trial.moved_bytes, trial.lent_bytes)
    scratch, moved, lent = (nbytes / math.prod(size) for nbytes in counts)
    return UpdateCost(scratch, moved, lent, device.type, trial.product_dtype)


def _as_state(tensor: StateTensor, whole: tuple[int, ...], size: tuple[int, ...]) -> Any:
    if tensor.dtype is None:
        return 1
    if tensor.shape_kind == "scalar":
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    return torch.empty(size if tensor.shape == whole else tensor.shape, dtype=tensor.dtype, device="meta")
