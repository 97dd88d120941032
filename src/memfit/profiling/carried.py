"""Changes that a forward makes to the model's modules themselves, and that the next forward meets: counters, words, exchanged submodules.

In: a model, before a forward. Out: names of what is different after it.

[Note: what one forward leaves to the next]
Microbatch by microbatch, forwards follow each other as in a plain loop. Layer by layer they run in descending order, and a model that counts its forwards (an
annealed temperature), or exchanges its modules in the first one and draws random numbers for them, would give the count or the draws to another microbatch. A
number that each forward sets to the same value (a height, a flag) tells no order; so what has changed is looked at over a second forward. Tensors are not looked
at here: buffers and parameters have rules of their own.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from memfit.tensors.own_attributes import PLAIN_TYPES, own_attributes

_ABSENT = object()


class ModuleMarks:
    """Plain attributes and submodules of a model as they are now.

    Memory: references; the modules live as long as this does, so that another one cannot be taken for them.

    Args:
        model: any.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = _modules_of(model)
        self._plain = _plain_of(self._modules)

    def exchanged(self) -> tuple[str, ...]:
        """Names of the submodules that are others now, the outermost only."""
        now = _modules_of(self._model)
        names = [n for n in sorted(self._modules.keys() | now.keys()) if self._modules.get(n) is not now.get(n)]
        return tuple(name for name in names if not any(name.startswith(f"{outer}.") for outer in names))

    def changed(self) -> tuple[str, ...]:
        """Names of numbers, flags and words on modules that are others now."""
        now = _plain_of(_modules_of(self._model))
        return tuple(
            name
            for name in sorted(self._plain.keys() | now.keys())
            if not _is_same(self._plain.get(name, _ABSENT), now.get(name, _ABSENT))
        )


def _modules_of(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def _plain_of(modules: dict[str, nn.Module]) -> dict[str, Any]:
    return {
        f"{place}.{name}" if place else name: value
        for place, module in modules.items()
        for name, value in own_attributes(module)
        if type(value) in PLAIN_TYPES
    }


def _is_same(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and left == right)
