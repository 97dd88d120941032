"""Starting the program again, once, with settings that libraries read when they are loaded.

In: this process's own command line. Out: either nothing, or the same program in the same process id
with more in its environment. For a console program only: the API never calls this.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from memfit.host.read import SET_BY_MEMFIT, read_host
from memfit.host.settings import binds_threads, choose_settings


def restart_with_settings(*, root: Path = Path("/")) -> None:
    """Replaces this process by itself with the settings that `choose_settings` finds and the user
    has not made.

    Returns, and changes nothing, where the program was started again already (the environment says
    so, to all children too), where nothing is to be set, on other systems than Linux, and where a
    restart would break something: other threads run, a debugger traces, the interpreter is
    interactive or does not know its own executable, or OpenMP has bound this thread to one place,
    which a restart would inherit.

    [Note: why a restart] OpenMP and glibc read their settings once, before Python code of ours
    runs: importing any part of memfit may load torch, and with it OpenMP. A new process image is
    the only way that works whatever has been imported; the id, the terminal and open files stay.

    Args:
        root: where `proc` and `sys` are; another tree is for tests.

    Raises:
        OSError: the interpreter cannot be started again.
    """
    if SET_BY_MEMFIT in os.environ or sys.platform != "linux" or not _may_restart():
        return
    host = read_host(root=root)
    if binds_threads(host) and "torch" in sys.modules:
        return
    wanted = {setting.name: setting.value for setting in choose_settings(host) if setting.yours is None}
    if not wanted:
        return
    environment = {**os.environ, **wanted, SET_BY_MEMFIT: ",".join(wanted)}
    sys.stdout.flush()
    sys.stderr.flush()
    # orig_argv keeps the interpreter's own options (-m, -X, -W, -u), which argv has lost.
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606, the program itself, with its own arguments


def _may_restart() -> bool:
    is_interactive = bool(sys.flags.interactive) or hasattr(sys, "ps1")
    return bool(sys.executable) and threading.active_count() == 1 and sys.gettrace() is None and not is_interactive
