"""Microbatches as coroutines: the user's loss runs unmodified and pauses at segment entries.

In: a function that computes one microbatch's loss. Out: a `Coroutine` that runs to the next pause
each time it is resumed.

[Note: what belongs to a coroutine]
A paused microbatch leaves thread-wide switches behind that another must not see: grad mode,
autocast, saved-tensor hooks, dispatch and torch-function modes, attention-kernel flags, random
streams. `ThreadState.capture` takes them off the thread at a pause and `install` puts them back at
a resume. Context variables travel with the greenlet (`gr_context`). Inference mode and functorch
levels cannot be moved (they are scoped to the C++ stack), so a segment entered under them does not
pause: it runs on, which is correct and only costs a visit.

[Note: autocast's cache]
Within `torch.autocast`, a weight is cast once and the cast kept until the context ends.
Microbatches that take turns inside their contexts would share the cast, and their gradients would
add up in its narrow dtype before they reach the weight. So the cache is emptied whenever they
change turns.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import greenlet
import torch
from torch.utils import _python_dispatch

from memfit.engine.modules import ModuleNotes, Notes
from memfit.tensors.random_streams import RandomStream

_saved_hooks: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue], the stack of default saved-tensor hooks has no public reader


@dataclass(frozen=True)
class ThreadState:
    """Everything of [Note: what belongs to a coroutine] except random streams."""

    grad_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    is_autocast_cached: bool
    saved_tensor_hooks: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    function_modes: tuple[Any, ...]
    attention_kernels: tuple[bool, bool, bool, bool]

    @classmethod
    def capture(cls, device_types: tuple[str, ...]) -> ThreadState:
        """Takes the thread's switches; stacks are left empty."""
        return cls(
            grad_enabled=torch.is_grad_enabled(),
            autocast=tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types),
            is_autocast_cached=torch.is_autocast_cache_enabled(),
            saved_tensor_hooks=_take_saved_tensor_hooks(),
            dispatch_modes=_take_dispatch_modes(),
            function_modes=_take_function_modes(),
            attention_kernels=_attention_kernels(),
        )

    def install(self) -> None:
        """Gives the thread these switches; its stacks must be empty (see `capture`)."""
        torch.set_grad_enabled(self.grad_enabled)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.is_autocast_cached)
        for pack, unpack in reversed(self.saved_tensor_hooks):
            _saved_hooks._push_saved_tensors_default_hooks(pack, unpack)
        for mode in self.dispatch_modes:
            _python_dispatch._push_mode(mode)
        for mode in self.function_modes:
            torch.overrides._push_mode(mode)
        if self.attention_kernels != _attention_kernels():
            flash, efficient, math, cudnn = self.attention_kernels
            torch.backends.cuda.enable_flash_sdp(flash)
            torch.backends.cuda.enable_mem_efficient_sdp(efficient)
            torch.backends.cuda.enable_math_sdp(math)
            torch.backends.cuda.enable_cudnn_sdp(cudnn)


class Coroutine:
    """One microbatch's run of the user's loss. With `modules` it takes turns with others.

    Attributes:
        microbatch: its index.
        call: index of the call at whose entry it is paused; None before the start, and after the
            end.
        result: what the user's function returned, once finished; see `take_result`.
        is_finished: the function has returned.
        position: index of the first call that it has not made yet.
        notes: attributes that it set on modules (see `engine.modules`).
    """

    def __init__(
        self,
        microbatch: int,
        run: Callable[[], Any],
        *,
        stream: RandomStream | None,
        device_types: tuple[str, ...],
        modules: ModuleNotes | None = None,
    ) -> None:
        self.microbatch = microbatch
        self.call: int | None = None
        self.result: Any = None
        self.is_finished = False
        self.position = 0
        self._device_types = device_types
        self._stream = stream
        self._state: ThreadState | None = None
        self._modules = modules
        self._takes_turns = modules is not None
        self.notes: Notes | None = None
        self._greenlet = greenlet.greenlet(run)
        self._greenlet.gr_context = contextvars.copy_context()

    def take_result(self) -> Any:
        """Returns the result of the code, and drops it here, so that this object does not keep its
        graph.
        """
        result, self.result = self.result, None
        return result

    def resume(self) -> None:
        """Runs until the next `pause` or the end. Errors of the user's code come out here."""
        outside = ThreadState.capture(self._device_types)
        # After the capture, which has emptied the stacks: `install` pushes onto them.
        (self._state or outside).install()
        if self._stream is not None:
            # Until `leave`: all random numbers in between are this microbatch's.
            self._stream.enter()
        # Attributes of modules are everybody's: another microbatch has set its own since.
        outside_notes = self._modules.enter(self.notes) if self._modules is not None else None
        self._forget_casts()
        try:
            # Each time: a finished greenlet passes control to its parent, who may be another caller
            # than last time.
            self._greenlet.parent = greenlet.getcurrent()
            result = self._greenlet.switch()
        finally:
            # Also after an error, like all below: the thread must be the caller's own again.
            self._forget_casts()
            if self._modules is not None and outside_notes is not None:
                self.notes = self._modules.leave(outside_notes)
            if self._stream is not None:
                self._stream.leave()
            # Takes the stacks off before the caller's are put back.
            self._state = ThreadState.capture(self._device_types)
            outside.install()
        if self._greenlet.dead:
            self.is_finished = True
            self.call = None
            # The graph hangs on it: it is dropped with `take_result`.
            self.result = result

    def _forget_casts(self) -> None:
        """See [Note: autocast's cache]."""
        if self._takes_turns:
            torch.clear_autocast_cache()

    def pause(self, call: int) -> None:
        """Pauses; called inside the coroutine at the entry of `call`. Control returns to the caller
        of `resume`.
        """
        self.call = call
        parent = self._greenlet.parent
        assert parent is not None
        # The user's code stands still here, with its locals, until `resume`.
        parent.switch()
        self.call = None

    @property
    def is_current(self) -> bool:
        """Tells whether the caller runs inside this coroutine."""
        return greenlet.getcurrent() is self._greenlet

    def cancel(self) -> None:
        """Ends it where it is paused: the user's `finally` clauses run."""
        if self._greenlet and not self._greenlet.dead:
            outside = ThreadState.capture(self._device_types)
            (self._state or outside).install()
            try:
                # With its own switches: the user's `finally` and `with` clauses undo what they did
                # to them.
                self._greenlet.throw(greenlet.GreenletExit)
            finally:
                ThreadState.capture(self._device_types)
                outside.install()


def can_pause() -> bool:
    """Tells whether a coroutine can pause here: not where switches are set that cannot be moved
    between coroutines.
    """
    return not torch.is_inference_mode_enabled() and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]


def _take_saved_tensor_hooks() -> tuple[Any, ...]:
    hooks: list[Any] = []
    while (top := _saved_hooks._top_saved_tensors_default_hooks(False)) is not None:  # noqa: FBT003, a C function
        # From the top down, so that `install` pushes them in reverse.
        hooks.append(top)
        _saved_hooks._pop_saved_tensors_default_hooks()
    return tuple(hooks)


def _take_dispatch_modes() -> tuple[Any, ...]:
    modes = tuple(_python_dispatch._get_current_dispatch_mode_stack())
    for _ in modes:
        _python_dispatch._pop_mode()
    return modes


def _take_function_modes() -> tuple[Any, ...]:
    modes = tuple(torch.overrides._get_current_function_mode_stack())
    for _ in modes:
        torch.overrides._pop_mode()
    return modes


def _attention_kernels() -> tuple[bool, bool, bool, bool]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )
