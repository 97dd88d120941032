"""Hooks of the user's program on the gradients of parameters, and whether they read other
parameters' gradients.

In: a parameter. Out: its hooks, without memfit's own; while a trace runs backward, the names of
parameters whose `.grad` is read.

[Note: gradients that others read]
A hook that runs while backward does may read `.grad` of another parameter: the norm of all, a
balance of two layers. In plain PyTorch each gradient stays until the program drops it; a plan that
updates inside of backward, or sends gradients home, has dropped it by then, and the hook would
compute with nothing, in silence. So a trace notes such reads, and gradients that are read stay
where they are until all updates are made after backward. For the time of a backward `torch.Tensor`
has a property `grad` of its own, which asks who reads; a parameter's own hooks may read its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
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
