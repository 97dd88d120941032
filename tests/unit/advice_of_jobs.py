"""Cures of running jobs: what changed behind them, hooks that came later, batches that are cut, ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

import memfit
from memfit.cli import app
from memfit.core.hardware import read_hardware
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.tiers import Tier
from memfit.job import probe_machine
from memfit.planner.compiled_blocks import check_compiler
from unit.advice import BATCH, ON_DISK, Scene, follows, loss, on_two_ranks

TWO = Plan(microbatches=2)


# --- the model -----------------------------------------------------------------------------------


@follows("job/contents.py", "that the job does not know: close the job and fit again")
def a_new_parameter_in_a_new_job(s: Scene) -> None:
    job = s.fit()
    s.model.append(nn.Linear(8, 8))
    s.refused(lambda: job.step(BATCH))
    job.close()
    s.optimizer.add_param_group({"params": list(s.model[3].parameters())})
    before = s.model.get_parameter("3.weight").clone()
    s.fit().step(BATCH)
    assert not torch.equal(s.model.get_parameter("3.weight"), before)


@follows("job/contents.py", "Change values in place inside `with job.weights():`; for anything else close the job")
def weights_changed_in_place_or_between_jobs(s: Scene) -> None:
    job, first = s.fit(plan=ON_DISK), s.model.get_submodule("0")
    ours = first.weight
    first.weight = nn.Parameter(torch.ones(8, 8))
    s.refused(lambda: job.step(BATCH))
    first.weight = ours
    with job.weights(), torch.no_grad():
        s.model.get_parameter("0.weight").fill_(1.0)
    job.step(BATCH)
    job.close()
    first.requires_grad_(requires_grad=False)
    s.fit(plan=ON_DISK).step(BATCH)


@follows("machine/machine.py", "the model must have parameters on one device")
def a_model_with_parameters(s: Scene) -> None:
    def run(model: nn.Module) -> Tensor:
        with memfit.infer(model) as session:
            return session.model(BATCH)

    s.refused(lambda: run(nn.Tanh()))
    assert torch.equal(run(nn.Sequential(s.model[0], nn.Tanh())), s.model[0](BATCH).tanh())


@follows("machine/machine.py", "the model is on the device meta")
def a_model_that_is_built_empty_or_on_the_processor(s: Scene) -> None:
    def fit(model: Any) -> None:
        s.model, s.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
        s.fit().step(BATCH)

    with torch.device("meta"):
        model = nn.Linear(8, 4096)
    s.refused(lambda: fit(model))
    fit(memfit.empty(lambda: nn.Linear(8, 4096)))
    fit(nn.Linear(8, 4096))


# --- hooks and cuts ------------------------------------------------------------------------------


@follows("job/forward_passes.py", "A hook was registered after memfit.fit: take it off, or close the job and fit again")
def a_late_hook_is_taken_off_or_fitted_with(s: Scene) -> None:
    def register() -> Any:
        return s.model[0].register_forward_hook(lambda _module, _inputs, output: output - output.mean(0))

    job = s.fit(plan=TWO)
    handle = register()
    s.refused(lambda: job.step(BATCH))
    handle.remove()
    job.step(BATCH)
    job.close()
    s.begin()
    register()
    with pytest.warns(memfit.MemfitWarning, match="hooks of yours also ran"):
        job = s.fit()
    job.step(BATCH)
    job.close()

    def body(model: nn.Module) -> None:
        register()
        loss(model, BATCH).backward()

    s.trains_as(body)


def counted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean over targets, of which some are left out."""
    logits = model(batch["x"])
    return functional.cross_entropy(logits, batch["y"], ignore_index=-1)


def count(batch: dict[str, Tensor]) -> float:
    return float((batch["y"] != -1).sum())


@follows(
    "job/forward_passes.py", "The sample's rows were alike and did not show it: give memfit.fit a sample with real rows"
)
def a_sample_with_real_rows(s: Scene) -> None:
    real = {"x": BATCH, "y": torch.tensor([1, -1, 2, 3])}
    alike = {"x": torch.ones(4, 8), "y": torch.ones(4, dtype=torch.int64)}
    job = s.fit(counted, sample=alike, plan=TWO)
    s.refused(lambda: job.step(real))
    job.close()
    with pytest.raises(memfit.UnsupportedError, match="give fit"):
        s.fit(counted, sample=real, plan=TWO)
    whole = counted(s.model, real).item()
    job = s.fit(counted, sample=real, plan=TWO, weight=count)
    assert job.step(real).loss == pytest.approx(whole)


