"""Frozen weights that rest in few bits: training is plain PyTorch on the rounded weights, bit for bit, wherever they rest."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence.beside_plain import same_bits_beside_plain
from memfit.core.errors import PlanError, UnsupportedError, UsageError
from memfit.core.format_catalog import find_format
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.storage_formats import FrozenFormat
from memfit.core.tiers import Tier
from memfit.devices.binding import install
from memfit.homes.encoded_weights import decode, encode

WIDTH, WORDS = 64, 11
FORMATS = [FrozenFormat.NF4, FrozenFormat.INT8]


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank one beside it, as LoRA has it; dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 2 * WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        for frozen in (self.base, self.down):
            frozen.requires_grad_(requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.base(hidden) + self.b(self.a(self.dropout(hidden)))))


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Adapted() for _ in range(3)), nn.Linear(WIDTH, WORDS))
    model[0].requires_grad_(requires_grad=False)
    return model.to(dtype)


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())


def batch(index: int) -> Tensor:
    return torch.randint(0, WORDS, (2, 5), generator=torch.Generator().manual_seed(index))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def rounded(values: Tensor, chosen: FrozenFormat) -> Tensor:
    """Another road: each value to its nearest level, by a table of all distances."""
    if chosen is FrozenFormat.INT8:
        scale = values.float().abs().amax(dim=1, keepdim=True)
        return (torch.round(values.float() * (127 / scale)) * scale * (1 / 127)).to(values.dtype)
    table: Any = find_format("nf4")
    levels = torch.tensor([float(level) for level in table.levels])
    blocks = values.float().view(-1, 64)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    nearest = ((blocks / scale).unsqueeze(-1) - levels).abs().argmin(dim=-1)
    return (levels[nearest] * scale).view_as(values).to(values.dtype)


def plan_of(where: str, chosen: FrozenFormat) -> Plan:
    disk = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
    blocks = {"disk": dict.fromkeys(("1", "2", "3"), disk), "mixed": {"2": disk}}.get(where, {})
    return Plan(blocks=blocks, frozen_format=chosen, update=UpdateTime.AFTER_BACKWARD)


def plain(chosen: FrozenFormat, dtype: torch.dtype) -> tuple[nn.Module, list[float]]:
    model: Any = build(dtype)
    with torch.no_grad():
        for layer in model[1:4]:
            for part in (layer.base, layer.down):
                part.weight.copy_(rounded(part.weight, chosen))
    log: list[float] = []
    train(model, optimizer_of(model), log)
    return model, log


def train(model: nn.Module, optimizer: torch.optim.Optimizer, log: list[float]) -> None:
    torch.manual_seed(5)
    for index in range(4):
        loss = loss_of(model, batch(index))
        loss.backward()
        log.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("where", ["device", "disk", "mixed"])
@pytest.mark.parametrize("chosen", FORMATS)
def test_training_is_that_of_the_rounded_weights(
    chosen: FrozenFormat, where: str, dtype: torch.dtype, tmp_path: Any
) -> None:
    """With an evaluation, a look at weights and a save in between, which change nothing."""
    theirs, plain_log = plain(chosen, dtype)
    ours, log = build(dtype), []
    optimizer = optimizer_of(ours)
    plan = plan_of(where, chosen)
    with memfit.fit(ours, optimizer, loss_of, batch(0), plan=plan, allow={chosen.allowance}) as job:
        assert f"frozen weights in {chosen}" in str(job.numerics)
        torch.manual_seed(5)
        for index in range(4):
            log.append(job.step(batch(index)).loss)
            state = torch.get_rng_state()
            job.evaluate(batch(9))
            with job.weights():
                assert torch.equal(ours[1].base.weight, theirs[1].base.weight)  # type: ignore[union-attr, arg-type]
            job.save(tmp_path / "saved")
            torch.set_rng_state(state)
    assert log == plain_log
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    again = build(dtype)
    memfit.fit(again, optimizer_of(again), loss_of, batch(0), weights=tmp_path / "saved").close()
    assert all(map(torch.equal, again.parameters(), theirs.parameters()))


def test_lines_of_the_users_own_train_on_them_too() -> None:
    theirs, plain_log = plain(FrozenFormat.NF4, torch.float32)
    ours, log = build(), []
    optimizer = optimizer_of(ours)
    plan = plan_of("disk", FrozenFormat.NF4)
    with (
        memfit.fit(ours, optimizer, loss_of, batch(0), plan=plan, allow={"nf4-frozen"}, lines=True) as job,
        job.lines(),
    ):
        train(ours, optimizer, log)
    assert log == plain_log
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


@pytest.mark.slow
def test_a_limit_that_the_base_does_not_fit_is_met_in_few_bits() -> None:
    """On an emulated device without room beside it, by a model that is never whole: half of its weights."""
    values = torch.randn(4, 1024)
    gc.collect()
    limit = install().stats().live_bytes + int(0.55 * 8 * 1024 * 1024 * 4)

    def new() -> nn.Module:
        return memfit.empty(lambda: nn.Sequential(*(Wide() for _ in range(8))))

    model = new()
    options: dict[str, Any] = {"limit": limit, "emulate_device": True, "host_limit": 1 << 16, "disk_limit": 1 << 16}
    with pytest.raises(memfit.DoesNotFitError):
        memfit.fit(model, optimizer_of(model), square, values, **options)
    model = new()
    job = memfit.fit(model, optimizer_of(model), square, values, allow={"nf4-frozen"}, **options)
    assert job.plan.frozen_format is FrozenFormat.NF4
    assert "rest in nf4" in job.reason
    first = job.step(values).loss
    assert job.step(values).loss < first
    assert job.proof().holds
    job.close(restore=False)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.scale = nn.Linear(1024, 1024, bias=False), nn.Parameter(torch.ones(1024))
        self.base.requires_grad_(requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.base(hidden) * self.scale


def square(model: nn.Module, values: Tensor) -> Tensor:
    return model(values).square().mean()


def test_what_does_not_go_with_few_bits_is_told() -> None:
    model = build()
    with pytest.raises(UsageError, match='allow={"nf4-frozen"}'):
        memfit.fit(model, optimizer_of(model), loss_of, batch(0), plan=Plan(frozen_format=FrozenFormat.NF4))
    with pytest.raises(PlanError, match="compute_dtype='given'"):
        Plan(frozen_format=FrozenFormat.NF4, compute_dtype="bfloat16")  # type: ignore[arg-type]
    trained = build().requires_grad_()
    with memfit.fit(
        trained,
        optimizer_of(trained),
        loss_of,
        batch(0),
        plan=Plan(frozen_format=FrozenFormat.NF4),
        allow={"nf4-frozen"},
    ) as job:
        assert job.numerics.is_exact  # nothing is frozen, and nothing rounded


def test_a_store_is_refused(tmp_path: Any) -> None:
    model = build()
    with pytest.raises(UnsupportedError, match="job.save between steps"):
        memfit.fit(
            model, optimizer_of(model), loss_of, batch(0), plan=Plan(frozen_format=FrozenFormat.NF4), allow={"nf4-frozen"},
            store=tmp_path / "run",
        )  # fmt: skip


def test_bits_are_those_of_bitsandbytes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="for comparison alone: pip install bitsandbytes")
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(96, 128).to(dtype)
        values[:, :64] *= torch.logspace(-12, 4, 96).to(dtype).unsqueeze(1)
        codes, state = bitsandbytes.functional.quantize_4bit(values, quant_type="nf4", compress_statistics=False)
        expected = bitsandbytes.functional.dequantize_4bit(codes, state)
        found = torch.empty(values.numel(), dtype=dtype)
        decode(FrozenFormat.NF4, state.absmax, codes.view(-1), found)
        assert torch.equal(found.view_as(expected), expected)
        scales, own = encode(FrozenFormat.NF4, values.view(-1), 96)
        assert torch.equal(scales, state.absmax)
        assert torch.equal(own, codes.view(-1))
        rows, row_scales, _ = bitsandbytes.functional.int8_vectorwise_quant(values.half())
        found = torch.empty(values.numel())
        decode(FrozenFormat.INT8, row_scales, rows.view(torch.uint8).view(-1), found)
        assert torch.equal(found.view(96, 128), bitsandbytes.functional.int8_vectorwise_dequant(rows, row_scales))


@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.DISK])
def test_blocks_that_the_optimizer_does_not_hold_are_left_alone(home: Tier, tmp_path: Path) -> None:
    """Their parameters want gradients, and nobody updates them: a head is trained without freezing the rest."""

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
        return model, torch.optim.AdamW(model[2].parameters(), lr=1e-2)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    batch = torch.randn(4, 16)
    same = same_bits_beside_plain(parts, loss, batch, lambda _: BlockPlan(weight_home=home), tmp_path)
    assert same == [True] * 6
