"""Children with a time limit, one after the other.

In: a command. Out: how it ended, and the end of what it said. Each child leads a process group of its own, so that what it started ends with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_KEPT_CHARACTERS = 6000


@dataclass(frozen=True, kw_only=True)
class Ending:
    """End of a child process.

    Attributes:
        outcome: "done", "failed" (an exit code), "crashed" (a signal) or "out of time".
        words: the reason in one line; empty where it is done.
        said: the end of its standard output and error.
        seconds: from start to end.
    """

    outcome: str
    words: str
    said: str
    seconds: float


def run_child(command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> Ending:
    """Runs one child to its end, or kills its process group when its time is up or this process is interrupted."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            is_late = not _ends_within(child.pid, limit_s)
        finally:
            # The child is not collected yet, so its number, which is its group's, is still its own.
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        seconds = time.monotonic() - began
        output.seek(max(0, output.seek(0, os.SEEK_END) - _KEPT_CHARACTERS))
        said = output.read().decode(errors="replace").strip()
    if is_late:
        return Ending(outcome="out of time", words=f"not done after {limit_s:.0f} s", said=said, seconds=seconds)
    if child.returncode < 0:
        words = f"ended by {_signal_name(-child.returncode)}"
        return Ending(outcome="crashed", words=words, said=said, seconds=seconds)
    if child.returncode:
        return Ending(outcome="failed", words=_last_line(said, child.returncode), said=said, seconds=seconds)
    return Ending(outcome="done", words="", said=said, seconds=seconds)


def _ends_within(pid: int, limit_s: float) -> bool:
    """Waits for a child without collecting it."""
    ends = time.monotonic() + limit_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(said: str, code: int) -> str:
    lines = said.splitlines()
    return lines[-1][:300] if lines else f"ended with {code} and said nothing"
