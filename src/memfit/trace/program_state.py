"""State that a user's function keeps from one call to the next, beside the model:
counters, baselines, logs.

In: the loss. Out: `ProgramState`, which gives everything back that a trial has changed, and tells
what is different now.

[Note: what a loss keeps]
A loss may keep a running baseline in a closure, a global, the object that it is a method of, or a
criterion's buffers. A trial calls it with tensors without values, or with a few rows of the sample,
and what it noted then would be in the user's numbers for good. So everything that its code names is
looked at before: bindings, the contents of containers, attributes of objects of the program's own
classes, values of small tensors, and generators of random numbers. Not reached: what libraries keep
to themselves, files, and what lies deeper than some steps of such names.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UnsupportedError
from memfit.core.limits import MIB, format_bytes
from memfit.tensors.trees import PLAIN_TYPES, own_attributes
from memfit.trace.traced_trees import reachable_tensors

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_DEPTH = 4
_MOST_ENTERED = 1000
_MOST_SEEN = 20_000
_KEPT_TENSOR_BYTES = 1 * MIB
_ABSENT = object()


@dataclass
class _Found:
    """Objects met on the walk."""

    cells: list[tuple[str, CellType, Any]] = field(default_factory=list[Any])
    # attributes, globals
    mappings: list[tuple[str, Any, dict[Any, Any]]] = field(default_factory=list[Any])
    containers: list[tuple[str, Any, Any]] = field(default_factory=list[Any])
    tensors: dict[int, tuple[str, torch.Tensor, int, torch.Tensor | None]] = field(default_factory=dict[int, Any])
    generators: list[tuple[Callable[[Any], Any], Any]] = field(default_factory=list[Any])
    seen: dict[int, Any] = field(default_factory=dict[int, Any])
    keeps_tensors: bool = True


class ProgramState:
    """The objects that a function names, as they are now.

    Memory: shallow copies of containers, and of tensors up to 1 MiB each.

    Args:
        function: of the user's program.
        model: not looked at; its modules are restored by themselves.
        keeps_tensors: values of tensors are given back, too; False: they may be many (a dataset).
    """

    def __init__(self, function: Any, model: nn.Module, *, keeps_tensors: bool = True) -> None:
        self._found = _Found(keeps_tensors=keeps_tensors)
        for module in model.modules():
            self._found.seen[id(module)] = module
        for tensor in (*model.parameters(), *model.buffers()):
            self._found.seen[id(tensor)] = tensor
        _visit(self._found, "the loss", function, _DEPTH)

    def values(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of all bindings, attributes and entries as they are now."""
        for name, cell, _ in self._found.cells:
            yield name, _content(cell)
        for name, mapping, before in self._found.mappings:
            yield from ((f"{name}.{key}" if name else key, mapping.get(key, _ABSENT)) for key in before)
        for name, container, _ in self._found.containers:
            if isinstance(container, dict):
                yield from ((f"{name}[{key!r}]", value) for key, value in list(container.items())[:_MOST_ENTERED])
            elif len(container) <= _MOST_ENTERED:
                yield name, list(container)

    def restore(self) -> None:
        """Gives everything back.

        Raises:
            UnsupportedError: a large tensor was written, of which there is no copy.
        """
        for _, cell, before in self._found.cells:
            if _content(cell) is not before:
                if before is _ABSENT:
                    del cell.cell_contents
                else:
                    cell.cell_contents = before
        for _, mapping, before in self._found.mappings:
            for key, value in before.items():
                if mapping.get(key, _ABSENT) is not value:
                    mapping[key] = value
        for _, container, before in self._found.containers:
            if not _is_same(container, before):
                container.clear()
                container.update(before) if isinstance(container, dict | set) else container.extend(before)
        for give, state in self._found.generators:
            give(state)
        for name, tensor, version, copied in self._found.tensors.values():
            # Where there is a copy its values are asked: `.data` has a counter of its own.
            if tensor._version == version if copied is None else torch.equal(tensor, copied):
                continue
            if copied is None:
                raise UnsupportedError(
                    f"the loss writes to a tensor of {format_bytes(tensor.nbytes)} that it keeps ({name}), also while memfit plans: leave that out where "
                    "memfit.is_tracing() is true, or make it a buffer of the model"
                )
            with torch.no_grad():
                tensor.copy_(copied)


