"""`fit`: from ordinary torch objects to a running job."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from memfit.core.documents import user_path
from memfit.core.errors import MemfitWarning, StoreInUseError, UsageError
from memfit.core.hardware import Hardware, read_hardware
from memfit.core.layout import Scheme
from memfit.core.limits import Limits
from memfit.core.numerics import Wish
from memfit.core.plan import Plan, own_allowances
from memfit.core.profile import Profile
from memfit.core.tiers import Tier, is_processor
from memfit.files.origin import build_empty
from memfit.files.trainer import OLD_FILE_NAME, is_of_trainer, state_file
from memfit.files.weight_sources import WeightsAside, WeightSources, open_sources
from memfit.homes.factories import FurtherTier, further_tiers
from memfit.job.deciding import begin_chosen, begin_given, begin_resumed, check_claim
from memfit.job.job import Job
from memfit.job.loading import load_states
from memfit.job.over_ranks import begin_over_ranks, fitting_ranks
from memfit.machine.hard_limit import refuse_held
from memfit.machine.limits_of_process import check_kind, check_limit
from memfit.machine.machine import Machine, device_of, guard, open_machine
from memfit.machine.probing import disk_directory, probe
from memfit.mesh.rank_group import RankGroup
from memfit.planner.compiled_blocks import check_compile, compile_blocks, tell_compiled
from memfit.planner.first_batch import sample_of
from memfit.planner.given_plans import check_asked, check_parts, profile_of_parts, read_given
from memfit.planner.problem import (
    Loss,
    Problem,
    check_arguments,
    computes_in_bf16,
    driver_of,
    encodes_states,
    encoding_bytes,
    workspaces_for,
    workspaces_of,
)
from memfit.planner.setup import Setup
from memfit.planner.user_hooks import tell_hooks
from memfit.runs.checkpointer import check_run
from memfit.runs.rank_stores import RankRunStore
from memfit.runs.run_store import RunStore
from memfit.store import Durability
from memfit.store.directory import is_there
from memfit.store.manifest import MANIFEST_NAME
from memfit.tensors.guard import is_away
from memfit.trace.batch import Parts
from memfit.trace.blocks import find_blocks

# Weights while a plan is looked for: where their values come from, and what lies aside.
#
# In: a model, perhaps files. Out: `LoadedWeights`.


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """Where the values of weights are while plans are made.

    Attributes:
        sources: they come from.
        aside: weights that were put aside, because there was no room for them and for planning.
        load_bytes: held while weights move home.
    """

    sources: WeightSources
    aside: WeightsAside | None
    load_bytes: int


def load_weights(
    model: nn.Module,
    weights: str | Path | None,
    home: str | Path | None,
    machine: Machine,
    stack: ExitStack,
    *,
    encoding_bytes: int = 0,
) -> LoadedWeights:
    """Finds where weights come from, and puts those that are here aside where planning has no room
    beside them.

    Args:
        model: may be built empty.
        weights: see `memfit.fit`.
        home: directory that homes on disk are made in.
        machine: with its limits.
        stack: closes files.
        encoding_bytes: that encoding weights on their way home takes.
    """
    sources = open_sources(model, weights, stack)
    here = [p for p in model.parameters() if not is_away(p)]
    lacks_room = machine.counts_process and machine.lacks_room
    load_bytes = machine.load_bytes(model, leaves=lacks_room, encoding_bytes=encoding_bytes)
    aside: WeightsAside | None = None
    if lacks_room:
        aside = stack.enter_context(WeightsAside(here, disk_directory(home)))
        machine.forget_peak()
        sources.insert(0, aside)  # what was put aside comes back before files overwrite it
    return LoadedWeights(sources=WeightSources(sources), aside=aside, load_bytes=load_bytes)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    sample: Any,
    *,
    # what to fit into
    limit: int | str | None = None,
    host_limit: int | str | None = None,
    disk_limit: int | str | None = None,
    enforce: bool | Literal["kernel"] = True,
    hardware: Hardware | str | Path | None = None,
    emulate_device: bool = False,
    # what may change
    numerics: Wish = "auto",
    allow: Collection[str] = frozenset(),
    plan: Plan | str | Path | None = None,
    blocks: Sequence[str | nn.Module] | None = None,
    compile: Literal["blocks"] | None = None,  # noqa: A002, the word of the field
    # where homes are
    directory: str | Path | None = None,
    tiers: Mapping[str, FurtherTier] = MappingProxyType({}),
    keep_gradients: bool = False,
    # the batch
    weight: Callable[[Any], float] | None = None,
    split: Callable[[Any, int], Sequence[Any]] | None = None,
    max_grad_norm: float | None = None,
    lines: bool = False,
    # the run
    weights: str | Path | None = None,
    store: str | Path | None = None,
    resume: str | Path | None = None,
    durability: Durability = "step",
    scheme: Scheme | None = None,
    on_breach: Literal["error", "replan"] = "error",
    adapt: bool = False,
) -> Job:
    """Plans, prepares and gives a job whose `step(batch)` is forward, backward and update inside
    the limit.

    The model, the optimizer and the loss stay the user's own objects. While the job lives, weights
    may be away from the device between their uses: touching one raises `AwayError`;
    `job.weights(...)` brings them, `job.close()` gives everything back.

    To plan, the model, its hooks and the loss run on tensors without values; `memfit.is_tracing()`
    is true there.

    Args:
        -- what is trained --
        model: any module, on one device, in any mode; or one that `memfit.empty` built, whose
            weights get their values here, one at a time.
        optimizer: any `torch.optim.Optimizer` whose step works on parameters one at a time.
        loss: `loss(model, batch)` -> a scalar tensor, or (sum, count) where the mean over counts is
            meant.
        sample: a batch as `step` will get them; or the loader that gives them, of which one is
            drawn so that its order stays (`memfit.first_batch`). A loader is a `DataLoader`, or can
            be iterated and has a `batch_size` or a `state_dict`; anything else is a batch, also a
            list of batches (pass `batches[0]`). A batch may be cut into microbatches if dimension 0
            of all its tensors counts rows (lists with as many entries are cut too). A batch of
            transformers' vision-language models, whose images' patches lie in one tensor, is cut by
            the rows that the patches belong to. Any other batch is trained whole. Whether a cut
            means the same is tried out on the sample (and on the first batch, if the sample's rows
            are alike). Batches that come cut already are given as `memfit.Parts`.

        -- what to fit into --
        limit: bytes of the device that must never be passed, as an integer or text such as "8GiB"
            ("8G" is the same, "8GB" is 8 * 10**9). Without a GPU it is the memory of the whole
            process, interpreter included. None: no limit, everything resident.
        host_limit: bytes of host memory beside a device that must never be passed; None: what the
            machine has.
        disk_limit: bytes of files that must never be passed: homes on disk, activations that are
            offloaded there, and all that `store=` claims (homes on disk lie inside of that). None:
            what the disk has.
        enforce: True arms the limit in the allocator, so that passing it is an error at a tensor's
            allocation; what else the process holds is measured when a step begins, and a step that
            no longer fits beside it is refused before it begins. "kernel", without a GPU: from the
            second step on the kernel refuses everything that would pass the limit as well
            (RLIMIT_DATA, of this process and children that it starts then): inside of a step that
            is a `LimitBreachError`, between steps a `MemoryError` of whoever asked. False: the
            limit is only reported.
        hardware: what the machine can do (object, JSON text, a path to it, or the name of a
            machine that memfit has a description of, such as "h200"; `Hardware.to_json` writes a
            file); by default it is probed (about a second). It is of the kind that the model lies
            on: plans for an accelerator that is not here are made by `memfit plan --hardware`.
        emulate_device: on a machine without a GPU, count a device of its own inside the process,
            with host memory beside it: for trying plans of three tiers.

        -- what may change --
        numerics: "exact": losses, gradients and weights are those of plain PyTorch on the whole
            batch, bit for bit, or the fit is refused with the smallest limit that this takes.
            "auto": a plan that adds the same numbers up in another order (several microbatches, a
            loss in chunks) is taken only where no other fits, or where it is predicted to be at
            least a tenth faster. `job.numerics` says which sums are regrouped, and why. A `plan`
            that is given and regroups sums is taken under "auto" and refused under "exact".
        allow: declared changes of arithmetic that the plan may use; "nonadditive-loss" permits
            splitting a batch whose loss does not add up over rows (the contract is then plain
            accumulation). "bf16" permits weights that compute in bf16, rounded from fp32 masters
            that the optimizer updates, with gradients that add up in fp32 (bitwise FSDP2's mixed
            precision on one rank); `job.close()` gives the masters back. While such a job lives,
            the model's own forward and its layers' get floating arguments cast to bf16.
            "bf16-weights-sr" permits the same without masters: the bf16 weights are all there is,
            rounded stochastically when they are updated. "fp16" permits plans that run the loss
            function under autocast to fp16 and scale losses dynamically, as `torch.amp.GradScaler`
            does it; a step whose gradients overflow updates nothing (`StepResult.is_skipped`,
            `job.loss_scaler`). "fp16-weights" permits weights that compute in fp16, with masters as
            under "bf16" and losses scaled as under "fp16": half the bytes move, and what autocast
            would compute in fp32 is computed in fp16. "int8-state", "int4-state", "fp8-state" and
            "bf16-state" permit optimizer states that rest in so many bits (never those of
            embeddings, of small tensors, or step counts); `optimizer.state_dict()`, `job.save` and
            `job.close()` give them decoded to fp32. "nf4-frozen" and "int8-frozen" permit weights
            of linear layers that do not train (the base of adapters) to rest in so many bits,
            rounded once; they are decoded where they compute.
        plan: take this plan (object, JSON text or a path to it) instead of choosing one; or the
            name of a technique of the field, such as "zero-offload" or "checkpoint-every-block"
            (`memfit plan` lists them): then the fastest of its plans that fits.
        blocks: names or modules that are to be the blocks, instead of those that memfit finds.
        compile: "blocks" compiles repeated blocks with torch.compile while the job lives, of each
            class those where one that is measured here gains seconds and takes no more memory;
            `job.reason` has both, and how many steps earn the compiling back. They round otherwise
            than plain PyTorch's (`job.numerics`). A limit of the process counts the compiler too.

        -- where homes are --
        directory: where homes on disk are made; by default a temporary directory that is deleted at
            the end. What a killed process left there is removed.
        tiers: further places where bytes may rest, by the name that plans have for them: memory of
            another machine, say. See `memfit.homes.factories.FurtherTier`.
        keep_gradients: gradients stay readable at their homes after a step (`job.gradient(name)`);
            costs their bytes there.

        -- the batch --
        weight: gives what a microbatch's loss counts for, from its batch (for example its number of
            target tokens). Rows by default.
        split: cuts a batch: `split(batch, count)` -> a list of at most `count` batches,
            fewer where it has not so many rows. For batches that count rows in other places. Needs
            `weight` where parts have no common dimension 0 that adds up to the batch's.
        max_grad_norm: clip the global gradient norm, as `torch.nn.utils.clip_grad_norm_`.
        lines: True plans for a training loop of your own, whose lines run inside of
            `with job.lines():`. `sample` is then a batch of one `loss.backward()`, and updates wait
            for your `optimizer.step()`.

        -- the run --
        weights: files that every weight and saved buffer of the model is read from, on its way
            home: a directory of safetensors, as `save_pretrained` or `Job.save` writes it, or of
            `pytorch_model.bin`; or one file, also of plain `torch.save` (a state dict, or a
            dictionary with one; read with `weights_only=True`, a piece at a time). None: the
            model's own values.
        store: a directory that the run is committed to, step by step, and that it goes on from if
            it holds a run already: then weights, optimizer states, settings, random numbers and the
            state of registered objects are the run's (`job.steps` says how far it is), and so is
            the plan, where none is given and it still fits. The model's own values are given up.
            Takes two slots of every weight and state on disk, claimed now.
        resume: as `store`, and a directory without a run is refused. Or a directory that `Job.save`
            or `memfit export` wrote: then as `weights`, and optimizer states, settings, loss scale,
            steps and torch's random numbers are the save's too (`job.extra` is what it was given
            along); nothing is committed.
        durability: "step": each step is committed when the next one begins, and from then on
            survives a kill and a power cut. N: every N-th step is. "exit": the run is committed
            only when it begins and by `close`.
        scheme: how a new store keeps a whole step on disk at every instant; a store that is there
            keeps its own. "generations" (None): two slots of every weight and state, 24 bytes a
            parameter with AdamW in fp32. "journal": one slot, room for the largest block to move
            through, and the gradients, some 16 bytes a parameter: for disks without more room.
            Then weights and states rest on disk and updates wait until all gradients of a step are
            durable; durability is "step"; weights and states of blocks on disk change by steps only
            (docs/store.md).
        on_breach: "error": a step that meets the limit raises `LimitBreachError`, and a batch of
            another shape that the plan is predicted not to fit `DoesNotFitError`. "replan": such a
            step is made again, with the same batch and random numbers, from the last commit under a
            tighter plan, at most three times; for such a batch a plan that fits it is taken first.
            `job.breaches` and a warning tell it with its cause, and where sums add up in another
            order from then on. Needs `store=`, and durability "step".
        adapt: True prices the plan again with what the job's own steps measure of the machine (its
            links; without a GPU its rates of work, too). Where that makes another plan at least a
            tenth faster, it takes the job's place between two steps, with the same bits from then
            on; one that measures slower than the plan before gives way to it again. `job.breaches`
            and a warning tell it. Needs `store=`, and durability "step".

    Returns:
        The job.

    Raises:
        UsageError: an argument is invalid.
        UnsupportedError: memfit would change what the model, the loss or the optimizer computes.
        DoesNotFitError: no plan fits the limits; the smallest limit that works is named.
        PlanError: the given plan is not legal.
        StoreError: the directory or its disk cannot be used, or the store is of another model,
            dtype or optimizer; the difference is named.
        StoreInUseError: a live job has the store.
    """
    sample = sample_of(sample)
    asked = dict(locals())
    with fitting_ranks(model, optimizer, asked) as ranks:
        allow = own_allowances(allow)
        check_arguments(model, loss, allow, max_grad_norm, numerics, split)
        refuse_held(model)
        saved = None if store is not None else _save_in(resume)
        if saved is not None:
            weights, resume = saved, None
        further = further_tiers(tiers)
        limits = Limits.read(limit, host_limit, disk_limit, {tier: each.spec.nbytes for tier, each in further.items()})
        stated = read_hardware(hardware)
        check_kind(stated, device_of(model), is_emulated=emulate_device)
        _check_enforce(enforce, limit)
        if enforce and stated is None:
            check_limit(limits, device_of(model), is_emulated=emulate_device)
        machine = open_machine(
            device_of(model),
            limits,
            is_emulated=emulate_device,
            uses_kernel=enforce == "kernel",
            further=further,
        )
        home = directory or store or resume
        with (
            machine.phases(_beginning(store, resume, saved)),
            guard(machine, "load", enforces=bool(enforce)),
            ExitStack() as stack,
        ):
            driver = driver_of(optimizer, model)
            block_map = find_blocks(model, blocks)
            given = read_given(plan)
            if given.classic is not None and (lines or ranks is not None):
                raise UsageError(
                    f"plan={given.classic!r} is chosen for job.step of one process: leave it out with lines=True and on several ranks"
                )
            if lines:
                check_asked(
                    max_grad_norm=max_grad_norm,
                    weight=weight,
                    split=split,
                    on_breach=on_breach,
                    scheme=scheme,
                    plan=given.plan,
                    adapt=adapt,
                )
            _check_on_breach(on_breach, store or resume, durability)
            if (adapt and (store or resume) is None) or (adapt and durability != "step"):
                raise UsageError(
                    'adapt=True takes a run up again from its last commit: name a directory with store=, and keep durability="step"'
                )
            giving_up = stack.enter_context(ExitStack())
            run = _open_run(store, resume, durability, scheme, giving_up, ranks)
            if run is not None and run.is_resumed:
                check_run(run, model, optimizer)
                weights = None  # they are the run's
            encoding = encoding_bytes(model, allow)
            loaded = load_weights(model, weights, home, machine, stack, encoding_bytes=encoding)
            probes = {"probes_bf16": computes_in_bf16(allow), "probes_codecs": encodes_states(allow)}
            probed = partial(probe, machine, home, **probes)
            problem = Problem(
                model=model,
                loss=loss,
                driver=driver,
                block_map=block_map,
                aside=loaded.aside,
                numerics=numerics,
                workspaces=workspaces_of(machine),
                left_bytes=machine.left_bytes,
            )
            load_bytes = loaded.load_bytes
            if compile is not None:
                check_compile(compile, numerics, lines=lines, is_alone=ranks is None)
                compiled = compile_blocks(problem, sample, machine)
                problem, load_bytes = replace(problem, compiled=compiled), max(load_bytes, compiled.peak_bytes)
            setup = Setup(
                problem=problem,
                optimizer=optimizer,
                machine=machine,
                sources=loaded.sources,
                run=run,
                weight=weight,
                split=split,
                allow=frozenset(allow),
                numerics=numerics,
                max_grad_norm=max_grad_norm,
                directory=directory,
                keeps_gradients=keep_gradients,
                enforces=bool(enforce),
                replans=on_breach == "replan",
                hardware=cache(lambda: machine.with_further(_beside_claim(stated or probed(), run))),
                load_bytes=load_bytes,
                lines_sample=sample if lines else None,
                ranks=ranks,
                classic=given.classic,
                adapts=adapt,
            )
            job = _begin(setup, sample, given.plan, saved)
            giving_up.pop_all()  # the directory is the job's now
        tell_hooks(model)
        return job


def _begin(setup: Setup, sample: Any, given: Plan | None, saved: Path | None) -> Job:
    """Begins the job: under the given plan, the run's own, or the fastest that fits."""
    resumed, told = setup.resumed_plan, ""
    check_parts(setup, sample)
    if setup.ranks is not None:
        # A run of another number of ranks goes on with what its plan says of each block.
        own = None if resumed is None else replace(resumed, ranks=setup.ranks.size)
        runner = begin_over_ranks(setup, setup.ranks, sample, given, own)
    elif given is not None and given.ranks > 1:
        raise UsageError(
            f"the plan is for {given.ranks} ranks, and this process is alone: start as many by torchrun, and initialize torch.distributed before fit"
        )
    elif given is not None:
        runner = begin_given(setup, sample, given)
    elif resumed is not None and setup.classic is None:
        runner, told = begin_resumed(setup, sample, resumed)
    else:
        runner = begin_chosen(setup, sample)
    if setup.run is not None and setup.run.is_resumed:
        tell_compiled(setup.run, runner.assembly.planned.prepared.profile.compiled)
    if told and setup.run is not None:
        warnings.warn(
            f"the run in {setup.run.directory} goes on under another plan. {told}", MemfitWarning, stacklevel=3
        )
    try:
        check_claim(setup)
        extra = None if saved is None else load_states(saved, runner.assembly, restore_random=True).extra
        runner.assembly.begin_run()
    except BaseException:
        runner.undo()
        raise
    return Job(runner, extra, saved)


