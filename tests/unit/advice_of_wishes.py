"""Cures that `memfit.fit` names for wishes that do not go together, followed."""

from __future__ import annotations

import gc
import json
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import memfit
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from unit.advice import BATCH, Scene, follows, loss, on_two_ranks

Parts = memfit.Parts


def plain(model: nn.Module) -> None:
    loss(model, BATCH).backward()


def trains(s: Scene, **wishes: Any) -> None:
    """Compares a step of a job with one of a plain loop."""
    s.begin()
    with s.fit(**wishes) as job:
        job.step(BATCH)
    s.trains_as(plain)


def runs(s: Scene, **wishes: Any) -> None:
    """Compares lines of a loop with those of a plain one."""
    s.begin()
    with s.fit(lines=True, **wishes) as job, job.lines():
        plain(s.model)
        s.optimizer.step()
        s.optimizer.zero_grad()
    s.trains_as(plain)


@follows("job/fit.py", "is a checkpoint of transformers' Trainer")
def weights_of_a_trainers_checkpoint(s: Scene) -> None:
    state = {"global_step": 3, "log_history": []}
    (s.directory / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    weights = {name: values + 1 for name, values in s.model.state_dict().items()}
    save_file(weights, s.directory / "model.safetensors")
    s.refused(lambda: s.fit(resume=s.directory))
    with s.fit(weights=s.directory):
        pass
    assert all(torch.equal(values, weights[name]) for name, values in s.model.state_dict().items())


@follows("job/fit.py", "the kernel would hold the process to nothing")
def a_limit_for_the_kernel_or_none(s: Scene) -> None:
    s.refused(lambda: s.fit(enforce="kernel"))
    with s.fit(enforce="kernel", limit="8GiB") as job:
        assert all(job.step(BATCH).is_finite for _ in range(2))
    trains(s)


@follows("job/fit.py", "makes a step again from the commit of the step before")
def a_store_to_replan_from(s: Scene) -> None:
    s.refused(lambda: s.fit(on_breach="replan"))
    s.refused(lambda: s.fit(on_breach="replan", store=s.directory / "run", durability=2))
    trains(s, on_breach="replan", store=s.directory / "run")


@follows("job/fit.py", "takes a run up again from its last commit")
def a_store_to_adapt_from(s: Scene) -> None:
    s.refused(lambda: s.fit(adapt=True, durability="step"))
    s.refused(lambda: s.fit(adapt=True, store=s.directory / "run", durability=2))
    trains(s, adapt=True, store=s.directory / "run")


@follows("job/fit.py", "fit takes store= (go on from there, or begin there)")
def one_directory_of_a_run(s: Scene) -> None:
    run = s.directory / "run"
    s.refused(lambda: s.fit(store=run, resume=run))
    trains(s, store=run)
    s.begin()
    assert s.fit(resume=run).steps == 1


@follows("job/fit.py", "says how often a run is committed: name its directory")
def a_run_of_some_durability(s: Scene) -> None:
    s.refused(lambda: s.fit(durability=2))
    trains(s, durability=2, store=s.directory / "run")


@follows("job/fit.py", "says how a run is kept: name its directory")
def a_run_of_a_scheme(s: Scene) -> None:
    s.refused(lambda: s.fit(scheme="journal"))
    trains(s, scheme="journal", store=s.directory / "run")


@follows("job/fit.py", "is chosen for job.step of one process")
def lines_and_ranks_without_a_technique(s: Scene) -> None:
    s.refused(lambda: s.fit(plan="checkpoint-every-block", lines=True))
    runs(s)
    assert refused_on_two_ranks()[0] == s.words


@follows("planner/given_plans.py", "is no file, and no technique")
def a_technique_by_its_name(s: Scene) -> None:
    s.refused(lambda: s.fit(plan="checkpoint-every-blok"))
    assert "did you mean 'checkpoint-every-block'" in s.words
    trains(s, plan="checkpoint-every-block")


@follows("planner/given_plans.py", "microbatches, and fit(lines=True) leaves that to your loop")
def a_loop_with_a_backward_for_each_part(s: Scene) -> None:
    s.refused(lambda: s.fit(lines=True, plan=Plan(microbatches=2)))

    def halves(model: nn.Module) -> None:
        for half in BATCH.split(2):
            (loss(model, half) / 2).backward()

    with s.fit(lines=True, sample=BATCH[:2], plan=Plan(microbatches=1)) as job, job.lines():
        halves(s.model)
        s.optimizer.step()
        s.optimizer.zero_grad()
    s.trains_as(halves)


@follows("planner/given_plans.py", "the plan computes the loss in chunks")
def a_plan_of_lines_without_chunks(s: Scene) -> None:
    s.refused(lambda: s.fit(lines=True, plan=Plan(loss_chunk_tokens=2)))
    runs(s, plan=Plan(loss_chunk_tokens=None))


def halved(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return loss(model, batch)


@follows("planner/given_plans.py", "scales losses, and fit(lines=True) leaves that to your loop")
def autocast_and_a_scaler_in_lines_or_a_step(s: Scene) -> None:
    half = Plan(compute_dtype="float16")  # type: ignore[arg-type]
    s.refused(lambda: s.fit(lines=True, plan=half, allow={"fp16"}))

    def scaled(model: nn.Module) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(halved(model, BATCH)).backward()
        scaler.unscale_(s.optimizer)

    with s.fit(halved, lines=True) as job, job.lines():
        scaled(s.model)
        s.optimizer.step()
        s.optimizer.zero_grad()
    s.trains_as(scaled)
    s.begin()
    assert s.fit(plan=half, allow={"fp16"}).step(BATCH).is_finite


@follows("planner/given_plans.py", "fit(lines=True) goes without")
def lines_that_do_it_themselves(s: Scene) -> None:
    wishes: dict[str, Any] = {
        "clip in your lines": {"max_grad_norm": 0.1},
        "your lines scale each loss": {"weight": len},
        "your lines cut the batch": {"split": lambda batch, count: [*batch.split(count)]},
        "cannot be made again": {"on_breach": "replan", "store": s.directory / "run"},
        "between two calls of job.step": {"adapt": True, "store": s.directory / "run"},
        "leave it out for two slots": {"scheme": "journal", "store": s.directory / "run"},
    }
    for words, wish in wishes.items():
        s.refused(lambda wish=wish: s.fit(lines=True, **wish))
        assert words in s.words

    def clipped(model: nn.Module) -> None:
        for half in BATCH.split(2):
            (loss(model, half) * 0.5).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    with s.fit(lines=True, store=s.directory / "run") as job, job.lines():
        clipped(s.model)
        s.optimizer.step()
        s.optimizer.zero_grad()
    s.trains_as(clipped)


@follows("planner/given_plans.py", "takes one batch of your loop as its sample")
def lines_of_a_batch_and_steps_of_parts(s: Scene) -> None:
    s.refused(lambda: s.fit(lines=True, sample=Parts([BATCH])))
    runs(s)
    s.begin()
    assert s.fit(sample=Parts([BATCH])).step(Parts([BATCH])).is_finite


@follows("planner/given_plans.py", "say what each counts for by shares=")
def shares_instead_of_weights(s: Scene) -> None:
    halves = [*BATCH.split(2)]
    s.refused(lambda: s.fit(sample=Parts(halves), weight=len))
    s.refused(lambda: s.fit(sample=Parts(halves), split=lambda batch, count: [*batch.split(count)]))
    window = Parts(halves, shares=[0.5, 0.5])
    with s.fit(sample=window) as job:
        job.step(window)
    s.trains_as(lambda model: [(loss(model, half) * 0.5).backward() for half in halves])


def trained(s: Scene, **wishes: Any) -> None:
    s.begin()
    with s.fit(**wishes) as job:
        assert job.step(BATCH).is_finite


def follow_on_ranks(rank: int, size: int, directory: str) -> list[str]:
    """Follows, on a rank, all refusals of ranks: two fits trained of what they name; returns their words."""
    wishes: list[dict[str, Any]] = [
        {"plan": "checkpoint-every-block"},
        {"sample": Parts([BATCH])},
        {"plan": Plan(ranks=size + 1)},
        {"lines": True},
    ]
    words = list[str]()
    with ExitStack() as stack:
        s = Scene(Path(directory) / str(rank), stack)
        for wish in wishes:
            s.refused(lambda wish=wish: s.fit(**wish))
            words.append(s.words)
        trained(s, plan=Plan(ranks=size))
        trained(s, split=lambda batch, count: [*batch.tensor_split(min(count, len(batch)))])
    return words


@cache
def refused_on_two_ranks() -> list[str]:
    with TemporaryDirectory() as directory:
        return on_two_ranks(f"{__name__}:follow_on_ranks", directory)[0]


@follows("planner/given_plans.py", "on several ranks give job.step the rank's whole batch")
def a_whole_batch_on_each_rank(s: Scene) -> None:
    s.words = refused_on_two_ranks()[1]


@follows("job/over_ranks.py", "ranks, and there are")
def a_plan_for_as_many_ranks_or_none(s: Scene) -> None:
    s.words = refused_on_two_ranks()[2]


@follows("job/over_ranks.py", "is for one process: leave it out on")
def steps_without_lines_on_ranks(s: Scene) -> None:
    s.words = refused_on_two_ranks()[3]


@follows("job/fit.py", "start as many by torchrun, and initialize torch.distributed before fit")
def as_many_ranks_as_the_plan_is_for(s: Scene) -> None:
    s.refused(lambda: s.fit(plan=Plan(ranks=2)))
    assert refused_on_two_ranks()  # trained with this plan


class Noted(nn.Module):
    """A layer beside a buffer."""

    def __init__(self, name: str, values: Tensor, *, is_saved: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer(name, values, persistent=is_saved)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(batch)


def saves(s: Scene, name: str, values: Tensor, *, is_saved: bool = True) -> None:
    s.begin(lambda: Noted(name, values, is_saved=is_saved))
    with s.fit() as job:
        job.save(s.directory / f"save {is_saved} {values.dtype}")


@follows("tensors/container.py", "which safetensors cannot hold: convert it, or register it")
def a_buffer_of_another_dtype_or_that_is_not_saved(s: Scene) -> None:
    values = torch.zeros(2, dtype=torch.complex128)
    s.refused(lambda: saves(s, "values", values))
    saves(s, "values", values, is_saved=False)
    saves(s, "values", values.to(torch.complex64))


@follows("tensors/container.py", "or a word of the format: rename it")
def a_buffer_of_another_name(s: Scene) -> None:
    s.refused(lambda: saves(s, "__metadata__", torch.zeros(2)))
    saves(s, "metadata", torch.zeros(2))


@follows("tensors/container.py", "the name of a tensor is no text")
def a_buffer_whose_name_is_text(s: Scene) -> None:
    s.refused(lambda: saves(s, "\ud800", torch.zeros(2)))
    saves(s, "values", torch.zeros(2))


@follows("job/deciding.py", "the plan keeps frozen weights in")
def frozen_weights_in_few_bits_without_a_store(s: Scene) -> None:
    def begin() -> Plan:
        s.begin()
        s.model[0].requires_grad_(False)
        return Plan(frozen_format="int8")  # type: ignore[arg-type]

    s.refused(lambda: s.fit(plan=begin(), allow={"int8-frozen"}, store=s.directory / "run"))
    job = s.fit(plan=begin(), allow={"int8-frozen"})
    job.step(BATCH)
    assert job.save(s.directory / "saved").directory.is_dir()


@follows("job/deciding.py", ": raise the limit, or keep less there")
def more_of_the_disk_or_less_on_it(s: Scene) -> None:
    homes = Plan(blocks={"0": BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)})
    s.refused(lambda: s.fit(plan=homes, disk_limit="1KiB"))
    trains(s, plan=homes, disk_limit="1MiB")
    trains(s, plan=Plan(), disk_limit="1KiB")


@follows("job/deciding.py", "the store claims")
def a_store_of_more_disk_or_of_states_in_few_bits(s: Scene) -> None:
    s.begin(lambda: nn.Sequential(nn.Linear(8, 4100), nn.BatchNorm1d(4100), nn.Linear(4100, 8)))
    with s.fit(store=s.directory / "run") as job:
        assert job.commits is not None
        claimed = job.commits.disk_bytes
    s.begin()
    s.refused(lambda: s.fit(store=s.directory / "short", disk_limit=claimed - 1))
    trains(s, store=s.directory / "raised", disk_limit=claimed)
    s.begin()
    few = Plan(state_format="int8")  # type: ignore[arg-type]
    job = s.fit(plan=few, allow={"int8-state"}, store=s.directory / "few", disk_limit=claimed - 1)
    assert job.step(BATCH).is_finite


class Bulky(nn.Module):
    """Makes, behind planning, 8 MiB for each row, twice, of which autograd saves the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, batch: Tensor) -> Tensor:
        copies = 1 if memfit.is_tracing() else 1 << 18
        return (batch.repeat(copies, 1, 1) * self.scale).mean(0)


@follows("job/steps.py", "Try a smaller batch, a larger limit, or a plan with more microbatches or more recompute")
def a_step_of_less_or_of_a_larger_limit(s: Scene) -> None:
    def step(limit: str = "144MiB", batch: Tensor = BATCH, plan: Plan | None = None) -> bool:
        s.begin(lambda: nn.Sequential(Bulky(), Bulky()))
        gc.collect()  # the refused step, whose error held its tensors
        with s.fit(limit=limit, plan=plan, emulate_device=True) as job:
            return job.step(batch).is_finite

    s.refused(step)
    again = CallPlan(saved=Saved.RECOMPUTE)
    assert step(batch=BATCH[:1])
    assert step(limit="256MiB")
    assert step(plan=Plan(microbatches=4))
    assert step(plan=Plan(calls=(again, again)))
