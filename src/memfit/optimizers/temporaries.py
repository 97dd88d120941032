"""Temporary memory of one step of an optimizer's class, beside the memory that it is lent.

In: an optimizer, one of its parameters, the layout of its states. Out: bytes an element of what is
updated at once, and bytes that its operations move for an element, by which its speed is foretold.

The class itself runs for a few steps on small tensors while every storage that an operation gives
is counted until it dies: what a step holds is a multiple of what it updates, so that a small run
tells it. Elementwise classes run on a flat vector, others on a tensor with as many dimensions as
the parameter; there, what grows with a row or a column only (Adafactor's factors) weighs more than
it will, never less. Of what kernels take for themselves only that of products in half precision
is counted (`tensors.product_scratch`), by which Muon makes a gradient orthogonal.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.core.operators import runs_across
from memfit.optimizers.kinds import UpdateKind
from memfit.optimizers.shadow import Part, Shadow, State
from memfit.optimizers.state_tensors import StateTensor, small_shape
from memfit.optimizers.validation import Entry
from memfit.tensors.product_scratch import update_product_bytes

_STEPS = 3
_ADAMW_LENT_BYTES = 28.0
# Measured on one core, ten optimizers on 2^18 and on 5e6 elements: within a fifth of that, but for
# Adafactor.
_MEMORY_SHARE = 0.1
# A norm along another dimension than the last takes 2.1 to 3 ns an element, as if it moved as much.
_NORM_ACROSS_BYTES = 110.0
_ADAMW_MOVED_BYTES = {True: 84.0, False: 104.0}
"""Bytes that torch's AdamW in fp32 moves for an element: on a processor, where it takes tensors one
by one, and elsewhere, where it takes them together. Counted as others are.
"""
_FLAT_ELEMENTS = 4096
_CAPS = {1: (4096,), 2: (64, 67), 3: (16, 17, 19)}
_CAPS_OF_MORE = (8, 9, 10, 11)
# Of a class that cannot be counted (its states are made in its __init__, or its step is compiled):
# as many copies as the hungriest of torch's own makes.
_UNKNOWN_COPIES = 4
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


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
    small = (_FLAT_ELEMENTS,) if kind is UpdateKind.ELEMENTWISE else _small(shape)
    has_live = bool(optimizer.state.get(entry.parameter))
    try:
        most, product_dtype = _run(optimizer, entry, small, dtype, {}, device)
    except Exception:  # noqa: BLE001  (it has run on small tensors before: what fails here is the counting, of a compiled step for example)
        given = _states_like(layout, shape, small) if has_live else None
        if given is None:
            return UpdateCost(float(_UNKNOWN_COPIES * dtype.itemsize))
        most, product_dtype = _run(optimizer, entry, small, dtype, given, device)
    scratch, moved, lent = (nbytes / math.prod(small) for nbytes in most)
    return UpdateCost(scratch, moved, lent, device.type, product_dtype)


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return small_shape(shape, _CAPS.get(len(shape), _CAPS_OF_MORE))


def _states_like(layout: Sequence[StateTensor], shape: tuple[int, ...], small: tuple[int, ...]) -> State | None:
    """States of a small tensor, for a class that does not make them in its step; None where their
    shapes are their own.
    """
    states: State = {}
    for tensor in layout:
        if tensor.shape_kind == "other":
            return None
        is_like = tensor.shape_kind == "like" and tensor.shape == shape
        states[tensor.key] = (
            1 if tensor.dtype is None else torch.ones(small if is_like else tensor.shape, dtype=tensor.dtype)
        )
    return states


def _run(
    optimizer: Optimizer,
    entry: Entry,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    state: State,
    device: torch.device,
) -> tuple[tuple[int, int, int], torch.dtype | None]:
    """Most bytes alive beside what is lent and what becomes state, over a few steps; the bytes that
    the last of them moves; those of what it was lent, in both directions. And the dtype of its
    products in half precision.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(device, dtype)
    shadow = Shadow(optimizer)
    most = moved = both_ways = 0
    product_dtype: torch.dtype | None = None
    for _ in range(_STEPS):
        gradient = torch.randn(shape, generator=generator).to(device, dtype)
        part = Part(
            group=entry.group, name=entry.name, parameter=entry.parameter, weight=weight, gradient=gradient, state=state
        )
        lent = [weight, gradient, *(value for value in state.values() if isinstance(value, torch.Tensor))]
        # Code that was asked to compile would find a mode that it cannot, and stay eager for good.
        with torch.compiler.set_stance("force_eager"), _Counting(lent) as counting:
            new = shadow.run([part])[0]
        most = max(most, counting.peak_bytes - counting.bytes_of(new.values()))
        both_ways = 2 * sum(t.nbytes for t in lent if t.dim()) - gradient.nbytes
        moved, state = counting.moved_bytes, new
        product_dtype = counting.product_dtype or product_dtype
    return (most, moved, both_ways), product_dtype


class _Counting(TorchDispatchMode):
    """Counts the bytes of storages that operations make, until they die."""

    def __init__(self, lent: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.moved_bytes = 0
        self.product_dtype: torch.dtype | None = None
        self._bytes = 0
        self._lent = {tensor.untyped_storage()._cdata for tensor in lent}
        self._made: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        made = [value for value in tree_leaves(out) if isinstance(value, torch.Tensor)]
        for value in made:
            self._note(value.untyped_storage())
        if func._overloadpacket in _PRODUCTS and made and made[0].dtype in (torch.bfloat16, torch.float16):
            self.product_dtype = made[0].dtype
        if not func.is_view:
            # Lists of tensors that are updated in place are given back as nothing.
            written = made or (given if func._schema.is_mutable else [])
            self.moved_bytes += sum(value.nbytes for value in (*given, *written) if value.dim())
            if runs_across(func, args, kwargs):
                self.moved_bytes += int(_NORM_ACROSS_BYTES * given[0].numel())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._lent or key in self._made:
            return
        self._made[key] = storage.nbytes(), weakref.ref(storage, lambda _: self._forget(key))
        nbytes = storage.nbytes()  # apart: finalizers, which run at any call, count here as well
        self._bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _forget(self, key: int) -> None:
        self._bytes -= self._made.pop(key)[0]

    def bytes_of(self, values: Iterable[Any]) -> int:
        """Returns the bytes of what was made that live on in these."""
        keys = {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}
        return sum(self._made[key][0] for key in keys if key in self._made)
