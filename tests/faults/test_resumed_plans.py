"""A run goes on under the plan that it had, or, where that cannot be here, under another one, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from equivalence import plans
from faults.tower import HARDWARE, ROWS, Tower, adamw, loss
from memfit.core.errors import MemfitWarning
from memfit.core.plan import CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier

TOWER = Tower(width=256)


def start(directory: Path, **options: Any) -> memfit.Job:
    model = TOWER.build()
    known: dict[str, Any] = {"hardware": HARDWARE, "store": directory / "run", **options}
    return memfit.fit(model, adamw(model), loss, known.pop("sample", TOWER.batch(0)), **known)


def begun(directory: Path, plan: Plan, **options: Any) -> int:
    """A run of one step; what its store claims of the disk."""
    job = start(directory, plan=plan, **options)
    job.step(TOWER.batch(0))
    job.close(restore=False)
    assert job.commits is not None
    return job.commits.disk_bytes


@pytest.mark.parametrize(
    "call",
    [CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.HOST), CallPlan(saved=Saved.RECOMPUTE, boundary_home=Tier.HOST)],
)
def test_a_plan_with_activations_in_host_memory_gives_way_where_there_is_none(call: CallPlan, tmp_path: Path) -> None:
    begun(tmp_path, Plan(calls=plans.fates(TOWER.profile(), call)), emulate_device=True)
    job = start(tmp_path)
    assert (
        "The plan that the run had is not taken: it puts something into the tier 'host', which this machine does not have"
        in job.reason
    )
    assert job.plan.microbatches == 1
    found = job.step(TOWER.batch(1)).loss
    job.close()
    reference, optimizer = TOWER.after_plain_steps(1)
    optimizer.zero_grad()
    assert found == float(loss(reference, TOWER.batch(1)).detach())


def test_other_sums_are_warned_of(tmp_path: Path) -> None:
    call = CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.HOST)
    begun(tmp_path, Plan(microbatches=2, calls=plans.fates(TOWER.profile(), call)), emulate_device=True)
    with pytest.warns(MemfitWarning, match="cut into 1, not 2 microbatches: sums add up in another order"):
        job = start(tmp_path)
    assert "batches are cut into 1, not 2 microbatches: sums add up in another order." in job.reason
    job.close()


def test_a_plan_that_takes_more_of_the_disk_than_it_may_gives_way(tmp_path: Path) -> None:
    call = CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK)
    claimed = begun(tmp_path, Plan(calls=plans.fates(TOWER.profile(), call)))
    job = start(tmp_path, disk_limit=claimed)
    assert "The plan that the run had is not taken: it takes" in job.reason
    job.step(TOWER.batch(1))
    job.close()


def test_a_plan_with_more_microbatches_than_the_sample_has_rows_goes_on(tmp_path: Path) -> None:
    begun(tmp_path, Plan(microbatches=ROWS))
    few = {name: tensor[:3] for name, tensor in TOWER.batch(0).items()}
    job = start(tmp_path, sample=few)
    assert job.plan.microbatches == ROWS
    torch.manual_seed(0)
    assert [len(job.step(data).losses) for data in (few, TOWER.batch(1))] == [3, ROWS]
    job.close()
