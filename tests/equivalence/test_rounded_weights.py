"""bf16 weights without masters: a plain loop that rounds by hand, bit for bit, wherever weights rest; what stochastic rounding keeps on average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import PlanError, UsageError
from memfit.core.plan import BlockPlan, Plan
from memfit.core.storage_formats import ComputeDtype, StateFormat
from memfit.core.tiers import Tier
from memfit.homes import update_pieces
from memfit.step.lower import lower
from memfit.step.predict import predict
from memfit.tensors.noise import RoundingNoise

WIDTH = 72
ON_DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
STATES_ON_DISK = BlockPlan(state_home=Tier.DISK)
NAMES = ["layers.0", "layers.1", "layers.2"]
BF16 = ComputeDtype.BFLOAT16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        return rows


def build() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - 0.1).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def plan_of(where: str, **options: Any) -> Plan:
    homes = {"resident": {}, "disk": dict.fromkeys(NAMES, ON_DISK), "states": dict.fromkeys(NAMES, STATES_ON_DISK)}
    atomic = where == "atomic"
    return Plan(
        blocks=homes["disk" if atomic else where], compute_dtype=BF16, drops_masters=True, is_atomic=atomic, **options
    )


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, directory: Path, **options: Any) -> memfit.Job:
    allow = {"bf16-weights-sr", "int8-state"}
    return memfit.fit(
        model, optimizer, loss_of, batch(0), plan=plan, allow=allow, directory=directory / "homes", **options
    )


def round_by_hand(value: Tensor, name: str, step: int) -> Tensor:
    bits = value.reshape(-1).view(torch.int32)
    noise = RoundingNoise(seed=torch.initial_seed(), step=step).bits(f"{name}/weight", 0, bits.numel(), bits.device)
    goes_up = noise >= 65536 - (bits & 0xFFFF)
    upper = (bits >> 16) + goes_up.to(torch.int32)
    return (upper << 16).view(torch.float32).view(value.shape)


def train_by_hand(steps: int) -> Net:
    """fp32 weights that always hold bf16 values; gradients of a bf16 copy."""
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    optimizer = adamw(model)
    copy = build().to(torch.bfloat16)
    for step in range(steps):
        copy.load_state_dict(model.state_dict())
        copy.zero_grad()
        loss_of(copy, batch(step).to(torch.bfloat16)).backward()
        for parameter, computed in zip(model.parameters(), copy.parameters(), strict=True):
            assert computed.grad is not None
            parameter.grad = computed.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(round_by_hand(parameter, name, step))
    return model


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_pieces, "PIECE_ELEMENTS", 1024)


@pytest.mark.parametrize("where", ["resident", "disk", "states", "atomic"])
def test_training_equals_plain_training_that_rounds_by_hand(where: str, tmp_path: Path) -> None:
    model = build()
    drawn = torch.get_rng_state()
    with fit(model, adamw(model), plan_of(where), tmp_path) as job:
        for step in range(3):
            assert job.step(batch(step)).departures == ()
    assert torch.equal(torch.get_rng_state(), drawn)
    plain = train_by_hand(3)
    for name, parameter in plain.named_parameters():
        mine = model.get_parameter(name)
        assert mine.dtype == torch.float32
        assert torch.equal(mine, parameter), name
        assert torch.equal(mine, mine.to(torch.bfloat16)), name


@pytest.mark.parametrize("where", ["resident", "disk"])
def test_two_bytes_a_parameter_rest_and_move(where: str, tmp_path: Path) -> None:
    model = build()
    with fit(model, adamw(model), plan_of(where, state_format=StateFormat.INT8), tmp_path) as job:
        job.step(batch(0))
        _, before = job.bytes_moved
        job.step(batch(1))
        _, after = job.bytes_moved
        written = predict(lower(job.schedule, job.plan, job.profile)).bytes_written
        assert "master" not in after
        assert written.get("master", 0) == 0
        weights = sum(2 * p.numel() for p in model.parameters())
        if where == "disk":
            assert after["weight"] - before["weight"] == weights
            assert weights <= written["weight"] < weights + 4096 * 6
        assert sum(block.nbytes for block in job._assembly.blocks) < weights + 4096 * 6


def test_an_update_below_half_a_unit_is_kept_on_average(tmp_path: Path) -> None:
    # 1 + 2^-11 is a sixteenth of the way from 1 to the next bf16 value: nearest rounding would never move a weight.
    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1 << 14))

        def forward(self, factor: Tensor) -> Tensor:
            return (self.weight * factor).sum()

    model = Row()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-11)
    plan = Plan(compute_dtype=BF16, drops_masters=True)
    with memfit.fit(
        model, optimizer, lambda row, factor: row(factor), torch.tensor([-1.0]), plan=plan, allow={"bf16-weights-sr"}
    ) as job:
        job.step(torch.tensor([-1.0]))
    values, counts = model.weight.detach().unique(return_counts=True)
    assert values.tolist() == [1.0, 1.0 + 2.0**-7]
    # A sixteenth moves: mean 1024 of 16384, standard deviation 31.
    assert 1024 - 5 * 31 < int(counts[1]) < 1024 + 5 * 31


def test_a_save_holds_the_weights_and_a_job_goes_on_from_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = build()
    with fit(model, adamw(model), plan_of("disk"), tmp_path) as job:
        job.step(batch(0))
        job.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(saved[name].float(), parameter), name


def test_it_has_to_be_allowed_and_to_make_sense() -> None:
    model = build()
    with pytest.raises(UsageError, match='allow={"bf16-weights-sr"}'):
        memfit.fit(model, adamw(model), loss_of, batch(0), plan=plan_of("resident"), allow={"bf16"})
    with pytest.raises(PlanError, match="drops_masters"):
        Plan(drops_masters=True)
    with pytest.raises(PlanError, match="drops_masters"):
        Plan(drops_masters=True, splits_masters=True, compute_dtype=BF16)
    plan = plan_of("disk")
    assert Plan.from_json(plan.to_json()) == plan
