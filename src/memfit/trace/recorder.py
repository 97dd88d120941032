"""Watches one forward and backward: every storage that is made and freed, who reads it, who saves
it, call by call.

In: operations (as a dispatch mode), module entries and returns (as hooks), saved tensors (as
hooks). Out: a log of events and records, which `summary` turns into a profile. It works on fake and
on real tensors alike; it holds no tensor longer than the program does. Storages are the business of
`storage_log`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.core.errors import UnsupportedError
from memfit.core.shape import is_movable
from memfit.core.work_kinds import WorkKind
from memfit.tensors.autograd_graph import sequence_number
from memfit.trace import python_calls
from memfit.trace.assemble import AttentionFollower
from memfit.trace.blocks import ModuleSite, kept_tensors
from memfit.trace.known import Kind, KnownOperations
from memfit.trace.known_values import Values
from memfit.trace.operation_facts import Facts, KernelsUsed, Origins, written_tensors
from memfit.trace.operations import run_operation
from memfit.trace.program_state import GradientReads
from memfit.trace.python_calls import PythonCalls, calling_line
from memfit.trace.storage_log import IS_VIEW, CallRecord, Role, SegmentRecord, StorageLog, StorageRecord, TraceEvent
from memfit.trace.traced_trees import contained_tensors, operator_tensors, reachable_tensors, uses_of_leaves

_ADD = torch.ops.aten.add.Tensor
_DEVICE = torch.ops.prim.device.default
# What stands between the code here and the mode's caller: what counts calls of Python, and what
# torch puts there; the last two keep its compiler out, once that is imported.
_WRAPPERS = (__file__, python_calls.__file__, "_python_dispatch.py", "torch/_compile.py", "_dynamo/eval_frame.py")

_ORDINARY = (torch.Tensor, nn.Parameter, FakeTensor)
_MADE = Role.MADE


class TraceRecorder(TorchDispatchMode):
    """Logs one step.

    Use: hooks on, `with recorder`, forward, `end_forward`, `begin_backward`, backward, `forget`.

    Args:
        sites: where calls begin and end, by `id` of the module.
        follows_values: whether known values of fake tensors are followed.
        known: runs operations on fake tensors, and tells what is to be known of each.
        guesses: reads of unknown numbers are answered; see `known_values`, [Note: likely values].
    """

    def __init__(
        self, sites: Mapping[int, ModuleSite], *, follows_values: bool, known: KnownOperations, guesses: bool = False
    ) -> None:
        super().__init__()
        self.sites = sites
        self.log = StorageLog()
        self.events = self.log.events
        self.records = self.log.records
        self.calls: list[CallRecord] = []
        # (block, calls before) of reads that train, by no call
        self.loose_reads: set[tuple[str, int]] = set()
        self.forward: list[SegmentRecord] = [SegmentRecord(call=-1, began=0)]
        self.backward: list[SegmentRecord] = []
        self.spanning: set[str] = set()
        self.reads_batch_statistics = False
        self.unsplittable_buffers: tuple[str, ...] = ()
        self.written_weights: tuple[str, ...] = ()
        self.shared_weights: tuple[str, ...] = ()
        self.uses_random = False
        self.kernels = KernelsUsed()
        self.exchanged: tuple[str, ...] = ()  # submodules, by this forward
        self.changed: tuple[str, ...] = ()  # numbers and words on modules, by this forward
        self.replaced: tuple[str, ...] = ()  # tensors that the program keeps, by this forward
        self.viewed_gradients: set[str] = set()
        self.gradient_reads = GradientReads()
        self.backward_reads: set[tuple[int, str]] = set()
        self._weights: set[int] = set()
        self._real: dict[int, str] = {}
        # Tensors that calls returned, with their versions then.
        self._returned: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._left: list[tuple[torch.Tensor, StorageRecord, int]] = []  # by an earlier forward
        self._left_read: set[int] = set()
        self._active: CallRecord | None = None
        self._modules: list[str] = []
        self.values = Values(self.log.is_trusted, self.log.distrust, guesses=guesses) if follows_values else None
        self._origins = Origins()
        self.attention = AttentionFollower()
        self.python = PythonCalls(self.forward)
        self._known = known

    # -- what is known before the step ----------

    def register(self, tensor: torch.Tensor, role: Role, block: str = "", *, is_batch: bool = False) -> None:
        """Declares a weight or an input.

        What is neither declared nor made by an operation is a shared input.
        """
        record = self.log.record_of(tensor, role, block)
        record.is_batch = is_batch
        if is_batch:
            self._origins.declare_batch(record)
        if role is Role.WEIGHT:
            self._weights.add(id(tensor))

    def register_real(self, parameter: nn.Parameter, name: str, block: str) -> None:
        """Declares the parameter that a stand-in was registered for: hooks and closures of the
        user's program may hold it and read it.
        """
        # it may wear the class of weights that are away
        with torch._C.DisableTorchFunctionSubclass():
            self.log.record_of(parameter, Role.WEIGHT, block)
        self._real[id(parameter)] = name

    def register_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Declares the model's buffers, by name."""
        for name, buffer in buffers.items():
            self.register(buffer, Role.INPUT)
            self._origins.declare_buffer(name, self.log.record_of(buffer, Role.INPUT))

    def watch_left(self, left: Iterable[torch.Tensor]) -> None:
        """Declares tensors that the program keeps as a forward begins.

        Whether it reads and changes them is asked later.
        """
        records = [(t, self.log.record_of(t, Role.INPUT)) for t in left if t.layout is torch.strided]
        self._left = [(tensor, record, record.writes) for tensor, record in records]
        for _, record in records:
            record.is_left = True

    def left_used(self) -> tuple[frozenset[int], frozenset[int]]:
        """Ids of those that were read (an operation took values from their storages), and of those
        that were changed in place.
        """
        read = frozenset(id(tensor) for tensor, record, _ in self._left if id(record) in self._left_read)
        return read, frozenset(id(tensor) for tensor, record, writes in self._left if record.writes > writes)

    def end_forward(
        self, loss: torch.Tensor, buffers: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
    ) -> None:
        """The forward has given its loss and left these buffers and weights."""
        left = {name: self.log.record_of(buffer, Role.INPUT) for name, buffer in buffers.items()}
        self.unsplittable_buffers = self._origins.unsplittable(left, self.log.record_of(loss, Role.INPUT))
        found = {name: self.log.record_of(weight, Role.INPUT) for name, weight in weights.items()}
        for name, record in found.items():
            if record.role is not Role.WEIGHT:
                raise UnsupportedError(
                    f"the forward gives the parameter {name!r} other memory (parameter.data = ...), but memfit places that memory: change it in place "
                    "(copy_), or compute with a tensor made from it"
                )
        self.written_weights = tuple(name for name, record in found.items() if record.is_written)
        uses = uses_of_leaves(loss)
        self.shared_weights = tuple(name for name, weight in weights.items() if uses[id(weight)] > 1)

    # -- operations ----------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spares each operation the two calls by which torch keeps its compiler out: nothing is
        compiled while a trace runs.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        if func is _DEVICE:
            # Asked more often than anything is computed: fake tensors know it without another
            # dispatch.
            return args[0].fake_device if type(args[0]) is FakeTensor else func(*args)
        if not self.python.is_counting:
            return self._dispatched(func, args, kwargs or {})
        return self.python.uncounted(self._dispatched, func, args, kwargs or {})

    def _dispatched(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        log = self.log
        if self.backward and _has_left(self.backward[-1], self.calls):
            self.backward[-1].left = len(self.events)
        log.begin_operation()
        kind = self._known.kind(func)
        read: list[torch.Tensor] = []
        key = self._known.key(kind, args, kwargs, read)
        found = [(tensor, self._note_read(func, tensor, is_view=kind.is_view)) for tensor in read]
        out, facts = self._run(kind, key, args, kwargs, found)
        results = [out] if type(out) is FakeTensor else list(operator_tensors(out))
        module = self._modules[-1] if self._modules else "the loss"
        made = [log.note_made(func, tensor, module) for tensor in results]
        if not log.is_backward:
            self._follow_forward(kind, args, found, facts, results, made)
        elif kind.is_view:
            for tensor in results:
                setattr(tensor, IS_VIEW, True)
        self._note_facts(facts)
        self.kernels.note(func, facts)
        if log.is_backward and func is _ADD and _is_called_by_autograd():
            log.note_sum(args, made)
        return out

    def _follow_forward(
        self,
        kind: Kind,
        args: Sequence[Any],
        found: Sequence[tuple[torch.Tensor, StorageRecord]],
        facts: Facts,
        results: Sequence[torch.Tensor],
        made: Sequence[StorageRecord],
    ) -> None:
        """Follows what an operation of the forward makes of what."""
        func, active = kind.operator, self._active
        for record in made:
            if not record.line and record.role is Role.MADE:
                record.line = calling_line()
        written = {id(found[i][0]) for i in facts.written}
        overwritten = {id(found[i][0]) for i in facts.overwritten}
        self._origins.follow(func, found, made, overwritten, written, is_random=facts.is_random)
        self.attention.follow(func, args, found, results, made)
        if self._left and not kind.is_view:
            # What an operation adds to is not read by that: a sum that nobody asks for tells no
            # order.
            self._left_read.update(id(r) for t, r in found if r.is_left and id(t) not in written)
        if written and not kind.relabels:
            _note_written(self.calls, active, {id(r): r for t, r in found if id(t) in written}.values())
        if active is None:
            return
        active.since_save.append(facts)
        for record in made if facts.kept_by else ():
            if record.role is Role.MADE:
                record.selected_in, record.kept_by = active.index, facts.kept_by
                active.selected.setdefault(id(record), (record, active.saves))

    def _run(
        self,
        kind: Kind,
        key: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        found: Sequence[tuple[torch.Tensor, StorageRecord]],
    ) -> tuple[Any, Facts]:
        """Results and facts of an operation."""
        func, read = kind.operator, [tensor for tensor, _ in found]
        if self.values is None:
            if not self.log.is_backward:
                _refuse_written_weights(func, _written(func, args, kwargs, found))
            out = run_operation(func, args, kwargs, is_fake=False)
            return out, self._known.facts(func, args, kwargs, read, out)
        if kind.needs_values:
            is_answered, out = self.values.answer(func, args, kwargs)
            if is_answered:
                return out, self._known.facts(func, args, kwargs, read, out)
        out, facts = self._known.run(kind, key, args, kwargs, read)
        self.values.follow(func, args, kwargs, out, read)
        return out, facts

    def _note_read(self, func: Any, tensor: torch.Tensor, *, is_view: bool) -> StorageRecord:
        record = self.log.record_of(tensor, Role.INPUT)
        record.note_use(self.log.segment, is_backward=self.log.is_backward, is_view=is_view)
        if record.role is _MADE and id(tensor) not in self._real:
            return record
        if id(tensor) in self._real and _would_train(tensor):
            raise UnsupportedError(
                f"the loss reads the weight {self._real[id(tensor)]!r} from where the program keeps it beside the model (a closure, a list): it must be read from "
                "the model itself, as model.get_parameter(...), for what stands there while memfit plans is another tensor"
            )
        if record.role is Role.WEIGHT:
            # A view of a real weight is a fake tensor over other memory, which tells nothing any
            # more.
            reads = not is_view or id(tensor) in self._real
            if self.log.is_backward and reads:
                self.backward_reads.add((self.backward[-1].call if self.backward else -1, record.block))
            elif reads or (self._active is None and not self.log.is_backward):
                # A view needs the weight as well: outside of calls nothing brings it; inside,
                # whether the call reads it shows later.
                (self._active.reads if self._active else self.spanning).add(record.block)
                if self._active is None and tensor.requires_grad:
                    self.loose_reads.add((record.block, len(self.calls)))
        elif record.role is Role.INPUT and _would_train(tensor):
            raise UnsupportedError(
                f"the loss uses a trainable parameter of shape {tuple(tensor.shape)} that is not part of the model "
                f"({func}): put the model and what belongs to the loss into one nn.Module, so that all parameters are "
                "placed and updated; or, where that is not to be trained here, freeze it before (requires_grad_(False))"
            )
        return record

    def _note_facts(self, facts: Facts) -> None:
        if facts.workspace_bytes:
            self.events.append((TraceEvent.WORKSPACE, None, facts.workspace_bytes))
        segment = (self.backward or self.forward)[-1]
        segment.flops += facts.flops
        for kind, amount in facts.work:
            segment.work[kind] = segment.work.get(kind, 0.0) + amount
        if self._active and not self.log.is_backward:
            for saved in facts.kept_by:
                spared = self._active.spared.setdefault(saved, {})
                for kind, amount in facts.work:
                    # It is still dispatched: its results are handed out there.
                    if kind is not WorkKind.OPERATIONS:
                        spared[kind] = spared.get(kind, 0.0) + amount
        if facts.is_random and not self.log.is_backward:
            self.uses_random = True
            if self._active:
                self._active.uses_random = True
        if facts.reads_statistics:
            self.reads_batch_statistics = True

    def note_arrival(self, name: str, gradient: torch.Tensor) -> None:
        """A parameter's gradient is about to be added to what is there."""
        if getattr(gradient, IS_VIEW, False):
            self.viewed_gradients.add(name)

    def note_saved(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor."""
        record = self.log.record_of(tensor, Role.INPUT)
        record.is_movable &= is_movable(tensor, _ORDINARY)
        if self._active:
            self._active.saves += 1
            self._active.since_save.clear()
            record.saved_inside.add(self._active.index)
        else:
            record.saved_outside.add(self.log.segment)

    def forget(self) -> None:
        """Lets go of what was watched: weak references and values point back here, and cycles would
        keep the model until a collection.
        """
        self.log.forget()
        self._left.clear()
        self._returned.clear()
        self.values = None
        self._active = None

    # -- modules ----------

    def enter_module(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> None:
        """A module begins: a call begins if it is a site and no call is running."""
        self._modules.append(name or type(module).__name__)
        site = self.sites.get(id(module))
        if site is None or self._active is not None or self.log.is_backward:
            return
        index = len(self.calls)
        self._active = CallRecord(
            index=index, site=site, began=len(self.events), depth=len(self._modules), began_at=sequence_number()
        )
        self.calls.append(self._active)
        self.forward.append(SegmentRecord(call=index, began=len(self.events)))
        self.log.segment = index
        self._active.received = (args, kwargs)
        own = (p for part in module.modules() for p in part._parameters.values() if p is not None)
        self._active.is_substituted = any(id(parameter) not in self._weights for parameter in own)
        self._active.kept = [(tensor, self.log.writes_to(tensor)) for tensor in kept_tensors(module)]
        self._active.held_at_entry = frozenset(id(tensor) for tensor in reachable_tensors((args, kwargs)))
        for tensor in contained_tensors((args, kwargs)):
            record = self.log.record_of(tensor, Role.INPUT)
            if record.role is not Role.WEIGHT:
                record.is_movable &= is_movable(tensor, _ORDINARY)
                record.argument_of.add(index)
                returned = self._returned.get(id(tensor))
                if returned is None or returned[0]() is not tensor or returned[1] != _version_of(tensor):
                    record.given_apart.add(index)
                record.last_use = index
                self._active.arguments.append((tensor, _version_of(tensor), record, record.writes))

    def leave_module(self, output: Any) -> CallRecord | None:
        """A module returns; the call that ends with it, if one does."""
        call = self._active
        depth = len(self._modules)
        self._modules.pop()
        if call is None or depth != call.depth:
            return None
        self._active = None
        call.returned = len(self.events)
        changed = [
            r for tensor, version, r, writes in call.arguments if _version_of(tensor) != version or r.writes != writes
        ]
        call.mutates_inputs = bool(changed)
        call.changes_itself = any(self.log.writes_to(tensor) != writes for tensor, writes in call.kept)
        call.kept.clear()
        call.copied = {id(record) for record in changed}
        call.changes_arguments = frozenset(map(id, reachable_tensors(call.received))) != call.held_at_entry
        call.arguments.clear()
        call.received = None
        for tensor in contained_tensors(output):
            if type(tensor) in _ORDINARY:
                self._returned[id(tensor)] = weakref.ref(tensor), _version_of(tensor)
        returned = {id(r): r for r in (self.log.record_of(t, Role.INPUT) for t in contained_tensors(output))}
        call.output_bytes = sum(r.nbytes for r in returned.values() if r.role is Role.MADE and r.segment == call.index)
        return call

    # -- backward ----------

    def begin_backward(self, call: CallRecord | None = None) -> None:
        """Starts a segment of backward: the first gradient reaches an output of `call`, or, without
        one, the loss.
        """
        self.log.is_backward = True
        self.backward.append(SegmentRecord(call=-1 if call is None else call.index, began=len(self.events)))


def _has_left(segment: SegmentRecord, calls: Sequence[CallRecord]) -> bool:
    """Tells whether the backward of a call is over, and that of code before it begins."""
    if segment.left is not None or segment.call < 0:
        return False
    # What autograd adds up itself has the highest number.
    node = torch._C._current_autograd_node()
    return node is not None and node._sequence_nr() < calls[segment.call].began_at


def _would_train(tensor: torch.Tensor) -> bool:
    """Tells whether the loss would give a parameter a gradient: a teacher's, read under `no_grad`,
    gets none.
    """
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad and torch.is_grad_enabled()


def _written(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    read: Sequence[tuple[torch.Tensor, StorageRecord]],
) -> list[StorageRecord]:
    """The storages that an operation writes, each once."""
    written = written_tensors(func, args, kwargs)[1]
    return list({id(record): record for tensor, record in read if id(tensor) in written}.values()) if written else []


def _note_written(calls: Sequence[CallRecord], active: CallRecord | None, written: Iterable[StorageRecord]) -> None:
    """Notes in the calls so far who counts on the storages that an operation of the forward writes.

    Known by storage: not all tensors over one share a version counter.
    """
    for record in written:
        record.writes += 1
        if active is not None:
            active.selected.pop(id(record), None)
            record.selected_in = -1
            # What is there anyway is given to the call that is run again as it is.
            active.must_keep |= record.role is Role.INPUT and active.index in record.argument_of
        for index in record.saved_inside | record.argument_of:
            call = calls[index]
            if call is not active and id(record) not in call.copied:
                call.must_keep |= record.role is Role.MADE or index in record.argument_of


def _refuse_written_weights(func: Any, written: Sequence[StorageRecord]) -> None:
    """Real weights are not to be changed by a trace."""
    for record in written:
        if record.role is Role.WEIGHT:
            raise UnsupportedError(
                f"the forward changes a weight of {record.block!r} in place ({func}), and it cannot be traced without data, so that the "
                "trace itself would change it: make it a buffer, or change it between steps, inside `with job.weights()`"
            )


def _version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


def _is_called_by_autograd() -> bool:
    """Says whether autograd, and not the program, runs the operation that is watched now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    # Autograd's thread for an accelerator has no frames of the program's below.
    return frame is None or frame.f_code.co_name == "_engine_run_backward"