@contextmanager
def untouched_program(function: Any, model: nn.Module, *, keeps_tensors: bool = True) -> Iterator[ProgramState]:
    """Gives what a function keeps back at the end. See [Note: what a loss keeps].

    Yields:
        What it keeps, as it was at entry.
    """
    state = ProgramState(function, model, keeps_tensors=keeps_tensors)
    try:
        yield state
    finally:
        state.restore()


def _visit(found: _Found, name: str, value: Any, depth: int) -> None:
    """Notes a value, and what it leads to."""
    if type(value) in PLAIN_TYPES or isinstance(value, type | ModuleType | nn.Parameter):
        return
    if id(value) in found.seen or len(found.seen) > _MOST_SEEN:
        return
    found.seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        _note_tensor(found, name, value)
    elif isinstance(value, FunctionType):
        if _is_of_program(value.__module__):
            _visit_function(found, value, depth)
    elif isinstance(value, MethodType):
        _visit(found, name, value.__func__, depth)
        _visit(found, name, value.__self__, depth)
    elif isinstance(value, partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _visit(found, name, part, depth)
    elif type(value) in _CONTAINERS:
        found.containers.append((name, value, value.copy()))
        _enter(found, name, value.values() if isinstance(value, dict) else value, depth)
    elif isinstance(value, tuple):
        _enter(found, name, value, depth)
    elif not _note_generator(found, value) and isinstance(getattr(value, "__dict__", None), dict):
        _visit_object(found, name, value, depth)


def _visit_function(found: _Found, function: Any, depth: int) -> None:
    if depth == 0:
        return
    for label, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        content = _content(cell)
        found.cells.append((label, cell, content))
        _visit(found, label, content, depth - 1)
    places: Mapping[str, Any] = function.__globals__
    named = {label: places[label] for label in sorted(_names_in(function.__code__)) if label in places}
    found.mappings.append(("", places, {k: v for k, v in named.items() if not isinstance(v, ModuleType | type)}))
    for label, content in named.items():
        _visit(found, label, content, depth - 1)
    for content in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        _visit(found, function.__name__, content, depth - 1)
    _visit(found, function.__name__, vars(function), depth - 1)


def _visit_object(found: _Found, name: str, value: Any, depth: int) -> None:
    """Objects of the program's own classes.

    Of modules (a criterion, a teacher) their buffers as well, and what lies below them.
    """
    is_module = isinstance(value, nn.Module)
    if depth == 0 or not (is_module or _is_of_program(type(value).__module__)):
        return
    own = dict(own_attributes(value) if is_module else vars(value))
    found.mappings.append((name, vars(value), own))
    inner = [*own.items()]
    if is_module:
        found.mappings.append((name, value._buffers, dict(value._buffers)))
        inner += [*value._buffers.items(), *value._modules.items()]
    for key, one in inner:
        # Modules nest by themselves: each is as near as the first.
        _visit(found, f"{name}.{key}", one, depth if isinstance(one, nn.Module) else depth - 1)


def _enter(found: _Found, name: str, values: Any, depth: int) -> None:
    if depth > 0 and len(values) <= _MOST_ENTERED:
        for one in values:
            _visit(found, name, one, depth - 1)


def _note_tensor(found: _Found, name: str, tensor: torch.Tensor) -> None:
    if (
        not found.keeps_tensors
        or type(tensor) is not torch.Tensor
        or tensor.is_inference()
        or tensor.layout is not torch.strided
        or tensor.is_meta
    ):
        return
    is_small = tensor.nbytes <= _KEPT_TENSOR_BYTES
    found.tensors[id(tensor)] = (name, tensor, tensor._version, tensor.detach().clone() if is_small else None)


def _note_generator(found: _Found, value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, torch.Generator):
        found.generators.append((value.set_state, value.get_state()))
    elif isinstance(value, random.Random):
        found.generators.append((value.setstate, value.getstate()))
    elif numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        found.generators.append((partial(setattr, bits, "state"), bits.state))
    elif numpy is not None and isinstance(value, numpy.random.RandomState):
        found.generators.append((value.set_state, value.get_state()))
    else:
        return False
    return True


def _names_in(code: CodeType) -> set[str]:
    """Names that a function's code, and that of functions inside it, may look up beside its own."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT  # nothing was put there yet


def _is_same(container: Any, before: Any) -> bool:
    """The very same objects in their order; tensors do not compare with ==."""
    if len(container) != len(before):
        return False
    if isinstance(container, set):
        return {*map(id, container)} == {*map(id, before)}
    if isinstance(container, dict):
        return all(a is b and container[a] is before[b] for a, b in zip(container, before, strict=True))
    return all(a is b for a, b in zip(container, before, strict=True))


def _is_of_program(place: str | None) -> bool:
    """The code is no library's that keeps its own things: torch's, memfit's, the standard
    library's.
    """
    root = (place or "builtins").partition(".")[0]
    return root not in {"torch", "memfit", "numpy"} and root not in sys.stdlib_module_names


def tensors_among(values: Iterator[tuple[str, Any]]) -> dict[str, tuple[torch.Tensor, ...]]:
    """By name, the tensors in values that are tensors or hold some in containers; no parameters."""
    found = {
        name: tuple(one for one in reachable_tensors(value) if not isinstance(one, nn.Parameter))
        for name, value in values
        if isinstance(value, (torch.Tensor, tuple, *_CONTAINERS))
    }
    return {name: tensors for name, tensors in found.items() if tensors}


# Hooks of the user's program on the gradients of parameters, and whether they read other
# parameters' gradients.
#
# In: a parameter. Out: its hooks, without memfit's own; while a trace runs backward, the names of
# parameters whose `.grad` is read.
#
# [Note: gradients that others read]
# A hook that runs while backward does may read `.grad` of another parameter: the norm of all, a
# balance of two layers. In plain PyTorch each gradient stays until the program drops it; a plan
# that updates inside of backward, or sends gradients home, has dropped it by then, and the hook
# would compute with nothing, in silence. So a trace notes such reads, and gradients that are read
# stay where they are until all updates are made after backward. For the time of a backward
# `torch.Tensor` has a property `grad` of its own, which asks who reads; a parameter's own hooks may
# read its own.

Hook = Callable[..., Any]


def gradient_hooks(parameter: nn.Parameter) -> tuple[list[Hook], list[Hook]]:
    """(those of `register_hook`, those of `register_post_accumulate_grad_hook`)."""
    with torch._C.DisableTorchFunctionSubclass():  # it may wear the class of weights that are away
        return _of_users(parameter._backward_hooks), _of_users(parameter._post_accumulate_grad_hooks)


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """The user's program looks at, or changes, its gradient."""
    return parameter.requires_grad and any(gradient_hooks(parameter))


class GradientReads:
    """Whose gradients the program reads in a backward. See [Note: gradients that others read].

    Attributes:
        found: names of parameters whose gradient was read by others than their own hooks.
    """

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self._own: torch.Tensor | None = None

    def hand_on(self, parameter: nn.Parameter, stand_in: torch.Tensor) -> None:
        """Gives a stand-in the hooks, so that a trace sees what they read."""
        before, after = gradient_hooks(parameter)
        for hook in before:
            stand_in.register_hook(self._in_hook(stand_in, hook))
        for hook in after:
            stand_in.register_post_accumulate_grad_hook(self._in_hook(stand_in, hook))

    @contextmanager
    def watched(self, names: Mapping[int, str], stand_ins: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Notes reads inside.

        Args:
            names: of parameters and their stand-ins, by `id`.
            stand_ins: by `id` of the parameter: what has its gradient now.
        """
        given: Any = torch._C.TensorBase.grad  # pyright: ignore[reportAttributeAccessIssue]

        def read(tensor: torch.Tensor) -> torch.Tensor | None:
            name = names.get(id(tensor))
            if name is None or _is_torchs_own(sys._getframe(1).f_globals.get("__name__", "")):
                return given.__get__(tensor)
            there = stand_ins.get(id(tensor), tensor)
            if there is not self._own:
                self.found[name] = None
            return given.__get__(there)

        # On the class, so for every thread: tensors that the trace does not know are read as ever.
        torch.Tensor.grad = property(read, given.__set__, given.__delete__)  # type: ignore[assignment]
        try:
            yield
        finally:
            del torch.Tensor.grad

    def _in_hook(self, stand_in: torch.Tensor, hook: Hook) -> Hook:
        @wraps(hook, updated=())
        def run(*args: Any) -> Any:
            outer, self._own = self._own, stand_in
            try:
                return hook(*args)
            finally:
                self._own = outer

        return run


def _is_torchs_own(place: str) -> bool:
    """The code asks for itself, and for nobody's program: memfit's, and what makes and copies fake
    tensors.
    """
    return place.startswith(("memfit.", "torch._subclasses", "torch._dynamo"))


def _of_users(hooks: Any) -> list[Hook]:
    return [hook for hook in (hooks or {}).values() if not _is_ours(hook)]


def _is_ours(hook: Any) -> bool:
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return place.partition(".")[0] == "memfit"
