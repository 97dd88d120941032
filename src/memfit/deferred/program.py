"""The program that makes weights: operations noted while a model was built, played again for one
weight at a time.

In: operations on deferred tensors, in their order. Out: the values of any deferred storage.

[Note: played again]
Building a model runs operations on tensors; those that make or change deferred ones are noted
instead of run. What a storage holds in the end depends on few of them: walking back from the end,
an operation counts if it writes a storage that is still asked for; what it reads is then asked for
as well, and what it makes or overwrites whole is not asked for any more (liveness analysis, at the
grain of storages). Playing these, in their order, with the random generator in the state it had,
gives the bits that plain building gives: they are the same operations on tensors of the same
shapes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memfit.core.errors import UsageError
from memfit.tensors.trees import new_storage, typed_view


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
