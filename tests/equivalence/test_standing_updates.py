"""Updates of blocks that rest where they are updated, whose memory stays lent: beside plain PyTorch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.layout import PIECE_ELEMENTS
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.tiers import Tier
from memfit.optimizers import OptimizerDriver

WIDTH = 24


class Model(nn.Module):
    """One weight takes more than a piece, one is used in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.large = nn.Embedding(PIECE_ELEMENTS // WIDTH + 9, WIDTH)
        self.seldom = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor, *, is_odd: bool) -> Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values))
        values = values + self.large.weight[-len(values) :]
        return self.seldom(values) if is_odd else values


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, two groups": lambda model: torch.optim.AdamW(
        [{"params": [model.large.weight], "weight_decay": 0.1}, {"params": [p for n, p in model.named_parameters() if "large" not in n]}], lr=1e-2
    ),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True),
}  # fmt: skip


def loss_of(model: Any, batch: tuple[Tensor, bool]) -> Tensor:
    return model(batch[0], is_odd=batch[1]).square().mean()


def batch(index: int) -> tuple[Tensor, bool]:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)), index % 2 == 1


def train(optimizer_of: Callable[[Any], torch.optim.Optimizer], save: Path | None) -> tuple[Model, list[float]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    norms: list[float] = []

    def step(index: int) -> None:
        loss_of(model, batch(index)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    if save is None:
        for index in range(6):
            step(index)
        return model, norms
    job = memfit.fit(model, optimizer, loss_of, batch(1), plan=Plan(update=UpdateTime.AFTER_BACKWARD), lines=True)
    with job.lines():
        for index in range(4):
            step(index)
        job.save(save)
        # What is lent must be what is there: states come and go in between.
        kept, learning_rates = list(norms), [group["lr"] for group in optimizer.param_groups]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        step(0)
        job.load(save)
        norms[:] = kept
        scheduler.last_epoch -= 1
        for group, rate in zip(optimizer.param_groups, learning_rates, strict=True):
            group["lr"] = rate
        for index in range(4, 6):
            step(index)
    job.close()
    return model, norms


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_lent_memory_are_plain(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    own = OptimizerDriver.update_standing

    def counting(driver: OptimizerDriver, lent: Any) -> Any:
        used.append(len({id(part.leaf) for part, _, _ in lent}))
        return own(driver, lent)

    monkeypatch.setattr(OptimizerDriver, "update_standing", counting)
    expected, expected_norms = train(OPTIMIZERS[name], None)
    found, norms = train(OPTIMIZERS[name], tmp_path / "saved")
    assert norms == expected_norms
    for (parameter, weight), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, other), parameter
    assert max(used) >= 2  # pieces in one call
    assert len(used) >= 6


def test_blocks_that_come_and_go_lend_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Model()
    blocks = {f"layers.{index}": BlockPlan(state_home=Tier.DISK) for index in range(3)}
    seen: set[str] = set()
    own = OptimizerDriver.stand

    def noting(driver: OptimizerDriver, name: str, *rest: Any) -> Any:
        seen.add(name)
        return own(driver, name, *rest)

    monkeypatch.setattr(OptimizerDriver, "stand", noting)
    plan = Plan(blocks=blocks, update=UpdateTime.AFTER_BACKWARD)
    with memfit.fit(model, torch.optim.AdamW(model.parameters()), loss_of, batch(1), plan=plan) as job:
        for _ in range(3):
            job.step(batch(1))
    assert not any(name.startswith("layers.") for name in seen)
