"""Loops of the user's own on an accelerator, whose backward runs in autograd's device thread: the bits of plain PyTorch there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import memfit
from memfit.core.plan import BlockPlan, CallPlan, Plan, UpdateTime
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier

ROWS, WIDTH, LAYERS = 32, 64, 3


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(torch.relu(self.up(hidden))))


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _made(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Layer() for _ in range(LAYERS))).to(device)
    batches = [torch.randn(ROWS, WIDTH, device=device) for _ in range(4)]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), batches


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> list[float]:
    torch.manual_seed(3)
    log: list[float] = []
    for step in range(3):
        for part in range(2):
            loss = _loss(model, batches[(2 * step + part) % 4]) / 2
            loss.backward()
            log.append(loss.item())
        log.append(float(clip_grad_norm_(model.parameters(), 0.1, foreach=False)))
        optimizer.step()
        optimizer.zero_grad()
    return log


def _plan(home: Tier, gradients: Tier, saved: Saved) -> Plan:
    blocks = {str(i): BlockPlan(weight_home=home, state_home=home, gradient_home=gradients) for i in range(LAYERS)}
    call = CallPlan(saved=saved, saved_home=Tier.HOST if saved is Saved.OFFLOAD else Tier.DISK)
    return Plan(blocks=blocks, calls=(call,) * LAYERS, update=UpdateTime.AFTER_BACKWARD)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(update=UpdateTime.AFTER_BACKWARD),
        _plan(Tier.HOST, Tier.HOST, Saved.RECOMPUTE),
        _plan(Tier.HOST, Tier.DEVICE, Saved.OFFLOAD),
        _plan(Tier.DISK, Tier.DISK, Saved.KEEP),
    ],
    ids=["resident", "host, recomputed", "gradients on the device, offloaded", "disk"],
)
def test_a_loop_is_bitwise_on_an_accelerator(device: torch.device, plan: Plan) -> None:
    model, optimizer, batches = _made(device)
    expected = _loop(model, optimizer, batches)
    ours, our_optimizer, batches = _made(device)
    with memfit.fit(ours, our_optimizer, _loss, batches[0], plan=plan, lines=True) as job:
        with job.lines() as lines:
            found = _loop(ours, our_optimizer, batches)
        assert lines.departures == ()
    assert found == expected
    for parameter, other in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter.cpu(), other.cpu())
