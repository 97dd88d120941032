"""The `with` statement for everything that has a `close`."""

from __future__ import annotations

from typing import Self


class ClosesAtExit:
    """Base class of objects whose `with` block ends with `close()`, with or without an error."""

    def close(self) -> None:
        """Gives up what the object holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
