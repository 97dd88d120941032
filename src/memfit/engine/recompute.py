"""Calls that are run again in backward, alone or several as one segment.

In: calls with their arguments, and a description of each tensor that autograd saved. Out: those
tensors, made again.

[Note: running again]
The first unpack of any saved tensor runs all calls of the segment again, from the first to the last
that is still needed, and fills every handle that is alive; autograd's graph stays the one that the
first run made, so outputs, side outputs and hooks are the real ones. The n-th tensor that autograd
wants to save in the second run is the n-th of the first run: kind, shape, dtype and the bits of a
few elements are checked. A call stops as soon as its last needed tensor is there (outputs of a call
that a later call takes need its end). It stops by an exception that is no `Exception`, so that the
user's `except Exception` does not hold it up; forward hooks with `always_call` of modules inside do
not run then. Nothing here yields to the engine, and on CUDA it runs on autograd's device thread.
Code that torch.compile compiles anew in the second run (its guards failed, its limit of
recompilations was reached, its caches were emptied) may save other tensors of the same shapes, in
another order: the second run is refused then.
Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 3 (segments).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.core.errors import UnsupportedError
from memfit.core.operators import is_kept
from memfit.engine.call_arguments import HeldArguments, Position, tensors_in
from memfit.engine.offload import KeptHandle, RemadeHandle, describe, refuse_again
from memfit.engine.surroundings import HeldAttributes, Surroundings
from memfit.engine.writes import (
    TRY_ANOTHER_POLICY,
    AstrayError,
    OperationMode,
    Watched,
    Writes,
    are_plain,
    sample_of,
    storage_of,
    version_of,
)

# Selective recomputation: results of matrix products and attention are kept, everything else is
# made again.
#
# In: the operations that run inside a call. Out: the same results when the call runs again, the
# expensive ones without computing.
#
# [Note: what selection keeps]
# While the call runs, a dispatch mode keeps the results of the operations that the policy names
# (`core.saved_policies`), without their graph. When it runs again, another mode hands them out in
# the same order; whatever is not selected runs again. Three cases are computed again although they
# are expensive, because handing out a result would not be exact: attention that draws random
# numbers (skipping it would leave the generator behind for whatever draws next), a result that was
# changed in place since (`nn.ReLU(inplace=True)` behind a linear layer; see [Note: writes are known
# by storage]), and a result that nobody will reach because recomputation stops before it (the last
# product of a call; it is not held either).
#
# `torch.utils.checkpoint.create_selective_checkpoint_contexts` is not used: it draws random numbers
# differently when attention has dropout, and fails in backward when a kept result was changed in
# place.


class _Kept:
    """One expensive operation: its result, or None where it has to run again."""

    __slots__ = ("_marks", "_versions", "operation", "packs_before", "result")

    def __init__(self, operation: Any, result: Any, packs_before: int, writes: Writes) -> None:
        self.operation = operation
        self.packs_before = packs_before
        is_dense = all(storage_of(t) is not None for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        self.result = pytree.tree_map_only(torch.Tensor, _without_graph, result) if is_dense else None
        self._versions = [version_of(tensor) for tensor in self.tensors]
        written = [writes.of(tensor.untyped_storage()) for tensor in self.tensors]
        self._marks = [(found, found.mark()) for found in written]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, torch.Tensor)]

    @property
    def is_unchanged(self) -> bool:
        # The whole storage counts, and so does what an operator without a schema may have written.
        return [version_of(tensor) for tensor in self.tensors] == self._versions and not any(
            written.since(mark, doubts=True) for written, mark in self._marks
        )

    def take(self) -> Any:
        """The result, handed over; None if it has to be computed again."""
        result = self.result if self.is_unchanged else None
        self.let_go()
        return result

    def let_go(self) -> None:
        """Gives the result up."""
        self.result = None
        self._versions, self._marks = [], []


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    # Below autograd an alias would get a version counter of its own; with this key back in, it
    # shares that of the result, which tells later whether the result was changed in place.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: FBT003 (C function)
        return tensor.detach()


class Selection:
    """Results kept of one call.

    Args:
        place: the site, for messages.
        count_packs: how many tensors autograd has saved in the call so far.
        writes: of the job's forwards.
        operators: schema names of those whose results are kept.
    """

    def __init__(self, place: str, count_packs: Callable[[], int], writes: Writes, operators: frozenset[str]) -> None:
        self._place = place
        self._operators = operators
        self._writes = writes
        self._count_packs: Callable[[], int] | None = count_packs
        self._kept: list[_Kept] = []
        self._position = 0

    def keeping(self) -> TorchDispatchMode:
        """The mode for the first run."""
        return _Keeping(self._note, self._operators)

    def using(self) -> TorchDispatchMode:
        """The mode for the second run."""
        self._position = 0
        return _Using(self._take, self._operators)

    def end_of_call(self, *, runs_to_the_end: bool) -> None:
        """Called when the call is over: lets go of results that cannot or will not be used.

        Args:
            runs_to_the_end: the call's outputs will be needed, so it will not stop at the last
                saved tensor.
        """
        assert self._count_packs is not None
        packs = self._count_packs()
        self._count_packs = None  # it refers to the frame
        for kept in self._kept:
            if (kept.packs_before == packs and not runs_to_the_end) or not kept.is_unchanged:
                kept.let_go()

    def storages(self) -> Iterable[torch.UntypedStorage]:
        """Storages of the kept results."""
        return (tensor.untyped_storage() for kept in self._kept for tensor in kept.tensors)

    def _note(self, operation: Any, result: Any) -> None:
        assert self._count_packs is not None
        self._kept.append(_Kept(operation, result, self._count_packs(), self._writes))

    def _take(self, operation: Any) -> Any:
        """The kept result, handed over; None if the operation has to run."""
        if self._position >= len(self._kept) or self._kept[self._position].operation is not operation:
            expected = (
                self._kept[self._position].operation if self._position < len(self._kept) else "the end of the call"
            )
            raise AstrayError(
                f"{self._place} runs other operations when it is recomputed: {operation} came where the first run had "
                f"{expected}. Its control flow depends on something outside its arguments; {TRY_ANOTHER_POLICY}"
            )
        kept = self._kept[self._position]
        self._position += 1
        return kept.take()


class _Keeping(OperationMode):
    supports_higher_order_operators = True

    def __init__(self, note: Callable[[Any, Any], None], operators: frozenset[str]) -> None:
        super().__init__()
        self._note = note
        self._operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not are_plain(types):
            return NotImplemented  # the products inside a subclass come here one by one
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_kept(func, args, kwargs, self._operators):
            self._note(func, result)
        return result


class _Using(OperationMode):
    supports_higher_order_operators = True

    def __init__(self, take: Callable[[Any], Any], operators: frozenset[str]) -> None:
        super().__init__()
        self._take = take
        self._operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not are_plain(types):
            return NotImplemented
        kwargs = kwargs or {}
        if is_kept(func, args, kwargs, self._operators):
            result = self._take(func)
            if result is not None:
                return result
        return func(*args, **kwargs)


# Parts of the names of operations that save more than their results, or results before they are
# filled.
_WITH_WORKSPACES = ("rnn", "lstm", "gru", "attention", "batch_norm", "empty")


class _EnoughError(BaseException):
    """Ends a recomputation early. No `Exception`; see [Note: running again]."""


@dataclass(kw_only=True, slots=True)
class ReplayedCall:
    """Everything needed to run one call again.

    Attributes:
        place: the site.
        call: the module, called with args and kwargs.
        surroundings, arguments, selection: as at entry; None once they were used.
        attributes: tensors that the module keeps on itself.
        writes: of the job's forwards.
        handles: one for each tensor that autograd saved, in order; None where the tensor was kept.
        is_over: the call returned.
    """

    place: str
    call: Callable[..., object]
    surroundings: Surroundings | None
    arguments: HeldArguments | None
    selection: Selection | None
    attributes: HeldAttributes | None
    writes: Writes
    handles: list[weakref.ref[RemadeHandle] | None] = field(default_factory=list)
    is_over: bool = False

    def live_handles(self) -> list[tuple[int, RemadeHandle]]:
        """(position, handle) of those that autograd still holds."""
        found = ((index, None if ref is None else ref()) for index, ref in enumerate(self.handles))
        return [(index, handle) for index, handle in found if handle is not None]

    def wanted(self) -> dict[int, RemadeHandle]:
        """Handles that are alive, not closed and empty, by position."""
        return {i: handle for i, handle in self.live_handles() if handle.value is None and not handle.is_closed}

    def let_go(self) -> None:
        """Drops all that running again needs."""
        self.surroundings = self.arguments = self.selection = self.attributes = None

    def storages(self) -> Iterable[torch.UntypedStorage]:
        """Storages it holds on the device."""
        if self.arguments is not None:
            yield from self.arguments.storages()
        if self.selection is not None:
            yield from self.selection.storages()
        for _, handle in self.live_handles():
            if handle.value is not None:
                yield handle.value.untyped_storage()


class SegmentGroup:
    """Consecutive calls of one microbatch that are run again together.

    One object a segment and microbatch.

    An argument of a later call that is the very tensor an earlier call returned is not held, only
    its position. Arguments that code between the calls made from outputs are held.
    """

    def __init__(self) -> None:
        self._records: list[ReplayedCall] = []
        # Weak: an output's graph holds handles that hold this segment.
        self._outputs: list[tuple[weakref.ref[torch.Tensor], int, Watched | None, Position]] = []
        self._was_run = False
        # Backward may unpack on autograd's device thread and on the calling thread at once.
        self._lock = threading.RLock()

    def made_by(self, tensor: torch.Tensor) -> Position | None:
        """Finds the output of an earlier call that this tensor is, unchanged since, or None."""
        for reference, version, watched, position in reversed(self._outputs):
            if reference() is tensor and version_of(tensor) == version and not (watched and watched.has_changed):
                return position
        return None

    def add(self, record: ReplayedCall) -> None:
        """The next call begins."""
        assert not self._was_run, "a call was added to a segment that was run again already"
        self._records.append(record)

    def note_outputs(self, outputs: Any) -> None:
        """The last call that was added returned."""
        call = len(self._records) - 1
        writes = self._records[call].writes
        for position, tensor in enumerate(tensors_in(outputs)):
            watched = writes.watch(tensor)
            self._outputs.append((weakref.ref(tensor), version_of(tensor), watched, (call, position)))

    def refill(self) -> None:
        """Runs the calls again and fills all handles that are alive. Does nothing if that was done.

        Raises:
            UnsupportedError: a call asks for its tensors before it returned, or saved other tensors
                than at first.
        """
        with self._lock:
            if self._was_run:
                return
            for record in self._records:
                if not record.is_over:
                    raise UnsupportedError(
                        f"{record.place} runs autograd inside its own forward (a gradient penalty, for instance), "
                        "which needs tensors that the plan recomputes; plan saved='keep' for this call"
                    )
            wanted = [record.wanted() for record in self._records]
            needed = max((call for call, handles in enumerate(wanted) if handles), default=-1) + 1
            takers = [record.arguments.positions if record.arguments else set() for record in self._records[:needed]]
            made: dict[Position, torch.Tensor] = {}
            for call in range(needed):
                later = set[Position]().union(*takers[call + 1 :])
                outputs = run_again(
                    self._records[call], wanted[call], made, needs_outputs=any(c == call for c, _ in later)
                )
                if outputs is not None:
                    made.update(((call, at), tensor) for at, tensor in enumerate(tensors_in(outputs)))
                del outputs
                made = {position: tensor.detach() for position, tensor in made.items() if position in later}
            self._was_run = True
            for record in self._records:
                record.let_go()


class _Capture:
    """The saved-tensor hooks of a second run."""

    def __init__(self, record: ReplayedCall, wanted: dict[int, RemadeHandle], *, stops: bool) -> None:
        self._place = record.place
        self._writes = record.writes
        self._packs_at_first = len(record.handles)
        self._wanted = wanted
        self._stops = stops
        self._packs = 0
        self.error: str | None = None
        self.has_all = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self._packs
        self._packs += 1
        if index >= self._packs_at_first and not self._stops:
            self._fail("it saves more tensors for backward than at first")
        handle = self._wanted.pop(index, None)
        if handle is not None:
            if describe(tensor) != handle.description:
                shape, dtype, device = handle.description
                self._fail(
                    f"saved tensor {index} was {dtype} {list(shape)} on {device} and is {tensor.dtype} "
                    f"{list(tensor.shape)} on {tensor.device}"
                )
            sample = _sample(tensor, self._writes)
            if handle.sample is not None and sample is not None and sample != handle.sample:
                self._fail(f"saved tensor {index} ({tensor.dtype} {list(tensor.shape)}) has other values")
            handle.fill(tensor)
        if self._stops and not self._wanted:
            self.has_all = True
            raise _EnoughError
        return tensor.detach()

    def check(self) -> None:
        """Raises what was found; the run is over."""
        if self.error is None and self._wanted:
            self.error = f"it saved {self._packs_at_first} tensors for backward at first, and now {self._packs}"
        if self.error is not None:
            raise UnsupportedError(
                f"{self._place} does not do the same when it is recomputed: {self.error}. It depends on something "
                f"outside its arguments (a number that other code changes, a counter, a cache, a random generator of its own); {TRY_ANOTHER_POLICY}"
            )

    def _fail(self, error: str) -> None:
        # Not raised from here as an Exception: the user's code might catch it.
        self.error = self.error or error
        raise _EnoughError


def run_again(
    record: ReplayedCall, wanted: dict[int, RemadeHandle], made: Mapping[Position, torch.Tensor], *, needs_outputs: bool
) -> object | None:
    """Runs one call again and fills `wanted`.

    Args:
        record: the call.
        wanted: handles to fill, by position.
        made: outputs of earlier calls of the segment.
        needs_outputs: run to the end.

    Returns:
        What the call returned; None if it was stopped, or not run because nothing is wanted of it.

    Raises:
        UnsupportedError: it saved other tensors than at first.
    """
    if not wanted and not needs_outputs:
        return None
    if record.arguments is None or record.surroundings is None or record.attributes is None:
        raise refuse_again(record.place)
    args, kwargs = record.arguments.rebuild(made)
    capture = _Capture(record, wanted, stops=not needs_outputs)
    outputs: object | None = None
    compilations = _compilations()
    try:
        with ExitStack() as stack:
            # As the first run: some composite operators take other ways where a mode is active.
            stack.enter_context(record.writes.watching())
            stack.enter_context(record.surroundings.restored())
            stack.enter_context(record.attributes.restored())
            stack.enter_context(saved_tensors_hooks(capture.pack, _as_it_is))
            guard = record.arguments.guard()
            if guard is not None:
                stack.enter_context(guard)
            if record.selection is not None:
                stack.enter_context(record.selection.using())
            outputs = record.surroundings.run(record.call, args, kwargs)
    except _EnoughError:
        outputs = None
    except AstrayError as astray:
        raise UnsupportedError(str(astray)) from None
    except Exception:
        # A failure of its own is the user's to see, unless the run had already gone astray, or was
        # being ended: TorchScript's interpreter makes an error of its own of whatever passes
        # through it.
        if capture.error is None and not capture.has_all:
            raise
    if _compilations() != compilations:
        raise UnsupportedError(
            f"{record.place} was compiled anew by torch.compile when it was recomputed, and other code may save other tensors. Its guards failed, or it "
            f"was compiled for too many shapes (TORCH_LOGS=recompiles tells why; torch._dynamo.config.recompile_limit); {TRY_ANOTHER_POLICY}"
        )
    capture.check()
    return outputs


def _compilations() -> int:
    """Number of compilations that torch.compile began in this process.

    Torch counts them for its own messages.
    """
    compiler: Any = sys.modules.get("torch._dynamo.convert_frame")
    return 0 if compiler is None else sum(compiler.FRAME_COMPILE_COUNTER.values())


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _sample(tensor: torch.Tensor, writes: Writes) -> bytes | None:
    """Elements of a saved tensor, to know it by; None for what may hold memory that nobody wrote:
    an operation's workspace, which is no value of the program.
    """
    if not tensor.requires_grad and any(part in writes.last_operation for part in _WITH_WORKSPACES):
        return None
    return sample_of(tensor)


def pack_for_recompute(
    segment: SegmentGroup, record: ReplayedCall, tensor: torch.Tensor, *, stays: bool
) -> KeptHandle | RemadeHandle:
    """Returns what autograd gets for a tensor of a recomputed call: itself if it stays anyway,
    else a handle.
    """
    if stays:
        record.handles.append(None)
        return KeptHandle(tensor, record.place)
    sample = _sample(tensor, record.writes)
    handle = RemadeHandle(segment, tensor, record.place, record.writes.watch(tensor), sample)
    record.handles.append(weakref.ref(handle))
    return handle
