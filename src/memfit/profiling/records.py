"""Records of a trace: storages, calls, stretches of the log.

In: nothing. Out: mutable records, which a `TraceRecorder` fills and `summary` reads.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from memfit.core.saved_policies import Saved
from memfit.core.work_kinds import WorkKind
from memfit.profiling.blocks import ModuleSite
from memfit.profiling.operation_facts import Facts


class Role(Enum):
    """Part of a storage in the step.

    MADE: the step made it. INPUT: there before it (batch, buffer, constant). WEIGHT, GRADIENT: of a
    parameter.
    """

    MADE = "made"
    INPUT = "input"
    WEIGHT = "weight"
    GRADIENT = "gradient"


class TraceEvent(Enum):
    """Sort of an event: bytes came, bytes left, the program let go of bytes that autograd keeps, an
    operation held bytes inside itself, or would in plain training, a gradient has been added to its
    parameter's.
    """

    ALLOCATED = "allocated"
    FREED = "freed"
    LET_GO = "let go"
    WORKSPACE = "workspace"
    PLAIN_WORKSPACE = "workspace of plain training"
    ARRIVED = "arrived"


@dataclass(eq=False)
class StorageRecord:
    """One storage. Segments are those of the forward, by number: -1 is what comes before the first
    call.

    Attributes:
        role: see `Role`.
        nbytes: its size; where it is resized, the largest so far.
        order: counts those that are made, equal in two runs of the same program; -1 for others.
        segment: the one in which it was first seen; the last one, if that was in backward.
        is_backward: it was first seen in backward.
        cause: of one that is made: operation, module, shape, dtype.
        line: of one that the forward makes: see `code_lines`.
        block: of a weight.
        is_batch: it belongs to the batch.
        saved_inside: calls in which autograd saved it.
        saved_outside: segments in which autograd saved it between calls.
        argument_of: calls that it was given to.
        given_apart: calls among these that were given a tensor which no call had returned as it is.
        last_use: the last segment in which an operation read it.
        uses: how often operations of the forward read it (views do not), by segment.
        backward_uses: how often those of the backward do.
        freed_in: the segment in which it was freed; None: in backward, or never.
        freed_in_backward: it was freed in backward.
        is_trusted: what `known_values` knows of it still holds.
        selected_in: the call that made it by an operation whose results a policy keeps; -1: none,
            or it was written since.
        kept_by: these policies.
        origins: bits that say what its values are made from; see `origins`.
        is_written: an operation of the forward wrote it in place.
        writes: number of such operations.
        is_movable: all that was saved of it or given to calls may leave the device.
        is_left: the program kept it from an earlier forward.
        is_made_once: the first forward leaves it behind, and the second does not make it again.
        key: address of the storage object that the program holds.
        holders: storage objects of this record that are alive; see `storage_log`, [Note: two
            holders].
        let_go_in: the segment in which the program let go of it; None: not in the forward.
        saved: the second storage object, which autograd is given.
    """

    role: Role
    nbytes: int
    order: int
    segment: int
    is_backward: bool
    cause: tuple[Any, ...] = ()
    line: str = ""
    block: str = ""
    is_batch: bool = False
    saved_inside: set[int] = field(default_factory=set)
    saved_outside: set[int] = field(default_factory=set)
    argument_of: set[int] = field(default_factory=set)
    given_apart: set[int] = field(default_factory=set)
    last_use: int = -1
    uses: dict[int, int] = field(default_factory=dict[int, int])
    backward_uses: int = 0
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

    def note_use(self, segment: int, *, is_backward: bool, is_view: bool) -> None:
        """Notes that an operation read it, in that segment of the forward or in the backward."""
        if not is_backward:
            self.last_use = segment
            if not is_view:
                self.uses[segment] = self.uses.get(segment, 0) + 1
        elif not is_view:
            self.backward_uses += 1

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
    """One call of a site. What a plan needs of it is said in `core.profile.CallProfile`, under the
    same names.

    Attributes:
        began, returned: places in the log.
        depth: modules that were entered when it began, itself among them.
        began_at: autograd's sequence number when it began.
        reads: blocks of the weights that it reads.
        saves: tensors that autograd has saved in it.
        since_save: facts of the operations behind the last of these.
        selected: by `id` of a record, results of operations that a policy keeps, and how many
            tensors had been saved before.
        arguments: tensors that it was given, with their version, their record and its writes then.
        copied: ids of records of arguments that it changed.
        received: its arguments, while it runs.
        held_at_entry: ids of the tensors in them as it began.
        kept: tensors on its module, with the writes to each as it began.
        spared: by policy, amounts of the operations whose results it keeps.
    """

    index: int
    site: ModuleSite
    began: int
    depth: int
    began_at: int
    returned: int = -1
    reads: set[str] = field(default_factory=set)
    uses_random: bool = False
    mutates_inputs: bool = False
    must_keep: bool = False
    changes_arguments: bool = False
    output_bytes: int = 0
    saves: int = 0
    since_save: list[Facts] = field(default_factory=list[Facts])
    selected: dict[int, tuple[StorageRecord, int]] = field(default_factory=dict)
    arguments: list[tuple[torch.Tensor, int, StorageRecord, int]] = field(default_factory=list)
    copied: set[int] = field(default_factory=set)
    received: Any = None
    held_at_entry: frozenset[int] = frozenset()
    is_substituted: bool = False
    changes_itself: bool = False
    kept: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    spared: dict[Saved, dict[WorkKind, float]] = field(default_factory=dict[Saved, dict[WorkKind, float]])


@dataclass(eq=False)
class SegmentRecord:
    """A stretch of the log: `call` -1 is the prologue (forward) or the seed (backward).

    Attributes:
        asked: place in the log at which backward first asked for a saved tensor that the step made;
            None: it did not.
        left: place in the log at which backward came to nodes that were made before the call: code
            between calls; None: it did not.
        python_calls: functions of Python that the program called.
    """

    call: int
    began: int
    asked: int | None = None
    left: int | None = None
    flops: int = 0
    python_calls: int = 0
    work: dict[WorkKind, float] = field(default_factory=dict[WorkKind, float])
