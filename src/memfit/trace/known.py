"""Results of operations on tensors without data: worked out once for each kind, and made again from
that.

In: an operator and its arguments, as a dispatch mode receives them. Out: its results, and what the
recorder asks of an operation.

[Note: known operations]
The layers of a model do the same operations on tensors of the same shapes, again and again, and
torch's fake tensors take 0.1 to 0.5 ms for each. What comes out follows from the operator, from its
other arguments and from what its tensors are: dtype, shape, strides, place in the storage, size of
that, device, flags, and which of them are one and the same. That is the key. The first operation of
a key runs on fake tensors; what it gave is noted: an argument itself, a view of an argument's
storage, or a new tensor. The next ones are made from the note. A note is kept only if what it makes
is at once what torch gave, down to the dispatch keys. Nothing is noted of operations that need
values, that change how an argument lies over its memory, that write constants or compute with
nothing else, of operators that are not torch's, and of results that share a new storage. Views, and
results of some other operators, come from torch's shape functions at once, without the rest of what
fake tensors do. The program itself runs whole, layer by layer: nothing is taken from one layer for
another but what single operations give. Results that are tensors serve every profile of the
process, under the same settings of torch; the newest some thousands of them are kept, 2 KiB each.
What the recorder asks besides (memory inside the operation, policies that keep its results) is
worked out once a profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from memfit.core.operators import only_relabels
from memfit.trace.measuring import Workspaces
from memfit.trace.operation_facts import Facts, facts_of
from memfit.trace.operations import run_operation
from memfit.trace.traced_trees import operator_tensors

aten = torch.ops.aten
_META = torch.device("meta")
_NAMESPACES = ("aten", "prims", "prim", "mkldnn")
_MOST_RESULTS = 1 << 12
# Beside views. Fake tensors do nothing more for them than to give results the arguments' device.
_DIRECT = {
    aten.mm.default, aten.bmm.default, aten.cat.default, aten.sum.dim_IntList, aten.mean.dim, aten._unsafe_view.default, aten.clone.default,
    aten.slice_backward.default,
}  # fmt: skip
_PLAIN = {
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip


@dataclass(slots=True, eq=False)
class Kind:
    """Facts of an operator's schema, and the notes of its operations.

    Attributes:
        operator: as a dispatch mode receives it.
        is_view: its results are views.
        is_mutable: it writes arguments.
        needs_values: of its tensors, for its results or their shapes.
        relabels: it changes how a tensor lies over memory, and no byte of that.
        is_direct: its results come from torch's shape function at once.
        is_notable: its results may be noted.
        notes: by what results follow from.
    """

    operator: Any
    is_view: bool
    is_mutable: bool
    needs_values: bool
    relabels: bool
    is_direct: bool
    is_notable: bool
    notes: dict[Any, _Note]


def _kind_of(func: Any) -> Kind:
    needs_values = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    relabels = only_relabels(func)
    writes_out = any(argument.is_out for argument in func._schema.arguments)
    return Kind(
        operator=func,
        is_view=func.is_view,
        is_mutable=func._schema.is_mutable,
        needs_values=needs_values,
        relabels=relabels,
        is_direct=func.is_view or func in _DIRECT,
        is_notable=func.namespace in _NAMESPACES and not (needs_values or relabels or writes_out),
        notes={},
    )


@dataclass(frozen=True, slots=True)
class _Result:
    """A result: argument `same` itself.

    Or else a tensor over the storage of argument `viewed`, or over a new one.
    """

    same: int = -1
    viewed: int = -1
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = _META


@dataclass(frozen=True, slots=True)
class _Output:
    """Output of an operation: results or plain values, one or (in a container of this type)
    several.
    """

    results: tuple[Any, ...]
    container: Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class _Note:
    """Output of an operation, and its facts."""

    output: _Output
    facts: Facts


class ResultsOfProcess:
    """Outputs of operations that earlier profiles of this process have met.

    Memory: about 2 KiB an operation; the older half goes where there are too many.

    Args:
        most: operations to keep.
    """

    def __init__(self, most: int = _MOST_RESULTS) -> None:
        self._most = most
        # With the operator, which keeps the `id` in the key from being another's.
        self._outputs: dict[Any, tuple[Any, _Output]] = {}

    def __len__(self) -> int:
        return len(self._outputs)

    def get(self, settings: Any, func: Any, key: Any) -> _Output | None:
        """The output of an operation, if it was met under these settings of torch."""
        found = self._outputs.get((settings, id(func), key))
        return None if found is None else found[1]

    def add(self, settings: Any, func: Any, key: Any, output: _Output) -> None:
        """Keeps an output. Plain values are left out: they may follow from more than the key."""
        if not all(type(one) is _Result or one is None for one in output.results):
            return
        if len(self._outputs) >= self._most:
            for old in list(islice(self._outputs, self._most // 2)):
                self._outputs.pop(old, None)  # another thread that plans may have been first
        self._outputs[settings, id(func), key] = (func, output)


_RESULTS = ResultsOfProcess()


def _settings() -> tuple[bool, ...]:
    """Settings of torch that the shape functions of operations ask for, beside arguments."""
    return (
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cudnn_benchmark(),
        torch.are_deterministic_algorithms_enabled(),
    )


class KnownOperations:
    """Runs operations on fake tensors, each kind once. See [Note: known operations].

    Args:
        workspaces: what operations take inside themselves.
        results: from earlier profiles.
    """

    def __init__(self, workspaces: Workspaces, results: ResultsOfProcess = _RESULTS) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Torch's own table of results costs more than it saves here, is never emptied, and would
        # grow with each shape.
        self.mode.cache_enabled = False
        self._workspaces = workspaces
        self._results = results
        self._settings = _settings()
        self._kinds: dict[int, Kind] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def kind(self, func: Any) -> Kind:
        """The kind of an operator. By its `id`: operators compute their hash in Python."""
        kind = self._kinds.get(id(func))
        if kind is None:
            kind = self._kinds[id(func)] = _kind_of(func)
        return kind

    def key(self, kind: Kind, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]) -> Any:
        """Key from which the results of an operation follow; None where they are not to be noted.

        Args:
            kind: of the operator.
            args: its positional arguments.
            kwargs: the others.
            tensors: to which the tensors among them are added.
        """
        if not kind.is_notable:
            tensors += operator_tensors((args, kwargs))
            return None
        parts: list[Any] = [torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        is_known = _describe(args, parts, tensors)
        if kwargs:
            parts += kwargs
            is_known &= _describe(kwargs.values(), parts, tensors)
        if not is_known:
            return None
        others = sum(type(one) is not FakeTensor or one.constant is not None for one in tensors)
        if others and (others == len(tensors) or kind.is_mutable) and not _is_empty_lift(kind, tensors):
            # torch computes with the values of constants, and forgets those that are written
            return None
        return tuple(parts)

    def run(
        self, kind: Kind, key: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[Any, Facts]:
        """Results and facts of an operation; call it below the recorder, in this object's mode.

        Args:
            kind: of the operator.
            key: from `key`.
            args: its positional arguments.
            kwargs: the others.
            tensors: among them.
        """
        note = kind.notes.get(key) if key is not None else None
        if note is not None:
            return self._made(note.output, tensors), note.facts
        func = kind.operator
        output = self._results.get(self._settings, func, key) if key is not None else None
        if output is not None:
            out = self._made(output, tensors)
        else:
            out = self._direct(kind, args, kwargs, tensors) if key is not None and kind.is_direct else None
            if out is None:
                out = run_operation(func, args, kwargs, is_fake=True)
        facts = facts_of(func, args, kwargs, tensors, out, self._workspaces)
        if output is None and key is not None:
            output = self._checked_output(tensors, out)
            if output is not None:
                self._results.add(self._settings, func, key, output)
        if output is not None:
            kind.notes[key] = _Note(output, facts)
        return out, facts

    def _direct(self, kind: Kind, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Results of an operation from torch's shape function alone; None where there is none, or
        where the results follow from more: tensors of several devices or dtypes.
        """
        fakes = [one for one in tensors if type(one) is FakeTensor]
        if len(fakes) < len(tensors) or len({(one.fake_device, one.dtype) for one in fakes}) != 1:
            return None
        try:
            with in_kernel_invocation_manager(self.mode):
                out = kind.operator(*args, **kwargs)
        except NotImplementedError:
            return None
        outs = out if isinstance(out, tuple | list) else (out,)
        if not all(type(one) is torch.Tensor for one in outs):
            return None
        made = [FakeTensor(self.mode, one, fakes[0].fake_device) for one in outs]
        return type(out)(made) if isinstance(out, tuple | list) else made[0]

    def facts(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor], out: Any
    ) -> Facts:
        """Facts of an operation that had its results from elsewhere."""
        return facts_of(func, args, kwargs, tensors, out, self._workspaces)

    def like(self, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> FakeTensor:
        """A leaf of the same shape, strides, dtype and `requires_grad`, without data.

        A parameter of a parameter.

        Args:
            tensor: its data is never read: its storage may be empty.
            device: stands in for `meta`; other devices are kept.
            dtype: another one.
        """
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        target = device if tensor.device.type == "meta" else tensor.device
        is_parameter, requires_grad = isinstance(tensor, nn.Parameter), tensor.requires_grad
        with torch._C._DisableTorchDispatch():
            bare = torch.empty_strided(shape, stride, dtype=dtype or tensor.dtype, device=_META)
        return FakeTensor(self.mode, bare, target, requires_grad=requires_grad, _is_param=is_parameter)

    def over(self, storage: torch.UntypedStorage, tensor: FakeTensor) -> FakeTensor:
        """A tensor as this one, over another storage."""
        result = _Result(
            viewed=0,
            shape=tensor.shape,
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            device=tensor.fake_device,
        )
        made: Any = self._tensor(result, storage)
        made.__dict__.update(vars(tensor))  # what the program, and who follows values, hung on it
        if tensor.is_conj():
            torch._C._set_conj(made, True)  # noqa: FBT003, torch's own signature
        if tensor.is_neg():
            torch._C._set_neg(made, True)  # noqa: FBT003, torch's own signature
        return made

    # -- notes ----------

    def _checked_output(self, tensors: Sequence[torch.Tensor], out: Any) -> _Output | None:
        """Output of an operation, from which it can be made again; None where it cannot."""
        container = type(out) if type(out) in (tuple, list) else None
        outs = out if container is not None else (out,)
        results = tuple(_result(one, tensors) for one in outs)
        made = {one.untyped_storage()._cdata for one in outs if isinstance(one, torch.Tensor)}
        is_apart = len(made) == sum(isinstance(one, torch.Tensor) for one in outs)
        if any(
            one is _UNKNOWN or (isinstance(one, _Result) and one.same == one.viewed == -1 and not is_apart)
            for one in results
        ):
            return None
        output = _Output(results, container)
        again = self._made(output, tensors)
        return output if all(map(_is_alike, again if container is not None else (again,), outs)) else None

    def _made(self, output: _Output, tensors: Sequence[torch.Tensor]) -> Any:
        made = [self._one(result, tensors) for result in output.results]
        return made[0] if output.container is None else output.container(made)

    def _one(self, result: Any, tensors: Sequence[torch.Tensor]) -> Any:
        if type(result) is not _Result:
            return result
        if result.same >= 0:
            return tensors[result.same]
        return self._tensor(result, tensors[result.viewed].untyped_storage() if result.viewed >= 0 else None)

    def _tensor(self, result: _Result, storage: torch.UntypedStorage | None) -> FakeTensor:
        # Until it is deleted, as in a `with` block, whose entry and exit take five times as long.
        undispatched = torch._C._DisableTorchDispatch()
        try:
            if storage is not None:
                bare = torch.empty(0, dtype=result.dtype, device=_META)
                bare.set_(storage, result.offset, result.shape, result.stride)
            else:
                bare = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device=_META)
            # As FakeTensor's own constructor does it, which takes longer than the rest together.
            made: Any = torch.Tensor._make_subclass(
                FakeTensor, bare, require_grad=False, dispatch_device=True, device_for_backend_keys=result.device
            )
        finally:
            del undispatched
        torch._C._set_throw_on_mutable_data_ptr(made)
        attributes = self._attributes.get(result.device)
        if attributes is None:
            attributes = self._attributes[result.device] = dict(vars(FakeTensor(self.mode, bare, result.device)))
        made.__dict__.update(attributes)
        return made


