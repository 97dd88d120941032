"""What a save costs in memory: two pieces, however large the model is, wherever it rests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import LimitBreachError, TierUnavailableError
from memfit.core.limits import MIB
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.devices.binding import Allocator, install
from memfit.files.writer import PIECE_BYTES
from memfit.job.loading import load

LAYERS, WIDTH = 4, 1800
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
# A tensor has at least this on the allocator's books beside its bytes.
SLACK_BYTES = 64 * 1024


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@pytest.fixture
def allocator() -> Allocator:
    try:
        return install()
    except TierUnavailableError as error:
        pytest.skip(f"exact peaks need memfit's allocator: {error}")


def start(tier: Tier, directory: Path) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    homes = BlockPlan(weight_home=tier, gradient_home=tier, state_home=tier)
    plan = Plan(blocks={str(i): homes for i in range(LAYERS)})
    job = memfit.fit(
        model,
        optimizer,
        loss,
        torch.randn(2, WIDTH),
        plan=plan,
        blocks=[str(i) for i in range(LAYERS)],
        directory=directory,
        enforce=False,
    )
    job.step(torch.randn(2, WIDTH))
    return job, model, optimizer


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.DEVICE])
def test_a_save_raises_the_peak_by_two_pieces_at_most(tmp_path: Path, allocator: Allocator, tier: Tier) -> None:
    job, _, _ = start(tier, tmp_path / "homes")
    with job:
        before = allocator.stats().live_bytes
        result = job.save(tmp_path / "out")
        record = next(r for r in job.proof().phases if r.name == "save")
        # Twelve times as many bytes were written as the two pieces hold.
        assert sum(result.files.values()) > 3 * LAYERS * LAYER_BYTES > 8 * 2 * PIECE_BYTES
        assert record.peak_bytes - before <= 2 * PIECE_BYTES + SLACK_BYTES
        assert allocator.stats().live_bytes - before <= SLACK_BYTES
        if tier is Tier.DISK:
            assert before < LAYER_BYTES


def test_loading_costs_one_piece_beside_what_it_makes(tmp_path: Path, allocator: Allocator) -> None:
    job, _, _ = start(Tier.DISK, tmp_path / "homes")
    job.save(tmp_path / "out")
    job.close()
    del job
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    before = allocator.stats().live_bytes
    allocator.reset_peak()
    load(tmp_path / "out", model, optimizer)
    states_bytes = 2 * LAYERS * LAYER_BYTES
    assert allocator.stats().peak_bytes - before <= states_bytes + PIECE_BYTES + MIB
    assert allocator.stats().live_bytes - before <= states_bytes + MIB


def test_a_limit_without_room_for_the_pieces_is_a_breach_that_changes_nothing(
    tmp_path: Path, allocator: Allocator
) -> None:
    job, _, _ = start(Tier.DISK, tmp_path / "homes")
    with job:
        # Room for one of the two pieces; what the pool keeps is given back when it is asked for.
        allocator.set_limit(allocator.stats().live_bytes + PIECE_BYTES + PIECE_BYTES // 2)
        try:
            with pytest.raises(LimitBreachError, match="while saving") as caught:
                job.save(tmp_path / "out")
        finally:
            allocator.set_limit(None)
        assert caught.value.phase == "save"
        assert not caught.value.torn
        assert sorted(p.name for p in tmp_path.iterdir()) == ["homes"]
        job.step(torch.randn(2, WIDTH))
        job.save(tmp_path / "out")
