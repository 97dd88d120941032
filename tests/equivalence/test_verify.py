"""`memfit.verify`: what it calls bitwise is, what it calls a rounding is declared, and what is different it finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import UsageError
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.homes.gradients import GradientHomes

WIDTH = 16
DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
AWAY = Plan(blocks={str(index): DISK for index in range(3)}, calls=(CallPlan(saved=Saved.RECOMPUTE),) * 3)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.dropout(self.down(torch.tanh(self.up(values))))


def objects(dropout: float = 0.0) -> tuple[Any, torch.optim.Optimizer, Callable[[Any, Any], Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(dropout) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    return model, optimizer, loss, batch


@pytest.mark.parametrize("options", [{}, {"plan": AWAY}, {"plan": AWAY, "max_grad_norm": 0.1}])
def test_an_exact_plan_is_bitwise_and_nothing_of_the_users_changes(options: dict[str, Any]) -> None:
    model, optimizer, loss, batch = objects(dropout=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    found = memfit.verify(model, optimizer, loss, batch, **options)
    assert found
    assert (found.kind, found.worst, found.steps) == ("bitwise", ("", 0.0), 3)
    # 12 parameters, their 3 states each, a gradient each, 3 losses; and the group's settings.
    assert found.compared >= 12 + 36 + 12 + 3
    assert str(found).startswith("bitwise: 3 steps")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_microbatches_are_a_rounding_that_the_plan_declares() -> None:
    found = memfit.verify(*objects(), plan=Plan(microbatches=4))
    assert found.kind == "rounding"
    assert 0.0 < found.worst[1] < 1e-5
    assert "microbatches" in found.declared


def test_other_arithmetic_is_approximate() -> None:
    plan = Plan(compute_dtype=ComputeDtype.BFLOAT16)
    found = memfit.verify(*objects(), plan=plan, allow={"bf16"})
    assert found.kind == "approximate"
    assert 1e-4 < found.worst[1] < 0.1


def test_random_numbers_of_microbatches_are_told() -> None:
    found = memfit.verify(*objects(dropout=0.5), plan=Plan(microbatches=2))
    assert not found
    assert "draws random numbers" in str(found)


def test_a_plan_that_is_not_what_it_declares_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient is a hundredth larger than it should be, in one of three steps."""
    plain, calls = GradientHomes.finish_piece, []

    def wrong(self: GradientHomes, piece: Any) -> Tensor:
        calls.append(piece.slot.name)
        found = plain(self, piece)
        return found.mul(1.01) if len(calls) == 20 else found

    monkeypatch.setattr(GradientHomes, "finish_piece", wrong)
    found = memfit.verify(*objects(), plan=AWAY)
    assert len(calls) == 36
    assert found.kind == "different"
    assert "please report" in str(found)


def test_a_changed_weight_is_found_without_a_changed_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, loss, batch = objects()
    calls: list[int] = []

    def other(given: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if not memfit.is_planning() and len(calls) == 1:
            with torch.no_grad():
                next(given.parameters()).add_(1e-7)  # the plain copy alone
        return loss(given, batch)

    assert memfit.verify(model, optimizer, other, batch, plan=AWAY).kind == "different"


@pytest.mark.parametrize(
    ("options", "words"), [({"store": "x"}, "store="), ({"lines": True}, "lines="), ({"steps": 0}, "at least 1")]
)
def test_what_has_no_meaning_here_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        memfit.verify(*objects(), **options)


def test_a_model_whose_weights_are_away_is_refused() -> None:
    model, optimizer, loss, batch = objects()
    with (
        memfit.fit(model, optimizer, loss, batch, plan=AWAY),
        pytest.raises(UsageError, match="a small model of the same kind"),
    ):
        memfit.verify(model, optimizer, loss, batch)
