"""Trials of an optimizer's class: a few steps for one parameter at a stated size, recorded.

In: an optimizer, one of its parameters, a size. Out: a `ShapeTrial`: states, operations, temporary
memory. Nothing of the live optimizer is changed.

[Note: true shapes] A class may choose its algorithm by the shape of a parameter: timm's Muon takes
AdamW for thin matrices, SOAP and Shampoo skip long dimensions. A run on small tensors then tells
nothing about the large ones. A trial therefore runs at the true size on tensors without data
(torch's fake tensors), which costs no memory; numbers that the class reads from such tensors are 1.
A class that needs data (`nonzero`, NumPy) is run for real, on one whole parameter at a time. Trials
are compared by operations and their factors, never by values: choices that a class makes by the
values of gradients are not seen here.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.core.errors import UnsupportedError
from memfit.core.operators import runs_across
from memfit.devices import is_accelerator
from memfit.optimizers.shadow import Part, Shadow, State, snapshot_groups
from memfit.optimizers.validation import Entry

# The small tensors on which an unknown optimizer is tried out.
#
# In: an optimizer's parameters. Out: a handful of `Sample`s per group: shapes with as many
# dimensions as the real ones, weights and gradients over many orders of magnitude, with exact zeros
# among them.

LARGE_ELEMENTS = 9216
"""Above the size at which published low-bit optimizers change format (4,096), and several of their
blocks (256, 2,048)."""

_GRADIENT_SCALES = (1.0, 1e-3, 40.0, 0.2, 5.0, 1e-6, 300.0)
_SMALL_CAPS = (7, 11, 5, 3, 2)
_SMALL_CUTS = (3, 16, 33, 64)
_LARGE_CUTS = (1000, 4097)
_LARGE_STEPS = 3
_SAMPLES_PER_GROUP = 4


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A small stand-in for one parameter: start weight and state, one gradient a step, and where to
    cut.
    """

    entry: Entry
    weight: torch.Tensor
    state: State
    gradients: tuple[torch.Tensor, ...]
    cuts: tuple[int, ...]


def small_samples(entries: Sequence[Entry], live: Mapping[Any, State] | None = None) -> list[Sample]:
    """A few distinct small shapes a group, a large one where it has a large parameter.

    Of each group two have one shape.

    Args:
        entries: the parameters; their bytes are not read.
        live: `optimizer.state`, to start from small parts of it; nothing to start as before a first
            step.
    """
    maker = _Maker(live)
    samples: list[Sample] = []
    seen: dict[int, set[tuple[Any, ...]]] = {}
    for entry in entries:
        parameter = entry.parameter
        keys = seen.setdefault(entry.group, set())
        shape = small_shape(parameter.shape, _SMALL_CAPS)
        attributes = tuple(sorted(getattr(parameter, "__dict__", {})))
        key = (shape, parameter.dtype, parameter.device, attributes)
        if key not in keys and len(keys) < _SAMPLES_PER_GROUP:
            keys.add(key)
            # The parameter's own dtype, and that of its master.
            dtypes = {parameter.dtype, torch.promote_types(parameter.dtype, torch.float32)}
            samples.extend(maker.small(entry, shape, dtype) for dtype in sorted(dtypes, key=str))
    for group in seen:
        large = next((e for e in entries if e.group == group and e.parameter.numel() > 4096), None)
        if large is not None:
            samples.append(maker.large(large))
    # Classes that stack parameters of one shape, as some Muons do, need two of a kind to show.
    firsts = {sample.entry.group: sample for sample in reversed(samples)}
    return samples + [maker.small(each.entry, each.weight.shape, each.weight.dtype) for each in firsts.values()]


def small_shape(shape: Sequence[int], caps: Sequence[int]) -> tuple[int, ...]:
    """A shape with as many dimensions, none larger than the cap of its place (the last cap holds
    further on).
    """
    return tuple(min(size, caps[min(place, len(caps) - 1)]) for place, size in enumerate(shape))