def sorted_rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"][batch["order"]]).square().mean()


def halves(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Cuts rows, and the order of rows inside of each part."""
    rows = zip(batch["x"].chunk(parts), batch["order"].chunk(parts), strict=True)
    return [{"x": x, "order": order - order.min()} for x, order in rows]


@follows(
    "job/forward_passes.py",
    "what counts its rows was not found. Give fit(split=...), which cuts it, or a plan with microbatches=1",
)
def a_batch_whose_parts_the_user_cuts(s: Scene) -> None:
    batch = {"x": BATCH, "order": torch.tensor([1, 0, 3, 2])}
    s.refused(lambda: s.fit(sorted_rows, sample=batch, plan=TWO))
    whole = sorted_rows(s.model, batch).item()
    assert s.fit(sorted_rows, sample=batch, plan=Plan()).step(batch).loss == whole
    s.begin()
    assert s.fit(sorted_rows, sample=batch, plan=TWO, split=halves).step(batch).loss == pytest.approx(whole)


def by_class(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"])[:, :2] * batch["class_weights"]).square().mean()


def rows_alone(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    return [{**batch, "x": rows} for rows in batch["x"].chunk(parts)]


@follows(
    "planner/problem.py",
    "something in the batch has as many entries as it has rows. Give fit(split=...), which cuts it",
)
def weights_of_classes_stay_whole(s: Scene) -> None:
    batch = {"x": BATCH[:2], "class_weights": torch.tensor([1.0, 3.0])}
    s.refused(lambda: s.fit(by_class, sample=batch, plan=TWO))
    whole = by_class(s.model, batch).item()
    job = s.fit(by_class, sample=batch, plan=TWO, split=rows_alone, weight=lambda part: len(part["x"]))
    assert job.step(batch).loss == pytest.approx(whole)


def summed(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), batch.numel()


@follows("job/steps.py", "its counts say what each part's loss counts for; leave shares out")
def parts_of_a_counting_loss_without_shares(s: Scene) -> None:
    parts = [*BATCH.split((1, 3))]
    job = s.fit(summed, sample=memfit.Parts(parts), plan=TWO)
    s.refused(lambda: job.step(memfit.Parts(parts, shares=[0.25, 0.75])))
    assert job.step(memfit.Parts(parts)).is_finite


class Dithering(torch.optim.SGD):
    """Adds noise to its updates, but for the first ones."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            p.data.sub_(0.1 * p.grad)
            if state["step"] > 8:
                p.data.add_(torch.randn_like(p), alpha=1e-3)


@follows("job/journaling.py", "would be another: begin the run with scheme='generations'")
def a_run_of_random_updates_has_generations(s: Scene) -> None:
    def fit(scheme: str) -> memfit.Job:
        s.begin()
        s.optimizer = Dithering(s.model.parameters(), lr=0.1)
        return s.fit(plan=plan, store=s.directory / scheme, scheme=scheme)

    home = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    plan = Plan(blocks={"0": home, "2": home}, update=UpdateTime.AFTER_BACKWARD)
    job = fit("journal")
    s.refused(lambda: [job.step(BATCH) for _ in range(10)])
    job.close(restore=False, commit=False)
    with fit("generations") as job:
        for _ in range(10):
            assert job.step(BATCH).is_finite


@follows("machine/described.py", "; name another")
def a_hardware_file_in_a_directory_that_is_there(s: Scene) -> None:
    with pytest.MonkeyPatch.context() as machine:
        # The probe measures for seconds.
        machine.setattr(probe_machine, "probe_whole", lambda *_: read_hardware("laptop-cpu"))
        machine.setattr(probe_machine, "measure_engine", lambda *_: {})
        s.refused(lambda: probe_machine.probe("cpu", out=s.directory))
        hardware, path = probe_machine.probe("cpu", out=s.directory / "hardware.json")
    assert read_hardware(path) == hardware


@follows("planner/compiled_blocks.py", "needs triton to compile for this device, and it is not installed: install it")
def a_device_that_triton_is_installed_for(s: Scene) -> None:
    gpu = torch.device("cuda")
    with pytest.MonkeyPatch.context() as machine:
        machine.setattr(importlib.util, "find_spec", lambda _: None)
        s.refused(lambda: check_compiler(gpu))
        machine.setattr(importlib.util, "find_spec", lambda _: importlib.util)
        check_compiler(gpu)
    s.fit().step(BATCH)


# --- ranks ---------------------------------------------------------------------------------------


def use_a_model_after_its_job(rank: int, _: int, directory: str) -> str:
    with ExitStack() as stack:
        s = Scene(Path(directory), stack)
        job = s.fit()
        job.step(BATCH)
        s.refused(lambda: job.inference().__enter__())
        s.refused(lambda: job.save(s.directory / "saved", form="trainer"))
        job.close()
        with torch.no_grad():
            assert loss(s.model, BATCH).isfinite()
        torch.save(s.optimizer.state_dict(), s.directory / f"optimizer-{rank}.pt")
        return s.words


@follows("job/job_facts.py", "on several ranks, close the job and use the model, which is whole again")
def a_model_of_ranks_is_used_after_its_job(s: Scene) -> None:
    s.words = min(on_two_ranks(f"{__name__}:use_a_model_after_its_job", str(s.directory)))


def fit_again_after_an_error(rank: int, _: int, directory: str) -> str:
    with ExitStack() as stack:
        s, fails = Scene(Path(directory), stack), [rank == 1]

        def failing(model: nn.Module, batch: Tensor) -> Tensor:
            if fails[0] and not memfit.is_tracing():
                raise KeyError("of one rank")
            return loss(model, batch)

        job = s.fit(failing)
        with pytest.raises((KeyError, memfit.PeerError)):
            job.step(BATCH)
        s.refused(lambda: job.step(BATCH))
        job.close()
        fails[0] = False
        s.begin()
        with s.fit(failing) as again:
            assert again.step(BATCH).is_finite
        return s.words


@follows("job/job_facts.py", "what other ranks held of it cannot be reached. Close it, and fit again")
def a_job_of_ranks_that_is_made_again(s: Scene) -> None:
    s.words = min(on_two_ranks(f"{__name__}:fit_again_after_an_error", str(s.directory)))


def trains(batches: Any) -> Callable[[], tuple[nn.Module, torch.optim.Optimizer, Any, Any]]:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
        model = nn.Linear(8, 8)
        return model, torch.optim.SGD(model.parameters(), lr=1e-2), of_rows, batches

    return parts


def of_rows(model: nn.Module, batch: Any) -> Tensor:
    rows = batch if isinstance(batch, Tensor) else torch.tensor(batch["rows"])
    return model(rows).square().mean()


one_row, two_rows = trains(BATCH[:1]), trains(BATCH[:2])
numbers = trains({"rows": tuple(BATCH[0].tolist())})


def train_by_command(_: int, __: int, functions: list[str]) -> list[str]:
    """Trains by the command line, one function after another; returns the exit code and output of each."""
    told = list[str]()
    for function in functions:
        done = CliRunner().invoke(app, ["train", f"{__name__}:{function}", "--steps", "1", "--limit", "4GiB"])
        told.append(f"{done.exit_code} {' '.join(done.output.split())}")
    return told


def trained(*functions: str) -> list[str]:
    return on_two_ranks(f"{__name__}:train_by_command", [*functions])[0]


@follows("job/rank_training.py", "ranks: make it larger")
def a_batch_with_a_row_for_each_rank(s: Scene) -> None:
    s.words, done = trained("one_row", "two_rows")
    assert done.startswith("0 ")


@follows(
    "job/rank_training.py",
    "it cannot be told what counts the rows of this one: give tensors whose dimension 0 they are",
)
def tensors_of_rows_for_ranks(s: Scene) -> None:
    s.words, done = trained("numbers", "two_rows")
    assert done.startswith("0 ")