def _save_in(directory: str | Path | None) -> Path | None:
    """Returns the directory if it has a save of `Job.save` and no run; else None."""
    if directory is None:
        return None
    path = user_path(directory)
    if is_there(path / MANIFEST_NAME):
        return None
    if state_file(path) is None and is_of_trainer(path / OLD_FILE_NAME):
        raise UsageError(
            f"resume={str(path)!r} is a checkpoint of transformers' Trainer, whose optimizer.pt memfit does not read: take its weights with "
            "memfit.fit(weights=...), or go on with Trainer"
        )
    return path if state_file(path) is not None else None


def _beginning(store: str | Path | None, resume: str | Path | None, saved: Path | None) -> str:
    """Name of the phase in which a job begins: "resume" where it goes on from files."""
    is_begun = store is not None and is_there(user_path(store) / MANIFEST_NAME)
    return "resume" if resume is not None or saved is not None or is_begun else "load"


def _beside_claim(hardware: Hardware, run: RunStore | None) -> Hardware:
    """Adds what the run has claimed of the disk already, which it need not find free."""
    disk = hardware.tiers[Tier.DISK]
    free = replace(disk, nbytes=disk.nbytes + (0 if run is None else run.claimed_bytes))
    return replace(hardware, tiers={**hardware.tiers, Tier.DISK: free})


