"""What a job is made of: the user's objects, a plan, and what depends on the shapes of a batch.

In: what `fit` found out. Out: data for an `Assembly`; nothing has moved yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from memfit.batches.cutting import Cut
from memfit.batches.splitting import Signature, Weigh
from memfit.checkpoints.run_store import RunStore
from memfit.core.numerics import Numerics
from memfit.core.plan import Plan
from memfit.core.profile import CallProfile, Profile
from memfit.core.step import Step
from memfit.core.timeline import Timeline
from memfit.engine.sites import Site
from memfit.huggingface.noop_cache import CacheChoice
from memfit.job.machine import Machine
from memfit.optimizers import OptimizerDriver


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All that depends on the shapes of a batch.

    Attributes:
        plan: the job's, with as many microbatches as the batch has rows where it has fewer than the plan wants.
        profile: traced with these shapes.
        rows: of the largest microbatch.
        step: a training step.
        evaluation: a forward pass.
        timeline: the predicted bytes of the step.
    """

    plan: Plan
    profile: Profile
    rows: int
    step: Step
    evaluation: Step
    timeline: Timeline

    @property
    def microbatches(self) -> int:
        """Into how many the batch is cut."""
        return self.plan.microbatches

    @property
    def calls(self) -> tuple[CallProfile, ...]:
        """The calls of a microbatch, as traced."""
        return self.profile.traces[self.rows].calls


class Replan(Protocol):
    """Makes the parts of a job under another plan. See `Task.replan`."""

    def __call__(
        self,
        batch: Any,
        *,
        like: Plan,
        adds_up: bool | None,
        held: Iterable[torch.Tensor] = (),
        margin_bytes: int = 0,
        below_bytes: int | None = None,
    ) -> JobParts:
        """For a batch that must fit."""
        ...


@dataclass(frozen=True, kw_only=True)
class JobParts:
    """What `fit` hands over.

    `excess` tells in words what of the host or the disk a step would take above its limit. `adds_up`: the loss of a batch is the sum over its microbatches;
    None: that was not looked at. `is_unproven`: the sample's rows were alike, so that they could not show it; the first batch is looked at.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    weight: Weigh | None
    optimizer: torch.optim.Optimizer
    driver: OptimizerDriver
    machine: Machine
    plan: Plan
    reason: str
    cut: Cut
    numerics: Numerics
    prepare: Callable[[Any, Plan], Prepared]
    excess: Callable[[Prepared], str | None]
    prepared: Prepared
    signature: Signature
    blocks: Sequence[tuple[str, Sequence[tuple[str, nn.Parameter]]]]
    sites: Sequence[Site]
    casts: Sequence[nn.Module]
    caches: CacheChoice
    predicted_peak_bytes: int
    max_grad_norm: float | None
    directory: str | Path | None
    keeps_gradients: bool
    enforces: bool
    bring: Callable[[Iterable[nn.Parameter]], None] | None = None
    take_back: Callable[[str, nn.Parameter], bool] | None = None
    run: RunStore | None = None
    forget: Callable[[Iterable[nn.Parameter]], None] | None = None
    replan: Replan | None = None
    adds_up: bool | None = None
    is_unproven: bool = False