_UNKNOWN = object()


def _result(out: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Note of one result; `_UNKNOWN` where nothing can be."""
    if out is None or type(out) in (bool, int):
        return out
    if type(out) is not FakeTensor or (out.constant is not None and out.numel()) or out.layout is not torch.strided:
        return _UNKNOWN
    same = next((i for i, tensor in enumerate(tensors) if tensor is out), -1)
    if same >= 0:
        return _Result(same=same)
    storage = out.untyped_storage()._cdata
    viewed = [i for i, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage]
    if len(viewed) > 1 or (viewed and len(tensors) > 1):
        return _UNKNOWN
    return _Result(
        viewed=viewed[0] if viewed else -1,
        shape=tuple(out.shape),
        stride=tuple(out.stride()),
        offset=int(out.storage_offset()),
        dtype=out.dtype,
        device=out.fake_device,
    )


def _is_alike(made: Any, out: Any) -> bool:
    """Says whether a result made from a note is the one that torch gave."""
    if not isinstance(out, torch.Tensor) or made is out:
        return made is out or (type(made) is type(out) and made == out)
    return _state_of(made) == _state_of(out)


def _state_of(tensor: Any) -> tuple[Any, ...]:
    return (
        tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.fake_device, tensor.untyped_storage().nbytes(),
        tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg(), torch._C._dispatch_key_set(tensor),
    )  # fmt: skip


def _describe(values: Iterable[Any], parts: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Adds arguments to a key, numbers with their types: 1, 1.0 and True are equal and give other
    dtypes.

    Adds the tensors among them to `tensors`.

    Returns:
        False where one is not known.
    """
    is_known = True
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            again = -1
            for index, one in enumerate(tensors):
                if one is value:
                    again = index
                    break
            tensors.append(value)
            if again >= 0:
                parts += (FakeTensor, again)
                continue
            parts += (
                value.dtype,
                value.shape,
                value.stride(),
                value.storage_offset(),
                value.untyped_storage().nbytes(),
                value._fake_device,
                value.requires_grad,
                value.is_inference(),
                value.is_conj(),
                value.is_neg(),
            )
        elif kind in _PLAIN:
            parts += (kind, value)
        elif kind is list or kind is tuple or kind is torch.Size:
            parts += (kind, len(value))
            is_known &= _describe(value, parts, tensors)
        elif kind is torch.Tensor and not value.numel():
            # Of an empty tensor that the program made there are no values to follow.
            tensors.append(value)
            parts += (kind, value.dtype, value.shape, value.stride(), value.device, value.untyped_storage().nbytes())
        else:
            tensors += operator_tensors(value)
            is_known = False
    return is_known


def _is_empty_lift(kind: Kind, tensors: Sequence[torch.Tensor]) -> bool:
    """An empty tensor that the program made becomes one without data."""
    return kind.operator is aten.lift_fresh.default and type(tensors[0]) is torch.Tensor
