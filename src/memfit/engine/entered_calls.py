"""Calls of the user's code as they begin and end: matches them with calls of the trace, and
provides their weights.

In: sites that are entered and left. Out: weights on the device, frames that manage saved tensors,
hooks that tell when a call's backward begins.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch

from memfit.core.errors import UnsupportedError
from memfit.core.schedule import Forward, Schedule
from memfit.engine.backward import BackwardPasses
from memfit.engine.coroutines import Coroutine, can_pause
from memfit.engine.frames import Frame, RecomputedFrame
from memfit.engine.measured_step import Recorder
from memfit.engine.modules import MicrobatchLeaves, Replaced
from memfit.engine.work import EngineParts, OpenFrames
from memfit.engine.writes import TRY_ANOTHER_POLICY
from memfit.tensors.autograd_graph import (
    parameters_of_earlier_calls,
    sequence_number,
    watch_gradients_of,
    without_bases,
)
from memfit.tensors.trees import tensors_in


class BackwardObserver(Protocol):
    """Protocol of objects that are told when autograd reaches a call."""

    def begins(self, serial: int, call: int | None, microbatch: int, site: int) -> None:
        """Notes that the first gradient has reached an output of a call.

        Args:
            serial: number of the run.
            call: its index in the trace; None or below 0 for a call that no schedule foresaw.
            microbatch: its index; -1 for such a call.
            site: its index.
        """
        ...


class Caller(Protocol):
    """Code that makes calls of one microbatch: a coroutine, or the user's own lines.

    Attributes:
        microbatch: its index.
        position: index of the first call that it has not made yet.
    """

    microbatch: int
    position: int

    @property
    def is_current(self) -> bool:
        """Tells whether the caller of this function is its code."""
        ...

    def pause(self, call: int) -> None:
        """Returns when the schedule has come to the forward of this call."""
        ...


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Tells an observer of backwards without keeping it alive, since hooks live in autograd's
    graph.
    """

    observer: weakref.ref[BackwardObserver]
    serial: int

    def watch(self, output: Any, call: int | None, microbatch: int, site: int, began: int = 0) -> list[torch.Tensor]:
        """Registers hooks that tell when the call's backward begins: before the node of any of its
        outputs runs.

        Hooks on nodes, not on tensors: a tensor that is changed in place later gets another node,
        and hooks registered on the tensor object would follow it or stay by rules of their own. Of
        a view that is changed later, only the base's node may be left in the graph.

        Args:
            output: of the call.
            call: its index in the trace; None or below 0 for a call that no schedule foresaw.
            microbatch: its index; -1 for such a call.
            site: its index.
            began: autograd's sequence number when the call began. Nodes from before are of earlier
                calls: a layer that is skipped hands on its input, and autograd, which comes to the
                earlier call there, would have the later one begin behind it.

        Returns:
            The outputs that need a gradient, and their bases.
        """
        tensors = [t for t in tensors_in(output) if t.requires_grad]
        tensors += [t._base for t in tensors if t._is_view() and t._base is not None]
        nodes = {node for t in tensors if (node := t.grad_fn) is not None and node._sequence_nr() >= began}
        # The number of the run: a graph that outlives it tells by it that its weights are gone.
        observer, serial = self.observer, self.serial

        def begins(_gradients: Any) -> None:
            it = observer()
            if it is not None:
                it.begins(serial, call, microbatch, site)

        for node in nodes:
            # Ahead of the node, which reads weights that may still have to be fetched.
            node.register_prehook(begins)
        return tensors


@dataclass
class _OpenCall:
    """A site that is running now."""

    site: int
    call: int | None
    frame: Frame | None
    replaced: Replaced = field(default_factory=list)
    began: int = 0
    """Autograd's sequence number in this thread when it began."""


