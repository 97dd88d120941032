"""Who holds an object: the variable, attribute, closure or hook that a person has to let go of.

In: live objects. Out: `Holder`s, each a readable name with file and line.

[Note: climbing to a name]
The collector can tell who refers to an object (`gc.get_referrers`), one level at a time and for
many objects at once. From the targets the search climbs until it meets something that a person
knows by name: a variable of a running or suspended function, a global, a class attribute, a module
of the model, or an object of memfit's. Running functions are the exception: the interpreter keeps
their variables where the collector does not look, so they are read from the threads' frames. What
has no way up to a name is either held from native code (an autograd node, a loop's hidden iterator)
or waits in a reference cycle for the collector; only a collection can tell these two apart, and
that is the caller's to make. Objects that were frozen (`gc.freeze`) are not seen.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from torch import nn

from memfit.machine.naming import (
    Place,
    class_name,
    describe_callable,
    is_container,
    is_module_names,
    name_attribute,
    name_item,
    name_key,
    own_dictionary,
    parenthesized,
    place_of_attribute,
    place_of_class,
    place_of_global,
    place_of_local,
    read_locals,
    short_name,
    underlying,
)

MOST_HOLDERS = 3
"""Ways to an object that are told, the shortest first."""

_MOST_LEVELS = 24
_MOST_OBJECTS = 4_000  # more parents than that on one level: a web in which no name is near
_FEW = (
    # up to so many objects, asking the collector at once is faster than reading every object's
    # references in Python
    48
)
_SUSPENDED = (types.GeneratorType, types.CoroutineType)
# what they hold has names of its own
_CALLS = (types.FunctionType, types.MethodType, types.FrameType)
_ENDS = (type, types.ModuleType, *_SUSPENDED)

HOOK_WORDS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_state_dict_hooks": "state-dict hook",
    "_state_dict_pre_hooks": "state-dict pre-hook",
    "_load_state_dict_pre_hooks": "load-state-dict pre-hook",
    "_load_state_dict_post_hooks": "load-state-dict post-hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}
"""Torch's registries of hooks, on modules and on tensors."""


