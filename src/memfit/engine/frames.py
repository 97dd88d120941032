"""One call of one microbatch, from its entry to the end of its backward.

In: a policy and a call. Out: a `Frame`, which the engine enters, leaves and finishes, and sends the
schedule's actions to.

[Note: how the engine uses a frame]
    frame = make_frame(policy, site, args, kwargs, offloader=..., group=...)
        in the pre-hook, after the engine has yielded
    frame.enter()
        at the end of the pre-hook; only leaves and aliases of weights take their places after it
    frame.leave(outputs)
        in the post-hook, when modules have their own weights back; `leave(None)` whenever the call
        raised
    frame.offload(); frame.drop(); frame.reload()
        the schedule's actions; nothing to do for policies that do not offload
    frame.finish()
        backward of this call is over, or the step was abandoned

`always_call` post-hooks run for `Exception` only: after a KeyboardInterrupt the engine has to call
`leave(None)` itself. Between `enter` and `leave` nothing may switch to another microbatch, and no
other frame that is not KEEP may be entered.

[Note: hooks do not compose]
torch asks only the innermost pair of saved-tensor hooks. Inside a call, the user's own hooks
(`torch.utils.checkpoint`, `save_on_cpu`) come above ours and take what is saved under them, as they
would in plain PyTorch; the inputs of an inner checkpoint are saved through ours. Around a call,
hooks of torch itself are shadowed, which changes where bytes rest and no value; hooks of anybody
else might change values, and are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from memfit.core.errors import UnsupportedError, UsageError
from memfit.core.plan import CallPlan
from memfit.core.tiers import Tier
from memfit.engine.call_arguments import HeldArguments
from memfit.engine.offload import (
    KeptHandle,
    MovedHandle,
    MovedStorage,
    Offloader,
    RemadeHandle,
    take_hooks_off,
    take_mode_off,
    unpack,
)
from memfit.engine.recompute import ReplayedCall, SegmentGroup, Selection, pack_for_recompute
from memfit.engine.surroundings import HeldAttributes, Surroundings
from memfit.engine.writes import Stays, Writes, is_compiled, plain_storage

# The stack of default saved-tensor hooks has no public reader.
_default_hooks: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue] (not in torch's stubs)


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """Properties of a module that are the same for all of its calls.

    Attributes:
        name: dotted name, for messages.
        module: the user's.
        call: runs the module again on given arguments, through `torch.nn.Module.__call__(module,
            ...)` so that the user's hooks run, and with the engine's own hooks passing through.
            (`module(...)` would run a subclass's `__call__` too, which is outside of the hooks:
            transformers' layers checkpoint themselves there.) It must not refer to frames.
        device: where it computes.
        stays: whether a storage is there anyway: weights, buffers, the batch. Such tensors are
            kept, whatever the policy.
        copies_inputs: it changes arguments in place.
        writes: of the job's forwards, which run inside its `watching`.
    """

    name: str
    module: torch.nn.Module
    call: Callable[..., object]
    device: torch.device
    stays: Stays
    copies_inputs: bool = False
    writes: Writes = field(default_factory=Writes)


class Frame:
    """The frame of a kept call, which leaves everything to autograd, and the interface of the
    others.
    """

    def enter(self) -> None:
        """The call begins: pushes the one pair of saved-tensor hooks."""

    def leave(self, outputs: Any) -> None:
        """The call is over: pops exactly what `enter` pushed. Repeating it does nothing.

        Args:
            outputs: what the call returned; None if it raised.
        """

    def withdraw(self) -> None:
        """Takes off what `enter` pushed, wherever it lies, if `leave` was never called: torch calls
        no hook on the way of a Ctrl-C.
        """

    def offload(self) -> None:
        """Starts writing what shall leave to its home."""

    def drop(self) -> None:
        """Waits for the writes and gives up the device memory."""

    def reload(self) -> None:
        """Starts bringing back what left and is still needed."""

    def finish(self) -> None:
        """Backward of the call is over: frees everything. Repeating it does nothing.

        A later unpack of a tensor of this call is an `UnsupportedError`.
        """

    def held_bytes(self) -> int:
        """Device bytes that the frame holds now, each storage once, without what stays anyway.

        0 for a kept call: what it saves is held by autograd.
        """
        return 0


class _HookedFrame(Frame):
    """Pushes and pops hooks; what autograd gets in place of a tensor is up to the subclass."""

    def __init__(self, site: CallSite) -> None:
        self._site = site
        self._hooks: saved_tensors_hooks | None = None
        self._modes: list[TorchDispatchMode] = []

    def _pack(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def _stays(self, tensor: torch.Tensor) -> bool:
        storage = plain_storage(tensor)
        return storage is not None and self._site.stays(storage)

    def _push(self, *modes: TorchDispatchMode) -> None:
        _check_outer_hooks(self._site.name)
        hooks = saved_tensors_hooks(self._pack, unpack)
        hooks.__enter__()
        self._hooks = hooks
        for mode in modes:
            mode.__enter__()
            self._modes.append(mode)

    def _pop(self) -> None:
        """Pops what was pushed, if it is still there and on top."""
        while self._modes:
            mode = self._modes.pop()
            if _get_current_dispatch_mode() is not mode:
                raise _unbalanced(self._site.name, "dispatch mode")
            mode.__exit__(None, None, None)
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            top = _default_hooks._top_saved_tensors_default_hooks(True)  # noqa: FBT003 (C function: also while disabled)
            if top is None or top[0] != self._pack:
                raise _unbalanced(self._site.name, "saved-tensor hooks")
            hooks.__exit__(None, None, None)

    def withdraw(self) -> None:
        """See `Frame`."""
        while self._modes:
            take_mode_off(self._modes.pop())
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            take_hooks_off(self._pack)


class RecomputedFrame(_HookedFrame):
    """A call that is run again in backward. See `recompute` and, for selection, `select`.

    Args:
        site: of the call.
        args, kwargs: as given; held from `enter` to the recomputation.
        kept_operators: operators whose results are kept; none: everything runs again.
        boundary_home: where the arguments rest.
        offloader: for arguments that leave.
        group: the segment; None for a call on its own.
    """

    def __init__(
        self,
        site: CallSite,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        kept_operators: frozenset[str],
        boundary_home: Tier,
        offloader: Offloader | None,
        group: SegmentGroup | None,
    ) -> None:
        super().__init__(site)
        self._given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = (args, kwargs)
        self._kept_operators = kept_operators
        self._home = boundary_home
        self._offloader = offloader
        self._is_alone = group is None
        self._segment = SegmentGroup() if group is None else group
        self._record: ReplayedCall | None = None
        self._moved_storages: list[weakref.ref[MovedStorage]] = []

    def enter(self) -> None:
        """See `Frame`. Takes copies of changeable arguments and buffers, generators and switches.

        Under no_grad nothing is saved, so nothing is done.
        """
        given, self._given = self._given, None
        assert given is not None, "a frame is entered once"
        if not torch.is_grad_enabled():
            return
        site = self._site
        record = ReplayedCall(
            place=site.name,
            call=site.call,
            surroundings=Surroundings(site.module, site.device),
            arguments=HeldArguments(
                *given,
                place=site.name,
                stays=site.stays,
                made_by=self._segment.made_by,
                copies=site.copies_inputs,
                writes=site.writes,
            ),
            selection=None,
            attributes=HeldAttributes(site.module, site.name, site.stays, site.writes),
            writes=site.writes,
        )
        self._record = record
        self._segment.add(record)
        self._push(*self._modes_of(record))

    def _modes_of(self, record: ReplayedCall) -> list[TorchDispatchMode]:
        modes: list[TorchDispatchMode] = []
        compiled = is_compiled(self._site.module)
        assert record.arguments is not None
        watcher = None if compiled else record.arguments.watcher()
        if watcher is not None:
            modes.append(watcher)
        assert record.attributes is not None
        own = None if compiled else record.attributes.watcher()
        if own is not None:
            modes.append(own)
        if self._kept_operators:
            if compiled:
                raise UnsupportedError(
                    f"{self._site.name} is compiled, and its operations cannot be looked at one by one without running it eagerly; "
                    "plan saved='recompute', 'offload' or 'keep' for this call"
                )
            record.selection = Selection(
                self._site.name, record.handles.__len__, self._site.writes, self._kept_operators
            )
            modes.append(record.selection.keeping())
        return modes

    def leave(self, outputs: Any) -> None:
        """See `Frame`."""
        record = self._record
        if record is None or record.is_over:
            return
        try:
            self._pop()
        finally:
            record.is_over = True
        if outputs is None:
            # It raised, or returned nothing that could carry a gradient on; a handle that side
            # outputs hold still finds its segment.
            self._end_of_call(record)
            return
        self._end_of_call(record)
        if self._is_alone and not any(record.live_handles()):
            record.let_go()  # nothing was saved: there will be nothing to make again
        elif not self._is_alone:
            self._segment.note_outputs(outputs)

    def _end_of_call(self, record: ReplayedCall) -> None:
        assert record.surroundings is not None
        assert record.arguments is not None
        record.surroundings.end_of_call()
        record.arguments.end_of_call()
        assert record.attributes is not None
        record.attributes.end_of_call()
        if record.selection is not None:
            record.selection.end_of_call(runs_to_the_end=not self._is_alone)
        if self._home is not Tier.DEVICE:
            assert self._offloader is not None
            self._moved_storages = [weakref.ref(p) for p in record.arguments.register(self._offloader, self._home)]

    def _pack(self, tensor: torch.Tensor) -> KeptHandle | RemadeHandle:
        assert self._record is not None
        return pack_for_recompute(self._segment, self._record, tensor, stays=self._stays(tensor))

    def offload(self) -> None:
        """See `Frame`: the arguments leave, if the policy gives them a home."""
        _each(self._moved_storages, MovedStorage.leave)

    def drop(self) -> None:
        """See `Frame`."""
        _each(self._moved_storages, MovedStorage.drop)

    def reload(self) -> None:
        """See `Frame`."""
        _each(self._moved_storages, MovedStorage.reload)

    def finish(self) -> None:
        """See `Frame`."""
        record, self._record = self._record, None
        self._given = None
        self._moved_storages = []
        if record is not None:
            record.let_go()
            for _, handle in record.live_handles():
                handle.close()

    def held_bytes(self) -> int:
        """See `Frame`: arguments, kept results, tensors made again, copies of changed buffers."""
        if self._record is None:
            return 0
        surroundings = self._record.surroundings
        storages = [*self._record.storages(), *_storages_of(self._moved_storages)]
        return _distinct_bytes(storages) + (0 if surroundings is None else surroundings.held_bytes)


class OffloadedFrame(_HookedFrame):
    """A call whose saved tensors rest in another tier.

    Args:
        site: of the call.
        home: HOST or DISK.
        offloader: of the job.
    """

    def __init__(self, site: CallSite, *, home: Tier, offloader: Offloader) -> None:
        super().__init__(site)
        self._home = home
        self._offloader = offloader
        self._handles: list[weakref.ref[MovedHandle]] = []
        self._small: list[weakref.ref[KeptHandle]] = []

    def enter(self) -> None:
        """See `Frame`."""
        if torch.is_grad_enabled():
            self._push()

    def leave(self, outputs: Any) -> None:
        """See `Frame`."""
        self._pop()

    def _pack(self, tensor: torch.Tensor) -> KeptHandle | MovedHandle:
        if not self._stays(tensor):
            moved = self._offloader.register(tensor, self._home, place=self._site.name)
            if moved is not None:
                handle = MovedHandle(tensor, moved, self._site.name)
                self._handles.append(weakref.ref(handle))
                return handle
            kept = KeptHandle(tensor, self._site.name)
            self._small.append(weakref.ref(kept))
            return kept
        return KeptHandle(tensor, self._site.name)

    def offload(self) -> None:
        """See `Frame`."""
        _each(self._moved_storages(), MovedStorage.leave)

    def drop(self) -> None:
        """See `Frame`."""
        _each(self._moved_storages(), MovedStorage.drop)

    def reload(self) -> None:
        """See `Frame`."""
        _each(self._moved_storages(), MovedStorage.reload)

    def finish(self) -> None:
        """See `Frame`."""
        for reference in self._handles:
            handle = reference()
            if handle is not None:
                handle.close()
        self._handles, self._small = [], []

    def held_bytes(self) -> int:
        """See `Frame`: what is not away, and what is too small to leave."""
        small = [handle.tensor.untyped_storage() for ref in self._small if (handle := ref()) is not None]
        return _distinct_bytes([*_storages_of(self._moved_storages()), *small])

    def _moved_storages(self) -> list[weakref.ref[MovedStorage]]:
        handles = [handle for reference in self._handles if (handle := reference()) is not None]
        # Each moved storage once, in the order of saving.
        return [weakref.ref(p) for p in dict.fromkeys(h.moved for h in handles if h.moved is not None)]


def make_frame(
    call_plan: CallPlan,
    site: CallSite,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    offloader: Offloader | None = None,
    group: SegmentGroup | None = None,
) -> Frame:
    """The frame for one call. See [Note: how the engine uses a frame].

    Args:
        call_plan: how the call's saved tensors and arguments are kept.
        site: of the call.
        args: as the module is called.
        kwargs: as the module is called.
        offloader: needed if the plan sends anything away.
        group: the segment that the call belongs to, one object a segment and microbatch; None for a
            call on its own.

    Raises:
        UsageError: the policy needs an offloader and there is none.
    """
    policy = call_plan.saved.policy
    if policy.keeps_all:
        return Frame()
    if policy.offloads:
        if offloader is None:
            raise UsageError(f"{site.name} is offloaded to {call_plan.saved_home}, but the job has no offloader")
        return OffloadedFrame(site, home=call_plan.saved_home, offloader=offloader)
    if call_plan.boundary_home is not Tier.DEVICE and offloader is None:
        raise UsageError(
            f"the arguments of {site.name} rest at {call_plan.boundary_home}, but the job has no offloader"
        )
    return RecomputedFrame(
        site,
        args,
        kwargs,
        kept_operators=policy.kept_operators,
        boundary_home=call_plan.boundary_home,
        offloader=offloader,
        group=group,
    )


def _check_outer_hooks(place: str) -> None:
    """Refuses hooks that ours would change the meaning of; see [Note: hooks do not compose].

    Raises:
        UnsupportedError: such hooks are active.
    """
    top = _default_hooks._top_saved_tensors_default_hooks(True)  # noqa: FBT003 (C function: also while disabled)
    if top is None:
        return
    owner = getattr(top[0], "__module__", None) or type(top[0]).__module__
    if owner.startswith("memfit."):
        raise UnsupportedError(
            f"{place} is called inside another call whose saved tensors are managed; "
            "plan saved='keep' for the outer one"
        )
    if not owner.startswith("torch."):
        raise UnsupportedError(
            f"{place} is called under saved-tensor hooks of {owner}, which may change values and do not compose with a "
            "memory plan; remove them, or plan saved='keep' for this call"
        )


def _unbalanced(place: str, what: str) -> UnsupportedError:
    return UnsupportedError(f"{place} returned with a {what} of its own still active; it must remove what it pushes")


def _each(moved_storages: Iterable[weakref.ref[MovedStorage]], action: Callable[[MovedStorage], None]) -> None:
    for reference in moved_storages:
        moved = reference()
        if moved is not None:
            action(moved)


def _storages_of(moved_storages: Iterable[weakref.ref[MovedStorage]]) -> list[torch.UntypedStorage]:
    alive = [moved for reference in moved_storages if (moved := reference()) is not None]
    return [storage for moved in alive if (storage := moved.storage) is not None]


def _distinct_bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
