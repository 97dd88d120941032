"""Ctrl-C at the command line: one message, one exit code, and never a wait for what cannot end.

What is committed is whole at every instant, so that a process may end anywhere: closing in order
only tidies up.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

INTERRUPTED = 130
"""Exit code that shells report of a program that Ctrl-C ended: 128 and the signal's number."""
_AGAIN_S = 0.02
"""Until then whatever threw the interrupt away has mostly returned; if not, it comes once more."""


def leave_at_once() -> None:
    """From here on another Ctrl-C ends the process where it stands.

    Nothing where the program's signals are another's (a test, a notebook).
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _leave)


def hear_again() -> None:
    """From here on a Ctrl-C that the interpreter throws away is sent again, and nothing is printed
    of it.

    Python raises `KeyboardInterrupt` wherever the main thread is; in a finalizer, or in what a weak
    reference calls, whatever is raised is told and forgotten, so that the person who typed it would
    wait for nothing.
    """
    tell = sys.unraisablehook
    main_thread = threading.main_thread().ident

    def send_again() -> None:
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGINT)

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            timer = threading.Timer(_AGAIN_S, send_again)
            timer.daemon = True
            timer.start()
        else:
            tell(unraisable)

    sys.unraisablehook = hook


def _leave(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)
