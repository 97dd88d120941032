"""Hooks that the user registers after `fit`: as in plain PyTorch, or refused before anything is trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import MemfitWarning, PlanError, UnsupportedError
from memfit.core.plan import BlockPlan, CallPlan, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier

WIDTH = 16
AGAIN = (CallPlan(saved=Saved.RECOMPUTE),) * 3 + (CallPlan(),)
AWAY = {str(i): BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK) for i in range(4)}
PLANS = {
    "resident": Plan(),
    "recompute": Plan(calls=AGAIN),
    "disk": Plan(blocks=AWAY, calls=AGAIN),
    "microbatches": Plan(microbatches=2, blocks=AWAY, calls=AGAIN),
}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.down(torch.tanh(self.up(values)))


def _build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(_Block() for _ in range(3)), nn.Linear(WIDTH, 4))


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, WIDTH), torch.randn(8, 4)


def _on_gradient(model: Any) -> None:
    model[1].up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def _on_arrival(model: Any) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model[1].up.weight.register_post_accumulate_grad_hook(halve)


def _on_output(model: Any) -> None:
    model[1].register_forward_hook(lambda _module, _inputs, output: output * 0.9)


def _on_input(model: Any) -> None:
    model[2].up.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 1.1,))


def _on_backward(model: Any) -> None:
    model[1].up.register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 0.5,))


def _train(step: Callable[[], object], register: Callable[[], None]) -> None:
    step()
    register()
    for _ in range(2):
        step()


def _plain(register: Callable[[Any], None], microbatches: int) -> dict[str, Tensor]:
    model, batch = _build(), _batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        for part in zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True):
            (_loss(model, part) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    _train(step, lambda: register(model))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _fit(model: Any, plan: Plan, directory: Path, **arguments: Any) -> memfit.Job:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return memfit.fit(model, optimizer, _loss, _batch(), plan=plan, directory=directory, **arguments)


def _trained(register: Callable[[Any], None], plan: Plan, directory: Path, **arguments: Any) -> dict[str, Tensor]:
    model = _build()
    job = _fit(model, plan, directory, **arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "hooks of yours also ran", MemfitWarning)
        _train(lambda: job.step(_batch()), lambda: register(model))
    job.close()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("register", [_on_gradient, _on_arrival, _on_output, _on_input, _on_backward])
def test_a_hook_acts_as_in_plain_pytorch_or_its_step_is_refused(
    register: Callable[[Any], None], plan: str, tmp_path: Path
) -> None:
    chosen = PLANS[plan]
    is_cut_gradient = chosen.microbatches > 1 and register in (_on_gradient, _on_arrival)
    if is_cut_gradient:
        # It would see sums or shares of the gradient, as the plan has it.
        with pytest.raises(UnsupportedError, match="hook on its gradient.*registered after memfit.fit"):
            _trained(register, chosen, tmp_path / "homes")
        return
    found = _trained(register, chosen, tmp_path / "homes")
    for name, expected in _plain(register, chosen.microbatches).items():
        assert torch.equal(found[name], expected), name


def test_a_refused_step_stays_refused_until_the_hook_is_gone(tmp_path: Path) -> None:
    model, reference = _build(), _build()
    with _fit(model, PLANS["microbatches"], tmp_path / "homes") as job:
        handle = model[0].up.weight.register_hook(lambda gradient: gradient * 2)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="hook on its gradient"):
                job.step(_batch())
        handle.remove()
        job.step(_batch())
    with _fit(reference, PLANS["microbatches"], tmp_path / "others") as job:
        job.step(_batch())
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_late_hook_that_reads_another_gradient_is_refused_where_the_plan_drops_it(tmp_path: Path) -> None:
    def register(model: Any) -> None:
        head = model[3].weight

        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.add_(0 if head.grad is None else 0.1 * head.grad.norm())

        model[2].up.weight.register_post_accumulate_grad_hook(add)

    with pytest.raises(PlanError, match=r"reads the gradient of '3\.weight'"):
        _trained(register, PLANS["disk"], tmp_path / "homes")
    found = _trained(register, Plan(update=UpdateTime.AFTER_BACKWARD), tmp_path / "others")
    for name, expected in _plain(register, 1).items():
        assert torch.equal(found[name], expected), name


def test_a_late_hook_that_mixes_rows_is_refused_where_the_batch_is_cut(tmp_path: Path) -> None:
    def register(model: Any) -> None:
        model[1].register_forward_hook(lambda _module, _inputs, output: output - output.mean(0))

    with pytest.raises(UnsupportedError, match="registered after memfit.fit"):
        _trained(register, PLANS["microbatches"], tmp_path / "homes")


def test_a_late_hook_runs_before_the_gradient_goes_home(tmp_path: Path) -> None:
    """With masters and a clipped norm gradients are handed on as soon as they are whole. The other road: the hook is there before `fit`, and sleeps at first."""
    arguments: dict[str, Any] = {"allow": {"bf16"}, "max_grad_norm": 0.1}
    plan = Plan(compute_dtype=ComputeDtype.BFLOAT16)
    found = _trained(_on_arrival, plan, tmp_path / "homes", **arguments)
    model, is_awake = _build(), False

    def halve(parameter: Tensor) -> None:
        if is_awake and parameter.grad is not None:
            parameter.grad.mul_(0.5)

    def wake() -> None:
        nonlocal is_awake
        is_awake = True

    model[1].up.weight.register_post_accumulate_grad_hook(halve)
    with pytest.warns(MemfitWarning, match="hooks of yours also ran"):
        job = _fit(model, plan, tmp_path / "others", **arguments)
    _train(lambda: job.step(_batch()), wake)
    job.close()
    assert not torch.equal(found["1.up.weight"], _build()[1].up.weight)
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter), name


def test_a_late_hook_is_told_that_it_runs_while_a_step_is_planned(tmp_path: Path) -> None:
    model = _build()
    with _fit(model, Plan(), tmp_path / "homes") as job:
        _on_output(model)
        with pytest.warns(MemfitWarning, match="hooks of yours also ran while a step was planned anew"):
            job.step(_batch())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            job.step(_batch())
