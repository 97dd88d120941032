"""Hooks and callbacks that keep more alive than they seem to: closures over an owner, bound
methods, cycles.

In: a model with hooks on its modules and parameters, and functions of the user. Out: findings, each
with the line to look at. Nothing is called.

[Note: what a hook holds]
A hook lives as long as what it is registered on, and so does everything it holds: the cells of its
closure, its defaults, the object of a bound method. If that leads back to the module or tensor that
it is registered on, they form a cycle: the model's memory is then freed when the garbage collector
comes by, not when the last reference goes. If it holds tensors beside the model's own, it is a
place where they gather. Both are told; a hook that merely keeps a small object alive is told as
well, but is no leak.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from memfit.core.limits import format_bytes
from memfit.machine.holders import HOOK_WORDS
from memfit.machine.naming import (
    Place,
    class_name,
    describe_callable,
    is_container,
    own_dictionary,
    parenthesized,
    place_of_class,
    place_of_code,
    underlying,
)

# Tensors that an autograd graph holds: looked up without unpacking anything.
#
# In: a tensor with a `grad_fn`. Out: the storages that its graph saved for a backward that may
# never come.
#
# [Note: saved, but not in sight]
# A saved tensor belongs to a C++ node: Python's collector does not see that reference, and often
# there is no Python object for the tensor at all. So the graph is walked from the tensor that is
# kept. `SavedTensor.data` gives what was packed without running the unpack hook (unpacking could
# recompute a block); with saved-tensor hooks that is the hooks' own object, which may hold tensors
# in its turn.

StorageKey = int
"""Identity of a storage for as long as it lives."""


@dataclass(frozen=True, kw_only=True)
class SavedStorage:
    """A storage that a graph saved: its bytes, and shape and dtype of the tensor that was saved on
    it.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(kw_only=True)
class GraphContents:
    """Contents of the graph of one tensor.

    Attributes:
        name: of its last node, such as "MulBackward0".
        storages: what was saved.
        objects: identities of Python objects that C++ nodes hold: contexts of custom functions, and
            what saved-tensor hooks packed.
        nodes: all of them; the identities above are valid while they live.
    """

    name: str
    storages: dict[StorageKey, SavedStorage] = field(default_factory=dict)
    objects: set[int] = field(default_factory=set)
    nodes: set[Any] = field(default_factory=set)


def storage_of(tensor: Tensor) -> tuple[StorageKey, int]:
    """A tensor's storage and its bytes.

    Tensors without one storage (sparse ones) count as their own.

    Views of one storage give the same key.
    """
    # a weight that is away refuses, and so may others' classes
    with torch._C.DisableTorchFunctionSubclass():
        try:
            storage = tensor.untyped_storage()
            return storage._cdata, storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have none
            parts = [tensor._values(), tensor._indices()] if tensor.layout == torch.sparse_coo else []
            return id(tensor), sum(part.nbytes for part in parts)


def graph_of(tensor: Tensor) -> GraphContents | None:
    """Returns the contents of the graph behind a tensor, or None.

    No saved tensor is unpacked; a graph that ran backward holds nothing.
    """
    first: Any = tensor.grad_fn
    if first is None:
        return None
    found = GraphContents(name=type(first).__name__)
    pending: list[Any] = [first]
    while pending:
        node = pending.pop()
        if node is None or node in found.nodes:
            continue
        found.nodes.add(node)
        if issubclass(
            type(node), torch.autograd.function.FunctionCtx
        ):  # a function written in Python: its node is its context
            found.objects.add(id(node))
        for packed in _packed_by(node):
            if isinstance(packed, Tensor):
                key, nbytes = storage_of(packed)
                found.storages[key] = SavedStorage(nbytes=nbytes, shape=tuple(packed.shape), dtype=packed.dtype)
            else:
                found.objects.add(id(packed))
        pending.extend(following for following, _ in node.next_functions)
    return found


def _packed_by(node: Any) -> Iterator[Any]:
    for name in dir(type(node)):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:  # torch's word for "freed by a backward"
            continue
        for one in saved if isinstance(saved, tuple | list) else (saved,):
            data = None if one is None else one.data
            if data is not None:
                yield data


