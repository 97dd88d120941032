"""Limits that change between two steps: the plan follows, the bits stay those of plain PyTorch, and each limit has its proof."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from faults.tower import HARDWARE, Tower, loss
from memfit.core.errors import DoesNotFitError, MemfitWarning, UsageError
from memfit.core.hardware import Link
from memfit.core.limits import MIB
from memfit.core.plan import Plan

TOWER = Tower(width=96, layers=6, times=4, dropout=0.0, shape=(1024,))
LARGE = 200 * MIB
_SLOW = Link(read_bytes_per_s=1e8, write_bytes_per_s=1e8)
SLOW_LINKS = replace(
    HARDWARE, tiers={tier: replace(spec, link=spec.link and _SLOW) for tier, spec in HARDWARE.tiers.items()}
)


def start(directory: Path, **options: Any) -> tuple[nn.Module, memfit.Job]:
    model = TOWER.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    known: dict[str, Any] = {
        "limit": LARGE,
        "emulate_device": True,
        "hardware": HARDWARE,
        "on_breach": "replan",
        "numerics": "exact",
        "store": directory / "run",
    }
    directory.mkdir(exist_ok=True)
    return model, memfit.fit(model, optimizer, loss, TOWER.batch(0), **{**known, **options})


def plain(steps: int) -> nn.Module:
    """The model behind so many steps of plain PyTorch."""
    model = TOWER.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, TOWER.batch(step)).backward()
        optimizer.step()
    return model


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name


def smallest(directory: Path) -> int:
    with pytest.raises(DoesNotFitError) as caught:
        start(directory, limit=MIB // 8)
    named = caught.value.smallest_limit_bytes
    assert named is not None
    return named


@pytest.mark.filterwarnings(
    "ignore:step:memfit.core.errors.MemfitWarning", "ignore:from step:memfit.core.errors.MemfitWarning"
)
@pytest.mark.parametrize("seed", range(4))
def test_steps_under_limits_that_come_and_go_have_the_bits_of_plain_pytorch(seed: int, tmp_path: Path) -> None:
    dice, least = random.Random(seed), smallest(tmp_path / "least")
    model, job = start(tmp_path / "run")
    for step in range(6):
        limit = int(least * dice.uniform(1.05, 3.0)) if dice.random() < 0.8 else LARGE
        job.set_limit(limit)
        result = job.step(TOWER.batch(step))
        assert result.peak_bytes <= limit
        proof = job.proof()
        assert proof.holds and proof.limit_bytes == limit, proof.table()
    job.close()
    assert_equal(model, plain(6))


def test_a_smaller_limit_takes_a_leaner_plan_and_a_larger_one_the_faster_again(tmp_path: Path) -> None:
    model, job = start(tmp_path / "run", hardware=SLOW_LINKS)
    first = job.plan
    job.step(TOWER.batch(0))
    limit = int(0.66 * job.predicted_peak_bytes)
    before = job.set_limit(f"{limit}B")
    assert before.limit_bytes == LARGE and before.holds
    assert not job.proof().phases, "it begins anew"
    with pytest.warns(MemfitWarning, match=r"the limit is .* now, and was 200\.0 MiB"):
        told = job.step(TOWER.batch(1)).departures
    assert job.breaches[-1].in_words() in told, "sums may be others: the step says so"
    assert job.plan != first
    assert job.proof().holds and job.proof().measured_peak_bytes <= limit
    job.set_limit("200MiB")
    with pytest.warns(MemfitWarning, match="another plan is predicted to be faster under it"):
        job.step(TOWER.batch(2))
    assert job.plan == first
    assert [report.after for report in job.breaches][-1] == first
    job.step(TOWER.batch(3))
    job.close()
    assert_equal(model, plain(4))
    again, resumed = start(tmp_path / "run")
    assert resumed.steps == 4
    resumed.close()
    assert_equal(again, plain(4))


def test_a_limit_that_nothing_fits_is_refused_and_a_larger_one_lets_the_job_go_on(tmp_path: Path) -> None:
    model, job = start(tmp_path / "run")
    job.step(TOWER.batch(0))
    job.set_limit("6MiB")
    for _ in range(2):
        with pytest.raises(DoesNotFitError, match=r"No other plan fits it either.*goes on under the plan that it has"):
            job.step(TOWER.batch(1))
    job.set_limit(LARGE)
    job.step(TOWER.batch(1))
    job.close()
    assert_equal(model, plain(2))


def test_a_job_that_cannot_take_another_plan_keeps_its_limit(tmp_path: Path) -> None:
    model, job = start(tmp_path / "run", store=None, on_breach="error", plan=Plan())
    peak = job.step(TOWER.batch(0)).peak_bytes
    with pytest.raises(DoesNotFitError, match=r"does not fit .*The limit is still 200\.0 MiB.*on_breach"):
        job.set_limit(peak // 2)
    assert job.proof().limit_bytes == LARGE and job.proof().phases
    job.set_limit(peak + 8 * MIB)  # which its plan fits
    job.step(TOWER.batch(1))
    assert job.proof().limit_bytes == peak + 8 * MIB and job.proof().holds
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(peak + 8 * MIB, dtype=torch.uint8)
    job.close()
    assert_equal(model, plain(2))


def test_a_job_without_a_limit_has_none_to_change(tmp_path: Path) -> None:
    model, job = start(tmp_path / "run", limit=None, on_breach="error", store=None)
    with pytest.raises(UsageError, match="without a limit"):
        job.set_limit("1GiB")
    job.step(TOWER.batch(0))
    job.close()
    assert_equal(model, plain(1))