class HolderKind(Enum):
    """Advice: what a person has to change."""

    LOCAL = "local variable"
    GLOBAL = "global variable"
    MODULE = "attribute of a module of the model"
    CLASS = "class attribute"
    CLOSURE = "closure"
    BOUND_METHOD = "bound method"
    GRAPH = "autograd graph"
    CYCLE = "reference cycle"
    MEMFIT = "memfit itself"
    NATIVE = "held out of Python's sight"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a tensor.

    Attributes:
        kind: what it is.
        name: the expression that reaches the tensor, such as "losses[...]" or
            "Recorder.outputs[...]".
        context: where that expression lives, from near to far.
        place: the line to look at; None where there is no source.
    """

    kind: HolderKind
    name: str
    context: tuple[str, ...]
    place: Place | None

    @property
    def text(self) -> str:
        """One line: "Recorder.outputs[...] (train.py:12), through the bound method Recorder.record
        (train.py:15), a forward hook of 'h.0'".
        """
        return ", ".join((self.name, *self.context))


@dataclass(frozen=True, kw_only=True)
class _Root:
    """A name that a person knows, and how many objects of the path below it belong to it."""

    kind: HolderKind
    expression: str
    context: tuple[str, ...]
    place: Place | None
    skips: int = 0


class HolderSearch:
    """The references above some objects. Strong references to all of them live as long as it does.

    Cost: 0.05 to 0.2 s for each level in a process with 400,000 objects, four times that for
    hundreds of targets; rarely more than eight levels.

    Args:
        targets: whose holders are wanted.
        model: its modules are called by their paths.
        own: containers of the caller that hold targets and shall not be named.
    """

    def __init__(
        self, targets: Sequence[object], *, model: nn.Module | None = None, own: Sequence[object] = ()
    ) -> None:
        self._objects = {id(target): target for target in targets}
        self._parents: dict[int, list[int]] = {}
        self._ignored = {id(targets), id(own), id(self._objects), *map(id, own)}
        self._modules = {id(m): name for name, m in model.named_modules()} if model is not None else {}
        self._locals = _running_locals()

    def climb(self) -> None:
        """Looks up the references, level by level, until names are reached."""
        frontier = dict(self._objects)
        for _ in range(_MOST_LEVELS):
            if not frontier or len(frontier) > max(_MOST_OBJECTS, len(self._objects)):
                return
            frontier = self._climb_one(frontier)

    def _climb_one(self, frontier: dict[int, object]) -> dict[int, object]:
        above: dict[int, object] = {}
        for parent in _referrers(frontier):
            if id(parent) in self._ignored or parent is frontier:
                continue
            for child in gc.get_referents(parent):
                if id(child) in frontier:
                    self._parents.setdefault(id(child), []).append(id(parent))
            if id(parent) not in self._objects:
                self._objects[id(parent)] = parent
                if not self._is_end(parent):
                    above[id(parent)] = parent
        return above

    def _is_end(self, thing: object) -> bool:
        """Nothing above it would say more."""
        return (
            id(thing) in self._modules
            # `isinstance` would ask proxies for the class of what they stand for
            or issubclass(type(thing), _ENDS)
            or is_module_names(thing)
            or _is_memfit(type(thing).__module__)
        )

    # --- answers ----------

    def holders(self, target: object) -> tuple[Holder, ...]:
        """The names that lead to a target, the nearest first and memfit's own last.

        Empty if there is none.
        """
        found: dict[str, Holder] = {}
        named: set[int] = set()
        for thing, path in self._ascend(target):
            passes_name = any(id(below) in named for below in path)
            for root in self._roots(thing, path):
                named.add(id(thing))
                if passes_name and root.kind is not HolderKind.MODULE:
                    # who holds what has a name already; a hook of the model still says how the
                    # tensors came there
                    continue
                holder = _render(path[root.skips :], root)
                found.setdefault(holder.text, holder)
            if sum(holder.kind is not HolderKind.MEMFIT for holder in found.values()) >= MOST_HOLDERS:
                break
        return tuple(sorted(found.values(), key=lambda holder: holder.kind is HolderKind.MEMFIT)[:MOST_HOLDERS])

    def nearest(self, target: object) -> Holder:
        """For a target without a name above it: the object that it belongs to, by its class."""
        for thing, path in self._ascend(target):
            if thing is target or is_container(thing) or isinstance(thing, types.CellType):
                continue
            expression = "" if isinstance(thing, _CALLS) else class_name(thing)
            root = _Root(kind=HolderKind.NATIVE, expression=expression, context=(), place=None)
            holder = _render(path, root)
            return Holder(kind=HolderKind.NATIVE, name=holder.name, context=holder.context, place=holder.place)
        return Holder(kind=HolderKind.NATIVE, name="no Python object", context=(), place=None)

    def cycle(self, target: object) -> str | None:
        """The nearest reference cycle above a target, as "Node.me -> Node (train.py:3)"; None if
        there is none.
        """
        for thing, _ in self._ascend(target):
            round_trip = self._round_trip(thing)
            if round_trip is not None:
                return _render_cycle(round_trip)
        return None

    def ancestors(self, target: object) -> set[int]:
        """Identities of everything that was found above a target, itself included."""
        return {id(thing) for thing, _ in self._ascend(target)}

    def _ascend(self, target: object) -> Iterator[tuple[object, list[object]]]:
        """Everything above a target, nearest first, with the path that leads down to it."""
        below: dict[int, int | None] = {id(target): None}
        pending = [id(target)]
        for key in pending:
            path: list[object] = []
            step: int | None = key
            while step is not None:
                path.append(self._objects[step])
                step = below[step]
            yield self._objects[key], path
            for parent in self._parents.get(key, ()):
                if parent not in below:
                    below[parent] = key
                    pending.append(parent)

    def _round_trip(self, thing: object) -> list[object] | None:
        for parent in self._parents.get(id(thing), ()):
            for ancestor, path in self._ascend(self._objects[parent]):
                if ancestor is thing:
                    return [*path, thing]
        return None

    def _roots(self, thing: object, path: list[object]) -> Iterator[_Root]:
        if id(thing) in self._modules:
            name = self._modules[id(thing)]
            yield _Root(kind=HolderKind.MODULE, expression=f"model.{name}" if name else "model", context=(), place=None)
        elif len(path) > 1 and issubclass(type(thing), _SUSPENDED):
            yield _suspended_root(thing, path)
        else:
            yield from (_local_root(code, name, "of", 0) for code, name in self._locals.get(id(thing), ()))
            if len(path) > 1:
                yield from _lasting_roots(thing, path)


def _lasting_roots(thing: object, path: list[object]) -> Iterator[_Root]:
    """Globals, class attributes, and what is memfit's own."""
    if is_module_names(thing):
        assert isinstance(thing, dict)
        name = name_key(thing, path[1])
        place = place_of_global(thing, name)
        context = f"a global of {thing['__name__']}{parenthesized(place)}"
        yield _Root(kind=HolderKind.GLOBAL, expression=name, context=(context,), place=place, skips=1)
    elif issubclass(type(thing), type):
        assert isinstance(thing, type)
        skips = 2 if isinstance(path[1], dict) and len(path) > 2 else 1
        place = place_of_class(thing)
        expression = f"{short_name(thing.__qualname__)}.{name_key(dict(vars(thing)), path[skips])}"
        context = f"an attribute of the class{parenthesized(place)}"
        yield _Root(kind=HolderKind.CLASS, expression=expression, context=(context,), place=place, skips=skips)
    elif _is_memfit(type(thing).__module__):
        yield _Root(kind=HolderKind.MEMFIT, expression=class_name(thing), context=("memfit's own",), place=None)