class ServedCalls:
    """Calls outside of any step: weights are fetched when a call begins, and released when it is
    over and no backward needs them.

    Args:
        parts: of the engine.
        listener: told of the backward of their outputs.
    """

    def __init__(self, parts: EngineParts, listener: Listener) -> None:
        self._parts = parts
        self._listener = listener
        self._opened: list[int] = []
        self._outermost: FrameType | None = None
        self.recomputing = 0

    def enter(self, site: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `CallObserver`."""
        del args, kwargs
        if self.recomputing:
            return
        if self._opened and self._outermost is not None and _is_over(self._outermost):
            # Ctrl-C: torch calls `leave` after an Exception only. What comes is inside of nothing.
            self._opened.clear()
            self._parts.visits.end_on_demand()
        if not self._opened:
            self._outermost = _calling_frame()
            self._parts.visits.ensure(self._parts.sites[site].blocks, is_foreseen=True)
        # Behind the fetch: where it fails, torch calls `leave` all the same; it must find nothing.
        self._opened.append(site)

    @property
    def is_inside(self) -> bool:
        """The caller runs inside of a call, or of one that is run again."""
        return bool(self.recomputing or self._opened)

    def leave(self, site: int, output: Any) -> None:
        """See `CallObserver`."""
        if self.recomputing or not self._opened or self._opened[-1] != site:
            return
        self._opened.pop()
        if self._opened:
            return  # inside another call: part of it
        self._outermost = None
        if output is not None and torch.is_grad_enabled():
            self._listener.watch(output, None, -1, site)
        # Also after an error: a forward that failed must not leave its weights on the device.
        self._parts.visits.end_on_demand()

    def ensure(self, blocks: Sequence[int]) -> None:
        """Brings the blocks' weights to the device, where they are not there yet."""
        self._parts.visits.ensure(blocks, is_foreseen=True)


def _calling_frame() -> FrameType | None:
    """Returns the frame that called memfit's hook: torch's, one for each call of a module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("memfit."):
        frame = frame.f_back
    return frame


def _is_over(frame: FrameType) -> bool:
    """Says whether a frame has ended, in whichever thread it ran; gives up its local variables."""
    try:
        frame.clear()
    except RuntimeError:  # it is executing, or suspended
        return False
    return True


class StepCalls:
    """Calls of one run.

    Args:
        parts: of the engine.
        schedule: of the run.
        frames: of its calls.
        passes: of its backwards.
        leaves: of microbatches, where gradients are added apart; None: they are not.
        listener: told of the backward of their outputs.
        recorder: measures waits; None: they are not measured.
        refuses_reuse: a weight that a microbatch uses again, unforeseen, is refused: layer by layer
            its gradient would add up in another order than in a loop.

    Attributes:
        running: the coroutine whose code runs now, or the user's own lines.
        recomputing: number of calls that are being recomputed in backward: their sites are ignored,
            and nothing pauses.
    """

    def __init__(
        self,
        parts: EngineParts,
        schedule: Schedule,
        *,
        frames: OpenFrames,
        passes: BackwardPasses,
        leaves: MicrobatchLeaves | None,
        listener: Listener,
        recorder: Recorder | None,
        refuses_reuse: bool = False,
    ) -> None:
        self._parts = parts
        self._recorder = recorder
        self._schedule = schedule
        self._used: set[tuple[int, int]] | None = set() if refuses_reuse else None
        self._frames = frames
        self._passes = passes
        self._leaves = leaves
        self._listener = listener
        self._shared = parameters_of_earlier_calls(
            [call.blocks for call in schedule.calls],
            lambda b: (id(slot.parameter) for slot in parts.blocks[b].slots if slot.requires_grad),
        )
        # One list for all microbatches: they pause only where nothing is open.
        self._opened: list[_OpenCall] = []
        self._firsts = {a.first for a in schedule.actions if isinstance(a, Forward)}
        self.running: Caller | None = None
        self.recomputing = 0

    def resume(self, coroutine: Coroutine) -> None:
        """Resumes the microbatch's code until it pauses or ends."""
        self.running = coroutine
        # For one turn: the next microbatch reads the same modules, and has leaves of its own.
        replaced = self._leaves.enter(self._parts.loose) if self._leaves is not None else []
        try:
            coroutine.resume()
        finally:
            self.running = None
            if self._leaves is not None:
                self._leaves.leave(replaced)

    def enter(self, site: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `CallObserver`."""
        if self.recomputing:
            return
        if self._opened:
            self._opened.append(_OpenCall(site, None, None))  # inside another call: part of it
            return
        parts, coroutine = self._parts, self.running
        blocks, name = parts.sites[site].blocks, parts.sites[site].name
        if coroutine is None or not coroutine.is_current:
            parts.visits.ensure(blocks, is_foreseen=True)
            self._opened.append(_OpenCall(site, None, None))
            return
        call = self._next_call(coroutine, name)
        if self._used is not None:
            self._note_use(self._used, coroutine.microbatch, site, is_foreseen=call is not None)
        if call is None:
            parts.departures.append(f"microbatch {coroutine.microbatch} calls {name!r} where the trace did not")
            parts.visits.ensure(blocks, is_foreseen=True)
            self._opened.append(_OpenCall(site, -1, None, self._put_leaves(site), sequence_number()))
            return
        is_own = parts.own.are_here(site)
        if self._schedule.is_interleaved and not is_own:
            raise _refused_substitutes(
                name,
                "microbatches that take turns would get each other's; plan microbatches=1, or order='microbatch-major'",
            )
        if call in self._firsts and can_pause():
            # Before the weights are asked for: when this returns, the schedule has fetched them.
            coroutine.pause(call)
        coroutine.position = call + 1
        self.ensure(blocks)
        # Behind the pause: the frame copies buffers that other microbatches change meanwhile.
        frame = parts.frames.begin(call, coroutine.microbatch, parts.sites[site], args, kwargs)
        if frame is not None:
            # In the table before it is entered: after an error `finish_all` ends what is there.
            self._frames.add(call, coroutine.microbatch, frame)
            if not is_own and isinstance(frame, RecomputedFrame) and torch.is_grad_enabled():
                raise _refused_substitutes(name, f"running it again would compute with its own; {TRY_ANOTHER_POLICY}")
            frame.enter()
        # Behind `ensure`: a leaf of a weight that is away cannot be made.
        replaced = self._put_leaves(site)
        if self._passes.is_in_tail(call):
            self._passes.aliases.enter(parts.sites[site].module)
        self._opened.append(_OpenCall(site, call, frame, replaced, sequence_number()))

    def _note_use(self, used: set[tuple[int, int]], microbatch: int, site: int, *, is_foreseen: bool) -> None:
        """Notes which trained blocks a microbatch has used.

        Raises:
            UnsupportedError: it uses one again where the trace did not.
        """
        blocks, name = self._parts.blocks, self._parts.sites[site].name
        uses = {
            (microbatch, b)
            for b in self._parts.sites[site].blocks
            if any(slot.requires_grad for slot in blocks[b].slots)
        }
        if not is_foreseen and uses & used:
            raise UnsupportedError(
                f"part {microbatch} of memfit.Parts calls {name!r} again, which the largest part does not: layer by layer the gradients of its uses would add up in "
                "another order than in a loop. Plan order='microbatch-major', or fit with a sample whose largest part does it too"
            )
        used |= uses

    def leave(self, site: int, output: Any) -> None:
        """See `CallObserver`."""
        if self.recomputing or not self._opened or self._opened[-1].site != site:
            return
        # Off first: where something below raises, torch calls `leave` for the outer sites as well.
        opened = self._opened.pop()
        if opened.call is None and self._opened:
            return
        # Before the frame is left, which may raise: modules have their own weights back by then.
        if opened.call is not None and self._passes.is_in_tail(opened.call):
            # Aliases before leaves, as they came last: they give back the weight itself, and the
            # turn's own leaf may have stood there.
            self._passes.aliases.leave(self._parts.sites[site].module)
        if self._leaves is not None:
            self._leaves.leave(opened.replaced)
        if opened.frame is not None:
            opened.frame.leave(output)
        if output is None or not torch.is_grad_enabled():
            return
        microbatch = self.running.microbatch if self.running is not None else -1
        aside: list[torch.Tensor] = []
        if opened.call is not None and any(self._parts.blocks[b].travels for b in self._parts.sites[site].blocks):
            aside = self._parts.side_tensors.made_since(site, opened.began)
        tensors = self._listener.watch((output, aside), opened.call, microbatch, site, opened.began)
        if opened.call in self._shared:
            shared, original = self._shared[opened.call], self._passes.aliases.original
            watch_gradients_of(lambda leaf: id(original(leaf)) in shared, tensors, opened.began, without_bases)
        if self._passes.tail is not None and opened.call is not None and not self._passes.is_in_tail(opened.call):
            self._passes.watch_cut(tensors)

    def ensure(self, blocks: Sequence[int]) -> None:
        """Brings the blocks' weights to the device, where they are not there yet."""
        with nullcontext() if self._recorder is None else self._recorder.stall("fetch"):
            self._parts.visits.ensure(blocks)

    def restore(self) -> None:
        """Gives all modules their own weights back, after an error."""
        # Whatever was open: modules that kept a leaf would train something that nobody updates.
        self._passes.aliases.restore_all()
        if self._leaves is not None:
            self._leaves.restore_all()

    def _put_leaves(self, site: int) -> Replaced:
        """See [Note: leaves of a microbatch]."""
        return self._leaves.enter(self._parts.sites[site].blocks) if self._leaves is not None else []

    def _next_call(self, coroutine: Caller, name: str) -> int | None:
        """Returns the call of the trace that this is: the next one of this site, at or after the
        microbatch's position.
        """
        calls = self._schedule.calls
        return next((call for call in range(coroutine.position, len(calls)) if calls[call].site == name), None)


def _refused_substitutes(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name!r} is called with other tensors in the places of its parameters (torch.func.functional_call, for instance): {why}"
    )
