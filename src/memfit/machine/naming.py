"""Words for references: which attribute, variable or line a person has to look at.

In: Python objects and who refers to whom. Out: text such as "Recorder.outputs[...]" and places
(file and line). Nothing is imported, called or changed.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import linecache
import sys
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_OPTIMIZED = inspect.CO_OPTIMIZED
_REFERENCES_OF_ITS_OWN = 3  # the frame's, the variable's that asks, and that of the question
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
# References of builtin objects that have neither a dictionary nor slots.
_BUILTIN_ATTRIBUTES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (BaseException, ("__traceback__", "__cause__", "__context__", "args")),
    (types.TracebackType, ("tb_frame", "tb_next")),
    (types.BuiltinMethodType, ("__self__",)),
    (functools.partial, ("func", "args", "keywords")),
    (torch.Tensor, ("_backward_hooks", "_post_accumulate_grad_hooks")),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A line of source."""

    file: str
    line: int

    def __str__(self) -> str:
        path = Path(self.file)
        if path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return f"{path}:{self.line}"


def parenthesized(place: Place | None) -> str:
    """The place behind a name: " (train.py:12)", or nothing."""
    return "" if place is None else f" ({place})"


def place_of_code(code: types.CodeType) -> Place:
    """Where a function is defined."""
    return Place(file=code.co_filename, line=code.co_firstlineno)


def place_of_local(code: types.CodeType, name: str) -> Place:
    """Where a function first assigns to one of its variables; its own first line for arguments."""
    return _first_store(code, ("STORE_FAST", "STORE_DEREF"), name) or place_of_code(code)


def place_of_attribute(kind: type, name: str) -> Place | None:
    """Where a method of the class (or of a base) first assigns to `self.name`.

    The class's own line otherwise; None for classes without source.
    """
    for base in kind.__mro__:
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else member
            if isinstance(function, types.FunctionType):
                found = _first_store(function.__code__, ("STORE_ATTR",), name)
                if found is not None:
                    return found
    return place_of_class(kind)


def place_of_class(kind: type) -> Place | None:
    """Where a class is defined; None where its source cannot be read."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    line = None if file is None else _definitions(file).classes.get(kind.__qualname__)
    return None if file is None or line is None else Place(file=file, line=line)


def place_of_global(module_names: dict[str, Any], name: str) -> Place | None:
    """Where a module first assigns to one of its globals outside of functions and classes; None
    where it does not, or has no source.
    """
    file = module_names.get("__file__")
    line = _definitions(file).names.get(name) if isinstance(file, str) else None
    return None if not isinstance(file, str) or line is None else Place(file=file, line=line)


@dataclass(frozen=True, kw_only=True)
class _Definitions:
    """Lines of a file's classes by qualified name, and of its globals' first assignments."""

    classes: dict[str, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)


@functools.lru_cache(maxsize=64)
def _definitions(file: str) -> _Definitions:
    found = _Definitions()
    if not file.endswith(".py"):
        return found
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # it changed since it was imported
        return found
    pending: deque[tuple[ast.AST, str, bool]] = deque([(tree, "", True)])
    while pending:
        node, inside, is_global = pending.popleft()
        if isinstance(node, ast.ClassDef):
            found.classes[inside + node.name] = node.lineno
            inside, is_global = f"{inside}{node.name}.", False
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside, is_global = f"{inside}{node.name}.<locals>.", False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and is_global:
            found.names[node.id] = min(node.lineno, found.names.get(node.id, node.lineno))
        pending.extend((child, inside, is_global) for child in ast.iter_child_nodes(node))
    return found


@functools.lru_cache(maxsize=1024)
def _first_store(code: types.CodeType, operations: tuple[str, ...], name: str) -> Place | None:
    for instruction in dis.get_instructions(code):
        line = None if instruction.positions is None else instruction.positions.lineno
        if instruction.opname in operations and instruction.argval == name and line is not None:
            return Place(file=code.co_filename, line=line)
    return None


def class_name(thing: object) -> str:
    """The class's name, with its outer classes but without the functions that it is defined in."""
    return short_name(type(thing).__qualname__)


