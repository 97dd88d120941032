"""Setup: what `fit` was asked for, and what a job does under one plan.

In: the user's objects and wishes, a machine. Out: `Setup`, the same for every plan of a job;
`Planned`, a setup with the plan that was decided. Both are frozen, and nothing has moved yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from memfit.core.hardware import Hardware
from memfit.core.limits import MIB, Budget
from memfit.core.numerics import Numerics, Wish
from memfit.core.plan import Plan
from memfit.core.profile import CallProfile, Profile
from memfit.core.schedule import Schedule
from memfit.core.step import Step, Timeline
from memfit.core.tiers import Tier
from memfit.files.weight_sources import WeightSources
from memfit.homes.update_pieces import UpdateWatchers
from memfit.machine.machine import Machine
from memfit.mesh.rank_group import RankGroup
from memfit.planner.problem import Problem, beside
from memfit.runs.checkpointer import stored_plan
from memfit.runs.run_store import RunStore
from memfit.step.build import place_turns
from memfit.step.predict import predict
from memfit.step.sizes import loaded_bytes
from memfit.trace.cutting import Cut, UserSplit
from memfit.trace.splitting import Signature, Weigh

_LOOP_BYTES = 24 * MIB
"""Kept free, where the limit is of the process, for what a loop of the user's own brings in.

Transformers' Trainer grew by 8 MiB more in its first steps than `job.step` does.
"""
_TURNS = 8
"""Orders of a journal's blocks that are remembered: a store's room has two slots, so that two come
round.
"""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Objects and wishes that `fit` was given for, whatever plan is decided.

    Attributes:
        problem: model, loss, optimizer's driver, blocks.
        optimizer: the user's.
        machine: with its limits.
        sources: where the values of weights come from.
        run: directory that the job is committed to.
        weight: what a microbatch's loss counts for; rows if None.
        split: cuts a batch instead of memfit.
        allow: declared changes of arithmetic.
        numerics: see `core.numerics.Wish`.
        max_grad_norm: gradients are clipped to this global norm.
        directory: where homes on disk are made.
        keeps_gradients: gradients stay readable after a step.
        enforces: the limit is armed.
        replans: a step that meets the limit is made again under another plan.
        adapts: a plan that is slower than was thought gives way to a faster one.
        hardware: measures what the machine can do, and what of the disk the run may take, once.
        load_bytes: held while weights move home.
        lines_sample: a batch of the user's own loop, whose lines make the steps; None: `job.step`
            does.
        ranks: processes that train the model together; None: this one is alone.
        classic: name of the technique whose plans are looked at; None: all plans are.
        watchers: of updates, under whatever plan.
    """

    problem: Problem
    optimizer: torch.optim.Optimizer
    machine: Machine
    sources: WeightSources
    run: RunStore | None
    weight: Weigh | None
    split: UserSplit | None
    allow: frozenset[str]
    numerics: Wish
    max_grad_norm: float | None
    directory: str | Path | None
    keeps_gradients: bool
    enforces: bool
    replans: bool
    hardware: Callable[[], Hardware]
    load_bytes: int
    lines_sample: Any = None
    ranks: RankGroup | None = None
    classic: str | None = None
    adapts: bool = False
    watchers: UpdateWatchers = field(default_factory=UpdateWatchers)

    @property
    def resumed_plan(self) -> Plan | None:
        """The plan of a resumed run, whose formats it goes on in."""
        return stored_plan(self.run) if self.run is not None and self.run.is_resumed else None

    @property
    def compiled_words(self) -> str:
        """Sentences on what was compiled, and what not; empty where nobody asked for it."""
        compiled = self.problem.compiled
        return "" if compiled is None else compiled.in_words()

    @property
    def has_journal(self) -> bool:
        """The run keeps a journal."""
        return self.run is not None and self.run.scheme == "journal"

    @property
    def clips_norm(self) -> bool:
        """Updates wait for the norm of all gradients."""
        return self.max_grad_norm is not None or self.has_lines

    @property
    def has_lines(self) -> bool:
        """The user's own lines make the steps: they may clip, and they say when to update."""
        return self.lines_sample is not None

    @property
    def device(self) -> str:
        """The device's kind, as `step.lower` takes it."""
        return self.machine.device.type

    @property
    def most_load_bytes(self) -> int:
        """`load_bytes`, or what the process held until now where that was more."""
        return max(self.load_bytes, self.machine.held_bytes)

    def load_peak_bytes(self, plan: Plan, profile: Profile, budget: Budget) -> int:
        """Returns what is held at most while weights move home under a plan."""
        if not self.machine.counts_process:
            return self.load_bytes
        at_home = budget.base_bytes + loaded_bytes(plan, profile, Tier.DEVICE)
        return self.machine.load_peak_bytes(self.problem.model, at_home)

    def budget(self, sample: Any, found: Profile, plan: Plan | None = None) -> Budget:
        """Measures what is left to tensors of the device, once the model has been traced.

        Args:
            sample: a batch.
            found: its profile.
            plan: that was decided; None: not yet.
        """
        model = self.problem.model
        held = [*beside(model, self.optimizer, sample)]
        kernels = found.kernel_bytes if plan is None else found.kernel_bytes_of(plan.microbatches)
        budget = self.machine.planned_budget(model, held, kernel_bytes=kernels, libraries=found.libraries)
        return beside_loop(budget, counts_process=self.machine.counts_process) if self.has_lines else budget

    def cut_by(self, way: Cut) -> Setup:
        """Returns the same, with another way to cut batches."""
        return replace(self, problem=replace(self.problem, cut=way))


