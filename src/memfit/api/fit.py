"""`fit`: from ordinary torch objects to a running job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from memfit.api.choosing import Choice, choose, microbatch_counts
from memfit.api.commits import check_model, stored_plan, stored_reason
from memfit.api.job import Job
from memfit.api.machine import Machine, device_of
from memfit.api.parts import JobParts, Prepared
from memfit.api.problem import (
    Loss,
    Problem,
    beside,
    check_arguments,
    check_precision,
    driver_of,
    encodes_states,
    read_hardware,
    read_plan,
)
from memfit.api.sources import Bring, Forget, TakeBack, bring_from, forget_in, open_sources, take_back_in
from memfit.api.splitting import Weigh, signature_of
from memfit.core.errors import DoesNotFitError, PlanError, UnsupportedError, UsageError
from memfit.core.hardware import Hardware
from memfit.core.layout import Scheme
from memfit.core.limits import Budget, Limits
from memfit.core.plan import Plan, Saved, Tier
from memfit.core.profile import Profile
from memfit.core.units import format_bytes
from memfit.planning.journaling import check_journaled
from memfit.prediction.bytes import disk_bytes_with_store, store_bytes
from memfit.prediction.predict import predict
from memfit.profiling.batch import batch_rows
from memfit.profiling.blocks import find_blocks
from memfit.profiling.trace import arrange_blocks
from memfit.runtime.aside import WeightsAside
from memfit.runtime.guard import is_away
from memfit.runtime.run_store import RunStore
from memfit.runtime.sites import Site
from memfit.runtime.store import Durability
from memfit.scheduling.build import build_forward, build_step
from memfit.scheduling.check import check_schedule


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    sample: Any,
    *,
    limit: int | str | None = None,
    weights: str | Path | None = None,
    plan: Plan | str | Path | None = None,
    allow: Collection[str] = frozenset(),
    max_grad_norm: float | None = None,
    weight: Callable[[Any], float] | None = None,
    blocks: Sequence[str | nn.Module] | None = None,
    directory: str | Path | None = None,
    store: str | Path | None = None,
    resume: str | Path | None = None,
    durability: Durability = "step",
    scheme: Scheme | None = None,
    on_breach: Literal["error", "replan"] = "error",
    host_limit: int | str | None = None,
    disk_limit: int | str | None = None,
    enforce: bool = True,
    keep_gradients: bool = False,
    emulate_device: bool = False,
    hardware: Hardware | str | Path | None = None,
) -> Job:
    """Plans, prepares and gives a job whose `step(batch)` is forward, backward and update inside the limit.

    The model, the optimizer and the loss stay the user's own objects. While the job lives, weights may be away from the device between their uses:
    touching one raises `AwayError`; `job.weights(...)` brings them, `job.close()` gives everything back.

    Args:
        model: any module, on one device, in any mode; or one that `memfit.empty` built, whose weights get their values here, one at a time.
        optimizer: any `torch.optim.Optimizer` whose step works on parameters one at a time.
        loss: `loss(model, batch)` -> a scalar tensor, or (sum, count) where the mean over counts is meant.
        sample: a batch as `step` will get them; only its shapes matter. A tree of tensors whose dimension 0 counts rows.
        limit: bytes of the device that must never be passed, as an integer or text such as "8GiB". Without a GPU it is the memory of the whole
            process, interpreter included. None: no limit, everything resident.
        weights: a directory of safetensors files, as `save_pretrained` or `Job.save` writes it: every weight and saved buffer of the model is read
            from there, on its way home. None: the model's own values.
        plan: take this plan (object, JSON text or a path to it) instead of choosing one.
        allow: declared changes of arithmetic that the plan may use; "nonadditive-loss" permits splitting a batch whose loss
            does not add up over rows (the contract is then plain accumulation). "bf16" permits weights that compute in bf16, rounded from fp32
            masters that the optimizer updates, with gradients that add up in fp32 (bitwise FSDP2's mixed precision on one rank); `job.close()` gives the
            masters back. While such a job lives, the model's own forward and its layers' get floating arguments cast to bf16. "bf16-weights-sr"
            permits the same without masters: the bf16 weights are all there is, rounded stochastically when they are updated. "fp16" permits plans that run
            the loss function under autocast to fp16 and scale losses dynamically, as `torch.amp.GradScaler` does it; a step whose gradients overflow
            updates nothing (`StepResult.is_skipped`, `job.loss_scaler`). "int8-state", "int4-state", "fp8-state" and "bf16-state" permit optimizer states
            that rest in so many bits (never those of embeddings, of small tensors, or step counts); `optimizer.state_dict()`, `job.save` and
            `job.close()` give them decoded to fp32.
        max_grad_norm: clip the global gradient norm, as `torch.nn.utils.clip_grad_norm_`.
        weight: what a microbatch's loss counts for, from its batch (for example its number of target tokens). Rows by default.
        blocks: names or modules that are to be the blocks, instead of those that memfit finds.
        directory: where homes on disk are made; by default a temporary directory that is deleted at the end.
        store: a directory that the run is committed to, step by step, and that it goes on from if it holds a run already: then weights, optimizer states,
            settings, random numbers and the state of registered objects are the run's (`job.steps` says how far it is), and so is the plan, where none is
            given and it still fits. The model's own values are given up. Takes two slots of every weight and state on disk, claimed now.
        resume: the same, and a directory without a run is refused.
        durability: "step": each step survives a kill and a power cut from the moment on that the next one begins. N: every N-th does. "exit": only what
            `close` commits, and the beginning.
        scheme: how a new store keeps a whole step on disk at every instant; a store that is there keeps its own. "generations" (None): two slots of every
            weight and state, 24 bytes a parameter with AdamW in fp32. "journal": one slot, room for the largest block to move through, and the
            gradients, some 16 bytes a parameter: for disks that have not more. Then weights and states rest on disk and updates wait until all
            gradients of a step are durable; durability is "step"; weights and states of blocks on disk change by steps only (docs/store.md).
        on_breach: "error": a step that meets the limit raises `LimitBreachError`. "replan": it is made again, with the same batch and random numbers, from
            the last commit under a tighter plan, at most three times; `job.breaches` and a warning tell it with its cause. Needs `store=`, and
            durability "step".
        host_limit: the same for host memory beside a device.
        disk_limit: the same for files: homes on disk, activations that are offloaded there, and all that `store=` claims (homes on disk lie inside of that).
        enforce: arm the limit in the allocator, so that passing it is an error at the allocation. Otherwise it is only reported.
        keep_gradients: gradients stay readable at their homes after a step (`job.gradient(name)`); costs their bytes there.
        emulate_device: on a machine without a GPU, count a device of its own inside the process, with host memory beside it: for trying plans of
            three tiers.
        hardware: what the machine can do (object, JSON text or a path to it; `Hardware.to_json` writes one); by default it is probed (about a second).

    Returns:
        The job.

    Raises:
        UsageError: arguments that cannot be; UnsupportedError: a model, loss or optimizer that memfit would change; DoesNotFitError: no plan
        fits; PlanError: a plan that is not legal; StoreError: the directory, its disk, or a store of another model, dtype or optimizer, with the
        difference; StoreInUseError: a live job has the store.
    """
    check_arguments(model, loss, allow, max_grad_norm)
    limits = Limits.read(limit, host_limit, disk_limit)
    stated = read_hardware(hardware)
    machine = Machine(device_of(model), limits, is_emulated=emulate_device)
    home = directory or store or resume
    with machine.phases("load"), machine.guard("load", enforces=enforce), ExitStack() as stack:
        driver = driver_of(optimizer, model)
        block_map = find_blocks(model, blocks)
        given = None if plan is None else read_plan(plan)
        _check_on_breach(on_breach, store or resume, durability)
        giving_up = stack.enter_context(ExitStack())
        run = _open_run(store, resume, durability, scheme, giving_up)
        if run is not None and run.is_resumed:
            check_model(run, model)
            weights = None  # they are the run's
        sources = open_sources(model, weights, stack)
        here = [p for p in model.parameters() if not is_away(p)]
        budget = machine.budget(here, beside(model, optimizer, sample))
        lacks_room = machine.counts_process and machine.lacks_room
        load_bytes = machine.load_bytes(model, leaves=lacks_room)
        aside: WeightsAside | None = None
        if lacks_room:
            aside = stack.enter_context(WeightsAside(here, Machine.disk_directory(home)))
            machine.forget_peak()
            sources.insert(0, aside)  # what was put aside comes back before files overwrite it
        task = _Task(
            problem=Problem(model=model, loss=loss, driver=driver, block_map=block_map, aside=aside),
            bring=bring_from(sources),
            forget=forget_in(sources),
            take_back=take_back_in(sources),
            sample=sample,
            load_bytes=load_bytes,
            machine=machine,
            optimizer=optimizer,
            weight=weight,
            allow=frozenset(allow),
            max_grad_norm=max_grad_norm,
            directory=directory,
            run=run,
            keeps_gradients=keep_gradients,
            enforces=enforce,
            replans=on_breach == "replan",
            probe=cache(
                lambda: stated or machine.probe(home, probes_bf16="bf16" in allow, probes_codecs=encodes_states(allow))
            ),
        )
        job = _plan_job(task, given, budget)
        try:
            task.check_claim()
            job.begin_run()
        except BaseException:
            job.undo()
            raise
        giving_up.pop_all()  # the directory is the job's now
        return job


def _plan_job(task: _Task, given: Plan | None, budget: Budget) -> Job:
    """The job of the given plan, of the run's own, or of the fastest that fits."""
    sample = task.sample
    if given is not None:
        return task.checked_job(given, "given by the user", task.trace(given), budget)
    own = _plan_of_run(task, budget)
    if own is not None:
        return own
    found = task.problem.profile(sample, microbatch_counts(sample), chunk_tokens=None)
    if budget.limit_bytes is None and task.like is None and not task.has_journal:
        return task.job(Plan(), "no limit was given: everything stays on the device", found, budget)
    probed = task.hardware()
    chosen = task.choose(found, budget, probed, may_split=found.may_split)
    try:
        return task.checked_job(chosen.plan, chosen.reason, chosen.profile, budget)
    except UnsupportedError:
        if chosen.plan.microbatches == 1:
            raise
    # The loss does not add up over rows: plans that cut the batch are out.
    chosen = task.choose(found, budget, probed, may_split=False)
    return task.job(chosen.plan, chosen.reason, chosen.profile, budget)


def _check_on_breach(on_breach: str, where: str | Path | None, durability: Durability) -> None:
    if on_breach not in ("error", "replan"):
        raise UsageError(f'on_breach is "error" or "replan", not {on_breach!r:.80}')
    if on_breach == "replan" and (where is None or durability != "step"):
        raise UsageError(
            'on_breach="replan" makes a step again from the commit of the step before: name a directory with store=, and keep durability="step"'
        )


def _open_run(
    store: str | Path | None,
    resume: str | Path | None,
    durability: Durability,
    scheme: Scheme | None,
    stack: ExitStack,
) -> RunStore | None:
    """The directory of the run, given up by the stack; None where nothing is committed."""
    if store is not None and resume is not None:
        raise UsageError("fit takes store= (go on from there, or begin there) or resume= (go on from there), not both")
    where = store if resume is None else resume
    if where is None:
        if durability != "step":
            raise UsageError(
                f"durability={durability!r} says how often a run is committed: name its directory with store="
            )
        if scheme is not None:
            raise UsageError(f"scheme={scheme!r} says how a run is kept: name its directory with store=")
        return None
    if scheme not in (None, "generations", "journal"):
        raise UsageError(f'scheme is "generations" or "journal", not {scheme!r:.80}')
    run = RunStore(where, durability=durability, must_exist=resume is not None, scheme=scheme)
    stack.callback(run.close)
    return run


def _plan_of_run(task: _Task, budget: Budget) -> Job | None:
    """The job of a resumed run under the plan that it had, whose arithmetic it goes on with; None if there is none, or it does not fit here."""
    run, plan = task.run, task.like
    if run is None or plan is None:
        return None
    homes = {h for b in plan.blocks.values() for h in (b.weight_home, b.gradient_home, b.state_home)}
    if Tier.HOST in homes and not task.machine.has_host:
        return None
    found = task.trace(plan)
    peak = _prepared(found, plan, clips_norm=task.clips_norm).timeline.peak_bytes
    if budget.tensor_bytes is not None and peak > budget.tensor_bytes:
        return None
    return task.checked_job(plan, stored_reason(run), found, budget)


def profile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    sample: Any,
    *,
    blocks: Sequence[str | nn.Module] | None = None,
    microbatches: Sequence[int] = (1,),
) -> Profile:
    """What a training step would take, without running it: bytes and lifetimes by block and call.

    Args:
        model: as in `fit`, like the next four.
        optimizer: its states are foretold, it is not stepped.
        loss: the user's.
        sample: a batch.
        blocks: names or modules.
        microbatches: trace the sizes that these splits make.

    Returns:
        The profile; nothing is allocated and nothing changed.
    """
    check_arguments(model, loss, (), None)
    problem = Problem(model=model, loss=loss, driver=driver_of(optimizer, model), block_map=find_blocks(model, blocks))
    return problem.profile(sample, tuple(microbatches), chunk_tokens=None)


