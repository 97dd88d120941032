"""The arguments of a call, held until it is run again.

In: args and kwargs at entry. Out: equal ones at recomputation, and the least memory in between.

[Note: stand-ins]
The call is run again on stand-ins: tensors over the same memory with the same shape, stride, dtype
and `requires_grad`, but without the graph behind the originals. The graph made by running again is
thrown away, so it needs no past; nothing is held that would keep an earlier part of the real graph
alive, and a hook that the call registers on an argument is not registered on the real one twice. A
stand-in for a non-leaf is a non-leaf, because changing a leaf that requires a gradient in place is
an error. Weights and other things that stay, and tensor subclasses, are passed as they are.
"""

from __future__ import annotations

import copy
import enum
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.errors import UnsupportedError
from memfit.core.tiers import Tier
from memfit.engine.offload import MovedStorage, Offloader
from memfit.engine.writes import (
    TRY_ANOTHER_POLICY,
    AstrayError,
    Geometry,
    ReadWatcher,
    Stays,
    Watched,
    Writes,
    plain_storage,
    version_of,
)
from memfit.tensors.write_marks import shares_elements

# Tensors inside whatever a call takes and gives, and how to make such a value again with others in
# their place.
#
# In: any nesting of containers, dataclasses and ordinary objects. Out: a copy of it in which every
# tensor was replaced.
#
# [Note: what a copy protects]
# A recomputed call must see its arguments as they were at entry. Containers and objects that hold
# tensors are often changed by the call itself (a key-value cache grows, a list collects auxiliary
# losses), and so would be changed twice. They are therefore copied on entry, shape by shape,
# sharing everything that is not a container, and the recomputed call gets a copy of its own. It
# also keeps reference counting whole: a cache that was passed in comes to hold tensors whose graph
# holds what recomputes them.

Replace = Callable[[Any], Any]

_ATOMS: frozenset[type] = frozenset({
    type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(...), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator,
})  # fmt: skip
_SHARED = (
    torch.nn.Module, torch.UntypedStorage, torch.TypedStorage, type, types.ModuleType, types.FunctionType,
    types.MethodType, types.BuiltinFunctionType, types.GeneratorType, enum.Enum,
)  # fmt: skip
"""Never copied: their identity is their meaning, or they are code."""


