"""Base class for objects that are closed by a `with` statement."""

from __future__ import annotations

from typing import Self


class ClosesAtExit:
    """Base class of objects whose `with` block ends with `close()`, with or without an error."""

    def close(self) -> None:
        """Releases what the object holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
