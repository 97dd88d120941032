"""`fit`: from ordinary torch objects to a running job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.api.job import Job, JobParts, Prepared
from memfit.api.machine import Machine, device_of
from memfit.api.setting import training_setting
from memfit.api.sources import Bring, bring_from, open_sources
from memfit.api.splitting import Weigh, signature_of
from memfit.core.errors import AwayError, DoesNotFitError, PlanError, UnsupportedError, UsageError
from memfit.core.hardware import Hardware
from memfit.core.limits import Budget, Limits
from memfit.core.plan import Plan, Saved, Tier
from memfit.core.precision import ComputeDtype
from memfit.core.profile import Profile
from memfit.core.units import MIB, format_bytes, round_up
from memfit.planning.rules import choose_plan
from memfit.prediction.predict import predict
from memfit.profiling.batch import batch_rows
from memfit.profiling.blocks import BlockMap, find_blocks
from memfit.profiling.trace import arrange_blocks, profile_step
from memfit.runtime.aside import WeightsAside
from memfit.runtime.guard import is_away
from memfit.runtime.inputs import casting_inputs
from memfit.runtime.losses import knows_loss
from memfit.runtime.optimizers import OptimizerDriver, UpdateKind
from memfit.runtime.sites import Site
from memfit.scheduling.build import build_forward, build_step
from memfit.scheduling.check import check_schedule

ALLOWANCES = frozenset({"exact", "reordered", "nonadditive-loss", "bf16"})
"""What `allow=` takes today; `exact` and `reordered` are always allowed."""

Loss = Callable[[nn.Module, Any], Any]

# Resident bytes of equal processes at the same line of the same script: up to 1 MiB apart seen, by address layout and timing of threads.
_BASE_VARIATION_BYTES = 4 * MIB


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
    host_limit: int | str | None = None,
    disk_limit: int | str | None = None,
    enforce: bool = True,
    keep_gradients: bool = False,
    emulate_device: bool = False,
    hardware: Hardware | None = None,
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
            masters back. While such a job lives, the model's own forward and its layers' get floating arguments cast to bf16.
        max_grad_norm: clip the global gradient norm, as `torch.nn.utils.clip_grad_norm_`.
        weight: what a microbatch's loss counts for, from its batch (for example its number of target tokens). Rows by default.
        blocks: names or modules that are to be the blocks, instead of those that memfit finds.
        directory: where homes on disk are made; by default a temporary directory that is deleted at the end.
        host_limit: the same for host memory beside a device.
        disk_limit: the same for files.
        enforce: arm the limit in the allocator, so that passing it is an error at the allocation. Otherwise it is only reported.
        keep_gradients: gradients stay readable at their homes after a step (`job.gradient(name)`); costs their bytes there.
        emulate_device: on a machine without a GPU, count a device of its own inside the process, with host memory beside it: for trying plans of
            three tiers.
        hardware: what the machine can do; by default it is probed (about a second).

    Returns:
        The job.

    Raises:
        UsageError: arguments that cannot be; UnsupportedError: a model, loss or optimizer that memfit would change; DoesNotFitError: no plan
        fits; PlanError: a plan that is not legal; StoreError: the directory.
    """
    _check_arguments(model, loss, allow, max_grad_norm)
    limits = Limits.read(limit, host_limit, disk_limit)
    machine = Machine(device_of(model), limits, is_emulated=emulate_device)
    with machine.phases("load"), machine.guard("load", enforces=enforce), ExitStack() as stack:
        driver = _driver(optimizer, model)
        block_map = find_blocks(model, blocks)
        given = None if plan is None else _read_plan(plan)
        sources = open_sources(model, weights, stack)
        here = [p for p in model.parameters() if not is_away(p)]
        budget = machine.budget(sum(p.nbytes for p in here))
        lacks_room = machine.counts_process and machine.lacks_room
        load_bytes = machine.load_bytes(model, leaves=lacks_room)
        aside: WeightsAside | None = None
        if lacks_room:
            aside = stack.enter_context(WeightsAside(here, Machine.disk_directory(directory)))
            machine.forget_peak()
            sources.insert(0, aside)  # what was put aside comes back before files overwrite it
        task = _Task(
            problem=_Problem(model=model, loss=loss, driver=driver, block_map=block_map, aside=aside),
            bring=bring_from(sources),
            sample=sample,
            load_bytes=load_bytes,
            machine=machine,
            optimizer=optimizer,
            weight=weight,
            allow=frozenset(allow),
            max_grad_norm=max_grad_norm,
            directory=directory,
            keeps_gradients=keep_gradients,
            enforces=enforce,
        )
        if given is not None:
            _check_tiers(given, machine)
            _check_precision(given, model, task.allow)
            found = task.problem.profile(
                sample, (given.microbatches,), chunk_tokens=given.loss_chunk_tokens, compute=given.compute_dtype
            )
            if given.microbatches > 1:
                _check_statistics(found)
            return task.checked_job(given, "given by the user", found, budget)
        found = task.problem.profile(sample, _microbatch_counts(sample), chunk_tokens=None)
        if budget.limit_bytes is None:
            return task.job(Plan(), "no limit was given: everything stays on the device", found, budget)
        probed = hardware or machine.probe(directory, probes_bf16="bf16" in task.allow)
        may_split = not found.reads_batch_statistics
        chosen, reason, traced = _choose(task, found, budget, probed, may_split=may_split)
        try:
            return task.checked_job(chosen, reason, traced, budget)
        except UnsupportedError:
            if chosen.microbatches == 1:
                raise
        # The loss does not add up over rows: plans that cut the batch are out.
        chosen, reason, traced = _choose(task, found, budget, probed, may_split=False)
        return task.job(chosen, reason, traced, budget)


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
    _check_arguments(model, loss, (), None)
    problem = _Problem(model=model, loss=loss, driver=_driver(optimizer, model), block_map=find_blocks(model, blocks))
    return problem.profile(sample, tuple(microbatches), chunk_tokens=None)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """What is to be trained, as profiles see it."""

    model: nn.Module
    loss: Loss
    driver: OptimizerDriver
    block_map: BlockMap
    aside: WeightsAside | None = None

    @property
    def casts(self) -> list[nn.Module]:
        """Modules whose floating arguments are cast where weights compute in another dtype: the model and its layers."""
        layers = [site.module for site in self.block_map.sites if site.is_repeated and site.module is not self.model]
        return [self.model, *layers]

    def profile(
        self,
        batch: Any,
        counts: Sequence[int],
        *,
        chunk_tokens: int | None,
        compute: ComputeDtype = ComputeDtype.GIVEN,
    ) -> Profile:
        """The profile of a batch, with a trace for each of the given numbers of microbatches."""
        rows = batch_rows(batch)
        if max(counts) > rows:
            raise UsageError(
                f"the plan cuts a batch into {max(counts)} microbatches, this one has {rows} rows: give a larger batch or a plan with fewer microbatches"
            )
        driver = self.driver
        is_bf16 = compute is ComputeDtype.BFLOAT16
        master = torch.float32 if is_bf16 else None
        states = {
            name: sum(t.nbytes for t in driver.state_layout(name, master) if t.shape_kind != "scalar")
            for name in driver.names
        }
        arguments = (self.model, _first_of(self.loss), batch, self.block_map)
        sizes = sorted({-(-rows // k) for k in counts})
        with (
            training_setting(self.model, chunk_tokens),
            casting_inputs(self.casts, torch.bfloat16 if is_bf16 else None),
        ):
            try:
                return profile_step(*arguments, rows=sizes, state_bytes=states, compute_dtype=compute)
            except AwayError:
                if self.aside is None:
                    raise
                self.aside.bring(self.model.parameters())  # the trace must run on real tensors
                return profile_step(*arguments, rows=sizes, state_bytes=states, compute_dtype=compute)


def _first_of(loss: Loss) -> Loss:
    """A loss that returns (sum, count), as its sum: what is differentiated, up to a factor."""

    def first(model: nn.Module, batch: Any) -> Any:
        result = loss(model, batch)
        return result[0] if isinstance(result, tuple) and len(result) == 2 else result

    return first


def _check_arguments(model: Any, loss: Any, allow: Collection[str], max_grad_norm: float | None) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not callable(loss):
        raise UsageError(f"loss must be a function loss(model, batch) -> scalar tensor, not {type(loss).__name__}")
    if isinstance(allow, str):
        raise UsageError(f'allow takes a set of names, such as allow={{"{allow}"}}')
    unknown = sorted(set(allow) - ALLOWANCES)
    if unknown:
        raise UsageError(f"allow={unknown[0]!r} is not something that can be allowed; known are {sorted(ALLOWANCES)}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UsageError(f"max_grad_norm must be above 0, not {max_grad_norm}")


def _driver(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerDriver:
    driver = OptimizerDriver(optimizer, dict(model.named_parameters()))
    for name in driver.names:
        verdict = driver.verdict(name)
        if verdict.kind is UpdateKind.JOINT:
            raise UnsupportedError(
                f"{type(optimizer).__name__} must see all parameters at once ({verdict.reason}), but memfit updates block by block: use an optimizer "
                "that treats each parameter on its own"
            )
    return driver


def _read_plan(plan: Plan | str | Path) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Path):
        return Plan.from_json(plan.read_text())
    if isinstance(plan, str):
        return Plan.from_json(plan if plan.lstrip().startswith("{") else Path(plan).read_text())
    raise UsageError(f"plan must be a Plan, its JSON text or a path to it, not {type(plan).__name__}")


def _microbatch_counts(sample: Any) -> tuple[int, ...]:
    rows = batch_rows(sample)
    return tuple(k for k in (1, 2, 4, 8, 16, 32, 64) if k <= rows)


def _prepared(profile: Profile, plan: Plan, *, clips_norm: bool) -> Prepared:
    schedule = build_step(plan, profile, clips_norm=clips_norm)
    check_schedule(schedule, plan, profile, clips_norm=clips_norm)
    return Prepared(
        profile=profile,
        rows=-(-profile.batch_rows // plan.microbatches),
        schedule=schedule,
        evaluation=build_forward(plan, profile, plan.microbatches),
        timeline=predict(schedule, plan, profile),
        microbatches=plan.microbatches,
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


def _check_precision(plan: Plan, model: nn.Module, allow: Collection[str]) -> None:
    if plan.compute_dtype is ComputeDtype.GIVEN:
        return
    if "bf16" not in allow:
        raise UsageError('the plan computes in bf16, which changes the arithmetic: fit(..., allow={"bf16"}) permits it')
    problem = _unfit_for_bf16(model)
    if problem is not None:
        raise UnsupportedError(problem)


def _unfit_for_bf16(model: nn.Module) -> str | None:
    """Why the model cannot have bf16 weights with fp32 masters; None if it can."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16):
            return f"the parameter {name!r} is {parameter.dtype}: bf16 training takes models in fp32 or bf16, whose masters are fp32"
        if parameter.grad is not None:
            return f"the parameter {name!r} has a gradient, whose dtype would not be that of bf16 weights: model.zero_grad() first"
    return None


def _check_statistics(profile: Profile) -> None:
    if profile.reads_batch_statistics:
        raise UnsupportedError(
            "the model computes statistics over the batch (batch norm in training mode), so that microbatches would not mean the same as the "
            "whole batch: plan microbatches=1, freeze the statistics (module.eval()), or use a norm without them"
        )


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What `fit` was asked, until a plan makes a job of it."""

    problem: _Problem
    bring: Bring | None
    sample: Any
    load_bytes: int
    machine: Machine
    optimizer: torch.optim.Optimizer
    weight: Weigh | None
    allow: frozenset[str]
    max_grad_norm: float | None
    directory: str | Path | None
    keeps_gradients: bool
    enforces: bool

    @property
    def clips_norm(self) -> bool:
        """Gradients are clipped by their global norm."""
        return self.max_grad_norm is not None

    def job(self, plan: Plan, reason: str, found: Profile, budget: Budget) -> Job:
        """The job of a plan: everything moves home."""
        problem = replace(self.problem, block_map=arrange_blocks(self.problem.block_map, found))

        def prepare(batch: Any, chosen: Plan) -> Prepared:
            traced = problem.profile(
                batch, (chosen.microbatches,), chunk_tokens=chosen.loss_chunk_tokens, compute=chosen.compute_dtype
            )
            return _prepared(traced, chosen, clips_norm=self.clips_norm)

        rows = -(-found.batch_rows // plan.microbatches)
        is_traced = found.batch_rows == batch_rows(self.sample) and rows in found.traces
        ready = _prepared(found, plan, clips_norm=self.clips_norm) if is_traced else prepare(self.sample, plan)
        return Job(
            JobParts(
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
            )
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


def _choose(
    task: _Task, found: Profile, budget: Budget, probed: Hardware, *, may_split: bool
) -> tuple[Plan, str, Profile]:
    """The fastest plan that fits and the profile it rests on, with the loss whole or, where it is a known one, in chunks."""
    problem, sample, machine = task.problem, task.sample, task.machine
    chunks = [None, _chunk_tokens(problem.model)] if knows_loss(problem.model) else [None]
    dtypes = [ComputeDtype.GIVEN]
    if "bf16" in task.allow and _unfit_for_bf16(problem.model) is None:
        dtypes.append(ComputeDtype.BFLOAT16)
    choices: list[tuple[float, Plan, str, Profile]] = []
    refusals: list[DoesNotFitError] = []
    for compute, chunk in product(dtypes, chunks):
        is_given = compute is ComputeDtype.GIVEN
        is_found = is_given and chunk is None
        counts = _microbatch_counts(sample)
        profile = found if is_found else problem.profile(sample, counts, chunk_tokens=chunk, compute=compute)
        try:
            choice = choose_plan(
                profile,
                budget,
                probed if is_given else replace(probed, flops_per_s=probed.bf16_flops_per_s or probed.flops_per_s),
                allow=task.allow,
                clips_norm=task.clips_norm,
                splits_allowed=may_split,
                has_host=machine.has_host,
                host_bytes=machine.limits.host_bytes,
                disk_bytes=machine.limits.disk_bytes,
            )
        except DoesNotFitError as error:
            refusals.append(error)
            continue
        words = choice.reason if chunk is None else f"{choice.reason} The loss runs in chunks of {chunk} tokens."
        words = words if is_given else f"{words} Weights compute in bf16, rounded from fp32 masters."
        plan = replace(choice.plan, loss_chunk_tokens=chunk, compute_dtype=compute)
        choices.append((choice.timeline.seconds, plan, words, profile))
    if not choices:
        raise _refusal(refusals, budget, task.load_bytes)
    _, plan, reason, profile = min(choices, key=lambda choice: choice[0])
    return plan, reason, profile


def _refusal(refusals: Sequence[DoesNotFitError], budget: Budget, load_bytes: int) -> DoesNotFitError:
    """The refusal that asks for least, with a limit that holds from the load on, and in the next process as well."""
    refusal = min(refusals, key=lambda error: error.smallest_limit_bytes or float("inf"))
    smallest = refusal.smallest_limit_bytes
    if smallest is None:
        return refusal
    words: list[str] = []
    sure = max(smallest, load_bytes)
    if load_bytes > smallest:
        words.append(
            f"Until its weights have moved home, the model as it was built makes that {format_bytes(load_bytes)}."
        )
    if budget.base_bytes + budget.reserve_bytes:
        sure = round_up(sure + _BASE_VARIATION_BYTES, MIB)
        words.append(
            f"Before any tensor, the process takes {format_bytes(budget.base_bytes)} (interpreter, libraries), which differs by a few MiB from one start "
            f"to the next, and {format_bytes(budget.reserve_bytes)} are kept for scratch of kernels."
        )
    if words:
        words.append(f"Give at least {format_bytes(sure)} ({sure} bytes).")
    return DoesNotFitError(" ".join([str(refusal), *words]), smallest_limit_bytes=sure)


def _chunk_tokens(model: nn.Module) -> int:
    """Tokens whose logits take about 64 MiB in fp32, a power of two of at least 32."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    tokens = (64 * MIB) // (4 * head.out_features)
    return max(32, 1 << max(0, tokens.bit_length() - 1))
