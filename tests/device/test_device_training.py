"""Training on an accelerator: the bits of plain PyTorch there, weights and states in host memory or on disk, the limit held by the caching allocator.

Every test runs on the late device (tests/accelerator) and, where there is one, on CUDA. Activations are larger than what never leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.core.plan import BlockPlan, CallPlan, Plan
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.homes.masters import join, split

ROWS, WIDTH, LAYERS, STEPS = 128, 128, 3, 2


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(torch.relu(self.up(self.norm(hidden)))))


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([_Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(rows)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _made(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = _Tower().to(device)
    batch = (torch.randn(ROWS, WIDTH, device=device), torch.randint(0, 10, (ROWS,), device=device))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch


def _plan(tier: Tier, saved: Saved, microbatches: int) -> Callable[[Profile], Plan]:
    def make(profile: Profile) -> Plan:
        calls = next(iter(profile.traces.values())).calls
        away = tier if tier is not Tier.DEVICE else Tier.HOST
        fate = CallPlan(saved=saved, saved_home=away)
        return Plan(
            microbatches=microbatches,
            blocks={
                b.name: BlockPlan(weight_home=tier, gradient_home=Tier.DEVICE, state_home=tier) for b in profile.blocks
            },
            calls=tuple(fate if c.is_repeated else CallPlan() for c in calls),
            tail=len(calls) - 1 if microbatches > 1 else None,
        )

    return make


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("saved", [Saved.KEEP, Saved.RECOMPUTE, Saved.OFFLOAD])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_training_on_a_device_equals_plain_pytorch_bit_for_bit(
    device: torch.device, tier: Tier, saved: Saved, microbatches: int, tmp_path: Path
) -> None:
    plain, plain_optimizer, batch = _made(device)
    torch.manual_seed(1)
    for _ in range(STEPS):
        plain_optimizer.zero_grad()
        stream = memfit.microbatch_streams(microbatches)
        for m, (rows, labels) in enumerate(zip(*(t.tensor_split(microbatches) for t in batch), strict=True)):
            with stream(m):
                loss = _loss(plain, (rows, labels))
                (loss if microbatches == 1 else loss * (len(rows) / ROWS)).backward()
        plain_optimizer.step()

    model, optimizer, batch = _made(device)
    plan = _plan(tier, saved, microbatches)(memfit.profile(model, optimizer, _loss, batch))
    torch.manual_seed(1)
    with memfit.fit(model, optimizer, _loss, batch, plan=plan, directory=tmp_path / "homes") as job:
        for _ in range(STEPS):
            assert job.step(batch).departures == ()
    for (name, theirs), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs, ours), name
        for key, value in plain_optimizer.state[theirs].items():
            assert torch.equal(value, optimizer.state[ours][key]), (name, key)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_bf16_training_on_a_device_equals_masters_and_sums_kept_by_hand(
    device: torch.device, tier: Tier, splits: bool, microbatches: int, tmp_path: Path
) -> None:
    """Weights in bf16 rounded from fp32 masters, gradients of microbatches added in fp32, AdamW on the masters."""
    plain, _, (rows, labels) = _made(device)
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in plain.named_parameters()}
    by_hand = torch.optim.AdamW(masters.values(), lr=1e-2)
    plain.bfloat16()
    sums: dict[str, torch.Tensor] = {}
    torch.manual_seed(1)
    for _ in range(STEPS):
        stream = memfit.microbatch_streams(microbatches)
        parts = zip(*(t.tensor_split(microbatches) for t in (rows.bfloat16(), labels)), strict=True)
        for m, part in enumerate(parts):
            with stream(m):
                loss = _loss(plain, part)
                (loss if microbatches == 1 else loss * (len(part[0]) / ROWS)).backward()
            for name, p in plain.named_parameters():
                assert p.grad is not None
                sums[name] = p.grad.float() if m == 0 else sums[name] + p.grad
                p.grad = None
                masters[name].grad = sums[name]
        by_hand.step()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(masters[name])

    model, optimizer, batch = _made(device)
    plan = _plan(tier, Saved.RECOMPUTE, microbatches)(memfit.profile(model, optimizer, _loss, batch))
    plan = replace(plan, compute_dtype=ComputeDtype.BFLOAT16, splits_masters=splits)
    torch.manual_seed(1)
    with memfit.fit(model, optimizer, _loss, batch, plan=plan, allow={"bf16"}, directory=tmp_path / "homes") as job:
        for _ in range(STEPS):
            assert job.step(batch).departures == ()
    for name, ours in model.named_parameters():
        assert torch.equal(masters[name], ours), name
        for key, value in by_hand.state[masters[name]].items():
            assert torch.equal(value, optimizer.state[ours][key]), (name, key)


def test_a_model_born_empty_on_a_device_trains_as_one_built_plainly(device: torch.device, tmp_path: Path) -> None:
    trained: list[dict[str, torch.Tensor]] = []
    for is_born in (False, True):
        plain, _, batch = _made(device)
        model = memfit.empty(lambda: _made(device)[0]) if is_born else plain
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = replace(
            _plan(Tier.HOST, Saved.RECOMPUTE, 4)(memfit.profile(model, optimizer, _loss, batch)),
            compute_dtype=ComputeDtype.BFLOAT16,
            splits_masters=True,
        )
        torch.manual_seed(1)
        with memfit.fit(model, optimizer, _loss, batch, plan=plan, allow={"bf16"}, directory=tmp_path / "homes") as job:
            for _ in range(STEPS):
                job.step(batch)
        trained.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, wanted in trained[0].items():
        assert torch.equal(trained[1][name], wanted), name


def test_masters_are_split_and_joined_on_a_device_as_on_the_cpu(device: torch.device) -> None:
    upper = torch.arange(1 << 16, dtype=torch.int64).unsqueeze(1) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    master = (upper | lower).reshape(-1).to(torch.int32).view(torch.float32)
    on_device = master.to(device)
    difference, marks = split(on_device)
    again = torch.empty_like(on_device)
    join(on_device.bfloat16(), difference, marks, again)
    is_nan = master.isnan()
    assert torch.equal(again.cpu().isnan(), is_nan)
    assert torch.equal(again.cpu().view(torch.int32)[~is_nan], master.view(torch.int32)[~is_nan])


def test_the_limit_is_held_by_the_device_and_an_impossible_one_is_refused(device: torch.device) -> None:
    model, optimizer, batch = _made(device)
    with pytest.raises(memfit.DoesNotFitError):
        memfit.fit(model, optimizer, _loss, batch, limit="64KiB", enforce=False)


def test_host_homes_are_pinned_in_exact_size(device: torch.device) -> None:
    from memfit.homes import MemoryHome

    home = MemoryHome(3 << 20, tier=Tier.HOST, device=device, stream=torch.Stream(device))
    there = torch.arange((3 << 20) // 4, dtype=torch.int32, device=device)
    back = torch.zeros_like(there)
    home.write(0, 3 << 20, there.untyped_storage()).wait()
    home.read(0, 3 << 20, back.untyped_storage()).wait()
    assert torch.equal(there, back)
    home.close()