def isolated(value: Any) -> Any:
    """A copy of a small mutable value, so that trying out changes nothing that the live optimizer
    holds.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (list, dict, set)):
        return copy.copy(value)
    return value


class _Maker:
    """Draws samples from one random stream, so that no two are alike and every run makes the same
    ones.
    """

    def __init__(self, live: Mapping[Any, State] | None) -> None:
        self._generator = torch.Generator().manual_seed(20)
        self._live = live

    def small(self, entry: Entry, shape: Sequence[int], dtype: torch.dtype) -> Sample:
        return self._sample(entry, shape, dtype, _SMALL_CUTS, len(_GRADIENT_SCALES))

    def large(self, entry: Entry) -> Sample:
        """All dimensions cut at the same length, to nearly `LARGE_ELEMENTS` elements."""
        cap, shape = LARGE_ELEMENTS, entry.parameter.shape
        while torch.Size(sizes := tuple(min(size, cap) for size in shape)).numel() > LARGE_ELEMENTS:
            cap = cap * 9 // 10 if cap > 10 else cap - 1
        return self._sample(entry, sizes, entry.parameter.dtype, _LARGE_CUTS, _LARGE_STEPS)

    def _sample(
        self, entry: Entry, shape: Sequence[int], dtype: torch.dtype, cuts: tuple[int, ...], steps: int
    ) -> Sample:
        return Sample(
            entry=entry,
            weight=self._values(entry, shape, dtype, 1.0),
            state=self._state(entry, shape, dtype),
            gradients=tuple(self._values(entry, shape, dtype, scale) for scale in _GRADIENT_SCALES[:steps]),
            cuts=cuts,
        )

    def _values(self, entry: Entry, shape: Sequence[int], dtype: torch.dtype, scale: float) -> torch.Tensor:
        """Normal values spread over five orders of magnitude, a tenth of them zero."""
        size, generator = tuple(shape), self._generator
        values = torch.randn(size, generator=generator) * 10.0 ** (-5.0 * torch.rand(size, generator=generator))
        values = torch.where(torch.rand(size, generator=generator) < 0.1, torch.zeros(()), values)
        return (values * scale).to(entry.parameter.device, dtype)

    def _state(self, entry: Entry, shape: Sequence[int], dtype: torch.dtype) -> State:
        """The first elements of the live states of the parameter's shape, and its scalars."""
        if self._live is None:
            return {}
        parameter, size = entry.parameter, torch.Size(shape)
        state: State = {}
        for key, value in self._live.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                own = dtype if value.dtype == parameter.dtype else value.dtype
                state[key] = value.detach().reshape(-1)[: size.numel()].reshape(size).to(own).clone()
            else:
                state[key] = isolated(value)
        return state


_STEPS = 3
# A norm along another dimension than the last takes 2.1 to 3 ns an element, as if it moved as much.
_NORM_ACROSS_BYTES = 110.0
# Types of arguments that hold factors. Numbers of Python also come where a tensor is expected.
_OF_NUMBERS = ("Tensor", "number", "Optional[number]", "List[number]", "float", "Optional[float]", "List[float]")
_HALF = (torch.bfloat16, torch.float16)
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


@dataclass(frozen=True, kw_only=True)
class ShapeTrial:
    """Record of a few steps of an optimizer's class for one parameter.

    Attributes:
        states: every state that a step left, with the tensors or numbers of the last step that had
            it; tensors may be without data.
        operations: with the numbers that they were given, in order; None: the class does not run
            where operations are recorded, as compiled steps may not, and no bytes are counted.
        scratch_bytes: most that a step has alive of its own: no weight, gradient or state.
        moved_bytes: read and written by the operations of the last step.
        lent_bytes: of weight, gradient and states, read once and, but for the gradient, written
            once.
        product_dtype: of products of matrices in half precision; None: there are none.
    """

    states: State
    operations: tuple[tuple[Any, ...], ...] | None
    scratch_bytes: int
    moved_bytes: int
    lent_bytes: int
    product_dtype: torch.dtype | None


def run_trial(
    optimizer: Optimizer,
    entry: Entry,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    device: torch.device | None = None,
    states: State | None = None,
) -> ShapeTrial:
    """Steps of the class for a parameter of this size. See [Note: true shapes].

    Args:
        optimizer: the live optimizer; only read.
        entry: the parameter that is stood in for; its bytes are not touched.
        shape: of the weight.
        dtype: of the weight.
        device: where the update runs; None: on the parameter's own.
        states: to begin with, of the size; tensors with dimensions are read for their shapes and
            dtypes only (they may be on the meta device). None: as before a first step.

    Raises:
        UnsupportedError: the class needs data and there is no memory for one parameter of the size.
        Exception: the class's own, where it runs neither without data nor with it.
    """
    where = device or entry.parameter.device

    def steps(*, has_data: bool, is_recorded: bool) -> ShapeTrial:
        # Constants of the class stay real: their numbers can be read.
        with nullcontext() if has_data else FakeTensorMode(allow_non_fake_inputs=True):
            weight = torch.empty(tuple(shape), dtype=dtype, device=where)
            gradient, begun = torch.empty_like(weight), _begun(states or {}, where)
        if has_data:
            generator = torch.Generator().manual_seed(0)
            for tensor in (weight, gradient):
                tensor.copy_(torch.randn(tuple(shape), generator=generator))
        return _steps(optimizer, entry, weight, gradient, begun, is_recorded=is_recorded)

    with suppress(Exception):
        return steps(has_data=False, is_recorded=True)
    try:
        with suppress(Exception):
            return steps(has_data=True, is_recorded=True)
        return steps(has_data=True, is_recorded=False)
    except torch.OutOfMemoryError as error:
        raise UnsupportedError(
            f"{type(optimizer).__name__} reads values in its step, so that memfit must try it on a whole parameter, and "
            f"there is no memory for one like {entry.name!r} {tuple(shape)}. Raise the limit, or use an optimizer "
            "whose step reads no values."
        ) from error