def short_name(qualified: str) -> str:
    """`f.<locals>.Recorder.record` as "Recorder.record"."""
    return qualified.rpartition("<locals>.")[2]


def own_dictionary(thing: object) -> dict[str, Any] | None:
    """An instance's attributes, without running any code of its class; None if it has no
    dictionary.
    """
    if issubclass(type(thing), type) or type(thing).__dictoffset__ == 0:
        return None
    found = object.__getattribute__(thing, "__dict__")
    return found if isinstance(found, dict) else None


def is_module_names(thing: object) -> bool:
    """The dictionary of a module's globals."""
    return type(thing) is dict and "__name__" in thing and ("__builtins__" in thing or "__spec__" in thing)


def name_item(container: object, child: object) -> str:
    """How a container's item is written: by its key if that is a plain word, else "[...]", as
    positions and numbered keys differ from step to step.
    """
    if isinstance(container, dict):
        for key, value in list(container.items()):  # another thread may add to it
            if value is child and isinstance(key, str) and key.isidentifier():
                return f"[{key!r}]" if not any(c.isdigit() for c in key) else "[...]"
    return "[...]"


def name_key(names: dict[str, Any], child: object) -> str:
    """The name under which a namespace holds a value; "?" if it is held as a name itself."""
    return next((str(name) for name, value in list(names.items()) if value is child), "?")


def name_attribute(thing: object, child: object) -> str:
    """The attribute through which an object refers to another one directly: dictionary, slots or a
    builtin's own; "?" if that is not known.
    """
    names = own_dictionary(thing)
    if names is not None:
        found = name_key(names, child)
        if found != "?":
            return found
    for base in type(thing).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and _slot(member, thing) is child:
                return name
    for kind, attributes in _BUILTIN_ATTRIBUTES:
        if isinstance(thing, kind):
            # a weight that is away refuses to be asked
            with torch._C.DisableTorchFunctionSubclass():
                return next((name for name in attributes if getattr(thing, name, None) is child), "?")
    return "?"


def _slot(member: types.MemberDescriptorType, thing: object) -> object:
    try:
        return member.__get__(thing)
    except AttributeError:  # an empty slot
        return None


def is_container(thing: object) -> bool:
    """A builtin collection, whose items have no names of their own."""
    return issubclass(type(thing), _CONTAINERS)


def read_locals(frame: types.FrameType) -> dict[str, Any]:
    """A frame's variables.

    Before Python 3.13 the interpreter keeps the dictionary that it makes for this, and so would
    keep this step's tensors: it is emptied again, unless it is the one that the user got from
    `locals()`, which then shows the variables as they are now.
    """
    found = frame.f_locals
    copy = dict(found)
    is_a_copy = sys.version_info < (3, 13) and frame.f_code.co_flags & _OPTIMIZED
    if is_a_copy and sys.getrefcount(found) == _REFERENCES_OF_ITS_OWN:
        found.clear()
    return copy


def underlying(function: object) -> types.FunctionType | None:
    """The Python function that a callable ends in: of a method, a partial, a callable object; None
    for C code.
    """
    current: Any = function
    for _ in range(8):
        if isinstance(current, types.FunctionType):
            return current
        if isinstance(current, types.MethodType):
            current = current.__func__
        elif isinstance(current, functools.partial):
            current = current.func
        elif isinstance(current, types.BuiltinMethodType | type):
            return None
        else:
            current = getattr(type(current), "__call__", None)  # noqa: B004, the function itself is wanted
    return None


def describe_callable(function: Callable[..., Any]) -> str:
    """A callable's name for people: "hook()", "bound method Recorder.record", "Recorder object"."""
    if isinstance(function, types.MethodType):
        name = getattr(function, "__name__", "?")
        return f"bound method {class_name(function.__self__)}.{name}"
    if isinstance(function, functools.partial):
        return f"partial of {describe_callable(function.func)}"
    if isinstance(function, types.FunctionType):
        return f"{short_name(function.__qualname__)}()"
    if isinstance(function, types.BuiltinMethodType):
        return f"method {class_name(function.__self__)}.{function.__name__}"
    return f"{class_name(function)} object"
