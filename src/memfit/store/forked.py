"""Descriptors that forked children give up, so that what they lock belongs to the parent alone.

In: a descriptor that holds a lock of `flock`. Out: in a child that is forked from here on it is
closed.

[Note: locks and forks]
A lock of `flock` belongs to the open file, which a forked child shares: it is free when the last
copy of the descriptor is closed. The workers of a data loader are such children. They live on after
the job is closed, and, when their parent was killed, until they notice (torch's look every five
seconds): as long the directory would be taken. So children close their copies as they begin; that
frees nothing under the parent. An explicit unlock would.
"""

from __future__ import annotations

import contextlib
import os

_kept: set[int] = set()
_hooked: list[bool] = []


def keep_from_children(descriptor: int) -> None:
    """Children that are forked from here on do not have this descriptor.

    `let_go` before it is closed.
    """
    if not _hooked:
        os.register_at_fork(after_in_child=_close_kept)
        _hooked.append(True)
    _kept.add(descriptor)


def let_go(descriptor: int) -> None:
    """Undoes `keep_from_children`."""
    _kept.discard(descriptor)


def _close_kept() -> None:
    # By number: one that was closed without `let_go` could be another file's by now.
    while _kept:
        with contextlib.suppress(OSError):
            os.close(_kept.pop())