def _check_enforce(enforce: bool | str, limit: int | str | None) -> None:  # noqa: FBT001, as it was given
    if enforce not in (True, False, "kernel"):
        raise UsageError(f'enforce is True, False or "kernel", not {enforce!r:.80}')
    if enforce == "kernel" and limit is None:
        raise UsageError(
            'enforce="kernel" was asked for without a limit, and the kernel would hold the process to nothing: give limit="8GiB", or leave enforce= out'
        )


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
    ranks: RankGroup | None,
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
    kind = RunStore if ranks is None else partial(RankRunStore, ranks)
    make = partial(kind, where, durability=durability, must_exist=resume is not None, scheme=scheme)
    try:
        run = make()
    except StoreInUseError:
        if ranks is not None:
            raise  # the others wait elsewhere
        # A job that nobody can reach any more, because the function that had it raised, holds its
        # store until its cycles are collected.
        gc.collect()
        run = make()
    stack.callback(run.close)
    return run


def profile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    sample: Any,
    *,
    blocks: Sequence[str | nn.Module] | None = None,
    microbatches: Sequence[int] = (1,),
    hardware: Hardware | str | Path | None = None,
) -> Profile:
    """Tells what a training step would take, without running it: bytes and lifetimes by block and
    call.

    Args:
        model: as in `fit`, like the next four.
        optimizer: its states are foretold, it is not stepped.
        loss: the user's.
        sample: a batch, or a loader.
        blocks: names or modules.
        microbatches: trace the sizes that these splits make; of `memfit.Parts` the largest is.
        hardware: the machine that the step would run on (object, name, JSON text or a path to it),
            which need not be here: its kernels take what they take beside tensors. None: the device
            that the model is on.

    Returns:
        The profile; nothing is allocated and nothing changed.

    Raises:
        UsageError: an argument is invalid, or no machine is called so.
    """
    check_arguments(model, loss, (), None)
    sample = sample_of(sample)
    stated, device = read_hardware(hardware), device_of(model)
    problem = Problem(
        model=model,
        loss=loss,
        driver=driver_of(optimizer, model),
        block_map=find_blocks(model, blocks),
        workspaces=workspaces_for(device, stated),
        is_for_accelerator=None if stated is None else not is_processor(stated.device),
    )
    if isinstance(sample, Parts):
        return profile_of_parts(problem, sample)
    problem = replace(problem, cut=problem.ways(sample, None)[0])
    return problem.profile(sample, tuple(microbatches), chunk_tokens=None)


