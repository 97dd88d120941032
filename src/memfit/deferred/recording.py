"""Notes what building a model does to large tensors, instead of doing it.

In: the operations that run inside its `with`. Out: tensors whose pages were never touched, and the
program that makes their values.

[Note: deferred tensors]
A tensor of 64 KiB or more that is made from nothing but sizes (`torch.empty`, `randn`, `ones`, ...)
is deferred, and so is whatever is computed from one. It is an ordinary tensor of its device over
memory whose pages nobody touches, which costs address space and no memory; so views, devices,
strides, ties, `Parameter` and references to it work as always. On a GPU memory costs whether it is
touched or not: there its storage has no bytes, except for the moment in which a view is made, which
is checked against the storage's size. Operations on it run on `meta` twins, for shapes, and are
noted. Where the program must see values (`.item()`, an operation without shapes), they are computed
there and then. Small tensors, and large ones made of data, are ordinary.

[Note: draws]
What is drawn after an operation that draws random numbers must be what plain building draws, and
the generator must be left where plain building leaves it. A large draw is skipped in the generator
(`draws`). Others are also done once, on memory of their own that is dropped at once.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit import devices
from memfit.core.errors import UnsupportedError
from memfit.core.units import round_up
from memfit.deferred.draws import skip_draw
from memfit.deferred.program import Program, RecordedOperation, RegionPlace, TensorRegion, flat_outputs

LEAST_BYTES = 64 << 10

_libc = ctypes.CDLL(None)
_aten = torch.ops.aten
# Operations that give every element of their first argument a new value, whatever it was.
_FILLS = frozenset({
    _aten.normal_, _aten.uniform_, _aten.fill_, _aten.zero_, _aten.copy_, _aten.bernoulli_, _aten.random_, _aten.exponential_, _aten.cauchy_,
    _aten.log_normal_, _aten.geometric_,
})  # fmt: skip
# What a meta kernel raises where it is missing or needs values.
_META_FAILURES = (RuntimeError, NotImplementedError)


class BuildRecorder(TorchDispatchMode):
    """See the module's notes.

    Memory: the largest tensor whose random numbers are drawn and not skipped, for a moment; address
    space of all deferred tensors, on a GPU of one at a time.

    Args:
        draws: random numbers are drawn, so that generators end where plain building leaves them;
            without it weights have no values of their own.
        least_bytes: smaller tensors are ordinary.
    """

    def __init__(self, *, draws: bool, least_bytes: int = LEAST_BYTES) -> None:
        super().__init__()
        self.program = Program()
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._draws = draws
        self._least_bytes = least_bytes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation of the user's program, below autograd."""
        del types
        named = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
        if not any(self.key(tensor) is not None for tensor in tensors):
            is_large = not tensors and _makes_large(func, args, named, self._least_bytes)
            return self._defer(func, args, named) if is_large else func(*args, **named)
        if func.is_view or torch.Tag.inplace_view in func.tags:
            with self._sized(tensors):
                return func(*args, **named)  # describes, touches no byte
        written = _written(func, args, named)
        if any(self.key(tensor) is None for tensor in written):
            if any(self.key(tensor) is not None for tensor in written):
                raise UnsupportedError(f"{func} changes tensors with and without bytes at once: build the model whole")
            return self._run_on_values(func, args, named)
        try:
            return self._defer(func, args, named)
        except _META_FAILURES:
            if written:
                raise
            return self._run_on_values(func, args, named)

    def key(self, tensor: torch.Tensor) -> int | None:
        """The key of the deferred storage that a tensor lies in; None if it is ordinary."""
        key = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -1
        return key if key in self.storages else None

    def fill(self, key: int) -> None:
        """Computes what a deferred storage holds, and puts it there: it is ordinary from now on,
        and all that view it.
        """
        storage = self.storages[key]
        values = self._values(key)
        storage.resize_(values.nbytes())
        storage.copy_(values)
        del self.storages[key]

    @contextmanager
    def _sized(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Storages without bytes have their size meanwhile. See [Note: deferred tensors]."""
        keys = {key for tensor in tensors if (key := self.key(tensor)) is not None and not self.storages[key].nbytes()}
        for key in keys:
            self.storages[key].resize_(self.program.regions[key].nbytes)
        try:
            yield
        finally:
            for key in keys:
                self.storages[key].resize_(0)

    def _run_on_values(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._value, (args, dict(kwargs)))
        return func(*args, **kwargs)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        key = self.key(tensor)
        return tensor if key is None else RegionPlace.of(key, tensor).view(self._values(key))

    def _values(self, key: int) -> torch.UntypedStorage:
        # A program that looks at numbers it has drawn (to draw some again, say) must find some,
        # even where none count.
        return self.program.values([key], may_invent=not self._draws)[key]

    def _defer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = next((t.device for t in self._deferred(args, kwargs)), _device_of(kwargs))
        device = device if kwargs.get("device") is None else _device_of(kwargs)  # it is moved there
        outputs, originals = _on_meta(func, args, kwargs, self.key)
        made: list[RegionPlace | None] = []

        def wrap(output: torch.Tensor) -> torch.Tensor:
            original = originals.get(id(output))
            if original is not None:
                made.append(None)
                return original
            fresh = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=device)
            storage = fresh.untyped_storage()
            self.storages[storage._cdata] = storage
            self.program.regions[storage._cdata] = TensorRegion(nbytes=storage.nbytes(), device=device)
            made.append(RegionPlace.of(storage._cdata, fresh))
            _untouch(storage)
            return fresh

        written = _written(func, args, kwargs)
        writes = {self._known(t) for t in written}
        overwrites = {self._known(t) for t in written if func.overloadpacket in _FILLS and self._is_whole(t)}
        is_read = [t for t in self._deferred(args, kwargs) if not (overwrites and t is args[0])]
        reads = frozenset(self._known(t) for t in is_read)
        generator = _generator_of(kwargs, device) if torch.Tag.nondeterministic_seeded in func.tags else None
        state = self._draw(func, args, kwargs, generator, overwrites) if generator is not None else None
        result = tree_map_only(torch.Tensor, wrap, outputs)
        noted_args, noted_kwargs = tree_map_only(torch.Tensor, self._noted, (args, kwargs))
        self.program.note(
            RecordedOperation(
                function=func,
                args=noted_args,
                kwargs=noted_kwargs,
                reads=reads,
                writes=frozenset(writes),
                overwrites=frozenset(overwrites),
                makes=tuple(made),
                generator=generator,
                state=state,
                serial=len(self.program),
                default_dtype=torch.get_default_dtype(),
            )
        )
        return result

    def _draw(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        generator: torch.Generator,
        overwrites: set[int],
    ) -> torch.Tensor | None:
        """The generator's state, which is then as after the operation. See [Note: draws]."""
        if not self._draws:
            return None
        state = generator.get_state()
        if skip_draw(func, args, kwargs, generator):
            return state

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            key = self.key(tensor)
            if key in overwrites:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            return self._value(tensor)

        drawn_args, drawn_kwargs = tree_map_only(torch.Tensor, stand_in, (args, dict(kwargs)))
        func(*drawn_args, **drawn_kwargs)
        return state

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        """The tensor is all of its storage."""
        return tensor.numel() * tensor.element_size() == self.program.regions[self._known(tensor)].nbytes

    def _noted(self, tensor: torch.Tensor) -> RegionPlace | torch.Tensor:
        key = self.key(tensor)
        return tensor.detach().clone() if key is None else RegionPlace.of(key, tensor)

    def _known(self, tensor: torch.Tensor) -> int:
        key = self.key(tensor)
        assert key is not None
        return key

    def _deferred(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        for leaf in tree_leaves((args, dict(kwargs))):
            if isinstance(leaf, torch.Tensor) and self.key(leaf) is not None:
                yield leaf


def _untouch(storage: torch.UntypedStorage) -> None:
    """Gives the pages of new memory back: an allocator may have taken it from what others have
    freed, and used.

    On other devices, the bytes.
    """
    if storage.device.type != "cpu":
        storage.resize_(0)
        return
    first = round_up(storage.data_ptr(), mmap.PAGESIZE)
    length = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        # Advice: where the system declines, memory is used and nothing else changes.
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _makes_large(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], least_bytes: int) -> bool:
    """Tells whether an operation without tensors as arguments makes a large one."""
    if "device" not in {argument.name for argument in func._schema.arguments}:
        return False
    device = _device_of(kwargs)
    if device.type == "meta" or kwargs.get("layout") not in (None, torch.strided):
        return False
    try:
        outputs, _ = _on_meta(func, args, kwargs, lambda _: None)
    except _META_FAILURES:
        return False  # its size depends on values (`tril_indices`, say): small in every model
    return any(t.untyped_storage().nbytes() >= least_bytes for t in flat_outputs(outputs))


def _on_meta(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Callable[[torch.Tensor], int | None]
) -> tuple[Any, dict[int, torch.Tensor]]:
    """(the outputs on `meta`, the real argument by `id` of an output that is one)."""
    originals: dict[int, torch.Tensor] = {}
    # alive while outputs are made, so that no output has the `id` of one
    twins: list[torch.Tensor] = []

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 and tensor.device.type == "cpu" and key(tensor) is None:
            return tensor  # a number in a tensor may meet tensors of any device
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        originals[id(made)] = tensor
        twins.append(made)
        return made

    meta_args, meta_kwargs = tree_map_only(torch.Tensor, twin, (args, kwargs))
    if "device" in {argument.name for argument in func._schema.arguments}:
        meta_kwargs["device"] = torch.device("meta")
    meta_kwargs.pop("generator", None)
    meta_kwargs.pop("pin_memory", None)
    return func(*meta_args, **meta_kwargs), originals


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors that an operation changes, by its schema."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _device_of(kwargs: Mapping[str, Any]) -> torch.device:
    device = kwargs.get("device")
    return torch.device("cpu") if device is None else torch.device(device)


def _generator_of(kwargs: Mapping[str, Any], device: torch.device) -> torch.Generator:
    given = kwargs.get("generator")
    if given is not None:
        return given
    if devices.is_accelerator(device):
        return devices.of(device).default_generator(device)
    return torch.default_generator
