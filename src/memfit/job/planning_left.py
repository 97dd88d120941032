"""Memory that memfit's own planning leaves in a process: code pages, caches of traces.

In: what the process holds before and after a fit that was refused. Out: the bytes of the next
fit's base that its reserve has already been asked for.

[Note: what planning leaves]
The reserve of a process covers what tracing touches (some 20 MiB of libraries' code and of
allocators' pages). A fit that is refused leaves that behind, so that the next one in the same
process finds it in its base and would ask for it a second time: the smallest limit that the first
one named would be refused. What refused fits *of the same program* have left is taken off the
reserve instead, as far as the process has grown since the first of them: then the sum of base and
reserve is the one that was named, and no less is left for the scratch of kernels. Another program
(other kinds of modules, another optimizer) runs through other code, and its planning will take
memory of its own: it gets nothing off, and what the first one left is in its base like anything
else. Never more than half of the reserve is taken off: a library that was first imported in a
planning is no scratch of planning.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer


@dataclass
class PlanningLeft:
    """Bytes that fits of one program that were refused have left in this process.

    Attributes:
        first_base_bytes: of the first of them; None before.
        left_bytes: by all of them.
    """

    first_base_bytes: int | None = None
    left_bytes: int = 0

    def note(self, before_bytes: int, after_bytes: int) -> None:
        """Notes what the process held before and after a fit that was refused."""
        if self.first_base_bytes is None:
            self.first_base_bytes = before_bytes
        self.left_bytes += max(0, after_bytes - before_bytes)

    def in_base(self, base_bytes: int) -> int:
        """Bytes of what a fit finds in the process that were left by others before it."""
        if self.first_base_bytes is None:
            return 0
        return max(0, min(self.left_bytes, base_bytes - self.first_base_bytes))


_OF_PROCESS: dict[str, PlanningLeft] = {}


def left_by(program: str) -> PlanningLeft:
    """Returns what refused fits of a program have left in this process, to be noted and asked.

    Args:
        program: see `program_of`.
    """
    return _OF_PROCESS.setdefault(program, PlanningLeft())


def program_of(model: nn.Module, optimizer: Optimizer) -> str:
    """Names the code that planning runs through: the kinds of the modules, and of the optimizer.

    Names, because classes that are kept would outlive the program's own references.
    """
    kinds = {type(part) for part in (*model.modules(), optimizer)}
    return " ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))
