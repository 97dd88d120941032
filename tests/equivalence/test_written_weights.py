"""Weights that are written past their version counters, or looked at from outside of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import UnsupportedError
from memfit.core.plan import BlockPlan, Plan
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier

ON_DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
AWAY = Plan(blocks={"0": ON_DISK, "2": ON_DISK})
BATCH = torch.linspace(-1, 1, 128).view(16, 8)


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _clamped_through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def test_weights_clamped_through_data_are_kept_as_in_plain_pytorch() -> None:
    plain, optimizer = _model()
    loss_of(plain, BATCH).backward()
    optimizer.step()
    _clamped_through_data(plain)
    model, optimizer = _model()
    job = memfit.fit(model, optimizer, loss_of, BATCH, plan=AWAY)
    job.step(BATCH)
    with job.weights():
        _clamped_through_data(model)
    job.close()
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


def test_what_was_changed_before_an_error_in_weights_stays_changed() -> None:
    model, optimizer = _model()
    job = memfit.fit(model, optimizer, loss_of, BATCH, plan=AWAY)

    def fail_in_the_middle() -> None:
        with job.weights():
            model.get_parameter("0.weight").data.fill_(0.25)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    job.close()
    assert torch.all(model.get_parameter("0.weight") == 0.25)


@pytest.mark.parametrize("plan", [Plan(), AWAY], ids=["on the device", "on disk"])
def test_a_job_goes_on_when_numpy_has_looked_at_its_weights_which_stay_with_the_array(plan: Plan) -> None:
    plain, optimizer = _model()
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(plain, BATCH).backward()
        optimizer.step()
    model, optimizer = _model()
    job = memfit.fit(model, optimizer, loss_of, BATCH, plan=plan)
    job.step(BATCH)
    with job.weights():
        array = model.get_parameter("0.weight").detach().numpy()
        seen = np.array(array)
    job.step(BATCH)
    job.step(BATCH)
    assert plan == Plan() or np.array_equal(array, seen)
    job.close()
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


class Bounding(nn.Module):
    """Writes a weight in the forward of some steps."""

    def __init__(self, write: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.write, self.writes = write, False

    def forward(self, batch: Tensor) -> Tensor:
        if self.writes:
            self.write(self.first.get_parameter("weight"))
        return self.last(torch.tanh(self.first(batch)))


@pytest.mark.parametrize(
    "write", [lambda w: w.data.mul_(0.5), lambda w: w.detach().numpy().fill(0.5)], ids=["data", "numpy"]
)
def test_a_weight_that_is_bounded_now_and_then_in_a_forward_is_refused_by_name_and_the_job_goes_on(
    write: Callable[[nn.Parameter], object],
) -> None:
    model = Bounding(lambda _: None)
    model.first.register_forward_hook(lambda *_: write(model.first.get_parameter("weight")) if model.writes else None)
    plan = Plan(blocks={"first": ON_DISK, "last": ON_DISK})
    job = memfit.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, BATCH, plan=plan)
    job.step(BATCH)
    with job.weights():
        before = model.first.weight.detach().clone()
    model.writes = True
    with pytest.raises(UnsupportedError, match=r"changed the weight 'first\.weight' in place while it visited"):
        job.step(BATCH)
    model.writes = False
    with job.weights():
        assert torch.equal(model.first.weight, before)
    job.step(BATCH)
    job.close()


@pytest.mark.parametrize("is_in_forward", [False, True])
def test_a_change_of_bf16_weights_on_the_device_becomes_their_master(*, is_in_forward: bool) -> None:
    model = Bounding(lambda w: w.data.fill_(0.25))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = Plan(compute_dtype=ComputeDtype.BFLOAT16)
    job = memfit.fit(model, optimizer, loss_of, BATCH, plan=plan, allow={"bf16"})
    job.step(BATCH)
    if is_in_forward:
        model.writes = True
    else:
        model.first.weight.data.fill_(0.25)
    job.step(BATCH)
    job.close()
    assert torch.all(model.first.get_parameter("weight") == 0.25)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_weight_on_the_device_that_was_written_without_a_step_is_in_the_store(
    tmp_path: Path, *, is_frozen: bool
) -> None:
    model, optimizer = _model()
    model.get_submodule("0").requires_grad_(not is_frozen)
    job = memfit.fit(model, optimizer, loss_of, BATCH, plan=Plan(), store=tmp_path / "run")
    job.step(BATCH)
    job.commit()
    model.get_parameter("0.weight").data.fill_(0.25)
    job.close()
    resumed, optimizer = _model()
    resumed.get_submodule("0").requires_grad_(not is_frozen)
    memfit.fit(resumed, optimizer, loss_of, BATCH, plan=Plan(), store=tmp_path / "run").close()
    assert all(torch.equal(p, q) for p, q in zip(resumed.parameters(), model.parameters(), strict=True))


def test_a_weight_in_memory_that_processes_share_is_refused_and_the_job_goes_on() -> None:
    model, optimizer = _model()
    job = memfit.fit(model, optimizer, loss_of, BATCH, plan=AWAY)
    with pytest.raises(UnsupportedError, match="memory that processes share"), job.weights():
        model.share_memory()
    job.step(BATCH)
    job.close()
