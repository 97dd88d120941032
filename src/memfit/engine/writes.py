"""Which memory the operations of a forward write.

In: storages that somebody counts on. Out: whether an operation has written them since, through
whatever tensor.

[Note: writes are known by storage]
Autograd counts changes in place in a version that a tensor shares with its views. Not every tensor
over a storage is such a view: results of `_unsafe_view` (a batched `matmul` ends in one),
`unsafe_chunk` and `.data` have counters of their own, `set_` and custom operators make tensors over
a storage that has some already. A change through one of them is not seen in the version of another.
So a dispatch mode watches the forward, in calls and between them, and notes for each storage of
interest which elements an operation writes; the operator's schema says which arguments that are.
Versions are still asked: they know of changes made under compiled code, where no mode looks.

A tensor that autograd saved, or that a call was given, is refused when its own elements were
written later: plain PyTorch either raises there, or (through a counter that is not the tensor's)
goes on with the changed values, which the plan has no longer or should not have. Other elements of
its storage may change: cells of recurrent layers work in place on the chunks of one product.

Not seen: writes that pass the dispatcher by (NumPy arrays over the same memory, kernels that are
handed addresses).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.core.operators import has_schema, only_relabels, written_arguments
from memfit.tensors.write_marks import address_of

# Dispatch modes that run beside the user's operations, as cheaply as Python can.
#
# In: a class with `__torch_dispatch__`. Out: the same, never compiled.
#
# [Note: modes and the compiler]
# torch wraps the method of each dispatch mode so that torch.compile does not trace it; the wrapper
# takes two thirds of what a mode costs an operation (15 of 23 us). Here the method's code object
# says the same to the compiler once: the frame and all that it calls run as they are, also where
# compiled code calls an operation.


class OperationMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` is not wrapped. See [Note: modes and the compiler]."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # The frame itself, and whatever it calls.
        skipped = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(cls.__torch_dispatch__.__code__, skipped)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper is left out


# Small things that all of saving needs to know about a tensor.
#
# In: a tensor. Out: its storage if it is an ordinary one, its version, a view of given geometry
# over a storage.

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue] (not in torch's stubs)

TRY_ANOTHER_POLICY = "plan saved='keep' or 'offload' for this call"
"""How messages end that tell why a call cannot be run again."""


class AstrayError(BaseException):
    """The second run of a call does something else.

    No `Exception`, so that the user's code does not catch it.
    """


NO_VERSION = -1
"""Tensors made in inference mode have no version counter."""


Stays = Callable[[torch.UntypedStorage], bool]
"""True for storages that are there anyway (weights, buffers, the batch).

Holding them costs nothing, so they are never moved or remade.
"""


ORDINARY: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors whose bytes are one range of their storage."""


def plain_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of an ordinary dense tensor.

    None for subclasses, sparse and functorch tensors, whose bytes are not one range.
    """
    if type(tensor) not in ORDINARY or tensor.layout is not torch.strided:
        return None
    if _functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage()


def sample_of(tensor: torch.Tensor) -> bytes | None:
    """The bits of four elements: the first, the last, and two between.

    None where they are not in this process's memory.

    Time: some microseconds. Read by address, because an operation of torch would be seen by modes
    and autograd.
    """
    storage = plain_storage(tensor)
    if storage is None or tensor.device.type != "cpu" or not tensor.numel() or not storage.nbytes():
        return None
    width, begin = tensor.element_size(), address_of(tensor)
    dims = list(zip(tensor.shape, tensor.stride(), strict=True))
    places = (sum((size - 1) * part // 3 * stride for size, stride in dims) for part in range(4))
    return b"".join(ctypes.string_at(begin + place * width, width) for place in places)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor that has one; subclasses that only wear another type have it too."""
    if tensor.layout is not torch.strided or _functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return tensor.untyped_storage()


def version_of(tensor: torch.Tensor) -> int:
    """How often it (with all its views) was changed in place."""
    return NO_VERSION if tensor.is_inference() else tensor._version


def check_unchanged(tensor: torch.Tensor, version: int, place: str) -> None:
    """The check that autograd makes for tensors it saves itself, and leaves to the hooks where
    there are some.

    Raises:
        RuntimeError: as plain PyTorch would.
    """
    if version_of(tensor) != version:
        raise_changed(tuple(tensor.shape), tensor.dtype, version, version_of(tensor), place)


