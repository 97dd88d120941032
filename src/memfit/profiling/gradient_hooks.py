"""Hooks of the user's program on the gradients of parameters.

In: a parameter. Out: its hooks, without memfit's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Hook = Callable[..., Any]


def gradient_hooks(parameter: nn.Parameter) -> tuple[list[Hook], list[Hook]]:
    """(those of `register_hook`, those of `register_post_accumulate_grad_hook`)."""
    with torch._C.DisableTorchFunctionSubclass():  # it may wear the class of weights that are away
        return _of_users(parameter._backward_hooks), _of_users(parameter._post_accumulate_grad_hooks)


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """The user's program looks at, or changes, its gradient."""
    return parameter.requires_grad and any(gradient_hooks(parameter))


def hand_on(parameter: nn.Parameter, stand_in: torch.Tensor) -> None:
    """Gives a stand-in the hooks, so that a trace sees what they read."""
    before, after = gradient_hooks(parameter)
    for hook in before:
        stand_in.register_hook(hook)
    for hook in after:
        stand_in.register_post_accumulate_grad_hook(hook)


def _of_users(hooks: Any) -> list[Hook]:
    return [hook for hook in (hooks or {}).values() if not _is_ours(hook)]


def _is_ours(hook: Any) -> bool:
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return place.partition(".")[0] == "memfit"
