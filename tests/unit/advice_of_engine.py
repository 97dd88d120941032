"""Cures of the refusals of `engine`: what a step, a loss or a backward meets while it runs."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from accelerator.build import NoCompilerError, built
from memfit.core.plan import BlockPlan, Order, Plan, UpdateTime
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from unit.advice import BATCH, DISK, Scene, follows, loss

TESTS = Path(__file__).parents[1]


class Turning:
    """A loss that becomes another one when it is turned."""

    def __init__(self, other: Callable[[Any, Tensor], Any]) -> None:
        self.other, self.is_turned = other, False

    def __call__(self, model: Any, batch: Tensor) -> Any:
        return self.other(model, batch) if self.is_turned else loss(model, batch)


def turned(s: Scene, other: Callable[[Any, Tensor], Any], **wishes: Any) -> memfit.Job:
    """Fits the loss and turns it, so that the other one is met in a step alone."""
    late = Turning(other)
    job = s.fit(late, **wishes)
    late.is_turned = True
    return job


def cured(s: Scene, function: Callable[[Any, Tensor], Tensor], **wishes: Any) -> memfit.Job:
    """Trains a new model by a function, to the bits of a plain loop."""
    s.begin()
    job = s.fit(function, **wishes)
    job.step(BATCH)
    job.close()
    s.trains_as(lambda model: function(model, BATCH).backward())
    return job


@follows("engine/backward.py", "returned a pair, which means (sum, count), but its second is")
def outputs_beside_a_loss_in_a_list(s: Scene) -> None:
    seen = list[Tensor]()
    s.refused(lambda: s.fit(lambda model, batch: (loss(model, batch), model(batch))))

    def keeping(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        seen.append(out.detach())
        return out.square().mean()

    cured(s, keeping)
    assert seen[-1].shape == BATCH.shape


@follows("engine/backward.py", "must count from 0 up")
def a_count_of_targets(s: Scene) -> None:
    job = turned(s, lambda model, batch: (model(batch).square().sum(), -1))
    s.refused(lambda: job.step(BATCH))
    job.close()
    s.begin()
    s.fit(lambda model, batch: (model(batch).square().sum(), batch.numel())).step(BATCH)
    s.trains_as(lambda model: (model(BATCH).square().sum() / BATCH.numel()).backward())


@follows("engine/backward.py", "gradients are off where job.step is called")
def a_step_outside_of_no_grad(s: Scene) -> None:
    job = s.fit()
    with torch.no_grad():
        s.refused(lambda: job.step(BATCH))
    job.step(BATCH)
    s.trains_as(lambda model: loss(model, BATCH).backward())


@follows("engine/backward.py", "must return a scalar, not a tensor of shape")
def a_mean_of_a_loss_for_each_row(s: Scene) -> None:
    job = turned(s, lambda model, batch: model(batch).square().mean(1))
    s.refused(lambda: job.step(BATCH))
    job.close()
    cured(s, lambda model, batch: model(batch).square().mean(1).mean())


@follows("engine/loss_scaling.py", "this is not the state of a loss scaler")
def a_state_of_a_scaler_whole(s: Scene) -> None:
    scaler = s.fit(plan=Plan(compute_dtype=ComputeDtype.FLOAT16), allow={"fp16"}).loss_scaler
    assert scaler is not None
    state = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    damaged = [{"scale": 8.0}, state | {"scale": "8"}, state | {"growth_interval": 2.5}]
    for one, words in zip(damaged, ("has no", "scale is '8'", "growth_interval is 2.5"), strict=True):
        s.refused(lambda one=one: scaler.load_state_dict(one))
        assert words in s.words
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state


def kept_inside(model: Any, batch: Tensor) -> Tensor:
    """A loss of what a hook keeps of the inside of the second block, and not of its output."""
    kept = list[Tensor]()
    handle = model[1][0].register_forward_hook(lambda _module, _args, out: kept.append(out))
    model(batch)
    handle.remove()
    return kept[0].square().mean()


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))


@follows("engine/backward.py", "backward reads weights that are away")
def a_sample_that_takes_the_way_past_a_call(s: Scene) -> None:
    s.begin(nested)
    away = {"0": DISK, "1": DISK, "2": DISK}
    job = turned(s, kept_inside, plan=Plan(blocks=away))
    s.refused(lambda: job.step(BATCH))
    job.close()
    cured(s, kept_inside, plan=Plan(blocks=away | {"1": BlockPlan(state_home=Tier.DISK)}))
    cured(s, kept_inside)


def regularized(model: Any, batch: Tensor) -> Tensor:
    """The penalty's node is made first, so that its gradient comes last."""
    penalty = model[2].weight.square().sum()
    return loss(model, batch) + 0.1 * penalty