def raise_changed(shape: tuple[int, ...], dtype: torch.dtype, version: int, now: int, place: str) -> None:
    """Raises what autograd would raise for a saved tensor that was changed in place."""
    raise RuntimeError(
        f"a tensor saved for backward in {place} has been modified by an inplace operation: {dtype} {list(shape)} is "
        f"at version {now}, expected version {version}. Change a copy (tensor.clone()), as for plain PyTorch, which refuses it too; "
        "torch.autograd.set_detect_anomaly(True) finds the operation."
    )


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of a dense tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this geometry over a storage, without a graph."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Elements in a storage, in bytes.

    Attributes:
        begin: of the first.
        dims: (stride, size) of dimensions with more than one place, longest stride first.
        width: of one element.
    """

    begin: int
    dims: tuple[tuple[int, int], ...]
    width: int

    @classmethod
    def of(cls, geometry: Geometry) -> ByteRange | None:
        """The elements of a tensor; None if it has none."""
        if 0 in geometry.shape:
            return None
        width = geometry.dtype.itemsize
        dims = [(stride * width, size) for stride, size in zip(geometry.stride, geometry.shape, strict=True)]
        placed = sorted((dim for dim in dims if dim[0] and dim[1] > 1), reverse=True)
        return cls(geometry.offset * width, tuple(placed), width)

    @property
    def end(self) -> int:
        """Behind the last."""
        return self.begin + sum(stride * (size - 1) for stride, size in self.dims) + self.width

    def overlaps(self, other: ByteRange) -> bool:
        """Tells whether they have an element in common.

        May be True where they only interlock in some irregular way.
        """
        if self.end <= other.begin or other.end <= self.begin:
            return False
        period = max((dims[0][0] for dims in (self.dims, other.dims) if dims), default=0)
        if not period:
            return True
        # Rows of one matrix: two ranges of columns do not meet.
        inner, others = self._within(period), other._within(period)
        if inner.end > period or others.end > period:
            return True
        return inner.overlaps(others)

    def _within(self, period: int) -> ByteRange:
        dims = self.dims[1:] if self.dims and self.dims[0][0] == period else self.dims
        return ByteRange(self.begin % period, dims, self.width)


class Written:
    """Record of writes to one storage since somebody first asked for this object, which must
    be held to go on.
    """

    __slots__ = ("__weakref__", "_identity", "_log")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        # Pins the address of the storage object (not its bytes): no later storage can be taken for
        # this one.
        self._identity = StorageWeakRef(storage)
        self._log: list[tuple[ByteRange, bool]] = []

    def mark(self) -> int:
        """Now, for `since`."""
        return len(self._log)

    def note(self, extent: ByteRange, *, is_certain: bool) -> None:
        """These elements were written, or may have been."""
        self._log.append((extent, is_certain))

    def since(self, mark: int, extent: ByteRange | None = None, *, doubts: bool = False) -> bool:
        """Tells whether something has been written since a mark.

        Args:
            mark: see `mark`.
            extent: elements that matter; None: all.
            doubts: also where an operator does not say what it writes.
        """
        return any(
            (certain or doubts) and (extent is None or extent.overlaps(found)) for found, certain in self._log[mark:]
        )


@dataclass(frozen=True, slots=True)
class Watched:
    """Elements of a storage from a moment on."""

    written: Written
    mark: int
    extent: ByteRange | None

    @property
    def has_changed(self) -> bool:
        """An operation of the forward wrote some of them since."""
        return self.extent is not None and self.written.since(self.mark, self.extent)

    def check_saved(self, place: str) -> None:
        """Raises RuntimeError, as plain PyTorch would where it sees it, if they were written after
        autograd saved them.

        Args:
            place: the site, for messages.
        """
        if self.has_changed:
            raise RuntimeError(
                f"a tensor saved for backward in {place} has been modified by an inplace operation: change a copy (tensor.clone()). Where plain PyTorch goes on "
                "with the changed values (.data, unsafe_chunk: views with a version counter of their own), plan saved='keep' for this call"
            )


class Writes:
    """All writes of a job's forwards to storages of interest.

    Memory: a small object for each storage that somebody asks about.

    Attributes:
        last_operation: name of the latest operation; when autograd saves a result, the one that
            made it.
    """

    def __init__(self) -> None:
        self._written: weakref.WeakValueDictionary[int, Written] = weakref.WeakValueDictionary()
        self.last_operation = ""

    def of(self, storage: torch.UntypedStorage) -> Written:
        """Notes on one storage."""
        found = self._written.get(storage._cdata)
        if found is None:
            found = self._written[storage._cdata] = Written(storage)
        return found

    def watch(self, tensor: torch.Tensor) -> Watched | None:
        """The elements of a tensor from now on; None for one that is no range of memory."""
        storage = plain_storage(tensor)
        if storage is None:
            return None
        written = self.of(storage)
        return Watched(written, written.mark(), ByteRange.of(Geometry.of(tensor)))

    def note(self, value: Any, *, is_certain: bool) -> None:
        """An operation writes a tensor, or each of a list."""
        if isinstance(value, torch.Tensor):
            storage = storage_of(value)
            found = None if storage is None else self._written.get(storage._cdata)
            if found is not None and (extent := ByteRange.of(Geometry.of(value))) is not None:
                found.note(extent, is_certain=is_certain)
        elif isinstance(value, list | tuple):
            for item in value:
                self.note(item, is_certain=is_certain)
        elif isinstance(value, dict):
            for item in value.values():
                self.note(item, is_certain=is_certain)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes what operations write inside. Time: some microseconds an operation.

        Compiled code stays compiled inside, because nobody tells torch.compile of the mode: it is
        pushed past `__enter__`.
        """
        mode = _Watch(self)
        _python_dispatch._push_mode(mode)
        try:
            yield
        finally:
            popped = _python_dispatch._pop_mode()
            assert popped is mode, "the user's code has left a dispatch mode behind"


