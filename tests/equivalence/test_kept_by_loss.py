"""What a loss keeps from one call to the next, beside the model: planning leaves it as it was, and microbatches meet it in the order of a plain loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import UnsupportedError
from memfit.core.plan import Order, Plan
from memfit.trace.program_state import ProgramState, untouched_program

WIDTH, ROWS, STEPS = 8, 8, 2
Loss = Callable[[nn.Module, Tensor], Tensor]
count_of_calls = 0


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)))


def sample() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def _mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def baseline_in_a_dict() -> Loss:
    kept = {"baseline": torch.zeros(())}

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value = _mean(model, batch)
        found = value * (1 + kept["baseline"])
        kept["baseline"] = 0.9 * kept["baseline"] + 0.1 * value.detach()
        return found

    return loss


def baseline_in_a_number() -> Loss:
    baseline = 0.0

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal baseline
        value = _mean(model, batch)
        found = value * (1 + baseline)
        baseline = 0.9 * baseline + 0.1 * value.item()
        return found

    return loss


def baseline_changed_in_place() -> Loss:
    baseline = torch.zeros(())

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value = _mean(model, batch)
        found = value * (1 + baseline.clone())
        with torch.no_grad():
            baseline.mul_(0.9).add_(value.detach(), alpha=0.1)
        return found

    return loss


def counter_in_a_global() -> Loss:
    global count_of_calls
    count_of_calls = 0

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        global count_of_calls
        count_of_calls += 1
        return _mean(model, batch) / count_of_calls

    return loss


class Centered(nn.Module):
    """A criterion with a running center in a buffer, as self-distillation has it."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))

    def forward(self, out: Tensor) -> Tensor:
        found = (out - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        return found


def center_in_a_criterion() -> Loss:
    criterion = Centered()
    return lambda model, batch: criterion(model(batch))


class Scheduled:
    """A loss that is an object, and anneals its own factor."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.factor *= 0.5
        return _mean(model, batch) * self.factor


KEEPING = (
    baseline_in_a_dict,
    baseline_in_a_number,
    baseline_changed_in_place,
    counter_in_a_global,
    center_in_a_criterion,
    Scheduled,
)


def plain(loss: Loss, microbatches: int) -> nn.Module:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in sample().chunk(microbatches):
            (loss(model, part) / microbatches).backward()
        optimizer.step()
    return model


@pytest.mark.thinned
@pytest.mark.parametrize("make", KEEPING)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_that_keeps_something_trains_as_in_a_plain_loop(make: Callable[[], Loss], microbatches: int) -> None:
    expected = plain(make(), microbatches)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(microbatches=microbatches, order=Order.MICROBATCH_MAJOR)
    with memfit.fit(model, optimizer, make(), sample(), plan=plan, allow={"nonadditive-loss"}) as job:
        for _ in range(STEPS):
            job.step(sample())
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("make", KEEPING)
def test_its_microbatches_are_not_run_layer_by_layer(make: Callable[[], Loss]) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(microbatches=2, order=Order.LAYER_MAJOR)
    with pytest.raises(UnsupportedError, match="a forward changes .* and the one after it meets that"):
        memfit.fit(model, optimizer, make(), sample(), plan=plan, allow={"nonadditive-loss"})
    assert memfit.profile(model, optimizer, make(), sample()).keeps_order


def test_a_log_and_a_sum_that_no_call_reads_are_free_and_have_real_values_only() -> None:
    log: list[float] = []
    total = torch.zeros(())

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value = _mean(model, batch)
        log.append(value.item())
        total.add_(value.detach())
        return value

    model = build()
    plan = Plan(microbatches=2, order=Order.LAYER_MAJOR)
    with memfit.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, sample(), plan=plan) as job:
        assert log == [] and total.item() == 0.0
        job.step(sample())
        assert len(log) == 2
        assert total.item() == pytest.approx(sum(log))


def test_everything_that_a_function_names_is_given_back() -> None:
    torch_numbers, numbers, array_numbers = torch.Generator(), random.Random(3), np.random.default_rng(4)
    shelf: dict[str, Any] = {"list": [1, 2], "set": {3}, "tensor": torch.arange(3.0)}
    word = "before"

    def function(marks: list[int] = []) -> None:  # noqa: B006, a default that is kept is what is tried
        nonlocal word
        word = "after"
        shelf["list"].append(3)
        shelf["set"].clear()
        shelf["tensor"][0] = 9.0
        shelf["new"] = None
        marks.append(1)
        torch.rand(2, generator=torch_numbers)
        numbers.random()
        array_numbers.random()

    states = torch_numbers.get_state(), numbers.getstate(), array_numbers.bit_generator.state
    with untouched_program(function, nn.Identity()):
        function()
        assert word == "after"
    assert word == "before"
    assert shelf["list"] == [1, 2] and shelf["set"] == {3} and "new" not in shelf
    assert shelf["tensor"].tolist() == [0.0, 1.0, 2.0]
    assert function.__defaults__ == ([],)
    assert torch.equal(states[0], torch_numbers.get_state())
    assert states[1:] == (numbers.getstate(), array_numbers.bit_generator.state)


def test_a_large_tensor_that_is_written_cannot_be_given_back_and_is_told() -> None:
    queue = torch.zeros(1 << 20)

    def function() -> None:
        queue[0] += 1

    state = ProgramState(function, nn.Identity())
    state.restore()
    function()
    with pytest.raises(UnsupportedError, match=r"4\.0 MiB that it keeps \(queue\).*is_tracing"):
        state.restore()
