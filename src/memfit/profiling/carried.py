"""Changes that a forward makes to the model's modules themselves, or to what the loss keeps, and
that the next forward meets: counters, words, exchanged submodules.

In: a model and what the loss keeps, before a forward. Out: names of what is different after it.

[Note: what one forward leaves to the next]
Microbatch by microbatch, forwards follow each other as in a plain loop. Layer by layer they run in
descending order, and a model that counts its forwards (an annealed temperature), or exchanges its
modules in the first one and draws random numbers for them, would give the count or the draws to
another microbatch. A number that each forward sets to the same value (a height, a flag) tells no
order; so what has changed is looked at over a second forward.

A tensor that a forward puts on a module in the place of another (a running mean, the last hidden
state) is handed on where the next forward both reads it and puts another one there. One that is
only put there (an auxiliary loss) or only read (a cache of positions) tells no order. Buffers and
parameters have rules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

from torch import nn

from memfit.profiling.program_state import ProgramState, tensors_among
from memfit.tensors.own_attributes import PLAIN_TYPES, held_objects, own_attributes

_ABSENT = object()


class ModuleMarks:
    """Plain attributes, tensors in attributes and submodules of a model, and the same that the loss
    keeps, as they are now.

    Memory: references; what is noted lives as long as this does, so that another one cannot be
    taken for it.

    Attributes:
        tensors: by name of the attribute, those that a forward finds there.

    Args:
        model: any.
        program: what the loss keeps beside it.
    """

    def __init__(self, model: nn.Module, program: ProgramState) -> None:
        self._model = model
        self._program = program
        self._modules = _modules_of(model)
        self._plain = _plain_of(self._values())
        self.tensors = tensors_among(self._values())

    def exchanged(self) -> tuple[str, ...]:
        """Names of the submodules that are others now, the outermost only."""
        now = _modules_of(self._model)
        names = [n for n in sorted(self._modules.keys() | now.keys()) if self._modules.get(n) is not now.get(n)]
        return tuple(name for name in names if not any(name.startswith(f"{outer}.") for outer in names))

    def changed(self) -> tuple[str, ...]:
        """Names of numbers, flags and words that are others now."""
        now = _plain_of(self._values())
        return tuple(
            name
            for name in sorted(self._plain.keys() | now.keys())
            if not _is_same(self._plain.get(name, _ABSENT), now.get(name, _ABSENT))
        )

    def replaced(self, written: AbstractSet[int], read: AbstractSet[int] | None = None) -> tuple[str, ...]:
        """Names under which other tensors lie now, or changed ones.

        Args:
            written: ids of those that were changed in place.
            read: only those of which one with such an `id` was found; None: all.
        """
        now = tensors_among(self._values())
        found: list[str] = []
        for name in sorted(self.tensors.keys() | now.keys()):
            before = [*map(id, self.tensors.get(name, ()))]
            is_other = before != [*map(id, now.get(name, ()))] or not written.isdisjoint(before)
            if is_other and (read is None or not read.isdisjoint(before)):
                found.append(name)
        return tuple(found)

    def _values(self) -> Iterator[tuple[str, Any]]:
        yield from _attributes_of(_modules_of(self._model))
        yield from self._program.values()


def _modules_of(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def _attributes_of(modules: dict[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """(name, value) of what modules have beside torch's own, and of what objects hold that they
    have.
    """
    for place, module in modules.items():
        outer = f"{place}." if place else ""
        for name, value in own_attributes(module):
            yield f"{outer}{name}", value
        for name, held in held_objects(module):
            for inner, value in vars(held).items():
                yield f"{outer}{name}.{inner}", value


def _plain_of(values: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in values if type(value) in PLAIN_TYPES}


def _is_same(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and left == right)