def like_states(states: State, whole: Sequence[int], shape: Sequence[int]) -> State:
    """States for a part of a parameter; those of the whole shape become parts, without data."""
    return {
        key: torch.empty(tuple(shape), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor) and value.shape == tuple(whole)
        else value
        for key, value in states.items()
    }


def _groups(optimizer: Optimizer, device: torch.device) -> list[dict[str, Any]]:
    """Hyperparameters with torch's choice of kernels written down, which it would take anew.

    torch takes tensors without data for a class of their own, whose steps are made one by one.
    """
    groups = snapshot_groups(optimizer)
    for group in groups:
        if is_accelerator(device) and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    return groups


def _begun(states: State, device: torch.device) -> State:
    return {
        key: torch.ones(value.shape, dtype=value.dtype, device=device)
        if isinstance(value, torch.Tensor) and value.dim()
        else isolated(value)
        for key, value in states.items()
    }


def _steps(
    optimizer: Optimizer,
    entry: Entry,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    states: State,
    *,
    is_recorded: bool,
) -> ShapeTrial:
    shadow = Shadow(optimizer, groups=_groups(optimizer, weight.device))
    seen: State = {}
    operations: list[tuple[Any, ...]] = []
    scratch_bytes = moved_bytes = lent_bytes = 0
    product_dtype: torch.dtype | None = None
    for _ in range(_STEPS):
        lent = [weight, gradient, *(value for value in states.values() if isinstance(value, torch.Tensor))]
        part = Part(
            group=entry.group,
            name=entry.name,
            parameter=entry.parameter,
            weight=weight,
            gradient=gradient,  # a class may overwrite it: its values matter to nothing
            state=states,
        )
        # Code that was asked to compile would find a mode that it cannot, and stay eager for good.
        recording = _StepRecording(lent)
        with torch.compiler.set_stance("force_eager"), recording if is_recorded else nullcontext():
            states = shadow.run([part])[0]
        seen.update({key: value for key, value in states.items() if value is not None})
        operations += recording.operations
        scratch_bytes = max(scratch_bytes, recording.peak_bytes - recording.bytes_of(states.values()))
        lent_bytes = 2 * sum(tensor.nbytes for tensor in lent if tensor.dim()) - gradient.nbytes
        moved_bytes = recording.moved_bytes
        product_dtype = recording.product_dtype or product_dtype
    return ShapeTrial(
        states=seen,
        operations=tuple(operations) if is_recorded else None,
        scratch_bytes=scratch_bytes,
        moved_bytes=moved_bytes,
        lent_bytes=lent_bytes,
        product_dtype=product_dtype,
    )


def _factors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[complex]:
    """Numbers that take part in the arithmetic of an operation: no sizes, dimensions or flags."""
    arguments = {argument.name: argument for argument in func._schema.arguments}
    by_name = {**dict(zip(arguments, args, strict=False)), **kwargs}
    numbers = [value for name, value in by_name.items() if str(arguments[name].type) in _OF_NUMBERS]
    return [value for value in tree_leaves(numbers) if isinstance(value, int | float | complex)]


class _StepRecording(TorchDispatchMode):
    """Records operations, and the bytes of storages that they make until these die."""

    def __init__(self, lent: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self.peak_bytes = 0
        self.moved_bytes = 0
        self.product_dtype: torch.dtype | None = None
        self._bytes = 0
        self._lent = {tensor.untyped_storage()._cdata for tensor in lent}
        self._made: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        if func.namespace == "prim":  # questions about a tensor without data, such as its device
            return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        self.operations.append((func._overloadpacket, *_factors(func, args, kwargs or {})))
        tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(tensors[0], FakeTensor):
            return torch.ones((), dtype=tensors[0].dtype).item()
        out = func(*args, **(kwargs or {}))
        made = [value for value in tree_leaves(out) if isinstance(value, torch.Tensor)]
        for value in made:
            self._note(value.untyped_storage())
        if func._overloadpacket in _PRODUCTS and made and made[0].dtype in _HALF:
            self.product_dtype = made[0].dtype
        if not func.is_view:
            # Lists of tensors that are updated in place are given back as nothing.
            written = made or (tensors if func._schema.is_mutable else [])
            self.moved_bytes += sum(value.nbytes for value in (*tensors, *written) if value.dim())
            if runs_across(func, args, kwargs):
                self.moved_bytes += int(_NORM_ACROSS_BYTES * tensors[0].numel())
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
        """Bytes of storages made by operations that live on in these values."""
        keys = {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}
        return sum(self._made[key][0] for key in keys if key in self._made)
