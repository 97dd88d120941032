"""Attributes that a model sets on its own modules while it runs, kept apart for interleaved
microbatches.

In: a model. Out: `ModuleNotes`, which takes attributes off at a pause of a coroutine and puts them
back when it resumes.

[Note: notes on modules]
Some models keep things on themselves during a forward: outputs that their own hooks capture, a
position, a cache. Run one after the other, microbatches overwrite these in turn; interleaved, they
would mix them up. So at a pause, attributes that differ from those of before the resume are taken
off and belong to the microbatch; lists, dictionaries and sets are taken with their content. So are
modules' modes (`train`, `eval`). Parameters, buffers and submodules are no notes, nor are other
switches, numbers and functions (a flag that hooks have been installed must hold for all). After the
step the notes of the last microbatch stay, as after a plain loop.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any

from torch import nn

_ABSENT: Any = object()
_MODE = "training"
_TORCH_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_CONTAINERS = (list, dict, set, deque)

Place = tuple[int, str]
Notes = dict[Place, Any]


class ModuleNotes:
    """Saved module attributes of one model.

    The first run of a schedule looks at every attribute of every module at every pause and learns
    which ones are written; later runs look at those.

    Memory: references to the attributes, shallow copies of containers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(model.modules())
        self._places: list[Place] | None = None
        self._written: set[Place] = set()

    def begin_run(self, *, learns: bool) -> None:
        """Prepares for a run of a schedule.

        Args:
            learns: look at every attribute (in the first run of these shapes).
        """
        self._places = None if learns else sorted(self._written)

    def enter(self, notes: Notes | None) -> Notes:
        """Puts the attributes of a microbatch that resumes on the modules.

        Returns:
            The replaced attributes, for `leave`.
        """
        outside = self._take()
        if notes:
            self._change(outside, {**outside, **notes})
        return outside

    def leave(self, outside: Notes) -> Notes:
        """Takes off the attributes that a microbatch has set, when it pauses.

        Returns:
            Its attributes, for the next `enter`.
        """
        here = self._take()
        places = here.keys() | outside.keys()
        notes = {
            place: here.get(place, _ABSENT)
            for place in places
            if not _same(here.get(place, _ABSENT), outside.get(place, _ABSENT))
        }
        self._written |= notes.keys()
        self._change(here, outside)
        return notes

    def _take(self) -> Notes:
        if self._places is not None:
            return {
                place: _noted(place[1], vars(self._modules[place[0]]).get(place[1], _ABSENT)) for place in self._places
            }
        return {
            (index, name): _noted(name, value)
            for index, module in enumerate(self._modules)
            for name, value in vars(module).items()
            if name not in _TORCH_OWN and not name.endswith("_hooks")
        }

    def _change(self, here: Notes, wanted: Notes) -> None:
        for place in here.keys() | wanted.keys():
            now, then = here.get(place, _ABSENT), wanted.get(place, _ABSENT)
            if not _same(now, then):
                _put(self._modules[place[0]], place[1], then)


class _Mode(Enum):
    """Mode of a module (training or evaluation), the only switch that belongs to a microbatch."""

    EVALUATION = False
    TRAINING = True


def _noted(name: str, value: Any) -> Any:
    """Returns a container and its present content: (the object, a shallow copy)."""
    if name == _MODE and isinstance(value, bool):
        return _Mode(value)
    if type(value) in _CONTAINERS:
        return (value, value.copy())
    return value


def _is_flag(value: Any) -> bool:
    """Tells whether a value belongs to no microbatch in particular: a switch, a counter, a function
    that was installed once.
    """
    return (
        value is _ABSENT
        or value is None
        or isinstance(value, bool | int | float | complex | str | bytes)
        or callable(value)
    )


def _same(a: Any, b: Any) -> bool:
    if _is_flag(a) and _is_flag(b):
        return True
    if type(a) is tuple and type(b) is tuple and len(a) == 2 and len(b) == 2 and type(a[0]) in _CONTAINERS:
        return a[0] is b[0] and _same_content(a[1], b[1])
    return a is b


def _same_content(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(key in b and a[key] is b[key] for key in a)
    if isinstance(a, set):
        return a == b
    return all(x is y for x, y in zip(a, b, strict=True))


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(module).pop(name, None)
        return
    if isinstance(value, _Mode):
        value = value.value
    if type(value) is tuple and len(value) == 2 and type(value[0]) in _CONTAINERS and type(value[0]) is type(value[1]):
        container, content = value
        container.clear()
        if isinstance(container, dict | set):
            container.update(content)
        else:
            container.extend(content)
        value = container
    vars(module)[name] = value
