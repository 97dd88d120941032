"""Tensors inside whatever a call takes and gives, and how to make such a value again with others in
their place.

In: any nesting of containers, dataclasses and ordinary objects. Out: a copy of it in which every
tensor was replaced.

[Note: what a copy protects]
A recomputed call must see its arguments as they were at entry. Containers and objects that hold
tensors are often changed by the call itself (a key-value cache grows, a list collects auxiliary
losses), and so would be changed twice. They are therefore copied on entry, shape by shape, sharing
everything that is not a container, and the recomputed call gets a copy of its own. It also keeps
reference counting whole: a cache that was passed in comes to hold tensors whose graph holds what
recomputes them.
"""

from __future__ import annotations

import copy
import enum
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

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