def _prepared(profile: Profile, plan: Plan, *, clips_norm: bool) -> Prepared:
    schedule = build_step(plan, profile, clips_norm=clips_norm)
    check_schedule(schedule, plan, profile, clips_norm=clips_norm)
    return Prepared(
        plan=plan,
        profile=profile,
        rows=-(-profile.batch_rows // plan.microbatches),
        schedule=schedule,
        evaluation=build_forward(plan, profile, plan.microbatches),
        timeline=predict(schedule, plan, profile),
    )


def _check_tiers(plan: Plan, machine: Machine) -> None:
    """Host memory is a tier only beside a device."""
    if machine.has_host:
        return
    homes = [h for b in plan.blocks.values() for h in (b.weight_home, b.gradient_home, b.state_home)]
    homes += [c.boundary_home for c in plan.calls]
    homes += [c.saved_home for c in plan.calls if c.saved is Saved.OFFLOAD]
    if Tier.HOST in homes:
        raise PlanError(
            "the plan names the tier 'host', but without a GPU the device is host memory itself: use 'device' or 'disk', or fit(emulate_device=True)"
        )


def _check_meaning(plan: Plan, profile: Profile, *, is_committed: bool) -> None:
    """Raises `UnsupportedError` where the plan would train another model than the profile is of."""
    if plan.microbatches > 1:
        _check_splits(profile)
    _check_written(plan, profile, is_committed=is_committed)


def _check_splits(profile: Profile) -> None:
    """Raises `UnsupportedError` where microbatches would not mean the same as the whole batch."""
    if profile.reads_batch_statistics:
        raise UnsupportedError(
            "the model computes statistics over the batch (batch norm in training mode), so that microbatches would not mean the same as the "
            "whole batch: plan microbatches=1, freeze the statistics (module.eval()), or use a norm without them"
        )
    if profile.unsplittable_buffers:
        name, *others = profile.unsplittable_buffers
        told = f"{name!r}" if not others else f"{name!r} (and {len(others)} more)"
        raise UnsupportedError(
            f"the model's forward changes its buffer {told}, and not only to count or to cache: what is in the batch goes into it, or each microbatch would "
            "compute with what another one left there. As with batch statistics, microbatches would not mean the same as the whole batch, and their order "
            "would show: plan microbatches=1, or freeze what changes it (in most modules, module.eval())"
        )


def _check_compiled(problem: Problem) -> None:
    """Compiled code around a call would have the call's hooks compiled into it, and meet weights that are away."""
    sites = {id(site.module) for site in problem.block_map.sites}
    for name, module in problem.model.named_modules():
        is_wrapper = hasattr(module, "_orig_mod")
        if not is_wrapper and getattr(module, "_compiled_call_impl", None) is None:
            continue
        inside = [part for part in module.modules() if part is not module or not is_wrapper]
        if any(id(part) in sites for part in inside):
            raise UnsupportedError(
                f"{name or 'the model'!r} is compiled with torch.compile around the calls at which weights come and go: compile what runs inside a call "
                "instead, `layer.forward = torch.compile(layer.forward)` for each layer, before memfit.fit"
            )


def _check_written(plan: Plan, profile: Profile, *, is_committed: bool) -> None:
    """Weights that the forward itself changes must stay where they are, and nothing may change them twice a step."""
    if not profile.written_weights:
        return
    name, *others = profile.written_weights
    written = set(profile.written_weights)
    blocks = {b.name for b in profile.blocks if any(p.name in written for p in b.parameters)}
    homes = [plan.block(name).weight_home for name in blocks]
    calls = next(iter(profile.traces.values())).calls
    again = [call for call in calls if plan.call(call.index).saved not in (Saved.KEEP, Saved.OFFLOAD)]
    runs_once = plan.microbatches == 1 and not any(blocks.intersection(call.blocks) for call in again)
    if (
        any(home is not Tier.DEVICE for home in homes)
        or not runs_once
        or plan.compute_dtype.has_masters
        or is_committed
    ):
        raise UnsupportedError(
            f"the model's forward changes its parameter {name!r}{f' (and {len(others)} more)' if others else ''} in place: that is kept only under a plan that "
            "leaves it on the device in its own dtype and runs its forward once (no microbatches, no recompute), and without store=. Change it between steps "
            "instead, inside `with job.weights():`, or make it a buffer"
        )


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What `fit` was asked, until a plan makes a job of it."""

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
    max_grad_norm: float | None
    directory: str | Path | None
    run: RunStore | None
    keeps_gradients: bool
    enforces: bool
    replans: bool
    probe: Callable[[], Hardware]

    @property
    def like(self) -> Plan | None:
        """The plan of a resumed run, whose formats it goes on in."""
        return stored_plan(self.run) if self.run is not None and self.run.is_resumed else None

    @property
    def has_journal(self) -> bool:
        """The run keeps a journal."""
        return self.run is not None and self.run.scheme == "journal"

    def hardware(self) -> Hardware:
        """What the machine can do; what the run has claimed of the disk it need not find free."""
        probed = self.probe()
        claimed = self.run.nbytes if self.run is not None and self.run.is_resumed else 0
        return replace(probed, disk_bytes=probed.disk_bytes + claimed)

    def trace(self, plan: Plan) -> Profile:
        """The profile of the sample under a plan that is decided.

        Raises:
            PlanError, UsageError, UnsupportedError: the machine, what is allowed, or the model does not go with the plan.
        """
        _check_tiers(plan, self.machine)
        check_precision(plan, self.problem.model, self.allow)
        found = self.problem.profile_for(plan, self.sample)
        _check_meaning(plan, found, is_committed=self.run is not None)
        if self.has_journal:
            check_journaled(plan, found)
        return found

    def replan(self, batch: Any, margin_bytes: int) -> JobParts:
        """The fastest plan that fits beside what is allocated now.

        Args:
            batch: that must fit.
            margin_bytes: to be left free besides.

        Raises:
            DoesNotFitError: none does.
        """
        task = replace(self, sample=batch, problem=replace(self.problem, aside=None), bring=None)
        budget = self.machine.budget()
        budget = replace(budget, reserve_bytes=budget.reserve_bytes + margin_bytes)
        found = task.problem.profile(batch, microbatch_counts(batch), chunk_tokens=None)
        chosen = task.choose(found, budget, self.hardware(), may_split=found.may_split)
        return task.parts(chosen.plan, chosen.reason, chosen.profile, budget)

    @property
    def clips_norm(self) -> bool:
        """Gradients are clipped by their global norm."""
        return self.max_grad_norm is not None

    def choose(self, found: Profile, budget: Budget, probed: Hardware, *, may_split: bool) -> Choice:
        """See `choosing.choose`."""
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
            load_bytes=self.load_bytes,
            like=self.like,
            scheme=None if self.run is None else self.run.scheme,
        )

    def check_claim(self) -> None:
        """Refuses a store that turned out larger than `disk_limit`: each tensor of a state begins on a page, which no profile counts."""
        limit = self.machine.limits.disk_bytes
        if self.run is not None and limit is not None and self.run.nbytes > limit:
            raise DoesNotFitError(
                f"the store claims {format_bytes(self.run.nbytes)} of disk, above disk_limit of {format_bytes(limit)}: raise it, or keep states in fewer bits"
            )

    def _check_disk(self, plan: Plan, found: Profile, predicted: Prepared) -> None:
        """Refuses what takes more of the disk than `disk_limit`: the store's room, and homes and activations beside it."""
        limit = self.machine.limits.disk_bytes
        needed = predicted.timeline.disk_peak_bytes
        store = less = ""
        if self.run is not None:
            needed = disk_bytes_with_store(plan, found, needed, self.run.scheme)
            store = f", {format_bytes(store_bytes(plan, found, self.run.scheme))} of it claimed by the store"
            less = "" if self.has_journal else ', or begin the run with scheme="journal", whose store claims less'
        if limit is not None and needed > limit:
            raise DoesNotFitError(
                f"the plan takes {format_bytes(needed)} of disk{store}, above disk_limit of {format_bytes(limit)}: raise it, or keep less on disk{less}"
            )

    def job(self, plan: Plan, reason: str, found: Profile, budget: Budget) -> Job:
        """The job of a plan: everything moves home."""
        return Job(self.parts(plan, reason, found, budget))

    def parts(self, plan: Plan, reason: str, found: Profile, budget: Budget) -> JobParts:
        """What a job of a plan is made of.

        Raises:
            UnsupportedError: the plan would train another model.
        """
        _check_meaning(plan, found, is_committed=self.run is not None)
        if any(block.weight_home is not Tier.DEVICE for block in plan.blocks.values()):
            _check_compiled(self.problem)
        problem = replace(self.problem, block_map=arrange_blocks(self.problem.block_map, found))

        def prepare(batch: Any, chosen: Plan) -> Prepared:
            # The last batch of an epoch may have fewer rows than the plan has microbatches.
            chosen = replace(chosen, microbatches=min(chosen.microbatches, batch_rows(batch)))
            traced = problem.profile_for(chosen, batch)
            _check_meaning(chosen, traced, is_committed=self.run is not None)
            return _prepared(traced, chosen, clips_norm=self.clips_norm)

        rows = -(-found.batch_rows // plan.microbatches)
        is_traced = found.batch_rows == batch_rows(self.sample) and rows in found.traces
        ready = _prepared(found, plan, clips_norm=self.clips_norm) if is_traced else prepare(self.sample, plan)
        self._check_disk(plan, found, ready)
        return JobParts(
            model=problem.model,
            loss=problem.loss,
            weight=self.weight,
            optimizer=self.optimizer,
            driver=problem.driver,
            machine=self.machine,
            plan=plan,
            reason=reason,
            prepare=prepare,
            prepared=ready,
            signature=signature_of(self.sample),
            blocks=[(block.name, block.parameters) for block in problem.block_map.blocks],
            sites=[Site(name=s.name, module=s.module, blocks=s.blocks) for s in problem.block_map.sites],
            casts=problem.casts,
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
            replan=self.replan if self.replans else None,
            checks_split="nonadditive-loss" not in self.allow,
        )

    def checked_job(self, plan: Plan, reason: str, found: Profile, budget: Budget) -> Job:
        """The same, and the loss is shown to add up over the plan's microbatches; else everything is given back."""
        job = self.job(plan, reason, found, budget)
        if plan.microbatches > 1 and "nonadditive-loss" not in self.allow:
            try:
                job.check_split(self.sample)
            except BaseException:
                job.undo()
                raise
        return job
