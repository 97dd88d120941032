"""Advice: what `fit` would decide, without preparing a job; and what a given plan would take.

In: the user's model, optimizer, loss and sample. Out: `Advice`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.core.errors import UsageError
from memfit.core.hardware import Hardware, in_dtype, read_hardware
from memfit.core.layout import Scheme
from memfit.core.limits import Budget, format_bytes
from memfit.core.numerics import Numerics, Wish, check_exact, declare
from memfit.core.plan import Plan, own_allowances
from memfit.core.profile import Profile
from memfit.core.schedule import Schedule
from memfit.core.step import Timeline
from memfit.core.tiers import NETWORK, is_processor
from memfit.machine.described import PlannedFor, plan_for
from memfit.machine.machine import device_of
from memfit.machine.probing import probe
from memfit.planner.choosing import Choice, Wanted, choose, commits_a_step, keeps_batch_whole
from memfit.planner.explaining import AskedPlan, explain_choice, explain_plan
from memfit.planner.first_batch import sample_of
from memfit.planner.given_plans import (
    check_asked,
    check_parts_alone,
    plan_of_one_batch,
    read_given,
    told_of_road,
    whole_by_lines,
)
from memfit.planner.plan_checks import check_effect, check_meaning
from memfit.planner.problem import (
    Loss,
    Problem,
    beside,
    check_arguments,
    check_precision,
    computes_in_bf16,
    driver_of,
    encodes_states,
    encoding_bytes,
    workspaces_for,
    workspaces_of,
)
from memfit.planner.search.over_ranks_plans import choose_over_ranks
from memfit.planner.search.plan_choice import ClassicPoint, Explanation, ParetoPoint
from memfit.planner.setup import beside_loop
from memfit.step.build import build_step
from memfit.step.check import check_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from memfit.store import Durability
from memfit.tensors.guard import is_away
from memfit.trace.batch import ByParts, Parts, UncuttableError
from memfit.trace.blocks import find_blocks
from memfit.trace.cutting import Cut, UserSplit


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
        explanation: why the plan is what it is, where that was asked for.
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
    explanation: Explanation | None = None

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
    host_limit: int | str | None = None,
    disk_limit: int | str | None = None,
    hardware: Hardware | str | Path | None = None,
    emulate_device: bool = False,
    numerics: Wish = "auto",
    allow: Collection[str] = frozenset(),
    plan: Plan | str | Path | None = None,
    blocks: Sequence[str | nn.Module] | None = None,
    directory: str | Path | None = None,
    split: UserSplit | None = None,
    max_grad_norm: float | None = None,
    lines: bool = False,
    durability: Durability | None = None,
    scheme: Scheme | None = None,
    ranks: int = 1,
    compares: bool = False,
    explains: bool = False,
) -> Advice:
    """Chooses a plan as `fit` does, or takes the one that is given, and prices it.

    Nothing is trained and nothing moves.

    A model whose weights have no bytes (built by `memfit.empty`, or storages of size 0) can be
    asked about as well; its loss is then taken to add up over microbatches.

    Args:
        model: as in `fit`, like all the others.
        optimizer: its states are foretold, it is not stepped.
        loss: the user's.
        sample: a batch, or a loader.
        limit: bytes of the device; None: no limit, or all that a described device has.
        host_limit: of host memory beside a device; None: what the machine has.
        disk_limit: of files; None likewise.
        hardware: the machine that plans are made for (object, name, JSON text or a path to it),
            which need not be here: its tiers, capacities and kind of device count, and nothing is
            allocated on it. None: this machine, which is probed.
        emulate_device: as in `fit`.
        numerics: "auto" or "exact".
        allow: declared changes of arithmetic.
        plan: priced instead of chosen; the name of a technique: chosen among its plans.
        blocks: names or modules.
        directory: on the disk that homes would use.
        split: cuts a batch.
        max_grad_norm: gradients are to be clipped.
        lines: for a loop of the user's own.
        durability: the run is to be committed to a store, so often; None: it is not, unless
            `scheme` is given.
        scheme: of that store.
        ranks: processes that are to train the model together, each on such a device with such a
            sample of its own. Uniform plans are looked at, and `hardware` must say what the links
            between ranks carry (`Hardware.network`).
        compares: techniques of the field are predicted as well (`Advice.classics`).
        explains: the plan is explained (`Advice.explanation`). One that is chosen also by what
            other limits and permissions would give: that takes as long as some twenty searches.

    Raises:
        DoesNotFitError: no plan fits the limit.
        UsageError: the limit is more than the described device has. Others as in `fit`.
    """
    asked = ask(
        model,
        optimizer,
        loss,
        sample,
        limit=limit,
        host_limit=host_limit,
        disk_limit=disk_limit,
        hardware=hardware,
        emulate_device=emulate_device,
        numerics=numerics,
        allow=allow,
        plan=plan,
        blocks=blocks,
        directory=directory,
        split=split,
        max_grad_norm=max_grad_norm,
        lines=lines,
        durability=durability,
        scheme=scheme,
        ranks=ranks,
        compares=compares,
        tries_permissions=explains,
    )
    return asked.answered(explains=explains)


def ask(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    sample: Any,
    *,
    limit: int | str | None = None,
    host_limit: int | str | None = None,
    disk_limit: int | str | None = None,
    hardware: Hardware | str | Path | None = None,
    emulate_device: bool = False,
    numerics: Wish = "auto",
    allow: Collection[str] = frozenset(),
    plan: Plan | str | Path | None = None,
    blocks: Sequence[str | nn.Module] | None = None,
    directory: str | Path | None = None,
    split: UserSplit | None = None,
    max_grad_norm: float | None = None,
    lines: bool = False,
    durability: Durability | None = None,
    scheme: Scheme | None = None,
    ranks: int = 1,
    compares: bool = False,
    tries_permissions: bool = False,
    measured: Hardware | None = None,
) -> Asked:
    """Reads the keywords of `advise`: a question that has not been answered.

    With `tries_permissions` permissions that are not given are tried too, and what they need is
    measured. `measured` are speeds of this machine, which is then not probed again.

    Raises:
        UsageError: as in `advise`.
    """
    allow, sample = own_allowances(allow), sample_of(sample)
    check_arguments(model, loss, allow, max_grad_norm, numerics, split)
    stated, device = read_hardware(hardware), device_of(model)
    given = read_given(plan)
    if lines:
        given_plan = given.plan
        if given.classic is not None:
            raise UsageError(f"plan={given.classic!r} is chosen for job.step: leave it out with lines=True")
        check_asked(
            max_grad_norm=max_grad_norm, weight=None, split=split, on_breach="error", scheme=scheme, plan=given_plan
        )
    check_parts_alone(sample, lines=lines, split=split, weight=None, ranks=ranks > 1)
    problem = Problem(
        model=model,
        loss=loss,
        driver=driver_of(optimizer, model),
        block_map=find_blocks(model, blocks),
        numerics=numerics,
        is_for_accelerator=None if stated is None else not is_processor(stated.device),
        workspaces=workspaces_for(device, stated),
    )
    if given.plan is None:
        check_effect(problem, allow, device.type if stated is None else stated.device)
    # How a model without bytes will be loaded is not known.
    loads = all(p.numel() == 0 or (not is_away(p) and p.untyped_storage().nbytes()) for p in model.parameters())
    planned = plan_for(
        model,
        limit,
        stated,
        [*beside(model, optimizer, sample)],
        loads=loads,
        host_limit=host_limit,
        disk_limit=disk_limit,
        is_emulated=emulate_device,
        encoding_bytes=encoding_bytes(model, allow),
    )
    if planned.here is not None:
        problem = replace(problem, workspaces=workspaces_of(planned.here))
        tries = tries_permissions and given.plan is None
        stated = measured or probe(
            planned.here,
            directory,
            probes_bf16=tries or computes_in_bf16(allow),
            probes_codecs=tries or encodes_states(allow),
        )
    assert stated is not None, "what is not here is described"
    is_committed = durability is not None or scheme is not None
    wanted = Wanted(
        allow=allow,
        may_split=not lines,
        clips_norm=max_grad_norm is not None or lines,
        load_bytes=planned.load_bytes,
        scheme=(scheme or "generations") if is_committed else None,
        checks_split=not lines and not isinstance(sample, Parts),
        numerics=numerics,
        commits=commits_a_step(durability or "step") if is_committed else 0.0,
        has_lines=lines,
        classic=given.classic,
        compares=compares,
    )
    if ranks > 1 and given.plan is None and (lines or is_committed or tries_permissions or given.classic is not None):
        raise UsageError(
            "plans for several ranks are looked for without lines=, durability=, scheme=, explains= and techniques"
        )
    return Asked(problem, sample, planned, stated, wanted, split, plan=given.plan, ranks=ranks)


class Asked:
    """A question with all that it was asked with.

    Args:
        problem: what is trained.
        sample: a batch.
        planned: the machine, and what is left to tensors.
        hardware: that plans are priced on.
        wanted: what is allowed.
        split: cuts a batch instead of memfit.
        plan: that is given; None: one is chosen.
        ranks: that train together.

    Attributes:
        hardware: that plans are priced on.
        planned: the machine, and what is left to tensors.
        wanted: what is allowed.
        plan: that is given, or None.
    """

    def __init__(
        self,
        problem: Problem,
        sample: Any,
        planned: PlannedFor,
        hardware: Hardware,
        wanted: Wanted,
        split: UserSplit | None,
        *,
        plan: Plan | None,
        ranks: int,
    ) -> None:
        self._problem = problem
        self._sample = sample
        self.planned = planned
        self.hardware = hardware
        self.wanted = wanted
        self._split = split
        self.plan = plan
        self._ranks = ranks

    def answered(self, *, explains: bool = False) -> Advice:
        """Chooses a plan, or prices the one that is given."""
        if self.plan is not None:
            return self.priced(self.plan, explains=explains)
        return self.over_ranks(self._ranks) if self._ranks > 1 else self.chosen(explains=explains)

    def chosen(self, *, explains: bool) -> Advice:
        """Chooses a plan, with the likeliest way to cut batches that the model runs on.

        That the loss adds up is shown by `fit`, which runs it.
        """
        wanted, machine, sample = self.wanted, self.planned.machine, self._sample

        def suffices(found: Profile) -> bool:
            own = replace(wanted, may_split=found.may_split)
            return keeps_batch_whole(self._problem, sample, found, self._budget(found), self.hardware, machine, own)

        # What is explained is asked for smaller limits too.
        has_parts = isinstance(sample, Parts)
        asked = self.traced(None if explains or wanted.has_lines or has_parts else suffices)
        first, budget = asked.first, self._budget(asked.first)
        found = choose(asked.problem, sample, first, budget, self.hardware, machine, asked.wanted, asked.traces)
        return self.advice_of(found, explain_choice(asked, found) if explains else None)

    def traced(self, suffices: Callable[[Profile], bool] | None = None) -> AskedPlan:
        """Traces the model: the question can then be asked for several limits.

        Args:
            suffices: tells from the trace of the whole batch that no smaller one is needed.
        """
        problem, first = self._profiled(suffices)
        return AskedPlan(
            problem=problem,
            sample=self._sample,
            first=first,
            budget=self._budget,
            hardware=self.hardware,
            machine=self.planned.machine,
            wanted=replace(self.wanted, may_split=first.may_split or self.wanted.has_lines or bool(first.own_parts)),
        )

    def over_ranks(self, ranks: int) -> Advice:
        """Chooses a plan for several ranks."""
        problem, found = self._profiled(None)
        budget, clips_norm = self._budget(found), self.wanted.clips_norm
        chosen = choose_over_ranks(
            found,
            problem.counts(self._sample) if found.may_split else (1,),
            ranks,
            budget.tensor_bytes,
            self.hardware,
            clips_norm=clips_norm,
            device=self.hardware.device,
        )
        advice = self.priced(chosen.plan, explains=False, why="there are several ranks")
        return replace(
            advice,
            reason=f"{chosen.reason} {advice.numerics.sentence()}",
            front=chosen.front,
            chosen=chosen.name,
        )

    def priced(self, plan: Plan, *, explains: bool, why: str = "the plan was given") -> Advice:
        """Prices a plan that is decided."""
        allow, clips_norm = self.wanted.allow, self.wanted.clips_norm
        check_precision(plan, self._problem.model, allow)
        if plan.ranks > 1:
            self.hardware.link(NETWORK)  # refuses machines of which it is not known
        problem = replace(self._problem, cut=self._ways()[0])
        found = problem.profile_for(plan, self._sample)
        check_meaning(plan, found, is_committed=bool(self.wanted.commits))
        check_exact(plan, found, problem.numerics)
        declared = declare(plan, found, allow=allow, why=why)
        speeds = in_dtype(self.hardware, plan.compute_dtype)
        schedule = build_step(plan, found, clips_norm=clips_norm)
        step = lower(schedule, plan, found, commits=self.wanted.commits, device=speeds.device)
        check_step(step, clips_norm=clips_norm)
        timeline = predict(step, speeds)
        explained = explain_plan(plan, found, timeline, speeds, clips_norm=clips_norm) if explains else None
        budget = self._budget(found)
        left, unfit = budget.tensor_bytes, ""
        if left is not None and timeline.peak_bytes > left:
            unfit = f"It does not fit: {format_bytes(timeline.peak_bytes)} of tensors are predicted, {format_bytes(left)} are left to them. "
        return Advice(
            plan=plan,
            reason=f"given by the user. {unfit}{declared.sentence()}",
            numerics=declared,
            schedule=schedule,
            timeline=timeline,
            budget=budget,
            profile=found,
            hardware=speeds,
            explanation=explained,
        )

    def advice_of(self, chosen: Choice, explanation: Explanation | None = None) -> Advice:
        """Returns what is known of a plan that was chosen."""
        declared = declare(chosen.plan, chosen.profile, allow=self.wanted.allow, why=chosen.why)
        plan, reason = chosen.plan, chosen.reason
        if self.wanted.has_lines:
            plan = plan_of_one_batch(plan)
            reason += " It was priced for a loop that runs two batches back before each update."
        if chosen.profile.own_parts:
            reason += told_of_road(plan, chosen.profile)
        return Advice(
            plan=plan,
            reason=f"{reason} {declared.sentence()}",
            numerics=declared,
            schedule=chosen.found.schedule,
            timeline=chosen.found.timeline,
            budget=self._budget(chosen.profile),
            profile=chosen.profile,
            hardware=chosen.hardware,
            front=chosen.found.front,
            chosen=chosen.found.name,
            classics=chosen.found.classics,
            explanation=explanation,
        )

    def _budget(self, found: Profile) -> Budget:
        planned = self.planned
        budget = planned.budget(found)
        return beside_loop(budget, counts_process=planned.machine.counts_process) if self.wanted.has_lines else budget

    def _ways(self) -> list[Cut]:
        if isinstance(self._sample, Parts):
            return [ByParts()]
        if self.wanted.has_lines:
            return [whole_by_lines()]
        return self._problem.ways(self._sample, self._split)

    def _profiled(self, suffices: Callable[[Profile], bool] | None) -> tuple[Problem, Profile]:
        """The problem with the likeliest way to cut its batches that the model runs on, and its
        profile.
        """
        *ways, whole = self._ways()
        if isinstance(self._sample, Parts):
            cut = replace(self._problem, cut=whole)
            return cut, cut.profile(self._sample, cut.counts(self._sample), chunk_tokens=None)
        for way in ways:
            cut = replace(self._problem, cut=way)
            try:
                counts = cut.counts(self._sample)
                return cut, cut.profile(self._sample, counts, chunk_tokens=None, suffices=suffices)
            except UncuttableError:
                continue
        cut = replace(self._problem, cut=whole)
        return cut, cut.profile(self._sample, (1,), chunk_tokens=None)