class Placeholder:
    """Stands where a tensor was."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def replace_tensors(value: Any, replace: Replace) -> Any:
    """Copies a nested value with `replace(tensor or slot)` for each tensor or slot in it.

    See [Note: what a copy protects]. Shared references and cycles are kept: an object that stands
    in two places is copied once, a tensor is replaced once. Objects that cannot be copied (locks,
    process groups) are shared, as they would be in a plain recomputation.
    """
    return _Copier(replace).copy(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested value, each object once, in the order in which `replace_tensors`
    meets them.
    """
    found: list[torch.Tensor] = []

    def note(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    replace_tensors(value, note)
    return found


def direct_tensors(value: Any) -> list[torch.Tensor]:
    """Tensors that stand in a value itself, or in lists, tuples and dictionaries inside it, but not
    in other objects.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in direct_tensors(item)]


class _Copier:
    def __init__(self, replace: Replace) -> None:
        self._replace = replace
        # By identity; the originals are held too, so that an address cannot come to stand for
        # another object.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS or isinstance(value, _SHARED):
            return value
        known = self._copies.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, torch.Tensor | Placeholder):
            return self._note(value, self._replace(value))
        if isinstance(value, tuple):
            return self._note(value, self._copy_tuple(value))
        if isinstance(value, list | dict | deque | set) or _attributes(value):
            return self._copy_in_place(value)
        return value

    def _note(self, value: Any, made: Any) -> Any:
        self._copies[id(value)] = (value, made)
        return made

    def _copy_tuple(self, value: tuple[Any, ...]) -> Any:
        items = [self.copy(item) for item in value]
        # a structseq, such as what torch.max returns: it takes one iterable
        if hasattr(value, "n_fields"):
            return type(value)(items)
        # Past the class's own __new__, whose arguments are its own business (named tuples, packed
        # sequences).
        return tuple.__new__(type(value), items)

    def _copy_in_place(self, value: Any) -> Any:
        try:
            made = copy.copy(value)
        except (TypeError, copy.Error):  # what cannot be copied is shared, see `replace_tensors`
            return self._note(value, value)
        if made is value:
            return self._note(value, value)
        self._note(value, made)  # before its parts, for cycles
        # The base classes' own setters: subclasses (transformers' ModelOutput) mirror items in
        # attributes, and both are done here.
        if isinstance(made, dict):
            for key, item in list(dict.items(made)):
                dict.__setitem__(made, key, self.copy(item))
        elif isinstance(made, list):
            for index, item in enumerate(list.__iter__(made)):
                list.__setitem__(made, index, self.copy(item))
        elif isinstance(made, deque):
            for index, item in enumerate(list(made)):
                made[index] = self.copy(item)
        for name, item in _attributes(made).items():
            part = self.copy(item)
            if part is not item:
                object.__setattr__(made, name, part)
        return made


def _attributes(value: Any) -> dict[str, Any]:
    """Instance attributes, in `__dict__` and in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and not name.startswith("__"):
                try:
                    found[name] = object.__getattribute__(value, name)
                except AttributeError:  # a slot that was never filled
                    continue
    return found


Position = tuple[int, int]
"""(call in its segment, position among the tensors of its output)."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Held:
    """One argument tensor.

    One of `tensor`, `moved` and `made_by` says where its value is, unless it `is_unread`.
    """

    tensor: torch.Tensor | None
    version: int
    requires_grad: bool
    is_leaf: bool
    is_passed_as_given: bool
    device: torch.device
    geometry: Geometry | None = None
    is_unread: bool = False
    moved: MovedStorage | None = None
    made_by: Position | None = None
    copy: torch.Tensor | None = None
    watched: Watched | None = None
    was_changed: bool = False

    @property
    def has_changed(self) -> bool:
        """It was changed in place since the call began."""
        return (self.watched is not None and self.watched.has_changed) or (
            self.tensor is not None and not self.is_passed_as_given and version_of(self.tensor) != self.version
        )


class HeldArguments:
    """Arguments of one call.

    Memory: each distinct tensor's storage as long as it rests on the device; nothing for weights,
        for outputs of an earlier call of the same segment (referred to by position), and for what
        left for `home`.

    What stands inside objects and is not read by the call is not held either.

    Args:
        args, kwargs: as given.
        place: the site, for messages.
        stays: see `saved_tensors.Stays`.
        made_by: position of a tensor that an earlier call of the segment returned, else None.
        copies: the call changes arguments in place; copies are made now, and after the call kept of
            those that changed.
        writes: of the job's forwards.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        place: str,
        stays: Stays,
        made_by: Callable[[torch.Tensor], Position | None],
        copies: bool,
        writes: Writes,
    ) -> None:
        self._place = place
        self._writes = writes
        self._stays = stays
        self._copies = copies
        self._held: list[_Held] = []
        self._read: set[int] | None = None
        self._hollow: list[torch.Tensor] = []
        givens: list[torch.Tensor] = []

        def hold(tensor: Any) -> Placeholder:
            givens.append(tensor)
            self._held.append(self._hold(tensor, made_by(tensor)))
            return Placeholder(len(self._held) - 1)

        self._template = replace_tensors((args, dict(kwargs)), hold)
        direct = {id(tensor) for tensor in direct_tensors((args, kwargs))}
        self._inside_objects = [held for held, given in zip(self._held, givens, strict=True) if id(given) not in direct]

    def watcher(self) -> ReadWatcher | None:
        """A mode for the first run, which learns what need not be held.

        See [Note: what a call does not read]. None if all must be.
        """
        movable = [held for held in self._inside_objects if held.tensor is not None and not held.is_passed_as_given]
        self._inside_objects = movable
        if not movable:
            return None
        self._read = set()
        return ReadWatcher((_address(held.tensor) for held in movable), self._read.add)

    def guard(self) -> ReadWatcher | None:
        """A mode for the second run, which refuses what the first run did not read.

        None if everything is held.
        """
        if not self._hollow:
            return None
        return ReadWatcher((_address(tensor) for tensor in self._hollow), self._refuse_read)

    def _refuse_read(self, address: int) -> None:
        raise AstrayError(
            f"{self._place} reads a tensor inside an object that it was given, which it did not read at first; {TRY_ANOTHER_POLICY}"
        )

    def _hold(self, tensor: torch.Tensor, made_by: Position | None) -> _Held:
        storage = plain_storage(tensor)
        as_given = storage is None or self._stays(storage)
        held = _Held(
            tensor=tensor if as_given else tensor.detach(),
            version=version_of(tensor),
            requires_grad=tensor.requires_grad,
            is_leaf=tensor.is_leaf,
            is_passed_as_given=as_given,
            device=tensor.device,
            watched=self._writes.watch(tensor),
        )
        if as_given:
            return held
        held.geometry = Geometry.of(tensor)
        if made_by is not None:
            held.tensor, held.made_by = None, made_by
        elif self._copies and not shares_elements(tensor):
            # (What overlaps itself, such as an expanded tensor, cannot be changed in place.)
            # The same stride, so that the same kernels run; `clone` would make a slice dense.
            held.copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            with torch.no_grad():
                held.copy.copy_(tensor)
        return held

    @property
    def positions(self) -> set[Position]:
        """Outputs of earlier calls that this call takes."""
        return {held.made_by for held in self._held if held.made_by is not None}

    def end_of_call(self) -> None:
        """Called when the call is over: keeps the copies of arguments that it changed, and only
        those.

        Raises:
            UnsupportedError: a changed argument shares memory with another one; their copies would
                not.
        """
        changed = [held for held in self._held if held.has_changed]
        for held in changed:
            if held.copy is None and held.made_by is None:
                held.was_changed = True  # refused when it is needed
                continue
            if any(other is not held and _share_memory(other, held) for other in self._held):
                raise UnsupportedError(
                    f"{self._place} changes an argument in place that shares its memory with another argument, "
                    f"so it cannot be run again from copies; {TRY_ANOTHER_POLICY}"
                )
            if held.copy is not None:
                held.tensor, held.version, held.geometry = held.copy, version_of(held.copy), Geometry.of(held.copy)
                held.watched = self._writes.watch(held.copy)
        for held in self._held:
            held.copy = None
        if self._read is not None:
            for held in self._inside_objects:
                # Unchanged then, too: an operation that changes a tensor is given it.
                if held.tensor is not None and held not in changed and _address(held.tensor) not in self._read:
                    held.tensor, held.is_unread = None, True
        self._inside_objects, self._read = [], None

    def register(self, offloader: Offloader, home: Tier) -> list[MovedStorage]:
        """Hands all that may leave to the offloader; returns their moved storages."""
        moved_storages: list[MovedStorage] = []
        for held in self._held:
            if held.tensor is None or held.is_passed_as_given or held.was_changed:
                continue
            moved = offloader.register(held.tensor, home, place=self._place)
            if moved is not None:
                held.tensor, held.moved = None, moved
                moved_storages.append(moved)
        return moved_storages

    def storages(self) -> list[torch.UntypedStorage]:
        """Storages that it holds on the device (for accounting; what stays is not among them)."""
        return [
            held.tensor.untyped_storage()
            for held in self._held
            if held.tensor is not None and not held.is_passed_as_given
        ]

    def rebuild(self, made: Mapping[Position, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments to run the call again with; see [Note: stand-ins].

        Args:
            made: outputs of earlier calls of the segment, as made again.

        Raises:
            UnsupportedError: an argument was changed in place since.
        """
        stand_ins: Sequence[torch.Tensor] = [self._stand_in(held, made) for held in self._held]
        args, kwargs = replace_tensors(self._template, lambda slot: stand_ins[slot.index])
        return args, kwargs

    def _stand_in(self, held: _Held, made: Mapping[Position, torch.Tensor]) -> torch.Tensor:
        # What stays may be changed after the call and be right (an update of a weight comes after
        # all of its uses). What a call of the segment returned is made again.
        if held.was_changed or (not held.is_passed_as_given and held.made_by is None and held.has_changed):
            shape = "" if held.geometry is None else f" ({held.geometry.dtype} {list(held.geometry.shape)})"
            raise UnsupportedError(
                f"an argument of {self._place}{shape} was changed in place after the call began, so the call cannot be run again from it; {TRY_ANOTHER_POLICY}"
            )
        if held.is_unread:
            assert held.geometry is not None
            # One element seen everywhere: the shape, dtype and device of the original, without its
            # memory.
            value = torch.zeros((), dtype=held.geometry.dtype, device=held.device).expand(held.geometry.shape)
            self._hollow.append(value)
        elif held.made_by is not None:
            value = made[held.made_by].detach()
        elif held.moved is not None:
            assert held.geometry is not None
            value = held.geometry.over(held.moved.bring())
        else:
            assert held.tensor is not None
            value = held.tensor
            if held.is_passed_as_given:
                return value
            value = value.detach()
        if not held.requires_grad:
            return value
        return value.requires_grad_() if held.is_leaf else non_leaf(value)


def _share_memory(one: _Held, other: _Held) -> bool:
    return one.watched is not None and other.watched is not None and one.watched.written is other.watched.written


def _address(tensor: torch.Tensor | None) -> int:
    assert tensor is not None
    return tensor.untyped_storage()._cdata


class _Anew(torch.autograd.Function):
    """Gives a tensor a past, so that it is no leaf."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        # In a list, so that autograd does not see it as an input: the output then is no view of a
        # leaf.
        return box.pop().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None


def non_leaf(value: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that requires a gradient and is no leaf."""
    with torch.enable_grad():
        return _Anew.apply(torch.zeros((), requires_grad=True), [value])  # type: ignore[return-value]
