"""Transfers that happen as late as they may: when somebody waits for them."""

from __future__ import annotations

from collections.abc import Callable

from memfit.homes import TransferHandle


class Late:
    """A transfer that happens when it is waited for, and holds what it needs until then."""

    def __init__(self, begin: Callable[[], TransferHandle]) -> None:
        self._begin: Callable[[], TransferHandle] | None = begin

    def wait(self) -> None:
        """Begins it and waits."""
        begin, self._begin = self._begin, None
        if begin is not None:
            begin().wait()
