"""Attributes that a module's class, or other code, has put on it beside torch's own.

In: a module. Out: names and values; parameters, buffers, submodules, hooks and the mode are torch's and are not among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
"""Types of numbers, flags and words: values that no forward changes in place."""

_TORCH_OWN = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of the attributes of this module, without its submodules'."""
    return ((name, value) for name, value in vars(module).items() if name not in _TORCH_OWN)
