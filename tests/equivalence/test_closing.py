"""A job's end: a model that was never whole in memory is not brought back whole past the limit unless somebody says so."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence.compare import same_bits
from memfit.core.errors import DoesNotFitError, TierUnavailableError
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.devices.binding import Allocator, install
from memfit.tensors.guard import is_away

WIDTH, LAYERS = 512, 12
LAYER_BYTES = 4 * WIDTH * WIDTH
STATES = 2


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    try:
        found = install()
    except TierUnavailableError as error:
        pytest.skip(f"exact limits need memfit's allocator: {error}")
    yield found
    found.set_limit(None)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def start(allocator: Allocator, directory: Path, *, is_empty: bool, layers: int) -> Any:
    """A job on disk, on an emulated device with room for so many layers."""
    model = memfit.empty(build) if is_empty else build()
    home = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    names = [str(i) for i in range(LAYERS)]
    gc.collect()  # what earlier tests left would be room for the model, were it given up later
    allocator.trim()
    limit = allocator.stats().live_bytes + layers * LAYER_BYTES
    job = memfit.fit(
        model,
        torch.optim.AdamW(model.parameters()),
        loss,
        torch.ones(4, WIDTH),
        plan=Plan(blocks=dict.fromkeys(names, home)),
        blocks=names,
        directory=directory,
        limit=limit,
        emulate_device=True,
    )
    job.step(torch.ones(4, WIDTH))
    return job


def weights(job: Any) -> list[Tensor]:
    with job.weights():
        return [p.detach().clone() for p in job._assembly.model.parameters()]


def test_a_model_larger_than_the_limit_is_kept_home_until_it_is_said_what_becomes_of_it(
    allocator: Allocator, tmp_path: Path
) -> None:
    job = start(allocator, tmp_path / "homes", is_empty=True, layers=20)
    model = job._assembly.model
    with pytest.raises(DoesNotFitError, match=r"job\.close\(restore=False\).*job\.close\(restore=True\)") as caught:
        job.close()
    limit = job.proof().limit_bytes
    assert caught.value.smallest_limit_bytes is not None
    assert caught.value.smallest_limit_bytes > limit
    assert all(is_away(p) for p in model.parameters())
    job.step(torch.ones(4, WIDTH))  # it goes on, its limit too
    assert allocator.stats().limit_bytes == limit
    job.save(tmp_path / "saved")
    job.close(restore=True)
    assert not any(is_away(p) for p in model.parameters())
    job.close()  # may be repeated


def test_nothing_is_brought_back_where_that_is_said_or_an_error_is_on_its_way(
    allocator: Allocator, tmp_path: Path
) -> None:
    with start(allocator, tmp_path / "one", is_empty=True, layers=20) as job:
        job.close(restore=False)
    assert all(is_away(p) for p in job._assembly.model.parameters())
    with pytest.raises(KeyError) as caught, start(allocator, tmp_path / "two", is_empty=True, layers=20) as job:
        raise KeyError("the user's own")
    assert "closed without giving the model back" in caught.value.__notes__[0]
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(("is_empty", "layers"), [(True, (2 + STATES) * LAYERS + 4), (False, 20)])
def test_what_fits_or_was_whole_before_comes_back(
    is_empty: bool, layers: int, allocator: Allocator, tmp_path: Path
) -> None:
    with start(allocator, tmp_path / "homes", is_empty=is_empty, layers=layers) as job:
        model = job._assembly.model
        allocator.set_limit(None)
        before = weights(job)
    for p, values in zip(model.parameters(), before, strict=True):
        assert same_bits(p.detach(), values)
    assert len(job._assembly.setup.optimizer.state) == LAYERS