def _suspended_root(thing: Any, path: list[object]) -> _Root:
    """A variable of a function that waits: what runs it is often a loop's hidden iterator, so
    nothing above it need have a name.
    """
    is_generator = isinstance(thing, types.GeneratorType)
    frame = thing.gi_frame if is_generator else thing.cr_frame
    skips = 2 if isinstance(path[1], types.CellType) and len(path) > 2 else 1
    word = "of the suspended generator" if is_generator else "of the suspended coroutine"
    assert frame is not None  # one that has ended refers to nothing
    return _local_root(frame.f_code, name_key(read_locals(frame), path[skips]), word, skips)


def _local_root(code: types.CodeType, name: str, word: str, skips: int) -> _Root:
    place = place_of_local(code, name)
    context = f"a local {word} {short_name(code.co_qualname)}() ({place})"
    return _Root(kind=HolderKind.LOCAL, expression=name, context=(context,), place=place, skips=skips)


def _referrers(frontier: dict[int, object]) -> list[object]:
    if len(frontier) <= _FEW:
        return gc.get_referrers(*frontier.values())
    wanted = frontier.keys()
    return [thing for thing in gc.get_objects() if not wanted.isdisjoint(map(id, gc.get_referents(thing)))]


def _is_memfit(module_name: object) -> bool:
    return isinstance(module_name, str) and module_name.partition(".")[0] == "memfit"


def _running_locals() -> dict[int, list[tuple[types.CodeType, str]]]:
    """Variables of all running functions (code and name) by the identity of their value.

    Memfit's own frames in this thread are left out.
    """
    found: dict[int, list[tuple[types.CodeType, str]]] = {}
    own = threading.get_ident()
    tops: dict[int, types.FrameType | None] = dict(sys._current_frames())
    # a frame that referred to itself would keep everything until the next collection
    tops[own] = sys._getframe(1)
    for thread, frame in tops.items():
        while frame is not None:
            is_ours = thread == own and _is_memfit(frame.f_globals.get("__name__"))
            if not is_ours and frame.f_locals is not frame.f_globals:
                for name, value in read_locals(frame).items():
                    if value is not None:
                        found.setdefault(id(value), []).append((frame.f_code, name))
            frame = frame.f_back  # noqa: PLW2901, it walks up
    return found


# --- words ----------


