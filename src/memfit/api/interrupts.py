"""Ctrl-C while a job works: it comes through between two actions, never inside one.

In: a job's work. Out: the same, with `KeyboardInterrupt` raised where nothing is half done.

[Note: why interrupts wait]
Python raises `KeyboardInterrupt` between any two bytecodes of the main thread. Between taking a lock and entering its `with` it leaves the lock taken for
ever; inside `Condition.notify` it loses a wake-up; in the wait for a transfer it lets go of memory that a thread still fills. So while a job works, Ctrl-C
is noted and raised at the next action of the schedule, or when the work is done. A second Ctrl-C does not wait: it is for a loss that never ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Notes Ctrl-C for one job. A handler of the user's own, or work in another thread, is left alone."""

    def __init__(self) -> None:
        self._is_holding = False
        self._came = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Ctrl-C waits for `check`, at the latest for the end of the context."""
        is_ours = threading.current_thread() is threading.main_thread() and not self._is_holding
        if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        self._came = False
        try:
            # Inside of the `try`: putting the handler in raises what came just before.
            self._is_holding = True
            signal.signal(signal.SIGINT, self._note)
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_holding = False
        self.check()

    def check(self, _done: object = None) -> None:
        """Raises the interrupt that came, if one did."""
        if self._came:
            self._came = False
            raise KeyboardInterrupt

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
