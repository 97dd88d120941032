"""Side effects of a step of the user's optimizer: step hooks, global hooks, LR
schedulers.

In: the live optimizer, before and after an update that was made elsewhere. Out: the same calls, in
the same order, once a step.
Source: torch/optim/optimizer.py, `profile_hook_step`; torch/optim/lr_scheduler.py,
`patch_track_step_called`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from memfit.core.errors import UnsupportedError
from memfit.optimizers.shadow import Shadow, has_hooked_base_step


class ClassStep:
    """Takes the place of the class's own `step` on one optimizer.

    Whoever took `optimizer.step` before the optimizer was adopted calls the class's function, past
    the instance's attribute: Accelerate does with a `GradScaler`, and some schedulers. torch asks
    the instance's step pre-hooks first, and calls the function with what they return: this one,
    the last of them, makes the update, and gives the function an optimizer without parameters.

    Attributes:
        is_running: torch's wrapper runs the user's hooks around an update that is being made.
    """

    def __init__(self, step: Callable[[Callable[[], Any] | None], Any]) -> None:
        """Prepares; changes nothing yet.

        Args:
            step: makes the update, or says why not; takes a closure.
        """
        self._step = step
        self.is_running = False

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the update, as a step pre-hook."""
        own = optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage]
        if next(reversed(own.values())) is not self:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step was taken before memfit.fit, and a step pre-hook registered after it: the hook would run behind the update. "
                "Register the hook before memfit.fit, or call optimizer.step()"
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self.is_running = True
        try:
            value = self._step(closure)
        finally:
            self.is_running = False
        empty = Shadow(optimizer, groups=[]).instance
        return (empty,) if closure is None else (empty, lambda: value), {}


def run_pre_hooks(optimizer: Optimizer) -> None:
    """Runs the global and then the instance's step pre-hooks.

    Hooks that look at `.grad` or at weights see what the engine shows them, which may be nothing.

    Raises:
        UnsupportedError: a hook returns other arguments for `step`, or global hooks would run once
            a piece.
    """
    if (_global_optimizer_pre_hooks or _global_optimizer_post_hooks) and has_hooked_base_step(type(optimizer)):
        raise UnsupportedError(
            f"{type(optimizer).__name__}'s base class has a step of its own; called by super(), it would run torch's "
            "global optimizer hooks once a piece. Remove the hooks made by register_optimizer_step_pre_hook and "
            "_post_hook, or register them on the optimizer itself."
        )
    own = optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage]
    if _is_around(optimizer):
        return
    for hook in [*_global_optimizer_pre_hooks.values(), *own.values()]:
        if isinstance(hook, ClassStep):
            continue
        result: Any = hook(optimizer, (optimizer,), {})
        if result is not None and not _is_plain_call(result, optimizer):
            raise UnsupportedError(
                f"The step pre-hook {getattr(hook, '__qualname__', hook)!r} returned new arguments for optimizer.step. "
                "memfit makes the update without arguments (no closure); return None."
            )


def run_post_hooks(optimizer: Optimizer) -> None:
    """Tells LR schedulers that a step was made, then runs the instance's and the global step
    post-hooks.
    """
    mark_stepped(optimizer)
    if _is_around(optimizer):
        return
    own = optimizer._optimizer_step_post_hooks  # pyright: ignore[reportPrivateUsage]
    for hook in [*own.values(), *_global_optimizer_post_hooks.values()]:
        hook(optimizer, (optimizer,), {})


def _is_around(optimizer: Optimizer) -> bool:
    """Tells whether torch's own wrapper of `step` runs the hooks of this update."""
    own = optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage]
    return any(isinstance(hook, ClassStep) and hook.is_running for hook in own.values())


def mark_stepped(optimizer: Optimizer) -> None:
    """Sets what torch's wrapper around `step` sets, without which the first `scheduler.step()`
    warns.
    """
    vars(optimizer)["_opt_called"] = True


def _is_plain_call(result: Any, optimizer: Optimizer) -> bool:
    """Tells whether a pre-hook's answer is the call that memfit makes anyway: `step()` without
    arguments.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        return False
    args, kwargs = result
    return len(args) == 1 and args[0] is optimizer and not any(value is not None for value in kwargs.values())
