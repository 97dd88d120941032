"""Watches storages: when they are made and freed, who saves them, and what their sizes are.

In: tensors as operations read and make them. Out: a log of events and records. It works on fake and
on real tensors alike, and holds no tensor longer than the program does.

[Note: storages, not tensors]
Memory belongs to storages; views share them. A record lives as long as its storage, watched by a
weak reference whose callback logs the release. The key is the address of the storage object, taken
out of the table by that callback before it can be used again.

[Note: sums of gradients]
When a tensor was used twice, autograd adds the second gradient to the first in place, if nobody
else holds the first and it is no view (the gradient of a transposed weight is one), and nobody has
asked for its storage in Python, which holds it from then on: as `engine.writes` does for what
a forward writes, also gradients that a function makes there already. Under a dispatch mode (and for
fake tensors) it makes a third tensor in any case. The recorder undoes the difference: an addition
that the autograd engine itself makes, whose first operand is released before anything else happens,
is logged as done in place; if that is a view or was made in the forward, with the third tensor for
a moment.

[Note: two holders]
A profile tells how long the program itself holds a storage, apart from what autograd saves of it.
So on fake tensors autograd is given tensors over a second storage of the same record: the record's
bytes are there until both are gone, and the program has let go of them when the first is
(`let_go_in`). On real tensors that would take the memory twice; there a second forward, in which
nothing is saved, tells it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.core.saved_policies import Saved
from memfit.core.work_kinds import WorkKind
from memfit.tensors.write_marks import check_dense
from memfit.trace.blocks import ModuleSite
from memfit.trace.known import KnownOperations
from memfit.trace.operation_facts import Facts

# Records of a trace: storages, calls, stretches of the log.
#
# In: nothing. Out: mutable records, which a `TraceRecorder` fills and `summary` reads.


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
        line: of one that the forward makes: see `python_calls`.
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
        origins: bits that say what its values are made from; see `operation_facts`.
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


_STRIDED = torch.strided
IS_VIEW, WAS_VIEW = "_memfit_is_view", "_memfit_was_view"
"""Attribute of tensors that an operation of backward made as views."""


class StorageLog:
    """The records of all storages of one traced step.

    Attributes:
        events: in the order in which they happened.
        records: of storages that the step made, and of its inputs.
        segment: index of the running forward segment; the last one during backward.
        is_backward: the backward has begun.
    """

    def __init__(self) -> None:
        self.events: list[tuple[TraceEvent, StorageRecord | None, int]] = []
        self.records: list[StorageRecord] = []
        self.segment = -1
        self.is_backward = False
        self._live: dict[int, tuple[StorageRecord, weakref.ref[torch.UntypedStorage]]] = {}
        self._pending_sum: tuple[StorageRecord, StorageRecord, int, int, tuple[TraceEvent, int]] | None = None
        self._is_over = False

    def begin_operation(self) -> None:
        """Ends what the operation before has left open."""
        # Only the engine's own sum can release its operand before the next operation: a sum still
        # pending was not one.
        self._pending_sum = None

    def end(self) -> None:
        """Ends the log: the program has run.

        Modules, and whatever the loss keeps, are given back next what they had before; tensors that
        the program left there would seem to be let go of by the program.
        """
        self._is_over = True

    def forget(self) -> None:
        """Drops the weak references, whose callbacks point back here."""
        self._live.clear()
        self._pending_sum = None

    def is_trusted(self, tensor: torch.Tensor) -> bool:
        """Returns whether the values known of a tensor still hold."""
        return self.record_of(tensor).is_trusted

    def distrust(self, tensor: torch.Tensor) -> None:
        """Marks the values known of a tensor as void."""
        self.record_of(tensor).is_trusted = False

    def note_made(self, func: Any, tensor: torch.Tensor, module: str) -> StorageRecord:
        """Returns the record of a result of an operation, new if its storage is."""
        if tensor.is_nested or tensor.layout is not _STRIDED:
            check_dense(tensor, f"{func._overloadpacket} makes")
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        if entry is None:
            return self._watch(storage, Role.MADE, (func._overloadpacket, module, tuple(tensor.shape), tensor.dtype))
        record = entry[0]
        if record.nbytes != storage.nbytes() and record.role is Role.MADE:
            self.note_resize(storage)
        return record

    def note_sum(self, args: Sequence[Any], made: Sequence[StorageRecord]) -> None:
        """Looks whether an addition of autograd's becomes one in place.

        See [Note: sums of gradients].
        """
        old, new = args[0], args[1]
        if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)) or old.shape != new.shape:
            return
        operand = self._live[old.untyped_storage()._cdata][0]
        event, record, _ = self.events[-1] if self.events else (None, None, 0)
        if (
            event is TraceEvent.ALLOCATED
            and record is not None
            and record is made[0]
            and record.nbytes == operand.nbytes
        ):
            key = next(key for key, (held, _) in reversed(self._live.items()) if held is record)
            is_held = getattr(old, IS_VIEW, False) or not operand.is_backward
            # Of what the run takes the base of, so that it is added to in place: plain training has
            # a third tensor.
            is_held_in_plain = is_held or getattr(old, WAS_VIEW, False)
            third = TraceEvent.WORKSPACE if is_held else TraceEvent.PLAIN_WORKSPACE
            third_bytes = record.nbytes if is_held_in_plain else 0
            self._pending_sum = (operand, record, len(self.events) - 1, key, (third, third_bytes))

    def record_of(self, tensor: torch.Tensor, role: Role = Role.INPUT, block: str = "") -> StorageRecord:
        """Returns the record of a tensor's storage, new (with `role`, `block`) if it was not seen
        before.
        """
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        return entry[0] if entry else self._watch(storage, role, block=block)

    def writes_to(self, tensor: torch.Tensor) -> int:
        """Returns the number of writes to the storage of a tensor so far; 0 for weights, which have
        rules of their own.
        """
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return 0 if entry is None or entry[0].role is Role.WEIGHT else entry[0].writes

    def _watch(
        self, storage: torch.UntypedStorage, role: Role, cause: tuple[Any, ...] = (), block: str = ""
    ) -> StorageRecord:
        record = StorageRecord(
            role=role,
            nbytes=storage.nbytes(),
            order=-1,
            segment=self.segment,
            is_backward=self.is_backward,
            cause=cause,
            block=block,
        )
        record.last_use = self.segment
        self._watch_release(storage, record)
        record.key = storage._cdata
        if role is Role.MADE:
            record.order = len(self.records)
            self.events.append((TraceEvent.ALLOCATED, record, record.nbytes))
            self.records.append(record)
        elif role is Role.INPUT:
            self.records.append(record)
        return record

    def _watch_release(self, storage: torch.UntypedStorage, record: StorageRecord) -> None:
        key = storage._cdata
        self._live[key] = (record, weakref.ref(storage, lambda _: self._note_freed(key)))

    def _note_freed(self, key: int) -> None:
        record = self._live.pop(key)[0]
        if self._is_over:
            return
        record.holders -= 1
        if key == record.key:
            record.let_go_in = self.segment
            if record.holders and not self.is_backward:
                self.events.append((TraceEvent.LET_GO, record, record.nbytes))
        if record.holders:
            return
        if self._pending_sum and self._pending_sum[0] is record:
            _, merged, event, merged_key, (third, third_bytes) = self._pending_sum
            self._pending_sum = None
            # The sum takes the operand's place: as if it had been added in place.
            self.events[event] = (third, None, third_bytes)
            self.records.remove(merged) if self.records[-1] is not merged else self.records.pop()
            self._live[merged_key] = (record, self._live[merged_key][1])
            record.key, record.holders = merged_key, 1
            return
        if record.role in (Role.MADE, Role.GRADIENT):
            record.freed_in = self.segment if not self.is_backward else None
            record.freed_in_backward = self.is_backward
            self.events.append((TraceEvent.FREED, record, record.nbytes))

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """Logs that a storage that the step made has another size now."""
        entry = self._live.get(storage._cdata)
        if entry is None or entry[0].role is not Role.MADE:
            return
        record = entry[0]
        change = storage.nbytes() - record.nbytes
        record.nbytes = max(record.nbytes, storage.nbytes())
        self.events.append(
            (TraceEvent.ALLOCATED, record, change) if change > 0 else (TraceEvent.FREED, record, -change)
        )

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """Logs that a parameter's gradient has arrived: its storage is no activation."""
        if parameter.grad is not None:
            record = self.record_of(parameter.grad, Role.GRADIENT)
            record.role = Role.GRADIENT
            self.events.append((TraceEvent.ARRIVED, record, record.nbytes))

    def saved_apart(self, tensor: torch.Tensor, known: KnownOperations) -> torch.Tensor:
        """Returns the tensor to save in another's place, over a second storage of its record.

        See [Note: two holders].
        """
        record = self.record_of(tensor, Role.INPUT)
        if record.role is not Role.MADE or self.is_backward or type(tensor) is not FakeTensor or tensor.is_inference():
            return tensor
        storage = record.saved() if record.saved is not None else None
        if storage is None:
            with torch._C._DisableTorchDispatch():
                storage = torch.empty(record.nbytes, dtype=torch.uint8, device="meta").untyped_storage()
            record.saved = weakref.ref(storage)
            record.holders += 1
            self._watch_release(storage, record)
        return known.over(storage, tensor)


@contextmanager
def storage_resizes(log: StorageLog) -> Iterator[None]:
    """Tells the log of `UntypedStorage.resize_`, which no dispatch mode sees."""
    original = torch.UntypedStorage.resize_

    # Process-wide: other threads' storages come here too, and `note_resize` passes over those that
    # the log does not know.
    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        log.note_resize(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
