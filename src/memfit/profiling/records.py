"""Records of a trace: storages, calls, stretches of the log.

In: nothing. Out: mutable records, which a `Recorder` fills and `summary` reads.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from memfit.core.saved_policies import Saved
from memfit.profiling.blocks import ModuleSite


class Role(Enum):
    """MADE: by the step.

    INPUT: there before it (batch, buffer, constant). WEIGHT, GRADIENT: of a parameter.
    """

    MADE = "made"
    INPUT = "input"
    WEIGHT = "weight"
    GRADIENT = "gradient"


class TraceEvent(Enum):
    """Sort of an event: bytes came, bytes left, an operation held bytes inside itself, a gradient
    has been added to its parameter's.
    """

    ALLOCATED = "allocated"
    FREED = "freed"
    WORKSPACE = "workspace"
    ARRIVED = "arrived"


@dataclass(eq=False)
class StorageRecord:
    """One storage; `order` counts those made, equal in two runs of the same program."""

    role: Role
    nbytes: int
    order: int
    segment: int
    is_backward: bool
    cause: tuple[Any, ...] = ()  # operation, module, shape, dtype
    block: str = ""
    is_batch: bool = False
    saved_inside: set[int] = field(default_factory=set)
    saved_outside: set[int] = field(default_factory=set)
    argument_of: set[int] = field(default_factory=set)
    last_use: int = -1
    freed_in: int | None = None
    freed_in_backward: bool = False
    is_trusted: bool = True
    selected_in: int = -1
    kept_by: tuple[Saved, ...] = ()
    origins: int = 0
    is_written: bool = False
    writes: int = 0
    is_movable: bool = True
    is_left: bool = False
    is_made_once: bool = False
    key: int = 0
    holders: int = 1
    let_go_in: int | None = None
    saved: weakref.ref[torch.UntypedStorage] | None = None

    @property
    def is_saved(self) -> bool:
        """Autograd saved it."""
        return bool(self.saved_inside or self.saved_outside)

    @property
    def is_lasting(self) -> bool:
        """The program holds it when all is over, as modules keep tables and notes."""
        is_made = self.role is Role.MADE and not self.is_backward
        return is_made and self.freed_in is None and not self.freed_in_backward

    @property
    def description(self) -> str:
        """Where it was made, in words."""
        operation, module, shape, dtype = self.cause
        return f"{operation} in {module}: {shape} {str(dtype).removeprefix('torch.')}"


@dataclass(eq=False)
class CallRecord:
    """One call of a site."""

    index: int
    site: ModuleSite
    began: int
    depth: int
    returned: int = -1
    reads: set[str] = field(default_factory=set)
    uses_random: bool = False
    mutates_inputs: bool = False
    must_keep: bool = False
    changes_arguments: bool = False
    output_bytes: int = 0
    saves: int = 0
    selected: dict[int, tuple[StorageRecord, int]] = field(default_factory=dict)
    arguments: list[tuple[torch.Tensor, int, StorageRecord, int]] = field(default_factory=list)
    copied: set[int] = field(default_factory=set)
    received: Any = None
    held_at_entry: frozenset[int] = frozenset()
    is_substituted: bool = False
    changes_itself: bool = False
    kept: list[tuple[torch.Tensor, int]] = field(default_factory=list)


@dataclass(eq=False)
class SegmentRecord:
    """A stretch of the log: `call` -1 is the prologue (forward) or the seed (backward)."""

    call: int
    began: int
    flops: int = 0
