"""Memory that memfit's own planning leaves in a process: code pages, caches of traces.

In: what the process holds before and after a fit that was refused. Out: the bytes of the next
fit's base that its reserve has already been asked for.

[Note: what planning leaves]
The reserve of a process covers what tracing touches (some 20 MiB of libraries' code and of
allocators' pages). A fit that is refused leaves that behind, so that the next one in the same
process finds it in its base and would ask for it a second time: the smallest limit that the first
one named would be refused. What fits that were refused have left is taken off the reserve instead,
as far as the process has grown since the first of them, and never more than half of the reserve:
what the program itself lets go or takes counts as it is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PlanningLeft:
    """Bytes that fits that were refused have left in this process.

    Attributes:
        first_base_bytes: of the first of them; None before.
        left_bytes: by all of them.
    """

    first_base_bytes: int | None = None
    left_bytes: int = 0

    def note(self, before_bytes: int, after_bytes: int) -> None:
        """A fit was refused; the process held so much before it and after it."""
        if self.first_base_bytes is None:
            self.first_base_bytes = before_bytes
        self.left_bytes += max(0, after_bytes - before_bytes)

    def in_base(self, base_bytes: int) -> int:
        """Bytes of what a fit finds in the process that were left by others before it."""
        if self.first_base_bytes is None:
            return 0
        return max(0, min(self.left_bytes, base_bytes - self.first_base_bytes))


OF_PROCESS = PlanningLeft()