_OURS = frozenset({"memfit", "torch"})
_MOST_OBJECTS = 200_000
_MOST_NESTED = 4  # functions that wrap functions


class CallbackKind(Enum):
    """How a callback keeps an object alive."""

    CLOSURE = "closure"
    BOUND_METHOD = "bound method"


@dataclass(frozen=True, kw_only=True)
class CallbackFinding:
    """One object that a callback keeps alive.

    Attributes:
        kind: how.
        callback: its name, such as "hook()" or "bound method Recorder.record".
        role: where it is registered, such as "a forward hook of 'layers.0'".
        captured: what it holds, such as "closure variable 'self' (a Trainer)".
        is_cycle: what it holds leads back to what it is registered on.
        held_bytes: of tensors in the object's own attributes and their collections, parameters and
            buffers of the model not counted.
        place: its definition; None for callables without source.
    """

    kind: CallbackKind
    callback: str
    role: str
    captured: str
    is_cycle: bool
    held_bytes: int
    place: Place | None

    @property
    def is_leak(self) -> bool:
        """It is worth a warning."""
        return self.is_cycle or self.held_bytes > 0

    @property
    def text(self) -> str:
        """One line for a person."""
        words = f"{self.callback}{parenthesized(self.place)}, {self.role}, keeps its {self.captured} alive"
        if self.held_bytes:
            words += f", which holds {format_bytes(self.held_bytes)} of tensors"
        if self.is_cycle:
            words += (
                ", which leads back to it: the cycle is freed only when the garbage collector comes by. Hold the owner by weakref.ref, or remove the "
                "callback when it has done its work"
            )
        return words


@dataclass(frozen=True, kw_only=True)
class _Registered:
    """A callback, what it is, and what holds it."""

    function: Any
    role: str
    keeper: object


@dataclass(frozen=True, kw_only=True)
class _Captured:
    """An object that a callback holds."""

    kind: CallbackKind
    words: str
    thing: object
    by: Any


def inspect_callbacks(
    model: nn.Module | None, callbacks: Mapping[str, Callable[..., Any]] | None = None, *, keeper: object = None
) -> tuple[CallbackFinding, ...]:
    """Looks at the hooks on a model's modules, parameters and buffers, and at given functions.

    Milliseconds, more where hooks hold large structures.

    Hooks of torch and memfit are left out; those of other libraries are not. Cycles through more
    than 200,000 objects are not found.

    Args:
        model: whose hooks are looked at; None for none.
        callbacks: functions of the user by a word for each ("loss").
        keeper: what holds these functions; one that holds it in turn is a cycle.

    Returns:
        Findings: owners and collections of tensors that are held, in the order of the model's
            modules.
    """
    own = set()
    if model is not None:
        own = {storage_of(t)[0] for t in (*model.parameters(), *model.buffers())}
    registered = [] if model is None else list(_hooks_of(model))
    registered += [
        _Registered(function=function, role=f"given as {word}", keeper=keeper)
        for word, function in (callbacks or {}).items()
    ]
    return tuple(
        finding for one in registered if not _is_ours(one.function) for finding in _findings(one, own_storages=own)
    )


def _findings(one: _Registered, *, own_storages: set[int]) -> Iterator[CallbackFinding]:
    for captured in _captured_by(one.function, _MOST_NESTED):
        held_bytes = _held_bytes(captured.thing, own_storages)
        if is_container(captured.thing) and not held_bytes:
            continue  # a plain table or counter
        plain = underlying(captured.by)
        yield CallbackFinding(
            kind=captured.kind,
            callback=describe_callable(captured.by),
            role=one.role,
            captured=captured.words,
            is_cycle=one.keeper is not None and _leads_to(captured.thing, one.keeper),
            held_bytes=held_bytes,
            place=place_of_class(type(captured.by)) if plain is None else place_of_code(plain.__code__),
        )