# `empty`: models that are bigger than memory from the start.
#
# In: the function that builds a model. Out: the model without the bytes of its weights, for
# `memfit.fit`.

_Model = TypeVar("_Model", bound=nn.Module)


def empty(build: Callable[[], _Model], *, initialises: bool = True) -> _Model:
    """Builds a model whose weights take no memory until `memfit.fit` sends each to its home.

        model = memfit.empty(lambda: LlamaForCausalLM(config))
        optimizer = torch.optim.AdamW(model.parameters())
        job = memfit.fit(model, optimizer, loss, sample, limit="2GiB")

    The parameters are those that stay: an optimizer may be made over them, gradients may be turned
    off, modules may be wrapped. Their values are what plain building gives, bit for bit, with the
    random numbers of the same seed, and the generators are left as plain building leaves them: what
    `build` does to weights is noted, and done for one weight at a time when its block moves home.
    Buffers and parameters below 64 KiB are ordinary. Until then, reading a weight raises
    `AwayError`.

    Memory: address space (no memory) for all weights while `build` runs, and for a moment the
    largest tensor whose random numbers must be drawn; afterwards the buffers, the small parameters
    and about 6 KiB a weight. On a GPU the same: a weight that `build` makes there takes its bytes
    only for moments.
    Time: normal and uniform numbers of large tensors on the CPU are skipped in the generator, some
    milliseconds a weight, and drawn in `fit`. Others are drawn in both: on a GPU, of other
    distributions, and where `build` looks at what it has drawn (`nn.init.trunc_normal_`).

    Args:
        build: builds the model, and may do whatever it likes to it: initialise, convert
            (`.to(torch.bfloat16)`), tie. Weights that it makes from data (a file that it reads) are
            ordinary, whole in memory.
        initialises: False draws no random numbers, which is faster and needs
            `fit(weights=directory)`.

    Returns:
        The model.

    Raises:
        UsageError: `build` returned no module. UnsupportedError: an operation on weights that
            cannot be put off. Whatever `build` raises.
    """
    return build_empty(build, draws=initialises)  # type: ignore[return-value]


__all__ = ["empty"]
