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
(`skip_draw`). Others are also done once, on memory of their own that is dropped at once.
"""

from __future__ import annotations

import ctypes
import functools
import heapq
import math
import mmap
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit import devices
from memfit.core.errors import UnsupportedError, UsageError
from memfit.core.limits import round_up
from memfit.tensors.random_streams import skipped
from memfit.tensors.trees import new_storage, typed_view

# The program that makes weights: operations noted while a model was built, played again for one
# weight at a time.
#
# In: operations on deferred tensors, in their order. Out: the values of any deferred storage.
#
# [Note: played again]
# Building a model runs operations on tensors; those that make or change deferred ones are noted
# instead of run. What a storage holds in the end depends on few of them: walking back from the end,
# an operation counts if it writes a storage that is still asked for; what it reads is then asked
# for as well, and what it makes or overwrites whole is not asked for any more (liveness analysis,
# at the grain of storages). Playing these, in their order, with the random generator in the state
# it had, gives the bits that plain building gives: they are the same operations on tensors of the
# same shapes.


@dataclass(frozen=True, kw_only=True)
class RegionPlace:
    """A tensor as a view of a deferred storage: `offset` in elements."""

    key: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, key: int, tensor: torch.Tensor) -> RegionPlace:
        """Where a tensor lies in its storage."""
        return cls(
            key=key,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, in a storage that has its bytes."""
        return typed_view(storage, self.offset * self.dtype.itemsize, self.dtype, self.shape, self.stride)


