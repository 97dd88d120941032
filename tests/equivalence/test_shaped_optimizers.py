"""Optimizers that choose their algorithm by the shape of a parameter, against plain PyTorch.

Small stand-ins of such parameters would take another algorithm than the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.optimizers import OptimizerDriver, UpdateKind

Rule = Callable[[torch.Tensor], bool]
ON_DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)


class ByShape(torch.optim.Optimizer):
    """Orthogonal updates of some matrices and AdamW's kind of update of all else, as timm's Muon has them."""

    def __init__(self, params: Any, rule: Rule, *, stacks: bool = False, lr: float = 0.02):
        super().__init__(params, {"lr": lr})
        self.rule, self.stacks = rule, stacks

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            matrices = [p for p in held if self.rule(p)]
            for p in held:
                if not self.rule(p):
                    state = self.state[p]
                    state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad.square(), 0.1)
                    p.addcdiv_(p.grad, state["square"].sqrt().add_(1e-8), value=-group["lr"])
            for p in matrices:
                self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            for p, update in zip(
                matrices, self._orthogonal([self.state[p]["momentum"] for p in matrices]), strict=True
            ):
                p.sub_(update, alpha=group["lr"])

    def _orthogonal(self, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.stacks and len({m.shape for m in matrices}) == 1:
            stacked = torch.stack(matrices)
            return list(stacked / (stacked.norm() + 1e-6))
        return [3.0 * (m / (m.norm() + 1e-6)) - (m @ m.T) @ m / (m.norm() + 1e-6) ** 3 for m in matrices]


RULES: dict[str, Rule] = {
    "large matrices": lambda p: p.ndim == 2 and min(p.shape) >= 100,
    "many elements": lambda p: p.ndim == 2 and p.numel() > 20_000,
    "no thin ones": lambda p: p.ndim == 2 and max(p.shape) <= 16 * min(p.shape),
    "no long ones": lambda p: p.ndim == 2 and max(p.shape) < 150,
}


def build(rule: Rule, **settings: Any) -> tuple[nn.Module, ByShape]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 110), nn.Tanh(), nn.Linear(110, 110), nn.Tanh(), nn.Linear(110, 4))
    return model, ByShape(model.parameters(), rule, **settings)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def assert_trains_as_plain(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], plan: Plan) -> None:
    batch = torch.randn(16, 200, generator=torch.Generator().manual_seed(1))
    plain, plain_optimizer = make()
    for _ in range(3):
        plain_optimizer.zero_grad()
        loss(plain, batch).backward()
        plain_optimizer.step()
    model, optimizer = make()
    with memfit.fit(model, optimizer, loss, batch, plan=plan) as job:
        for _ in range(3):
            job.step(batch)
    for (name, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, actual), name
        assert plain_optimizer.state[expected].keys() == optimizer.state[actual].keys()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("plan", [Plan(), Plan(blocks=dict.fromkeys("024", ON_DISK))], ids=["device", "disk"])
def test_a_choice_by_shape_is_the_choice_of_plain_pytorch(rule: str, plan: Plan) -> None:
    assert_trains_as_plain(lambda: build(RULES[rule]), plan)


@pytest.mark.parametrize("rule", ["large matrices", "many elements"])
def test_small_pieces_are_not_believed_where_the_true_shape_takes_other_operations(rule: str) -> None:
    model, optimizer = build(RULES[rule])
    verdict = OptimizerDriver(optimizer, dict(model.named_parameters())).verdict("0.weight")
    assert verdict.kind is UpdateKind.PER_PARAMETER
    assert "other operations for a parameter of shape" in verdict.reason


def test_a_factor_that_depends_on_the_size_is_seen_though_the_operations_are_the_same() -> None:
    class ByFactor(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1 if p.numel() > 20_000 else 0.2)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = build(RULES["no thin ones"])
        return model, ByFactor(model.parameters())

    assert_trains_as_plain(make, Plan(blocks=dict.fromkeys("024", ON_DISK)))
    model, optimizer = make()
    verdict = OptimizerDriver(optimizer, dict(model.named_parameters())).verdict("0.weight")
    assert verdict.kind is UpdateKind.PER_PARAMETER


def test_matrices_of_one_shape_that_are_stacked_are_seen_as_updated_together() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    optimizer = ByShape(model.parameters(), lambda p: p.ndim == 2, stacks=True)
    with pytest.raises(memfit.UnsupportedError, match="when others are present"):
        memfit.fit(model, optimizer, loss, torch.randn(8, 32))


def test_a_class_that_reads_values_is_tried_with_numbers_on_one_whole_parameter() -> None:
    class Reading(ByShape):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None and len(p.grad.nonzero()):
                    return super().step()
            return None

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = build(RULES["no thin ones"])
        return model, Reading(model.parameters(), RULES["no thin ones"])

    assert_trains_as_plain(make, Plan(blocks=dict.fromkeys("024", ON_DISK)))


def test_an_integer_factor_is_seen_as_well() -> None:
    class ByInteger(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (2 if p.numel() > 20_000 else 1), alpha=0.1)

    model, _ = build(RULES["no thin ones"])
    verdict = OptimizerDriver(ByInteger(model.parameters()), dict(model.named_parameters())).verdict("0.weight")
    assert verdict.kind is UpdateKind.PER_PARAMETER


def test_a_choice_by_shape_holds_in_lines_and_behind_a_resume_with_clipping(tmp_path: Path) -> None:
    rule, batch = RULES["large matrices"], torch.randn(16, 200, generator=torch.Generator().manual_seed(1))
    on_disk, options = Plan(blocks=dict.fromkeys("024", ON_DISK)), {"store": tmp_path / "run", "max_grad_norm": 0.01}
    (plain, plain_optimizer), (model, optimizer) = build(rule), build(rule)
    with memfit.fit(model, optimizer, loss, batch, lines=True, plan=on_disk) as job:
        for _ in range(2):
            plain_optimizer.zero_grad()
            loss(plain, batch).backward()
            plain_optimizer.step()
            with job.lines():
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    (plain, plain_optimizer), (model, optimizer) = build(rule), build(rule)
    for _ in range(3):
        plain_optimizer.zero_grad()
        loss(plain, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        plain_optimizer.step()
    with memfit.fit(model, optimizer, loss, batch, plan=on_disk, **options) as job:
        job.step(batch)
    model, optimizer = build(rule)
    with memfit.fit(model, optimizer, loss, batch, **options) as job:
        assert job.steps == 1
        job.step(batch)
        job.step(batch)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
