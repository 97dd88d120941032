"""Plans for several ranks: the choice among uniform ones, against arithmetic on a hand-made machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from memfit.core.errors import DoesNotFitError, PlanError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.limits import MIB
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.tiers import Tier
from memfit.planner.search.over_ranks_plans import choose_over_ranks, share_out
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict

LAYERS, WIDTH = 6, 512
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
WEIGHTS = LAYERS * LAYER_BYTES


def machine(network: float = 1e9, *, latency_s: float = 0.0) -> Hardware:
    """A device that computes in no time, with a slow disk."""
    slow = Link(read_bytes_per_s=1e8, write_bytes_per_s=1e8)
    return Hardware(
        device="gpu",
        flops_per_s=1e18,
        update_elements_per_s=1e18,
        tiers={Tier.DEVICE: TierSpec(nbytes=1 << 40), Tier.DISK: TierSpec(nbytes=1 << 40, link=slow)},
        network={"data": Link(read_bytes_per_s=network, write_bytes_per_s=network, latency_s=latency_s)},
    )


@pytest.fixture(scope="module")
def profile() -> Profile:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return memfit.profile(model, optimizer, lambda m, b: m(b).square().mean(), torch.randn(8, WIDTH), microbatches=(1,))


def choose(profile: Profile, ranks: int, room: int | None, hardware: Hardware | None) -> tuple[str, Plan]:
    found = choose_over_ranks(profile, (1,), ranks, room, hardware, clips_norm=False, device="gpu")
    return found.name, found.plan


def test_the_tables_of_zero_are_the_bytes_that_rest(profile: Profile) -> None:
    """Weights, gradients, and states of twice as many bytes: K = 8 without masters. Source: Rajbhandari et al. 2020, figure 1."""
    for ranks in (2, 3, 4, 64):
        for stage, (weights, gradients, states) in enumerate(
            [(1, 1, 1), (1, 1, ranks), (1, ranks, ranks), (ranks,) * 3]
        ):
            plan = share_out(Plan(), ranks, stage, [block.name for block in profile.blocks])
            step = lower(build_step(plan, profile, clips_norm=False), plan, profile, device="gpu")
            resting = sum(
                c.nbytes for c in step.resting if c.category in ("weight", "gradient", "state") and c.owner[0] == "B"
            )
            expected = WEIGHTS / weights + WEIGHTS / gradients + 2 * WEIGHTS / states
            # A share ends on a unit of 4096 elements, of each layer's four tensors.
            assert expected * 0.999 - 1 <= resting <= expected * 1.03 + LAYERS * 4 * 2 * 16384


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_a_rank_receives_is_by_the_textbook_and_takes_the_links_time(profile: Profile, ranks: int) -> None:
    part = (ranks - 1) / ranks
    # All-reduce as reduction and gather; ZeRO-1 gathers the sums and the new weights; ZeRO-3 gathers
    # for forward and backward, but the last block, which stays, once.
    expected = {0: 2.0, 1: 3.0, 2: 2.0, 3: 3.0 - 1 / LAYERS}
    for stage, ways in expected.items():
        plan = share_out(Plan(), ranks, stage, [block.name for block in profile.blocks])
        step = lower(build_step(plan, profile, clips_norm=False), plan, profile, device="gpu")
        found = predict(step, machine(network=1e6))
        assert sum(found.bytes_received.values()) == pytest.approx(ways * part * WEIGHTS, rel=0.01)
        # The device takes no time: the step is what the link takes.
        assert found.seconds == pytest.approx(ways * part * WEIGHTS / 1e6, rel=0.02)


def test_the_fastest_plan_that_fits_is_taken_and_less_room_takes_no_less_time(profile: Profile) -> None:
    free = choose(profile, 4, None, machine())
    assert " on device, 1 microbatches, keep" in free[0]
    before = 0.0
    for room in (int(4.5 * WEIGHTS), int(2.5 * WEIGHTS), int(1.9 * WEIGHTS)):
        _, plan = choose(profile, 4, room, machine())
        step = lower(build_step(plan, profile, clips_norm=False), plan, profile, device="gpu")
        found = predict(step, machine())
        assert found.peak_bytes <= room
        assert found.seconds >= before
        before = found.seconds
    assert plan.block(profile.blocks[0].name).weights_over == "data"


def test_a_fast_disk_wins_where_shares_do_not_fit_and_what_fits_nowhere_is_refused(profile: Profile) -> None:
    name, _ = choose(profile, 2, int(10.5 * MIB), machine())
    assert name.startswith("ZeRO-3 on disk")
    with pytest.raises(
        DoesNotFitError, match=r"no plan fits the rank with the least room, 1.0 MiB of tensors: the smallest"
    ):
        choose(profile, 2, MIB, machine())


def test_a_machine_without_links_between_ranks_prices_no_plan_for_them(profile: Profile) -> None:
    with pytest.raises(PlanError, match="nothing is known of the links between those of 'gpu'"):
        choose(profile, 2, None, replace(machine(), network={}))


def test_each_collective_takes_the_latency_too(profile: Profile) -> None:
    plan = share_out(Plan(), 2, 3, [block.name for block in profile.blocks])
    step = lower(build_step(plan, profile, clips_norm=False), plan, profile, device="gpu")
    collectives = sum(len(operation.transfers) for operation in step)
    seconds = [predict(step, machine(latency_s=latency)).seconds for latency in (0.0, 1.0)]
    assert collectives == 3 * LAYERS - 1
    assert seconds[1] - seconds[0] == pytest.approx(collectives, rel=0.1)
