"""Attributes that a module's class, or other code, has put on it beside torch's own.

In: a module. Out: names and values; parameters, buffers, submodules, hooks and the mode are torch's
and are not among them. And objects of the program's own classes among the values, which may keep
something from one forward to the next.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
"""Types of numbers, flags and words: values that no forward changes in place."""

_TORCH_OWN = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of the attributes of this module, without its submodules'."""
    return ((name, value) for name, value in vars(module).items() if name not in _TORCH_OWN)


def held_objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, object) of the attributes that are objects with attributes of their own:
    configurations, caches, records.

    Torch's and the interpreter's are not.
    """
    for name, value in own_attributes(module):
        if isinstance(value, nn.Module | torch.Tensor | ModuleType | type) or not hasattr(value, "__dict__"):
            continue
        root = type(value).__module__.partition(".")[0]
        if root not in {"torch", "memfit", "builtins"} and root not in sys.stdlib_module_names:
            yield name, value