class _Trail:
    """A path of references, told from a root down to the target."""

    def __init__(self, root: _Root) -> None:
        self.kind = root.kind
        self.place = root.place
        self._context = list(root.context)  # far to near is reversed at the end
        self._expression = root.expression
        self._owner = ""
        self._names_of: object = None
        self._closure_of: types.FunctionType | None = None
        self._frame_of: types.FrameType | None = None
        self._local_of: threading.local | None = None
        self._last_step = ""
        self._is_unnamed = False

    def follow(self, parent: object, child: object) -> None:
        """One reference further down."""
        if self._names_of is not None:
            self._attribute(self._names_of, name_key(parent, child) if isinstance(parent, dict) else "?")
            self._names_of = None
        elif self._closure_of is not None:
            self._enter_closure(self._closure_of, child)
        elif self._frame_of is not None or isinstance(parent, types.FrameType):
            self._leave_frame(self._frame_of or parent, child)
        elif self._local_of is not None:
            self._enter_thread(self._local_of, parent, child)
        elif isinstance(parent, threading.local):
            self._local_of = parent
        elif isinstance(child, dict) and own_dictionary(parent) is child:
            self._names_of = parent
        elif isinstance(parent, types.FunctionType):
            if child is parent.__closure__:
                self._closure_of = parent
            else:
                self._enter(f"of {_function(parent)}", HolderKind.CLOSURE, "a default argument", parent)
                self._is_unnamed = True  # the tuple of all defaults
        elif isinstance(parent, types.MethodType):
            if child is parent.__self__:
                words = f"through the {_function(parent)}"
                self._enter(words, HolderKind.BOUND_METHOD, class_name(child), parent)
        elif isinstance(parent, types.CellType):
            pass
        elif is_container(parent):
            if not self._is_unnamed:
                self._append(name_item(parent, child))
            self._is_unnamed = False
        else:
            self._attribute(parent, name_attribute(parent, child))

    def _enter_closure(self, function: types.FunctionType, cell: object) -> None:
        cells = function.__closure__ or ()
        index = next((i for i, one in enumerate(cells) if one is cell), None)
        name = "?" if index is None else function.__code__.co_freevars[index]
        self._closure_of = None
        self._enter(f"in the closure of {_function(function)}", HolderKind.CLOSURE, name, function)

    def _enter_thread(self, owner: threading.local, parent: object, child: object) -> None:
        """A thread's attributes: a dictionary in one of all threads, or one of its own."""
        self._local_of = None
        if isinstance(parent, dict) and all(isinstance(key, str) for key in parent):
            self._attribute(owner, name_key(parent, child))
        else:
            self._names_of = owner

    def _leave_frame(self, frame: Any, child: object) -> None:
        """A function that has ended; an exception's traceback keeps its variables."""
        self._frame_of = frame if isinstance(child, types.CellType) else None
        # the variable comes next, or its caller's frame
        if isinstance(child, types.CellType | types.FrameType):
            return
        root = _local_root(frame.f_code, name_key(read_locals(frame), child), "kept by a traceback, of", 0)
        self._enter(root.context[0], HolderKind.LOCAL, root.expression, frame)
        self.place = root.place

    def _enter(self, words: str, kind: HolderKind, expression: str, function: object) -> None:
        """The path goes on inside a callable, with a name of its own."""
        if self._expression:
            self._context.append(f"in {self._expression}")
        self._context.append(words)
        self.kind, self._expression, self._owner, self._last_step = kind, expression, "", ""
        self._is_unnamed = False
        plain = underlying(function)
        self.place = (
            self.place if plain is None else Place(file=plain.__code__.co_filename, line=plain.__code__.co_firstlineno)
        )

    def _attribute(self, owner: object, name: str) -> None:
        if name in HOOK_WORDS:
            where = self._expression.removeprefix("model.") or class_name(owner)
            self._context.append(f"a {HOOK_WORDS[name]} of {where!r}")
            self._expression, self._is_unnamed = "", True
            return
        if isinstance(owner, nn.Module) and name == "_buffers":
            self._is_unnamed = False
            self._names_of = owner  # the next reference is the buffer's name
            return
        self._append(f".{name}")
        place = None if name == "?" else place_of_attribute(type(owner), name)
        self._owner = f"{class_name(owner)}.{name}"
        self.place = place or self.place

    def _append(self, step: str) -> None:
        is_item = step.startswith("[")
        if step == self._last_step or (is_item and self._last_step == "[...]"):
            return  # the links of a chain, and items of items, are one word
        self._expression += step
        self._last_step = step

    def finish(self) -> Holder:
        """The path as a whole."""
        name = self._expression or "?"
        if self._owner:
            known = "" if name.startswith(self._owner) else f"{self._owner}, "
            name += f" ({known}{self.place})" if self.place is not None else f" ({self._owner})"
        return Holder(kind=self.kind, name=name, context=tuple(reversed(self._context)), place=self.place)


def _function(function: Any) -> str:
    plain = underlying(function)
    place = None if plain is None else Place(file=plain.__code__.co_filename, line=plain.__code__.co_firstlineno)
    return f"{describe_callable(function)}{parenthesized(place)}"


def _render(path: list[object], root: _Root) -> Holder:
    trail = _Trail(root)
    for parent, child in pairwise(path):
        trail.follow(parent, child)
    return trail.finish()


def _render_cycle(path: list[object]) -> str:
    """A round trip, told from one of its objects with a class of its own."""
    ring = path[:-1]
    first = next((i for i, thing in enumerate(ring) if _has_own_class(thing)), 0)
    ring = ring[first:] + ring[:first]
    words: list[str] = []
    names_of: object = None
    for thing, following in pairwise([*ring, ring[0]]):
        if names_of is not None:
            words[-1] += f".{name_key(thing, following)}" if isinstance(thing, dict) else ""
            names_of = None
        elif own_dictionary(thing) is following and following is not None:
            words.append(class_name(thing))
            names_of = thing
        elif isinstance(thing, types.FunctionType | types.MethodType):
            words.append(_function(thing))
        elif isinstance(thing, types.FrameType):
            words.append(
                f"local {name_key(read_locals(thing), following)!r} of {short_name(thing.f_code.co_qualname)}()"
            )
        elif not is_container(thing) and not isinstance(thing, types.CellType):
            words.append(f"{class_name(thing)}.{name_attribute(thing, following)}")
    start = ring[0]
    last = (
        class_name(start) if not isinstance(start, types.FunctionType | types.MethodType) else describe_callable(start)
    )
    place = place_of_class(type(start)) if _has_own_class(start) else None
    return f"{' -> '.join([*words, last])}{parenthesized(place)}"


def _has_own_class(thing: object) -> bool:
    return not is_container(thing) and type(thing).__module__ not in {"builtins", "types"}
