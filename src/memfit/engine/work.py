"""Data of a run of a step: its input, its outcome, and the parts of the engine that it uses.

In: a step's `StepInput`, from the job; `EngineParts`, made once with the engine. Out: an `Outcome`.
Nothing is computed here; `engine.engine` and `engine.run` do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from memfit.core.schedule import Drop, Offload, Reload
from memfit.engine.frames import Frame
from memfit.engine.modules import MicrobatchLeaves, ModuleNotes
from memfit.engine.sites import OwnWeights, SideTensors, Site
from memfit.engine.update_phase import UpdatePhase, Visits
from memfit.homes.gradients import GradientHomes
from memfit.homes.weights import BlockWeights
from memfit.tensors.random_streams import RandomStream


class EnginePhase(Enum):
    """Phase of a run: what autograd may be doing."""

    IDLE = "idle"
    FORWARD = "forward"
    TAIL = "tail"
    BACKWARD = "backward"


@dataclass(kw_only=True)
class Outcome:
    """Outcome of a run of a step.

    Attributes:
        losses: one a microbatch, detached, as the user's function returned them (mean or sum).
        shares: loss weight of each.
        norm: global gradient norm, if it was asked for.
        is_skipped: a gradient was infinite or NaN in a step that scales its losses: nothing was
            updated.
        departures: texts of what the schedule did not foresee.
        loss: weighted sum over the microbatches of all ranks, if there are several.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    norm: torch.Tensor | None = None
    is_skipped: bool = False
    departures: list[str] = field(default_factory=list)
    loss: float | None = None

    @property
    def own_loss(self) -> float:
        """Weighted sum over the microbatches of this process."""
        return sum(float(loss) * share for loss, share in zip(self.losses, self.shares, strict=True))


class TurnKeeper(Protocol):
    """Protocol of a journal, which makes a step durable before its updates; see
    `job.journaling`.
    """

    def decide(self, outcome: Outcome) -> None:
        """Decides the step: all gradients are at home, and its updates will be made by this process
        or the next.
        """
        ...

    def keep(self, blocks: Sequence[int]) -> None:
        """Commits new versions of blocks whose updates are done."""
        ...


@dataclass(kw_only=True)
class StepInput:
    """One step's input to the engine.

    Attributes:
        run: computes microbatch m's loss (in training) or output (forward only).
        shares: loss weight of each microbatch; None for one microbatch: 1.
        streams: random streams, None entries for the user's own.
        max_norm: clip gradients to this global norm.
        scale: losses are multiplied by it, gradients divided by it.
        begin_updates: called when it is known that the updates will be made, in a step that scales
            its losses.
        count_over_ranks: adds a number up over the processes that train together.
        journal: decides the step and commits its blocks, where the step says so.
        adds_as_loop: gradients are to be those of a loop over the microbatches, also where one
            leaves the traced order: what would add up otherwise is refused.
    """

    run: Callable[[int], Any]
    shares: Sequence[float] | None
    streams: Sequence[RandomStream | None]
    max_norm: float | None = None
    scale: float | None = None
    begin_updates: Callable[[], None] | None = None
    journal: TurnKeeper | None = None
    count_over_ranks: Callable[[float], float] | None = None
    adds_as_loop: bool = False


class FrameFactory(Protocol):
    """Makes the frames of calls; see `engine.call_frames`."""

    def begin(
        self, call: int, microbatch: int, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Frame | None:
        """Returns the frame of one call, or None if everything is kept."""
        ...

    def watching(self) -> AbstractContextManager[None]:
        """Returns the context of a microbatch's forward."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Parts of an engine that all its runs use.

    Attributes:
        sites: all call sites.
        blocks: by the schedule's block index.
        frames: makes the frames of calls.
        gradients: their homes; None for an engine that only runs forward.
        update_phase: gradients and updates.
        visits: weights that come and go.
        notes: what modules keep, microbatch by microbatch.
        own: the sites' own weights.
        side_tensors: what calls leave on their modules.
        own_leaves: leaves of microbatches, where gradients are added apart.
        device_types: whose autocast state belongs to a coroutine.
        loose: blocks that code outside of all calls reads.
        departures: texts of what the schedule did not foresee.
    """

    sites: tuple[Site, ...]
    blocks: tuple[BlockWeights, ...]
    frames: FrameFactory
    gradients: GradientHomes | None
    update_phase: UpdatePhase
    visits: Visits
    notes: ModuleNotes
    own: OwnWeights
    side_tensors: SideTensors
    own_leaves: MicrobatchLeaves | None
    device_types: tuple[str, ...]
    loose: tuple[int, ...]
    departures: list[str]

    @property
    def has_accelerator(self) -> bool:
        """True if the device is an accelerator."""
        return len(self.device_types) > 1


# Frames of the calls whose backward is still to come, and of those that autograd is in.
#
# In: frames as calls begin, backwards as they begin. Out: frames that are emptied when their
# backward is over.


class OpenFrames:
    """Frames of one run by (call, microbatch)."""

    def __init__(self) -> None:
        self._frames: dict[tuple[int, int], Frame] = {}
        self._current: list[tuple[int, int]] = []

    def add(self, call: int, microbatch: int, frame: Frame) -> None:
        """Adds the frame of a call that has begun."""
        self._frames[call, microbatch] = frame

    def move(self, action: Offload | Drop | Reload) -> None:
        """Offloads, drops or reloads the tensors that a call saved; does nothing if it keeps
        all.
        """
        frame = self._frames.get((action.call, action.microbatch))
        if frame is None:
            return
        match action:
            case Offload():
                frame.offload()
            case Drop():
                frame.drop()
            case Reload():
                frame.reload()

    def reach(self, first: int, last: int, microbatch: int) -> None:
        """Notes that autograd has reached the backward of these calls."""
        # The frames that autograd is in: they are emptied when it has left them, not before it has
        # read what they hold.
        self._current = [(call, microbatch) for call in range(first, last + 1)]

    def leave(self) -> None:
        """Empties the frames of the backward that has ended."""
        for key in self._current:
            # Out of the table first: a frame whose end fails is not ended again by `finish_all`.
            frame = self._frames.pop(key, None)
            if frame is not None:
                frame.finish()
        self._current = []

    def end_pass(self, microbatches: Collection[int]) -> None:
        """Ends a whole backward of these microbatches: none of their saved tensors can be needed
        any more.

        A backward that the schedule passes is not over by that: where calls left the traced order,
        its gradient may still come.
        """
        # What autograd was in last belongs to this pass.
        self.leave()
        for key in [key for key in self._frames if key[1] in microbatches]:
            self._frames.pop(key).finish()

    def withdraw_all(self) -> None:
        """Takes off what frames have pushed whose calls were never left."""
        # The latest first: each finds its own on top.
        for frame in reversed(self._frames.values()):
            frame.withdraw()

    def finish_all(self) -> None:
        """Ends all frames, after an error."""
        for frame in self._frames.values():
            frame.finish()
        # Frames hold storages: an error's traceback would keep them alive.
        self.forget()

    def forget(self) -> None:
        """Drops all references."""
        self._frames.clear()
        self._current = []
