"""Every error that memfit raises on purpose, in one family.

In: nothing. Out: exception classes. Each message says what happened, where, and what to try.
`MemfitError` is the root, so that `except memfit.MemfitError` catches all of them; the second base
keeps ordinary `except ValueError` code working.
"""

from __future__ import annotations

import logging


def shown(value: object) -> str:
    """Returns a value as a message shows it: the beginning of its `repr`."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "a number of thousands of digits"


class MemfitError(Exception):
    """Base class of all of memfit's errors."""


class MemfitWarning(UserWarning):
    """Warning of something that works but will cause trouble: a leak, a callback that keeps a model
    alive.
    """


class UsageError(MemfitError, ValueError):
    """An argument is invalid: wrong type, unknown name, contradictory settings."""


class UnsupportedError(MemfitError, ValueError):
    """A model, loss or optimizer is refused because memfit would silently change what it
    computes.
    """


class PlanError(MemfitError, ValueError):
    """A plan or schedule is not legal; the message names the decision or action."""


class DoesNotFitError(MemfitError, ValueError):
    """No plan fits the limit.

    Attributes:
        smallest_limit_bytes: the smallest limit under which some plan fits; None if unknown.
        report: a table of the largest residents at the peak; empty if nothing was predicted.
        refusal: the facts that the message was made from.
    """

    def __init__(
        self,
        message: str,
        *,
        smallest_limit_bytes: int | None = None,
        report: str = "",
        refusal: object | None = None,
    ) -> None:
        super().__init__(message)
        self.smallest_limit_bytes = smallest_limit_bytes
        self.report = report
        self.refusal = refusal


class AwayError(MemfitError, RuntimeError):
    """A weight was touched while its bytes rest in its home (host or disk) and not on the
    device.
    """


class LimitBreachError(MemfitError, RuntimeError):
    """The limit was hit while running. Carries the phase and the place; `torn` says whether the
    step can be repeated.
    """

    def __init__(self, message: str, *, phase: str, where: str, torn: bool) -> None:
        super().__init__(message)
        self.phase = phase
        self.where = where
        self.torn = torn


class TornStepError(MemfitError, RuntimeError):
    """A step that updates in place was interrupted: some blocks hold new weights and some old
    ones.
    """


class StoreError(MemfitError, OSError):
    """A disk home cannot be created, read, written or locked."""


class StoreInUseError(StoreError):
    """Another live job owns the directory."""


class TierUnavailableError(MemfitError, RuntimeError):
    """A tier, device or allocator that was asked for does not exist on this machine."""


class PlatformError(MemfitError, ImportError):
    """The operating system is not Linux: raised by `import memfit`."""


class PeerError(MemfitError, RuntimeError):
    """Another rank failed, was lost, or disagrees; the message says which one and why, where it is
    known.

    All ranks of the job raise it, but for the one that failed, which raises its own error.
    """


# Operating systems that memfit runs on.
#
# In: `sys.platform`. Out: nothing, or an error that says where to go.

_WAYS = {
    "darwin": "run it in a Linux container or virtual machine (it has no backend for Apple's GPUs)",
    "win32": "run it in WSL 2, which is Linux (wsl --install, then pip install memfit there)",
}


def check_platform(platform: str) -> None:
    """Refuses other systems than Linux.

    Args:
        platform: as `sys.platform` has it.

    Raises:
        PlatformError: another system.
    """
    if platform == "linux":
        return
    name = {"darwin": "macOS", "win32": "Windows"}.get(platform, repr(platform))
    way = _WAYS.get(platform, "run it on Linux, or in a Linux container or virtual machine")
    raise PlatformError(
        f"memfit runs on Linux only, and this is {name}: it measures and limits memory through /proc and the allocator of Linux. To use it here, {way}"
    )


# The logger of memfit: everything it logs goes through `logging.getLogger("memfit")`.
#
# In: lines of text. Out: records, shown only where the program has set logging up
# (`logging.basicConfig`). Plans, saves, exchanged plans and the end of a job are of level INFO,
# each step and commit of level DEBUG; what the user must know is a warning or an error of its own,
# and not in the log alone.

LOG = logging.getLogger("memfit")
# A library leaves it to the program where records go.
LOG.addHandler(logging.NullHandler())
