"""Stacks of a thread, from which something is taken that is not on top.

In: a dispatch mode, or saved-tensor hooks, that a call pushed and never popped, because a Ctrl-C
went past it. Out: the same stacks without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

_default_hooks: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue] (not in torch's stubs)


def take_mode_off(mode: TorchDispatchMode) -> None:
    """Leaves a dispatch mode, if it is on the stack; those above it stay."""
    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:
        return
    above: list[Any] = [_pop_mode() for _ in stack[stack.index(mode) + 1 :]]
    mode.__exit__(None, None, None)
    for other in reversed(above):
        _push_mode(other)


def take_hooks_off(pack: Callable[[torch.Tensor], Any]) -> None:
    """Takes the saved-tensor hooks with this `pack` off the stack, if they are there."""
    found: list[Any] = []
    while (top := _default_hooks._top_saved_tensors_default_hooks(True)) is not None:  # noqa: FBT003, a C function
        found.append(top)
        _default_hooks._pop_saved_tensors_default_hooks()
    for own, unpack in reversed(found):
        if own != pack:
            _default_hooks._push_saved_tensors_default_hooks(own, unpack)
