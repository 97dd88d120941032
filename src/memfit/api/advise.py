"""Advice: what `fit` would decide, without preparing a job; and what a given plan would take.

In: the user's model, optimizer, loss and sample. Out: `Advice`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.api.choosing import Choice, Wanted, choose, keeps_batch_whole
from memfit.api.given_plans import read_given
from memfit.batches.batch import UncuttableError
from memfit.core.aliases import own_allowances
from memfit.core.hardware import Hardware
from memfit.core.limits import Budget
from memfit.core.machines import read_hardware
from memfit.core.numerics import Numerics, Wish, check_exact, declare
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.rates import in_dtype
from memfit.core.schedule import Schedule
from memfit.core.tiers import is_processor
from memfit.core.timeline import Timeline
from memfit.job.described import PlannedMachine, plan_for
from memfit.job.machine import device_of
from memfit.job.plan_checks import check_effect
from memfit.job.probing import probe
from memfit.job.problem import (
    Loss,
    Problem,
    beside,
    check_arguments,
    check_precision,
    driver_of,
    encodes_states,
)
from memfit.planning.plan_choice import ClassicPoint, ParetoPoint
from memfit.prediction.predict import predict
from memfit.profiling.blocks import find_blocks
from memfit.scheduling.build import build_step
from memfit.scheduling.check import check_step
from memfit.scheduling.lower import lower
from memfit.tensors.guard import is_away


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A plan with everything that is known about it before it runs.

    Attributes:
        plan: the decisions.
        reason: why these, in a sentence or two, and what they do to the numbers.
        numerics: the same as data.
        schedule: the step as data.
        timeline: predicted bytes and seconds, action by action.
        budget: the limit and what is taken off it before tensors.
        profile: that the plan was made from.
        hardware: that it was priced on.
        front: what stood beside it, from the fastest to the leanest; empty for a plan that was
            given.
        chosen: name of its point; empty for a plan that was given.
        classics: techniques of the field on the same question, where they were asked for.
    """

    plan: Plan
    reason: str
    numerics: Numerics
    schedule: Schedule
    timeline: Timeline
    budget: Budget
    profile: Profile
    hardware: Hardware
    front: tuple[ParetoPoint, ...] = ()
    chosen: str = ""
    classics: tuple[ClassicPoint, ...] = ()

    @property
    def predicted_peak_bytes(self) -> int:
        """Bytes that the limit is compared with: tensors, base and reserve."""
        return self.timeline.peak_bytes + self.budget.base_bytes + self.budget.reserve_bytes


def advise(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    sample: Any,
    *,
    limit: int | str | None = None,
    plan: Plan | str | Path | None = None,
    allow: Collection[str] = frozenset(),
    numerics: Wish = "auto",
    max_grad_norm: float | None = None,
    directory: str | Path | None = None,
    hardware: Hardware | str | Path | None = None,
    compares: bool = False,
) -> Advice:
    """Chooses a plan as `fit` does, or takes the one that is given, and prices it.

    Nothing is trained and nothing moves.

    A model whose weights have no bytes (built by `memfit.empty`, or storages of size 0) can be
    asked about as well; its loss is then taken to add up over microbatches.

    Args:
        model: as in `fit`, like all the others.
        optimizer: its states are foretold, it is not stepped.
        loss: the user's.
        sample: a batch.
        limit: bytes of the device; None: no limit, or all that a described device has.
        plan: priced instead of chosen; the name of a technique: chosen among its plans.
        allow: declared changes of arithmetic.
        numerics: "auto" or "exact".
        max_grad_norm: gradients are to be clipped.
        directory: on the disk that homes would use.
        hardware: the machine that plans are made for (object, name, JSON text or a path to it),
            which need not be here: its tiers, capacities and kind of device count, and nothing is
            allocated on it. None: this machine, which is probed.
        compares: techniques of the field are predicted as well (`Advice.classics`).

    Raises:
        DoesNotFitError: no plan fits the limit.
        UsageError: the limit is more than the described device has. Others as in `fit`.
    """
    allow = own_allowances(allow)
    check_arguments(model, loss, allow, max_grad_norm, numerics)
    stated, device = read_hardware(hardware), device_of(model)
    problem = Problem(
        model=model,
        loss=loss,
        driver=driver_of(optimizer, model),
        block_map=find_blocks(model, None),
        numerics=numerics,
        is_for_accelerator=None if stated is None else not is_processor(stated.device),
    )
    given = read_given(plan)
    if given.plan is None:
        check_effect(problem, allow, device.type if stated is None else stated.device)
    # How a model without bytes will be loaded is not known.
    loads = all(p.numel() == 0 or (not is_away(p) and p.untyped_storage().nbytes()) for p in model.parameters())
    planned = plan_for(model, limit, stated, [*beside(model, optimizer, sample)], loads=loads)
    if planned.here is not None:
        stated = probe(planned.here, directory, probes_bf16="bf16" in allow, probes_codecs=encodes_states(allow))
    assert stated is not None, "what is not here is described"
    clips_norm = max_grad_norm is not None
    if given.plan is not None:
        check_precision(given.plan, model, allow)
        return _price(problem, sample, given.plan, planned.budget, stated, allow=allow, clips_norm=clips_norm)
    wanted = Wanted(
        allow=allow,
        may_split=True,
        clips_norm=clips_norm,
        load_bytes=planned.load_bytes,
        numerics=numerics,
        classic=given.classic,
        compares=compares,
    )
    chosen = _chosen(problem, sample, planned.budget, stated, planned.machine, wanted)
    return _advice(chosen, planned.budget(chosen.profile), allow=allow)