class _Watch(OperationMode):
    supports_higher_order_operators = True

    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self._writes = writes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not are_plain(types):
            return NotImplemented  # what the subclass does inside comes here, too
        kwargs = kwargs or {}
        self._writes.last_operation = func.name()
        if has_schema(func):
            if (values := written_arguments(func, args, kwargs)) and not only_relabels(func):
                self._writes.note(values, is_certain=True)
        else:
            self._writes.note([args, kwargs], is_certain="mutation" in func.name())
        return func(*args, **kwargs)


_NO_OPERATIONS: Any = getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009 (pyright would bind it)


@cache
def are_plain(types: tuple[type, ...]) -> bool:
    """Tells whether tensors of these types have no operations of their own, below autograd."""
    return all(getattr(kind, "__torch_dispatch__", None) is _NO_OPERATIONS for kind in types)


# Which tensors the operations of a call read.
#
# In: storages of interest. Out: those that an operation was given.
#
# [Note: what a call does not read]
# A key-value cache hands the keys and values of all earlier layers to each layer, which looks at
# its own only. Holding what such an object contains would keep every layer's keys and values until
# backward (measured on a six-layer GPT-2 with its default `use_cache=True`: 16 hidden states held
# where 6 are needed). So while a call runs that got an object with tensors inside, a dispatch mode
# notes which of them are read; the others are not held, and stand-ins with their shapes, but no
# values, take their places when the call runs again. A second run that does read one is refused.


class ReadWatcher(OperationMode):
    """Tells of every operation that is given a tensor over one of some storages.

    Time: a few microseconds an operation.

    Args:
        storages: of interest, by the address of the storage object; they must stay alive.
        tell: is given that address.
    """

    def __init__(self, storages: Iterable[int], tell: Callable[[int], None]) -> None:
        super().__init__()
        self._storages = frozenset(storages)
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._look(args)
        self._look(kwargs.values())
        return func(*args, **kwargs)

    def _look(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = plain_storage(value)
                if storage is not None and storage._cdata in self._storages:
                    self._tell(storage._cdata)
            elif isinstance(value, list | tuple):
                self._look(value)


def is_compiled(module: torch.nn.Module) -> bool:
    """Tells whether the module or one inside has a compiled forward.

    Under a dispatch mode compiled code would run eagerly, with other roundings.
    """
    return any(
        getattr(inner, "_compiled_call_impl", None) is not None or hasattr(inner.forward, "_torchdynamo_orig_callable")
        for inner in module.modules()
    )