def beside_loop(budget: Budget, *, counts_process: bool) -> Budget:
    """Returns what is left beside a loop of the user's own, which runs inside of the step with all
    that it and its host load and keep.
    """
    if not counts_process or budget.limit_bytes is None:
        return budget
    return replace(budget, reserve_bytes=budget.reserve_bytes + _LOOP_BYTES)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Schedules and prediction for the shapes of a batch.

    Attributes:
        plan: the job's, with as many microbatches as the batch has rows where it has fewer than the
            plan wants.
        profile: traced with these shapes.
        rows: of the largest microbatch.
        step: a training step.
        evaluation: a forward pass.
        timeline: the predicted bytes of the step.
        further: those of a step of the user's own loop in which gradients of an earlier backward
            are there already; None: `job.step` makes the steps.
        lower: gives other schedules of the same plan their meaning.
    """

    plan: Plan
    profile: Profile
    rows: int
    step: Step
    evaluation: Step
    timeline: Timeline
    further: Timeline | None
    lower: Callable[[Schedule], Step]
    _turns: dict[tuple[tuple[int, ...], ...], Step] = field(default_factory=dict[tuple[tuple[int, ...], ...], Step])

    @property
    def microbatches(self) -> int:
        """Number of microbatches that the batch is cut into."""
        return self.plan.microbatches

    @cached_property
    def evaluation_peak_bytes(self) -> int:
        """Predicted peak of the device in a forward pass."""
        return predict(self.evaluation).peak_bytes

    @cached_property
    def lasting_bytes(self) -> int:
        """Predicted bytes that the user's program keeps from one step to the next."""
        return sum(s.nbytes for s in self.profile.traces[self.rows].storages if s.is_lasting)

    @property
    def resting_bytes(self) -> int:
        """Predicted bytes of the device between two steps."""
        return sum(change.nbytes for change in self.step.resting if change.tier is Tier.DEVICE)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the device."""
        return max(found.peak_bytes for found in (self.timeline, self.further) if found is not None)

    def in_turns(self, turns: Sequence[tuple[int, ...]]) -> Step:
        """Returns the step of a run with a journal, whose store lets blocks be written in these
        turns.

        They come round again, so that each order is lowered once.
        """
        key = tuple(turns)
        if key not in self._turns:
            if len(self._turns) >= _TURNS:
                self._turns.clear()
            self._turns[key] = self.lower(place_turns(self.step.schedule, key))
        return self._turns[key]

    @property
    def calls(self) -> tuple[CallProfile, ...]:
        """The calls of a microbatch, as traced."""
        return self.profile.traces[self.rows].calls


class Replan(Protocol):
    """Decides another plan for a running job. See `job.deciding.replan`."""

    def __call__(
        self,
        batch: Any,
        *,
        like: Plan,
        adds_up: bool | None,
        held: Iterable[torch.Tensor] = (),
        margin_bytes: int = 0,
        below_bytes: int | None = None,
        hardware: Hardware | None = None,
        plan: Plan | None = None,
    ) -> Planned:
        """Plans for a batch that must fit."""
        ...


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A setup with the plan that was decided.

    Attributes:
        setup: its blocks are in the order of the profile's.
        plan: the decisions.
        reason: why this plan, and what was measured besides.
        choice: the first alone, as a run keeps it.
        numerics: effect of the plan on the numbers.
        adds_apart: see `Plan.adds_apart`.
        prepared: for the sample's shapes.
        signature: of the sample.
        predicted_peak_bytes: of the process without a GPU, else of the device.
        load_bytes: of the same, predicted of moving weights home.
        beside_bytes: of the same, predicted beside tensors.
        budget: of the device, that it was decided for.
        adds_up: the loss of a batch is the sum over its microbatches; None: that was not tried.
        is_unproven: the sample's rows were alike, so they could not show it: the first batch is
            tried.
        replan: decides another plan; None where the job keeps the one that it has.
    """

    setup: Setup
    plan: Plan
    reason: str
    choice: str
    numerics: Numerics
    adds_apart: bool
    prepared: Prepared
    signature: Signature
    predicted_peak_bytes: int
    load_bytes: int
    beside_bytes: int
    budget: Budget
    adds_up: bool | None
    replan: Replan | None
    is_unproven: bool = False
