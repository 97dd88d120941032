"""Ctrl-C while a job works: it comes through between two actions, never inside one.

In: a job's work. Out: the same, with `KeyboardInterrupt` raised where nothing is half done.

[Note: why interrupts wait]
Python raises `KeyboardInterrupt` between any two bytecodes of the main thread. Between taking a
lock and entering its `with` it leaves the lock taken for ever; inside `Condition.notify` it loses a
wake-up; in the wait for a transfer it lets go of memory that a thread still fills. So while a job
works, Ctrl-C is noted and raised at the next action of the schedule, or when the work is done. A
second Ctrl-C does not wait: it is for a loss that never ends.

[Note: interrupts in the device's thread]
Python runs signal handlers in the main thread, between bytecodes; on an accelerator that thread
waits in C++ for the whole backward, while the schedule's actions run in autograd's device thread.
There the note comes too late: all blocks would be updated before anyone hears of it. What comes at
once is a byte in a pipe (`signal.set_wakeup_fd`), which `check` reads in other threads than the
holder's. The handler runs all the same when backward has ended, and is then known to have been
raised already. A second Ctrl-C cannot be quicker than the next action while backward runs there.
"""

from __future__ import annotations

# `signal` without enumerations of its constants, which take 3 us a call.
import _signal  # pyright: ignore[reportMissingImports]
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from memfit.tensors.one_call import OneCall


class Interrupts:
    """Notes Ctrl-C for one job.

    A handler of the user's own, or work in another thread, is left alone.

    Attributes:
        calls: guard of the job's public calls.
    """

    def __init__(self) -> None:
        self.calls = OneCall()
        self._is_holding = False
        self._holder = 0
        self._is_postponed = False
        self._wake: int | None = None
        # Interrupts since `held` began: whose handler ran, whose byte was read, and how many have
        # been raised.
        self._noted = self._arrived = self._raised = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which Ctrl-C waits for `check`, at the latest for the context's end."""
        # The handler before the pipe: an interrupt that came between the two steps of having the
        # pipe and of noting what to take back would leave a closed descriptor with the interpreter;
        # likewise at the end.
        with self.held_briefly() as is_ours, ExitStack() as stack:
            if is_ours:
                self._wake = _wake_pipe(stack)
                stack.callback(self._forget_pipe)  # first of all at the end: other threads ask it
            yield

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        """Context of a public call: Ctrl-C waits, and other calls are refused.

        Args:
            name: of the call.
        """
        with self.held(), self.calls.enter(name):
            yield

    @contextmanager
    def held_briefly(self) -> Iterator[bool]:
        """Context as `held`, for work that is over soon: in other threads than the main one `check`
        hears of nothing. Gives whether interrupts are held here.
        """
        is_ours = threading.current_thread() is threading.main_thread() and not self._is_holding
        if not is_ours or _signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield False
            return
        self._noted = self._arrived = self._raised = 0
        self._holder = threading.get_ident()
        try:
            # Inside of the `try`: putting the handler in raises what came just before.
            self._is_holding = True
            _signal.signal(signal.SIGINT, self._note)
            yield True
        finally:
            _signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_holding = False
        self.check()

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Context in which `check` raises nothing: what came waits for the end of `held`."""
        self._is_postponed = True
        try:
            yield
        finally:
            self._is_postponed = False

    def check(self, _done: object = None) -> None:
        """Raises the interrupt that came, if one did.

        From any thread; see [Note: interrupts in the device's thread].
        """
        if self._is_postponed:
            return
        if self._wake is not None and threading.get_ident() != self._holder:
            self._arrived += _read_all(self._wake).count(signal.SIGINT)
        came = max(self._noted, self._arrived)
        if came > self._raised:
            self._raised = came
            raise KeyboardInterrupt

    def _forget_pipe(self) -> None:
        self._wake = None

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._noted += 1
        if self._noted > self._raised + 1:
            self._raised = self._noted
            raise KeyboardInterrupt


def _wake_pipe(stack: ExitStack) -> int | None:
    """A pipe into which the interpreter writes the number of each signal at once; None where
    somebody else has one (an event loop).
    """
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    stack.callback(os.close, read)
    stack.callback(os.close, write)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    stack.callback(signal.set_wakeup_fd, before)
    if before != -1:
        signal.set_wakeup_fd(before)
        return None
    return read


def _read_all(pipe: int) -> bytes:
    try:
        return os.read(pipe, 4096)
    except BlockingIOError:
        return b""
