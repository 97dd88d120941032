"""Cures for saves, loads, exports, averages, and objects of one process."""

from __future__ import annotations

import copy
import pickle
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import memfit
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.storage_formats import ComputeDtype, StateFormat
from memfit.core.tiers import Tier
from memfit.job.loading import load
from memfit.runs import exporting
from memfit.runs.exporting import export_run
from unit.advice import BATCH, ON_DISK, Scene, follows, loss


def saved(s: Scene, **wishes: Any) -> Path:
    """Saves a job of the scene's model after a step; the scene begins anew."""
    with s.fit(**wishes) as job:
        job.step(BATCH)
        job.save(s.directory / "saved")
    s.begin()
    return s.directory / "saved"


HOME = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)


# --- loads ---------------------------------------------------------------------------------------


def loads(s: Scene, source: Path) -> None:
    """Loads a save into the scene's model and optimizer, with the bits that were saved."""
    load(source, s.model, s.optimizer)
    weights = load_file(source / "model.safetensors")
    assert all(torch.equal(p, weights[name]) for name, p in s.model.named_parameters())


@follows("job/loading.py", "so its weights have no memory yet: give the directory to memfit.fit(weights=...)")
def an_empty_model_is_loaded_by_its_job(s: Scene) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 8))

    def give(model: Any) -> None:
        s.model, s.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    give(build())
    source = saved(s)
    weights = load_file(source / "model.safetensors")
    give(memfit.empty(build))
    s.refused(lambda: load(source, s.model, s.optimizer))
    with s.fit(weights=source) as job:
        assert job.load(source).steps == 1
    assert all(torch.equal(p, weights[name]) for name, p in s.model.named_parameters())


@follows("job/loading.py", "the model is under a running job: load before memfit.fit, or after job.close()")
def a_save_is_loaded_before_a_job_or_after(s: Scene) -> None:
    source = saved(s)
    loads(s, source)
    job = s.fit(plan=ON_DISK)
    s.refused(lambda: load(source, s.model, s.optimizer))
    job.close()
    loads(s, source)


@follows("job/loading.py", "has no memory (meta device): give it some first, with model.to_empty(device=...)")
def a_model_on_meta_is_given_memory(s: Scene) -> None:
    source = saved(s)
    s.model.to("meta")
    s.refused(lambda: load(source, s.model, s.optimizer))
    s.model.to_empty(device="cpu")
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=1e-2)
    loads(s, source)


@follows("job/loading.py", "which the model does not have; build the model as it was when it was saved")
def all_layers_that_were_saved(s: Scene) -> None:
    source = saved(s)
    s.refused(lambda: load(source, s.model[:2]))
    loads(s, source)


@follows("job/loading.py", "the weight")
def weights_of_the_dtype_that_was_saved(s: Scene) -> None:
    source = saved(s)
    s.model.double()
    s.refused(lambda: load(source, s.model, s.optimizer))
    s.model.float()
    loads(s, source)


@follows("job/loading.py", ": make the same one, or load the weights alone")
def the_optimizer_that_was_saved_or_none(s: Scene) -> None:
    source = saved(s)
    s.refused(lambda: load(source, s.model, torch.optim.SGD(s.model.parameters(), lr=1e-2)))
    loads(s, source)
    load(source, s.model)


@follows("job/loading.py", "or they hold other parameters: build it as it was")
def the_groups_that_were_saved(s: Scene) -> None:
    source = saved(s)
    s.refused(lambda: load(source, s.model, torch.optim.AdamW(s.model[0].parameters(), lr=1e-2)))
    loads(s, source)


class Averaging(torch.optim.SGD):
    """Keeps a running mean of each gradient, with a precision of its own."""

    precision = torch.float64

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            state, grad = self.state[p], p.grad.to(self.precision)
            state["mean"] = grad if "mean" not in state else state["mean"].lerp(grad, 0.1)
            p.data.sub_(0.1 * state["mean"].to(p.dtype))


@follows("job/loading.py", "this optimizer keeps it as")
def states_of_the_optimizer_that_was_saved(s: Scene) -> None:
    s.optimizer = Averaging(s.model.parameters(), lr=0.1)
    source = saved(s)
    s.optimizer = Averaging(s.model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as code:
        code.setattr(Averaging, "precision", torch.float32)
        s.refused(lambda: load(source, s.model, s.optimizer))
    loads(s, source)


@follows("job/loading.py", "which its own groups do not have: its files are of several saves; take all of one")
def files_of_one_save(s: Scene) -> None:
    source = saved(s)
    s.model.append(nn.Linear(8, 8))
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=1e-2)
    with s.fit() as job:
        job.step(BATCH)
        job.save(s.directory / "other")
    file, states = source / "optimizer.safetensors", (source / "optimizer.safetensors").read_bytes()
    file.write_bytes((s.directory / "other" / "optimizer.safetensors").read_bytes())
    s.begin()
    s.refused(lambda: load(source, s.model, s.optimizer))
    file.write_bytes(states)
    loads(s, source)


