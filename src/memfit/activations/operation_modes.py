"""Dispatch modes that run beside the user's operations, as cheaply as Python can.

In: a class with `__torch_dispatch__`. Out: the same, never compiled.

[Note: modes and the compiler]
torch wraps the method of each dispatch mode so that torch.compile does not trace it; the wrapper
takes two thirds of what a mode costs an operation (15 of 23 us). Here the method's code object says
the same to the compiler once: the frame and all that it calls run as they are, also where compiled
code calls an operation.
"""

from __future__ import annotations

from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` is not wrapped. See [Note: modes and the compiler]."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # The frame itself, and whatever it calls.
        skipped = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(cls.__torch_dispatch__.__code__, skipped)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper is left out