def _advice(chosen: Choice, budget: Budget, *, allow: Collection[str]) -> Advice:
    """Returns what is known of a plan that was chosen."""
    declared = declare(chosen.plan, chosen.profile, allow=allow, why=chosen.why)
    return Advice(
        plan=chosen.plan,
        reason=f"{chosen.reason} {declared.sentence()}",
        numerics=declared,
        schedule=chosen.found.schedule,
        timeline=chosen.found.timeline,
        budget=budget,
        profile=chosen.profile,
        hardware=chosen.hardware,
        front=chosen.found.front,
        chosen=chosen.found.name,
        classics=chosen.found.classics,
    )


def _price(
    problem: Problem,
    sample: Any,
    plan: Plan,
    budget: Callable[[Profile], Budget],
    hardware: Hardware,
    *,
    allow: Collection[str],
    clips_norm: bool,
) -> Advice:
    """Prices a plan that is given."""
    problem = replace(problem, cut=problem.ways(sample, None)[0])
    found = problem.profile_for(plan, sample)
    check_exact(plan, found, problem.numerics)
    declared = declare(plan, found, allow=allow, why="the plan was given")
    speeds = in_dtype(hardware, plan.compute_dtype)
    schedule = build_step(plan, found, clips_norm=clips_norm)
    step = lower(schedule, plan, found, device=speeds.device)
    check_step(step, clips_norm=clips_norm)
    return Advice(
        plan=plan,
        reason=f"given by the user. {declared.sentence()}",
        numerics=declared,
        schedule=schedule,
        timeline=predict(step, speeds),
        budget=budget(found),
        profile=found,
        hardware=speeds,
    )


def _chosen(
    problem: Problem,
    sample: Any,
    budget: Callable[[Profile], Budget],
    hardware: Hardware,
    machine: PlannedMachine,
    wanted: Wanted,
) -> Choice:
    """The choice with the likeliest way to cut batches that the model runs on.

    That the loss adds up is shown by `fit`, which runs it.
    """

    def suffices(found: Profile) -> bool:
        own = replace(wanted, may_split=found.may_split)
        return keeps_batch_whole(problem, sample, found, budget(found), hardware, machine, own)

    cut, whole = _cut_and_profiled(problem, sample, suffices)
    wanted = replace(wanted, may_split=whole.may_split)
    return choose(cut, sample, whole, budget(whole), hardware, machine, wanted)


def _cut_and_profiled(problem: Problem, sample: Any, suffices: Callable[[Profile], bool]) -> tuple[Problem, Profile]:
    """The problem with the likeliest way to cut its batches that the model runs on, and its
    profile.
    """
    *ways, whole = problem.ways(sample, None)
    for way in ways:
        cut = replace(problem, cut=way)
        try:
            return cut, cut.profile(sample, cut.counts(sample), chunk_tokens=None, suffices=suffices)
        except UncuttableError:
            continue
    cut = replace(problem, cut=whole)
    return cut, cut.profile(sample, (1,), chunk_tokens=None)
