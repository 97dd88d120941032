"""Which environment variables are safe to set before torch is loaded, and why.

In: `Host`. Out: `Setting`s. None of them changes what is computed but for the order of sums that
the number of threads gives (as it does for plain PyTorch). What the user has set stays, and so does
whatever hangs together with it.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from memfit.machine.host.read import SET_BY_MEMFIT, Host, read_host

_THRESHOLD_BYTES = 128 << 10  # as memfit's own allocator and its fallback have it

# Whoever sets one of these has decided the same matter on their own.
WAITING_NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that say what an OpenMP thread does while it waits."""
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET")
_THREADS = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "MKL_NUM_THREADS", *_BINDING)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One environment variable.

    Attributes:
        name, value: what memfit would set.
        reason: what it is good for.
        yours: what the user has set in this matter, such as "OMP_NUM_THREADS=4": it stays, and
            memfit sets nothing. None: nothing.
    """

    name: str
    value: str
    reason: str
    yours: str | None


def choose_settings(host: Host) -> tuple[Setting, ...]:
    """Decides what to set; a pure function of what was found.

    - `OMP_WAIT_POLICY=PASSIVE`: idle OpenMP threads sleep at once. Those that spin take cores from
      the threads that move bytes and update weights.
    - `OMP_NUM_THREADS`: physical cores inside affinity and quota, shared among the ranks that
      torchrun starts on this machine. OpenMP by itself counts hyper-threads, and nothing in torch
      reads the quota.
    - only where memfit's own allocator cannot be built (no compiler), under glibc's own malloc:
      `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_`, so that freed tensors leave the process
      from its first moment on, and `THP_MEM_ALLOC_ENABLE=1`, which has torch ask for huge pages and
      wins most of the page faults back.
    """
    settings = [
        _setting(
            host,
            "OMP_WAIT_POLICY",
            "PASSIVE",
            "threads that wait sleep, and leave their cores to disk, checksums and update",
            (*WAITING_NAMES, *_BINDING),
        ),
        _setting(host, "OMP_NUM_THREADS", str(compute_threads(host)), _why_threads(host), _THREADS),
    ]
    if host.malloc.compiler is None and host.malloc.glibc is not None and host.malloc.preloaded is None:
        tunables = host.environment.get("GLIBC_TUNABLES", "")
        for name, tunable in (("MMAP_THRESHOLD", "mmap_threshold"), ("TRIM_THRESHOLD", "trim_threshold")):
            rivals = (f"MALLOC_{name}_", *(("GLIBC_TUNABLES",) if f"glibc.malloc.{tunable}" in tunables else ()))
            settings.append(
                _setting(
                    host,
                    f"MALLOC_{name}_",
                    str(_THRESHOLD_BYTES),
                    "no compiler for memfit's allocator: malloc gives freed tensors back to the system",
                    rivals,
                )
            )
        if host.huge_pages.mode in ("always", "madvise"):
            settings.append(
                _setting(
                    host,
                    "THP_MEM_ALLOC_ENABLE",
                    "1",
                    "memory that was given back faults in again, cheaper by huge pages",
                    ("THP_MEM_ALLOC_ENABLE",),
                )
            )
    return tuple(settings)


def own_waiting(host: Host) -> str | None:
    """Returns the user's setting that waiting threads shall spin: "OMP_WAIT_POLICY=ACTIVE".
    None: nothing, or to sleep.
    """
    own = [f"{name}={host.environment[name]}" for name in WAITING_NAMES if _is_users(host, name)]
    return ", ".join(own) if own and own[0].upper() != "OMP_WAIT_POLICY=PASSIVE" else None


def compute_threads(host: Host) -> int:
    """Threads that a rank should compute with; at least 1."""
    return max(1, host.processors.usable_cores // _local_ranks(host))


def binds_threads(host: Host) -> bool:
    """OpenMP ties threads to places: it does so to the main thread when it is loaded, and its mask
    outlives a restart.
    """
    return any(name in host.environment for name in _BINDING)


def _local_ranks(host: Host) -> int:
    text = host.environment.get("LOCAL_WORLD_SIZE", "1")
    return int(text) if text.isdigit() and int(text) > 0 else 1


def _why_threads(host: Host) -> str:
    processors = host.processors
    reason = f"{processors.physical_cores} physical cores may be used"
    if processors.quota is not None:
        reason += f", the quota gives {processors.quota.value:g}"
    if _local_ranks(host) > 1:
        reason += f", {_local_ranks(host)} ranks share them"
    return reason


def _setting(host: Host, name: str, value: str, reason: str, rivals: tuple[str, ...]) -> Setting:
    """A setting, with what the user has already decided among its rivals."""
    mine = host.set_by_memfit
    yours = [
        f"{rival}={host.environment[rival]}" for rival in rivals if rival in host.environment and rival not in mine
    ]
    return Setting(
        name=name,
        value=value,
        reason=reason,
        yours=", ".join(yours) or None,
    )


def _is_users(host: Host, name: str) -> bool:
    return name in host.environment and name not in host.set_by_memfit


# Starting the program again, once, with settings that libraries read when they are loaded.
#
# In: this process's own command line. Out: either nothing, or the same program in the same process
# id with more in its environment. For a console program only: the API never calls this.


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