@dataclass(frozen=True, kw_only=True)
class TensorRegion:
    """A deferred storage's size and device."""

    nbytes: int
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class RecordedOperation:
    """One noted operation.

    Attributes:
        function: what to call.
        args: with `RegionPlace` where a deferred tensor stood; other tensors are copies.
        kwargs: the same.
        reads: keys whose earlier contents matter.
        writes: keys that it changes.
        overwrites: those of `writes` that it changes whole.
        makes: places of the new tensors that it returns, in order; None for outputs that are not
            new.
        generator: the random generator it draws from; None: it draws nothing.
        state: of the generator before it; None where nothing was drawn.
        serial: how many operations were noted before it.
        default_dtype: torch's at that time.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    makes: tuple[RegionPlace | None, ...]
    generator: torch.Generator | None
    state: torch.Tensor | None
    serial: int
    default_dtype: torch.dtype

    @property
    def made(self) -> frozenset[int]:
        """Keys of the storages that it makes."""
        return frozenset(place.key for place in self.makes if place is not None)

    def run(self, get: Callable[[RegionPlace], torch.Tensor], *, may_invent: bool) -> list[torch.Tensor]:
        """Calls the function on real tensors; its tensor outputs in order.

        Args:
            get: gives a tensor at a place.
            may_invent: where nothing was drawn, other random numbers do, the same at every call.

        Raises:
            UsageError: it draws random numbers, and the model was built without drawing.
        """
        args, kwargs = tree_map_only(RegionPlace, get, (self.args, dict(self.kwargs)))
        with torch.no_grad(), _default_dtype(self.default_dtype):
            if self.generator is None:
                return flat_outputs(self.function(*args, **kwargs))
            if self.state is None and not may_invent:
                raise UsageError(
                    "the model was built by memfit.empty(..., initialises=False), so its weights have no values of their own: give "
                    "memfit.fit(weights=directory), or build it with memfit.empty(...)"
                )
            invented = torch.Generator(self.generator.device).manual_seed(self.serial)
            with _generator_at(self.generator, invented.get_state() if self.state is None else self.state):
                return flat_outputs(self.function(*args, **kwargs))


class Program:
    """All operations noted, in order.

    Memory: an operation takes about a kilobyte, one that draws random numbers 5 KiB more (the state
    of the generator); copies of small tensors that were arguments.
    """

    def __init__(self) -> None:
        self.regions: dict[int, TensorRegion] = {}
        self._operations: list[RecordedOperation] = []
        self._writers: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._operations)

    def note(self, operation: RecordedOperation) -> None:
        """Adds an operation at the end."""
        index = len(self._operations)
        self._operations.append(operation)
        for key in operation.writes | operation.made:
            self._writers.setdefault(key, []).append(index)

    def keep(self, keys: Collection[int]) -> None:
        """Forgets every operation that these storages do not depend on."""
        needed = sorted({index for key in keys for index in self._needed([key])})
        operations = [self._operations[index] for index in needed]
        self._operations, self._writers = [], {}
        for operation in operations:
            self.note(operation)
        used = set(keys)
        for operation in operations:
            used |= operation.reads | operation.writes | operation.made
        self.regions = {key: region for key, region in self.regions.items() if key in used}

    def values(self, keys: Sequence[int], *, may_invent: bool = False) -> dict[int, torch.UntypedStorage]:
        """The storages as the program leaves them.

        Memory: these storages, and while it runs what they are computed from; each is given up
        after its last use.

        Args:
            keys: of the storages.
            may_invent: see `RecordedOperation.run`.

        Raises:
            UsageError: random numbers are needed and none were drawn.
        """
        indices = self._needed(keys)
        last: dict[int, int] = {}
        for index in indices:
            operation = self._operations[index]
            for key in operation.reads | operation.writes | operation.made:
                last[key] = index
        storages: dict[int, torch.UntypedStorage] = {}

        def get(place: RegionPlace) -> torch.Tensor:
            if place.key not in storages:
                storages[place.key] = self.blank(place.key)
            return place.view(storages[place.key])

        for index in indices:
            operation = self._operations[index]
            outputs = operation.run(get, may_invent=may_invent)
            storages.update(self._laid_out(operation, outputs))
            del outputs
            for key in [key for key in storages if last[key] == index and key not in keys]:
                del storages[key]
        for key in keys:
            if key not in storages:
                storages[key] = self.blank(key)
        return {key: storages[key] for key in keys}

    def blank(self, key: int) -> torch.UntypedStorage:
        """Memory of a storage's size, uninitialised."""
        region = self.regions[key]
        return new_storage(region.nbytes, region.device)

    def _laid_out(
        self, operation: RecordedOperation, outputs: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """(key, storage) of what an operation made, in the layout that was foreseen."""
        for place, output in zip(operation.makes, outputs, strict=True):
            if place is None:
                continue
            storage = output.untyped_storage()
            if RegionPlace.of(place.key, output) != place or storage.nbytes() != self.regions[place.key].nbytes:
                storage = self.blank(place.key)
                place.view(storage).copy_(output)
            yield place.key, storage

    def _needed(self, keys: Collection[int]) -> list[int]:
        """Indices of the operations that these storages depend on, in order.

        See [Note: played again].
        """
        live: set[int] = set()
        heap: list[int] = []

        def ask(key: int, before: int) -> None:
            live.add(key)
            writers = self._writers.get(key, [])
            position = bisect_left(writers, before) - 1
            if position >= 0:
                heapq.heappush(heap, -writers[position])

        for key in keys:
            ask(key, len(self._operations))
        chosen: list[int] = []
        while heap:
            index = -heapq.heappop(heap)
            if chosen and chosen[-1] == index:
                continue
            operation = self._operations[index]
            touched = (operation.writes | operation.made) & live
            if not touched:
                continue
            chosen.append(index)
            replaced = operation.overwrites | operation.made
            live -= replaced
            for key in (touched - replaced) | operation.reads:
                ask(key, index)
        return chosen[::-1]


def flat_outputs(value: Any) -> list[torch.Tensor]:
    """Tensors that an operation returned, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, list | tuple) else []


@contextmanager
def _generator_at(generator: torch.Generator, state: torch.Tensor) -> Iterator[None]:
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Skips large draws of random numbers, in no time and no memory.
#
# In: an operation that fills a tensor with random numbers, and its generator. Out: the generator as
# the operation would leave it.
#
# [Note: words of a draw]
# On a processor `uniform_` takes a word of 32 bits for each number, two for fp64, in the order of
# the elements. `normal_` makes sixteen numbers of sixteen uniform ones where a tensor is
# contiguous; where sixteen does not divide the elements, it makes the last sixteen a second time,
# or in 16 bits as many as are missing (aten/src/ATen/native/cpu/DistributionTemplates.h,
# `normal_fill`). Which of these rules this build of torch follows is tried on smaller tensors, with
# the same dtype and arguments; a draw that follows none of them is not skipped.

_GROUP = 16
# Words by elements.
_RULES: tuple[Callable[[int], int], ...] = (
    lambda elements: elements,
    lambda elements: 2 * elements,
    lambda elements: elements + (_GROUP if elements % _GROUP else 0),
    lambda elements: 2 * (elements + (_GROUP if elements % _GROUP else 0)),
    lambda elements: -(-elements // _GROUP) * _GROUP,
)
# Smaller draws take no longer than to skip them.
_LEAST_ELEMENTS = 1 << 19
_TRIED_ELEMENTS = (1 << 16, (1 << 16) + 1, (1 << 16) + 15, (1 << 16) + 24)

_aten = torch.ops.aten
_FACTORIES = (_aten.rand, _aten.randn)
_DRAWS = (_aten.uniform_, _aten.normal_, *_FACTORIES)


def skip_draw(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], generator: torch.Generator) -> bool:
    """Brings a generator to where an operation on a large tensor leaves it.

    Args:
        func: an operation.
        args: its positional arguments.
        kwargs: the others.
        generator: that it draws from.

    Returns:
        True if it did; False if the operation must be run for that.
    """
    packet = func.overloadpacket
    if generator.device.type != "cpu" or packet not in _DRAWS or not args:
        return False
    named = {name: value for name, value in kwargs.items() if name != "generator"}
    if packet in _FACTORIES:
        elements, dtype = math.prod(args[0]), named.get("dtype") or torch.get_default_dtype()
    elif args[0].is_contiguous():  # others are filled number by number, with halves of pairs kept
        elements, dtype = args[0].numel(), args[0].dtype
    else:
        return False
    if elements < _LEAST_ELEMENTS:
        return False
    rule = _rule(func, dtype, args[1:], tuple(named.items()))
    if rule is None:
        return False
    generator.set_state(skipped(generator.get_state(), rule(elements)))
    return True


@functools.lru_cache(maxsize=256)
def _rule(
    func: Any, dtype: torch.dtype, rest: tuple[Any, ...], named: tuple[tuple[str, Any], ...]
) -> Callable[[int], int] | None:
    """Words by elements of an operation; None where no known rule tells them."""
    states: list[tuple[int, torch.Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    for elements in _TRIED_ELEMENTS:
        states.append((elements, generator.get_state()))
        first = [elements] if func.overloadpacket in _FACTORIES else torch.empty(elements, dtype=dtype)
        func.overloadpacket(first, *rest, **{**dict(named), "generator": generator})
    after = [state for _, state in states[1:]] + [generator.get_state()]
    for rule in _RULES:
        if all(
            torch.equal(skipped(state, rule(elements)), left)
            for (elements, state), left in zip(states, after, strict=True)
        ):
            return rule
    return None


LEAST_BYTES = 64 << 10

_libc = ctypes.CDLL(None)
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
