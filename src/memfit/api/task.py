"""What `fit` was asked, until a plan makes a job of it.

In: the user's objects and wishes, a machine. Out: profiles, choices, the parts of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from memfit.api.choosing import Choice, choose
from memfit.batches.batch import UncuttableError
from memfit.batches.cutting import Cut, UserSplit, Whole
from memfit.batches.splitting import Weigh, checked_rows, signature_of
from memfit.checkpoints.checkpointer import stored_plan
from memfit.checkpoints.run_store import RunStore
from memfit.core.errors import DoesNotFitError
from memfit.core.hardware import Hardware
from memfit.core.limits import Budget
from memfit.core.numerics import NONADDITIVE, Wish, check_exact, declare
from memfit.core.plan import Plan
from memfit.core.precision import ComputeDtype
from memfit.core.profile import Profile
from memfit.core.tiers import Tier
from memfit.core.units import format_bytes
from memfit.engine.sites import Site
from memfit.job.job import Job
from memfit.job.machine import Machine
from memfit.job.parts import JobParts, Prepared
from memfit.job.plan_checks import check_compiled, check_meaning, check_tiers
from memfit.job.problem import Problem, check_precision
from memfit.job.weight_sources import Bring, Forget, TakeBack
from memfit.planning.journal_rules import check_journaled
from memfit.planning.refusals import Refusal
from memfit.planning.rules import bytes_of_check
from memfit.prediction.predict import predict
from memfit.prediction.residents import peak_report
from memfit.profiling.trace import arrange_blocks
from memfit.scheduling.build import build_forward, build_step
from memfit.scheduling.check import check_schedule
from memfit.scheduling.lower import lower
from memfit.scheduling.sizes import disk_bytes_with_store, store_bytes
from memfit.store import Durability
from memfit.tensors.trees import tensors_in


@dataclass(frozen=True, kw_only=True)
class Task:
    """What `fit` was asked, until a plan makes a job of it. `hardware` tells what the machine can do, and what of the disk the run may take.

    A job keeps its task without the sample, which would be a batch too many beside those of its steps.
    """

    problem: Problem
    bring: Bring | None
    forget: Forget
    take_back: TakeBack
    sample: Any
    load_bytes: int
    machine: Machine
    optimizer: torch.optim.Optimizer
    weight: Weigh | None
    allow: frozenset[str]
    numerics: Wish
    max_grad_norm: float | None
    directory: str | Path | None
    run: RunStore | None
    keeps_gradients: bool
    enforces: bool
    replans: bool
    hardware: Callable[[], Hardware]
    split: UserSplit | None = None

    @property
    def like(self) -> Plan | None:
        """The plan of a resumed run, whose formats it goes on in."""
        return stored_plan(self.run) if self.run is not None and self.run.is_resumed else None

    @property
    def has_journal(self) -> bool:
        """The run keeps a journal."""
        return self.run is not None and self.run.scheme == "journal"

    def trace(self, plan: Plan) -> Profile:
        """The profile of the sample under a plan that is decided.

        Raises:
            PlanError, UsageError, UnsupportedError: the machine, what is allowed, or the model does not go with the plan.
        """
        check_tiers(plan, self.machine)
        check_precision(plan, self.problem.model, self.allow)
        found = self.problem.profile_for(plan, self.sample)
        check_meaning(plan, found, is_committed=self.run is not None)
        check_exact(plan, found, self.numerics)
        if self.has_journal:
            check_journaled(plan, found)
        return found

    def replan(
        self,
        batch: Any,
        *,
        like: Plan,
        adds_up: bool | None,
        held: Iterable[torch.Tensor] = (),
        margin_bytes: int = 0,
        below_bytes: int | None = None,
    ) -> JobParts:
        """The fastest plan that fits beside what is allocated now.

        Args:
            batch: that must fit.
            like: the plan that it takes the place of, in whose formats bytes rest.
            adds_up: as in `JobParts`.
            held: what goes with that plan.
            margin_bytes: to be left free besides.
            below_bytes: what it must be predicted to take less than, by the margin too: a plan of that peak did not do.

        Raises:
            DoesNotFitError: none does.
        """
        task = replace(self, sample=batch, problem=replace(self.problem, aside=None), bring=None)
        budget = self.machine.budget(beside=[*held, *tensors_in(batch), *self.problem.model.buffers()])
        if below_bytes is not None and budget.tensor_bytes is not None:
            margin_bytes += max(0, budget.tensor_bytes - below_bytes)
        budget = replace(budget, reserve_bytes=budget.reserve_bytes + margin_bytes)
        try:
            found = task.profile_counts()
        except UncuttableError as error:
            task = task.cut_by(Whole(str(error)))
            found = task.profile_counts()
        may_split = found.may_split and adds_up is not False
        chosen = task.choose(found, budget, self.hardware(), may_split=may_split, like=like, is_running=True)
        plan = chosen.plan
        if plan.microbatches == task.problem.cut.rows(batch):
            # It is cut into as many by any larger number too: then batches with more rows keep theirs.
            plan = replace(plan, microbatches=max(plan.microbatches, like.microbatches))
        return task.parts(plan, chosen.reason, chosen.profile, budget, adds_up=adds_up, why=chosen.why)

    def cut_by(self, way: Cut) -> Task:
        """The same, with another way to cut batches."""
        return replace(self, problem=replace(self.problem, cut=way))

    def profile_counts(self) -> Profile:
        """The profile of the sample in all the sizes of microbatches that plans are looked for with.

        Raises:
            UncuttableError: the model runs on no part of it.
        """
        return self.problem.profile(self.sample, self.problem.counts(self.sample), chunk_tokens=None)

    @property
    def clips_norm(self) -> bool:
        """Gradients are clipped by their global norm."""
        return self.max_grad_norm is not None

    def choose(
        self,
        found: Profile,
        budget: Budget,
        probed: Hardware,
        *,
        may_split: bool,
        like: Plan | None = None,
        is_running: bool = False,
    ) -> Choice:
        """See `choosing.choose`; `like` is the plan of a resumed run, where none is given. While a job runs nothing is loaded, and no cut is checked."""
        return choose(
            self.problem,
            self.sample,
            found,
            budget,
            probed,
            self.machine,
            allow=self.allow,
            may_split=may_split,
            clips_norm=self.clips_norm,
            load_bytes=0 if is_running else self.load_bytes,
            checks_split=not is_running,
            like=like or self.like,
            scheme=None if self.run is None else self.run.scheme,
            numerics=self.numerics,
            commits=0.0 if self.run is None else commits_a_step(self.run.durability),
        )

    @property
    def device(self) -> str:
        """The device's kind, as `scheduling.lower` is told it."""
        return self.machine.device.type

    def check_claim(self) -> None:
        """Refuses a store that turned out larger than `disk_limit`: each tensor of a state begins on a page, which no profile counts."""
        limit = self.machine.limits.of(Tier.DISK)
        if self.run is not None and limit is not None and self.run.nbytes > limit:
            raise DoesNotFitError(
                f"the store claims {format_bytes(self.run.nbytes)} of disk, above disk_limit of {format_bytes(limit)}: raise it, or keep states in fewer bits"
            )

    def excess(self, ready: Prepared) -> str | None:
        """Says what a step takes above the limit of a tier beside the device (on disk the store's room, and homes and activations beside it); None if nothing."""
        plan, found = ready.plan, ready.profile
        for tier, limit in self.machine.limits.by_tier.items():
            if tier.traits.is_device:
                continue
            taken, store, less = ready.timeline.peak_in(tier), "", ""
            if tier is Tier.DISK and self.run is not None:
                taken = disk_bytes_with_store(plan, found, taken, self.run.scheme)
                store = f", {format_bytes(store_bytes(plan, found, self.run.scheme))} of it claimed by the store"
                less = "" if self.has_journal else ' (a run that is begun with scheme="journal" claims less)'
            if taken > limit:
                word = "host memory" if tier is Tier.HOST else tier
                return (
                    f"takes {format_bytes(taken)} of {word}{store}, above {tier}_limit of {format_bytes(limit)}{less}"
                )
        return None

    def check_fits(self, plan: Plan, found: Profile, budget: Budget) -> None:
        """Refuses a given plan that is predicted to pass the limit.

        Raises:
            DoesNotFitError: with its peak, what stands there, and the smallest limit for it.
        """
        if budget.limit_bytes is None or budget.tensor_bytes is None or not self.enforces:
            return
        cut = replace(plan, microbatches=self.problem.cut.most(self.sample, plan.microbatches))
        ready = prepared_for(found, cut, clips_norm=self.clips_norm, device=self.device)
        peak = ready.timeline.peak_bytes
        report = peak_report(lower(ready.step.schedule, cut, found, device=self.device, is_itemized=True), rows=6)
        if cut.microbatches > 1 and NONADDITIVE not in self.allow:
            rows = min(checked_rows(self.problem.cut), found.batch_rows)
            traced = found
            if max(found.traces) < rows:
                traced = self.problem.profile_for(replace(cut, microbatches=found.batch_rows // rows), self.sample)
            checked = bytes_of_check(cut, traced, rows, device=self.device)
            if checked > peak:
                peak, report = (
                    checked,
                    f"{rows} rows that run whole, to show that the batch may be cut, {format_bytes(checked)}",
                )
        load_bytes = self.load_bytes if self.machine.counts_process else 0
        if peak > budget.tensor_bytes or load_bytes > budget.limit_bytes:
            raise Refusal(
                budget=budget,
                peak_bytes=peak,
                plan="the given plan",
                report=report,
                advice=("a plan that keeps less here", "none, so that one is chosen"),
                load_bytes=load_bytes,
                is_given=True,
                varies=self.machine.counts_process,
            ).error()

    def job(
        self, plan: Plan, reason: str, found: Profile, budget: Budget, *, why: str, adds_up: bool | None = None
    ) -> Job:
        """The job of a plan: everything moves home."""
        return Job(self.parts(plan, reason, found, budget, adds_up=adds_up, why=why))

    def parts(
        self, plan: Plan, reason: str, found: Profile, budget: Budget, *, why: str, adds_up: bool | None = None
    ) -> JobParts:
        """The parts of a job of a plan. `why`: why sums are regrouped, where they are.

        Raises:
            UnsupportedError: the plan would train another model. DoesNotFitError: it takes more of the host or the disk than it may.
        """
        check_meaning(plan, found, is_committed=self.run is not None)
        check_compiled(self.problem, plan)
        problem = replace(self.problem, block_map=arrange_blocks(self.problem.block_map, found))
        kept = replace(self, sample=None)
        adds_apart = plan.adds_apart(has_masters=found.has_masters, clips_norm=self.clips_norm)

        def prepare(batch: Any, chosen: Plan) -> Prepared:
            # The last batch of an epoch may have fewer rows than the plan has microbatches.
            chosen = replace(chosen, microbatches=problem.cut.most(batch, chosen.microbatches))
            traced = problem.profile_for(chosen, batch, checks_repeat=False)
            check_meaning(chosen, traced, is_committed=kept.run is not None)
            return prepared_for(traced, chosen, clips_norm=kept.clips_norm, adds_apart=adds_apart, device=kept.device)

        cut = replace(plan, microbatches=problem.cut.most(self.sample, plan.microbatches))
        rows = -(-found.batch_rows // cut.microbatches)
        is_traced = found.batch_rows == problem.cut.rows(self.sample) and rows in found.traces
        ready = (
            prepared_for(found, cut, clips_norm=self.clips_norm, adds_apart=adds_apart, device=self.device)
            if is_traced
            else prepare(self.sample, plan)
        )
        excess = self.excess(ready)
        if excess is not None:
            raise DoesNotFitError(f"the plan {excess}: raise the limit, or keep less there")
        return JobParts(
            model=problem.model,
            loss=problem.loss,
            weight=self.weight,
            optimizer=self.optimizer,
            driver=problem.driver,
            machine=self.machine,
            plan=plan,
            reason=reason,
            numerics=declare(plan, found, allow=self.allow, why=why),
            cut=problem.cut,
            prepare=prepare,
            excess=kept.excess,
            prepared=ready,
            signature=signature_of(self.sample, problem.cut, plan.microbatches),
            blocks=[(block.name, block.parameters) for block in problem.block_map.blocks],
            sites=[Site(name=s.name, module=s.module, blocks=s.blocks) for s in problem.block_map.sites],
            casts=problem.casts,
            caches=problem.caches,
            predicted_peak_bytes=max(
                ready.timeline.peak_bytes + budget.base_bytes + budget.reserve_bytes,
                self.load_bytes,
            ),
            max_grad_norm=self.max_grad_norm,
            directory=self.directory,
            keeps_gradients=self.keeps_gradients,
            enforces=self.enforces,
            bring=self.bring,
            take_back=self.take_back,
            run=self.run,
            forget=self.forget,
            replan=kept.replan if self.replans else None,
            adds_up=True if NONADDITIVE in self.allow else adds_up,
        )

    def checked_job(self, plan: Plan, reason: str, found: Profile, budget: Budget, *, why: str) -> Job:
        """The same, and the loss is shown to be what it says, and to add up over the plan's microbatches; else everything is given back."""
        job = self.job(plan, reason, found, budget, why=why)
        try:
            if plan.compute_dtype is not ComputeDtype.GIVEN:
                job.check_dtype(self.sample)
            if found.counts_losses:
                job.check_counted(self.sample)
            if plan.microbatches > 1 and NONADDITIVE not in self.allow:
                if found.source == "fake":
                    self.problem.check_rows(self.sample)
                job.check_split(self.sample)
        except BaseException:
            job.undo()
            raise
        return job


def commits_a_step(durability: Durability) -> float:
    """How many commits a step brings with it."""
    if isinstance(durability, int):
        return 1.0 / durability
    return 1.0 if durability == "step" else 0.0


def prepared_for(
    profile: Profile, plan: Plan, *, clips_norm: bool, adds_apart: bool | None = None, device: str = "cpu"
) -> Prepared:
    """Schedules and prediction of a plan, checked, for the batch that the profile is of.

    Args:
        profile: of the batch.
        plan: cut into no more microbatches than the batch has rows.
        clips_norm: gradients are clipped by their global norm.
        adds_apart: `Plan.adds_apart` of the job's own plan; None: this is it.
        device: as in `scheduling.lower`.
    """
    schedule = build_step(plan, profile, clips_norm=clips_norm)
    check_schedule(schedule, plan, profile, clips_norm=clips_norm)
    step = lower(schedule, plan, profile, adds_apart=adds_apart, device=device)
    return Prepared(
        plan=plan,
        profile=profile,
        rows=-(-profile.batch_rows // plan.microbatches),
        step=step,
        evaluation=lower(build_forward(plan, profile, plan.microbatches), plan, profile, device=device),
        timeline=predict(step),
    )
