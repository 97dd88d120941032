"""Ctrl-C at the command line: one message, one exit code, and never a wait for what cannot end.

What is committed is whole at every instant, so that a process may end anywhere: closing in order only tidies up.
"""

from __future__ import annotations

import os
import signal
import threading

INTERRUPTED = 130
"""What shells report of a program that Ctrl-C ended: 128 and the signal's number."""


def leave_at_once() -> None:
    """From here on another Ctrl-C ends the process where it stands. Nothing where the program's signals are another's (a test, a notebook)."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _leave)


def _leave(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)
