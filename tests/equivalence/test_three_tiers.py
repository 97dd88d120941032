"""Device, host and disk at once, on an emulated device: homes mixed block by block, activations gone to both, every bit as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from equivalence import plans, zoo
from equivalence.compare import assert_equal_training
from equivalence.plain import adamw, sgd
from equivalence.with_memfit import fit_with, profile_by_name
from memfit.core.limits import Budget
from memfit.core.plan import BlockPlan, CallPlan, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.devices.binding import Allocator, install
from memfit.engine.offload import Offloader
from memfit.planner.search.planner import choose_plan
from unit.test_mixing import card

HOST, DISK, DEVICE = Tier.HOST, Tier.DISK, Tier.DEVICE

HOMES = (
    BlockPlan(weight_home=HOST, gradient_home=HOST, state_home=HOST),
    BlockPlan(weight_home=DISK, gradient_home=DISK, state_home=DISK),
    BlockPlan(weight_home=HOST, gradient_home=DEVICE, state_home=DISK),
    BlockPlan(weight_home=DISK, gradient_home=HOST, state_home=HOST),
    BlockPlan(weight_home=DEVICE, gradient_home=HOST, state_home=DISK),
    BlockPlan(),
)
FATES = (
    CallPlan(saved=Saved.OFFLOAD, saved_home=HOST),
    CallPlan(saved=Saved.OFFLOAD, saved_home=DISK),
    CallPlan(saved=Saved.RECOMPUTE, boundary_home=HOST),
    CallPlan(saved=Saved.RECOMPUTE, boundary_home=DISK),
    CallPlan(saved=Saved.SELECT, boundary_home=HOST),
)


def mixed_blocks(profile: Profile, first: int) -> dict[str, BlockPlan]:
    """Each block another mixture of homes, beginning with the given one."""
    homes = cycle(HOMES[first:] + HOMES[:first])
    return {block.name: next(homes) for block in profile.blocks if not block.is_spanning}


def mixed_fates(profile: Profile, first: int) -> tuple[CallPlan, ...]:
    """Each repeated call another fate."""
    fates: Iterator[CallPlan] = cycle(FATES[first:] + FATES[:first])
    is_repeated = [fate.saved is not Saved.KEEP for fate in plans.fates(profile, FATES[0])]
    return tuple(next(fates) if repeated else CallPlan() for repeated in is_repeated)


@pytest.fixture(autouse=True)
def every_storage_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are tiny; their saved tensors leave all the same."""
    defaults = Offloader.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "minimum_bytes", 256)


@pytest.mark.parametrize(("name", "first"), [("dict", 0), ("dict", 1), ("dict", 2), ("gpt2", 1)])
def test_homes_and_saved_tensors_mixed_over_three_tiers_give_the_bits_of_plain_pytorch(
    name: str, first: int, tmp_path: Path
) -> None:
    profile = profile_by_name(name)
    plan = Plan(blocks=mixed_blocks(profile, 2 * first), calls=mixed_fates(profile, first))
    assert_equal_training(
        zoo.ZOO[name], adamw(), fit_with(plan, tmp_path, emulate_device=True, keep_gradients=True), may_reorder=False
    )


@pytest.mark.parametrize(("name", "microbatches"), [("llama", 3), ("sequential", 2)])
def test_microbatches_layer_by_layer_over_three_tiers_give_the_bits_of_plain_accumulation(
    name: str, microbatches: int, tmp_path: Path
) -> None:
    profile = profile_by_name(name)
    plan = Plan(
        microbatches=microbatches,
        blocks=mixed_blocks(profile, 1),
        calls=mixed_fates(profile, 1),
        tail=plans.tail(profile),
        update=UpdateTime.AFTER_BACKWARD,
        prefetch=2,
    )
    assert_equal_training(
        zoo.ZOO[name],
        sgd(lr=0.5, momentum=0.9),
        fit_with(plan, tmp_path, max_grad_norm=0.05, emulate_device=True, keep_gradients=True),
        microbatches=microbatches,
        max_grad_norm=0.05,
    )


def test_what_rests_on_the_host_is_counted_there_and_not_on_the_device(tmp_path: Path) -> None:
    allocator = install()
    assert isinstance(allocator, Allocator)
    profile = profile_by_name("kwargs")
    on_host = BlockPlan(weight_home=HOST, gradient_home=HOST, state_home=HOST)
    plan = Plan(
        blocks={block.name: on_host for block in profile.blocks},
        calls=plans.fates(profile, CallPlan(saved=Saved.OFFLOAD, saved_home=HOST)),
    )
    case = zoo.ZOO["kwargs"]()
    before = allocator.stats("host").live_bytes
    job: Any = fit_with(plan, tmp_path, emulate_device=True)(case, adamw()(case.model))
    job.step(case.batch(0))
    house = job._assembly.house
    homes = sum(home.nbytes for home in house.factories[HOST]._homes)
    # Weight, gradient and two moments of each parameter, and the buffers that saved tensors rested in.
    assert homes >= 4 * sum(block.weight_bytes for block in profile.blocks)
    pool = house.pools()[HOST]
    assert pool.peak_bytes > 0
    assert allocator.stats("host").live_bytes - before == homes + pool.reserved_bytes
    job.close()
    del job, house
    assert allocator.stats("host").live_bytes == before


def test_a_mixed_plan_as_the_planner_finds_it_gives_the_bits_and_stays_below_its_peak(tmp_path: Path) -> None:
    """Layers of 9 MiB, planned for a card on which links are slow: they get unlike homes and policies."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
        torch.manual_seed(5)
        layers = [nn.Sequential(nn.Linear(1536, 1536, bias=False), nn.Tanh()) for _ in range(8)]
        model = nn.Sequential(*layers)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randn(512, 1536)

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).square().mean()

    plain, optimizer, rows = made()
    expected: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        found = loss(plain, rows)
        found.backward()
        optimizer.step()
        expected.append(found.item())
    model, own, rows = made()
    profile = replace(memfit.profile(model, own, loss, rows), agrees_on_host=True)
    hardware = card(flops=1e12, host=1e10, disk=2e9)
    budget = Budget(limit_bytes=round(0.75 * (4 * profile.weight_bytes)))
    choice = choose_plan(profile, budget, hardware, tiers=(HOST, DISK), splits_allowed=False)
    assert " x " in choice.name
    with memfit.fit(model, own, loss, rows, plan=choice.plan, emulate_device=True, directory=tmp_path) as job:
        results = [job.step(rows) for _ in range(2)]
        assert [result.loss for result in results] == expected
        assert all(result.peak_bytes <= job.predicted_peak_bytes for result in results)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