# --- saves ---------------------------------------------------------------------------------------


@follows("runs/saving.py", 'job.save(form=...) is "memfit", "trainer" or "weights", not')
def forms_of_a_save(s: Scene) -> None:
    job = s.fit()
    s.refused(lambda: job.save(s.directory / "saved", form="zip"))  # type: ignore[arg-type]
    for form in ("memfit", "trainer", "weights"):
        assert job.save(s.directory / form, form=form).directory.is_dir()


@follows("runs/saving.py", "has no place for extra=: save it in a file of your own")
def values_beside_weights_in_a_file(s: Scene) -> None:
    job, values = s.fit(), {"epoch": 3}
    s.refused(lambda: job.save(s.directory / "saved", form="weights", extra=values))
    job.save(s.directory / "saved", form="weights")
    torch.save(values, s.directory / "saved" / "epoch.pt")
    job.save(s.directory / "saved", form="weights")
    assert torch.load(s.directory / "saved" / "epoch.pt") == values


@follows("runs/saving.py", "name another directory, or remove that one first")
def a_directory_without_another_model(s: Scene) -> None:
    directory = s.directory / "gpt2"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    job = s.fit()
    s.refused(lambda: job.save(directory))
    job.save(s.directory / "another")
    (directory / "config.json").unlink()
    job.save(directory)
    job.close()
    loads(s, s.directory / "another")
    loads(s, directory)


@follows("job/saved_job.py", "give the directory of the run to resume= instead, or")
def a_run_goes_on_or_begins_with_weights(s: Scene) -> None:
    source, store = saved(s), s.directory / "run"
    with s.fit(store=store) as job:
        s.refused(lambda: job.load(source))
        job.step(BATCH)
    s.begin()
    with s.fit(resume=store) as job:
        assert job.steps == 1
    with s.fit(weights=source, store=s.directory / "another") as job, job.weights():
        weights = load_file(source / "model.safetensors")
        assert all(torch.equal(p, weights[name]) for name, p in s.model.named_parameters())


@follows("job/saved_job.py", "is in the middle of a step, or of job.inference(): what runs inside cannot step")
def a_step_after_inference(s: Scene) -> None:
    job = s.fit(plan=ON_DISK)
    with job.inference():
        s.refused(lambda: job.step(BATCH))
    assert job.step(BATCH).is_finite


def fails(_: object) -> None:
    raise KeyError("of the program's own")


def torn(s: Scene, **wishes: Any) -> memfit.Job:
    """A job whose second step ends between the updates of two blocks."""
    job = s.fit(plan=ON_DISK, **wishes)
    job.step(BATCH)
    job.on_update("0", fails)
    with pytest.raises(KeyError):
        job.step(BATCH)
    s.refused(lambda: job.step(BATCH))
    return job


@follows("job/saved_job.py", "; some blocks hold new weights and some old ones. Go back:")
def a_torn_step_is_left_by_a_save_or_by_its_run(s: Scene) -> None:
    source = saved(s)
    torn(s).close()
    loads(s, source)
    assert s.fit(plan=ON_DISK).step(BATCH).is_finite
    s.begin()
    torn(s, store=s.directory / "run", durability="exit").close(restore=False)
    job = s.fit(store=s.directory / "run")
    assert job.steps == 0
    job.step(BATCH)


# --- averages ------------------------------------------------------------------------------------


@follows("job/ema.py", "the averages are in the places of the weights already: leave that context first")
def averages_one_context_after_another(s: Scene) -> None:
    job = s.fit()
    average = memfit.MemfitEma(job, 0.5)
    job.step(BATCH)
    with average.applied():
        s.refused(lambda: average.applied().__enter__())
        first = job.evaluate(BATCH).loss
    with average.applied():
        assert job.evaluate(BATCH).loss == first


@follows("job/ema.py", "the plan keeps fp32 masters, which weights that are exchanged would round: load")
def averages_in_a_model_of_their_own(s: Scene) -> None:
    job = s.fit(plan=Plan(compute_dtype=ComputeDtype.BFLOAT16), allow={"bf16"})
    average = memfit.MemfitEma(job, 0.5)
    job.step(BATCH)
    s.refused(lambda: average.applied().__enter__())
    other = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    other.load_state_dict(load_file(average.path))
    assert loss(other, BATCH).isfinite()


