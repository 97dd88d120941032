"""Side effects of a step of the user's optimizer: step hooks, global hooks, LR
schedulers.

In: the live optimizer, before and after an update that was made elsewhere. Out: the same calls, in
the same order, once a step.
Source: torch/optim/optimizer.py, `profile_hook_step`; torch/optim/lr_scheduler.py,
`patch_track_step_called`.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from memfit.core.errors import UnsupportedError
from memfit.optimizers.shadow import has_hooked_base_step


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
    for hook in [*_global_optimizer_pre_hooks.values(), *own.values()]:
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
    own = optimizer._optimizer_step_post_hooks  # pyright: ignore[reportPrivateUsage]
    for hook in [*own.values(), *_global_optimizer_post_hooks.values()]:
        hook(optimizer, (optimizer,), {})


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
