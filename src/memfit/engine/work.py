"""What a run of a step is given, what it gives back, and the parts that it works on.

In: the job's, once. Out: data for `engine.engine` and `engine.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from memfit.activations import Frame
from memfit.engine.leaves import MicrobatchLeaves
from memfit.engine.modules import ModuleNotes
from memfit.engine.settling import Settling
from memfit.engine.side_tensors import SideTensors
from memfit.engine.sites import OwnWeights, Site
from memfit.engine.visits import Visits
from memfit.homes.gradients import GradientHomes
from memfit.homes.weights import BlockWeights
from memfit.tensors.random_streams import RandomStream


class EnginePhase(Enum):
    """What autograd may be doing now."""

    IDLE = "idle"
    FORWARD = "forward"
    TAIL = "tail"
    BACKWARD = "backward"


@dataclass(kw_only=True)
class Outcome:
    """What a run of a step gave.

    Attributes:
        losses: one a microbatch, detached, as the user's function returned them (mean or sum).
        shares: what each was multiplied with.
        norm: global gradient norm, if it was asked for.
        is_skipped: a gradient was infinite or NaN in a step that scales its losses: nothing was
            updated.
        departures: texts of what the schedule did not foresee.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    norm: torch.Tensor | None = None
    is_skipped: bool = False
    departures: list[str] = field(default_factory=list)


class TurnKeeper(Protocol):
    """What makes a step durable before it is made; see `job.journaling`."""

    def decide(self, outcome: Outcome) -> None:
        """All gradients are at home: the step is made from here on, by this process or the next."""
        ...

    def keep(self, blocks: Sequence[int]) -> None:
        """The blocks' updates are through: their new versions are committed."""
        ...


@dataclass(kw_only=True)
class StepInput:
    """One step's input to the engine.

    Attributes:
        run: computes microbatch m's loss (in training) or output (forward only).
        shares: what each microbatch's loss is multiplied with; None for one microbatch: the loss as
            it is.
        streams: random streams, None entries for the user's own.
        max_norm: clip gradients to this global norm.
        scale: losses are multiplied with it, gradients divided by it.
        begin_updates: called when it is known that the updates will be made, in a step that scales
            its losses.
        journal: decides the step and commits its blocks, where the step says so.
    """

    run: Callable[[int], Any]
    shares: Sequence[float] | None
    streams: Sequence[RandomStream | None]
    max_norm: float | None = None
    scale: float | None = None
    begin_updates: Callable[[], None] | None = None
    journal: TurnKeeper | None = None


class FrameFactory(Protocol):
    """Makes the frames of calls; see `engine.policies`."""

    def begin(
        self, call: int, microbatch: int, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Frame | None:
        """The frame of one call, or None where everything is kept."""
        ...

    def watching(self) -> AbstractContextManager[None]:
        """What a microbatch's forward runs in."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What all runs of one engine work on.

    Attributes:
        sites: all call sites.
        blocks: by the schedule's block index.
        frames: makes the frames of calls.
        gradients: their homes; None for an engine that only runs forward.
        settling: gradients and updates.
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
    settling: Settling
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
        """Work is done on an accelerator."""
        return len(self.device_types) > 1