def _hooks_of(model: nn.Module) -> Iterator[_Registered]:
    for path, module in model.named_modules():
        where = path or type(module).__name__
        for registry, word in HOOK_WORDS.items():
            for hook in (vars(module).get(registry) or {}).values():
                yield _Registered(function=_unwrapped(hook), role=f"a {word} of {where!r}", keeper=module)
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        for registry, word in (
            ("_backward_hooks", "gradient hook"),
            ("_post_accumulate_grad_hooks", HOOK_WORDS["_post_accumulate_grad_hooks"]),
        ):
            for hook in (getattr(tensor, registry) or {}).values():
                yield _Registered(function=_unwrapped(hook), role=f"a {word} of {path!r}", keeper=tensor)


def _unwrapped(hook: Any) -> Any:
    """Torch puts some hooks into a wrapper of its own."""
    return hook.hook if type(hook).__module__ == "torch.nn.modules.module" and hasattr(hook, "hook") else hook


def _is_ours(function: Any) -> bool:
    plain = underlying(function)
    name = type(function).__module__ if plain is None else plain.__module__
    return (name or "").partition(".")[0] in _OURS


def _captured_by(function: Any, depth: int) -> Iterator[_Captured]:
    """Objects that a callable holds beside code: through wrapped functions, too."""
    if depth == 0:
        return
    if isinstance(function, types.MethodType):
        owner = function.__self__
        if not isinstance(owner, type):
            words = f"owner (a {class_name(owner)})"
            yield _Captured(kind=CallbackKind.BOUND_METHOD, words=words, thing=owner, by=function)
        return
    if isinstance(function, functools.partial):
        held = [("partial argument", value) for value in (*function.args, *function.keywords.values())]
        yield from _captured_by(function.func, depth - 1)
    elif isinstance(function, types.FunctionType):
        held = _held_by_function(function)
    elif isinstance(function, types.BuiltinMethodType):
        owner = function.__self__
        held = [] if isinstance(owner, types.ModuleType) else [("owner", owner)]
    else:
        yield _Captured(
            kind=CallbackKind.BOUND_METHOD, words=f"own {class_name(function)}", thing=function, by=function
        )
        return
    for word, value in held:
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            yield from _captured_by(value, depth - 1)
        elif _is_owner(value):
            words = f"{word} (a {class_name(value)})"
            yield _Captured(kind=CallbackKind.CLOSURE, words=words, thing=value, by=function)


def _held_by_function(function: types.FunctionType) -> list[tuple[str, object]]:
    held: list[tuple[str, object]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held.append((f"closure variable {name!r}", cell.cell_contents))
        except ValueError:  # a variable that has no value yet
            continue
    held += [("default argument", value) for value in function.__defaults__ or ()]
    held += [("default argument", value) for value in (function.__kwdefaults__ or {}).values()]
    return held


def _is_owner(value: object) -> bool:
    """An object with attributes of its own, a tensor, or a collection that may gather tensors.

    No module, class, function or number.
    """
    if isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        return False
    return is_container(value) or isinstance(value, Tensor) or own_dictionary(value) is not None


def _held_bytes(thing: object, own_storages: set[int]) -> int:
    """Finds tensors in an object's attributes and in collections there, not in other objects."""
    found: dict[int, int] = {}
    visited: set[int] = set()
    pending: list[object] = [thing, *(own_dictionary(thing) or {}).values()]
    while pending and len(visited) < _MOST_OBJECTS:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        if isinstance(current, Tensor):
            key, nbytes = storage_of(current)
            if key not in own_storages:
                found[key] = nbytes
        elif isinstance(current, dict):
            pending.extend(current.values())
        elif is_container(current):
            pending.extend(current)  # type: ignore[arg-type]
    return sum(found.values())


def _leads_to(start: object, goal: object) -> bool:
    """Tells whether references lead from one object to another, not counting classes, imported
    modules, running functions and functions' globals.
    """
    visited: set[int] = set()
    pending: list[object] = [start]
    while pending and len(visited) < _MOST_OBJECTS:
        current = pending.pop()
        if current is goal:
            return True
        if id(current) in visited or issubclass(
            type(current), type | types.ModuleType | types.FrameType | types.CodeType
        ):
            continue
        visited.add(id(current))
        if isinstance(current, types.FunctionType):
            pending.extend((current.__closure__, current.__defaults__, current.__kwdefaults__))
        else:
            pending.extend(gc.get_referents(current))
    return False