@follows("job/ema.py", "the weight is not contiguous; make it so before memfit.fit")
def averages_of_contiguous_weights(s: Scene) -> None:
    first: Any = s.model[0]
    first.weight = nn.Parameter(first.weight.detach().t())
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=1e-2)
    job = s.fit()
    s.refused(lambda: memfit.MemfitEma(job, 0.5))
    job.close()
    first.weight = nn.Parameter(first.weight.detach().contiguous())
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=1e-2)
    job = s.fit()
    average = memfit.MemfitEma(job, 0.5)
    job.step(BATCH)
    assert "0.weight" in load_file(average.path)


# --- exports -------------------------------------------------------------------------------------


def runs(s: Scene, plan: Plan, **wishes: Any) -> Path:
    """Leaves a run of one step in a store."""
    s.begin()
    with s.fit(plan=plan, store=s.directory / "run", **wishes) as job:
        job.step(BATCH)
    return s.directory / "run"


@follows("runs/exporting.py", "has files already, and a checkpoint has a directory of its own: name another")
def a_checkpoint_in_another_directory(s: Scene) -> None:
    store = runs(s, Plan())
    s.refused(lambda: export_run(store, s.directory, form="dcp"))
    assert export_run(store, s.directory / "another", form="dcp").files


@follows("runs/exporting.py", ", which only a job decodes: go on with it and call job.save(...)")
def split_masters_are_saved_by_a_job(s: Scene) -> None:
    store = runs(s, Plan(compute_dtype=ComputeDtype.BFLOAT16, splits_masters=True), allow={"bf16"})
    s.refused(lambda: export_run(store, s.directory / "exported"))
    s.begin()
    with s.fit(store=store, allow={"bf16"}) as job:
        assert job.steps == 1
        job.save(s.directory / "saved")
    s.begin()
    load(s.directory / "saved", s.model, s.optimizer)


@follows("runs/exporting.py", ", which this memfit does not know: use the version that wrote it")
def the_version_that_wrote_a_run(s: Scene) -> None:
    s.model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))
    s.optimizer = torch.optim.AdamW(s.model.parameters(), lr=1e-2)
    with s.fit(plan=Plan(state_format=StateFormat.INT8), allow={"int8-state"}, store=s.directory / "run") as job:
        job.step(BATCH)
    with pytest.MonkeyPatch.context() as older:
        older.setattr(exporting, "StateFormat", StrEnum("StateFormat", {"GIVEN": "given"}))
        s.refused(lambda: export_run(s.directory / "run", s.directory / "exported"))
    assert export_run(s.directory / "run", s.directory / "exported").files


@follows("runs/exporting.py", "let the program go on with the run once (memfit.fit makes the updates), then export")
def a_step_under_way_is_made_first(s: Scene) -> None:
    store, wishes = (
        s.directory / "run",
        {"scheme": "journal", "plan": Plan(blocks={"0": HOME, "2": HOME}, update=UpdateTime.AFTER_BACKWARD)},
    )

    job = s.fit(store=store, **wishes)
    job.on_update("0", fails)
    with pytest.raises(KeyError):
        job.step(BATCH)
    job.close(restore=False, commit=False)
    s.refused(lambda: export_run(store, s.directory / "exported"))
    s.begin()
    with pytest.warns(memfit.MemfitWarning, match="its updates are made now"):
        s.fit(store=store, **wishes).close()
    export_run(store, s.directory / "exported")
    s.begin()
    assert load(s.directory / "exported", s.model, s.optimizer).steps == 1
    s.trains_as(lambda model: loss(model, BATCH).backward())


# --- objects of one process ----------------------------------------------------------------------


@follows("job/job.py", "a job cannot be pickled or copied")
def a_job_is_saved_and_taken_up(s: Scene) -> None:
    with s.fit() as job:
        s.refused(lambda: copy.deepcopy(job))
        job.step(BATCH)
        job.save(s.directory / "saved")
        expected = job.step(BATCH).loss
    s.begin()
    with s.fit(resume=s.directory / "saved") as job:
        assert job.steps == 1
        assert job.step(BATCH).loss == expected


@follows("job/inference.py", "an inference session cannot be pickled or copied")
def a_session_is_made_where_it_is_wanted(s: Scene) -> None:
    with memfit.infer(s.model) as session:
        s.refused(lambda: pickle.dumps(session))
        expected = session.model(BATCH)
    with memfit.infer(s.model) as session:
        assert torch.equal(session.model(BATCH), expected)