@follows("engine/update_phase.py", "was updated before all of its gradient had come")
def updates_behind_the_backward(s: Scene) -> None:
    job = turned(s, regularized, plan=Plan(microbatches=2))
    s.refused(lambda: job.step(BATCH))
    job.close(restore=False)
    s.begin()
    job = turned(s, regularized, plan=Plan(microbatches=2, update=UpdateTime.AFTER_BACKWARD))
    job.step(BATCH)
    job.close()
    s.trains_as(lambda model: [(regularized(model, half) / 2).backward() for half in BATCH.chunk(2)], atol=1e-5)


@follows("engine/engine.py", "already run back")
def a_loss_as_a_number(s: Scene) -> None:
    kept = list[Tensor]()

    def keeping(model: nn.Module, batch: Tensor) -> Tensor:
        kept.append(model(batch).mean())
        return kept[-1]

    job = s.fit(keeping)
    result = job.step(BATCH)
    s.refused(kept[-1].backward)
    assert result.loss == kept[-1].item()
    s.trains_as(lambda model: model(BATCH).mean().backward())


def twice(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean() + model(-batch).mean()


@follows("engine/engine.py", "whose weights and saved tensors are given up")
def each_loss_back_before_the_next_forward(s: Scene) -> None:
    def by_lines(job: memfit.Job, body: Callable[[], object]) -> None:
        with job.lines():
            body()
            s.optimizer.step()
            s.optimizer.zero_grad()
        job.close()
        s.trains_as(lambda model: twice(model, BATCH).backward())

    job = s.fit(lines=True)
    with job.lines():
        s.refused(lambda: twice(s.model, BATCH).backward())
        s.optimizer.zero_grad()
    by_lines(job, lambda: [s.model(sign * BATCH).mean().backward() for sign in (-1, 1)])
    s.begin()
    by_lines(s.fit(twice, lines=True), lambda: twice(s.model, BATCH).backward())


class Picking(nn.Module):
    """Calls the layers that its batch names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, batch: dict[str, Any]) -> Tensor:
        hidden = batch["x"]
        for index in batch["layers"]:
            hidden = torch.tanh(self.layers[index](hidden))
        return hidden


@follows("engine/entered_calls.py", "which the largest part does not")
def parts_that_all_meet_a_module_again(s: Scene) -> None:
    def parts(*layers: list[int]) -> list[Any]:
        return [{"x": BATCH[:rows], "layers": each} for rows, each in zip((4, 2), layers, strict=True)]

    def cured(given: list[Any], sample: list[Any], atol: float = 0.0, **plan: Any) -> None:
        s.begin(Picking)
        with s.fit(loss, memfit.Parts(sample), plan=Plan(microbatches=2, **plan)) as job:
            job.step(memfit.Parts(given))
        s.trains_as(lambda model: [loss(model, part).backward() for part in given], atol=atol)

    once, again = parts([0, 1], [0, 1]), parts([0, 1], [1, 0, 1])
    s.refused(lambda: cured(again, once))
    cured(again, once, order=Order.MICROBATCH_MAJOR)
    cured(parts([0, 1], [1, 0, 1]), parts([1, 0, 1], [1, 0, 1]), 1e-5)


@follows("engine/tail.py", "is read before the tail and again in it")
def no_tail(s: Scene) -> None:
    def tied(model: Any, batch: Tensor) -> Tensor:
        return (model(batch) @ model[0].weight).square().mean()

    job = turned(s, tied, plan=Plan(microbatches=2, tail=1))
    s.refused(lambda: job.step(BATCH))
    job.close()
    s.begin()
    job = turned(s, tied, plan=Plan(microbatches=2, tail=None))
    job.step(BATCH)
    job.close()
    s.trains_as(lambda model: [(tied(model, half) / 2).backward() for half in BATCH.chunk(2)], atol=1e-5)


@functools.cache
def words_on_the_late_device() -> list[str]:
    """What two cases refused that need an accelerator, and whose cures worked."""
    try:
        built()
    except NoCompilerError as error:
        pytest.skip(str(error))
    program = [sys.executable, "-m", "unit.advice_late"]
    child = subprocess.run(program, cwd=TESTS, capture_output=True, text=True, timeout=280, check=False)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@follows("engine/backward.py", "computes on the CPU in the middle")
def a_model_that_stays_on_its_device(s: Scene) -> None:
    s.words, _ = words_on_the_late_device()


@follows("engine/backward.py", "reads a parameter on the CPU")
def a_parameter_on_the_device_of_the_model(s: Scene) -> None:
    _, s.words = words_on_the_late_device()
