"""What a store claims of the disk, foretold to the last pages, and counted once against `disk_limit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from equivalence import plans
from faults import small_run
from faults.small_run import adamw, build, draw, loss
from memfit.core.errors import DoesNotFitError
from memfit.core.plan import CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.step.sizes import disk_bytes_with_store, store_bytes

PAGE_BYTES = 4096
ROWS = 64
"""As many that a layer's activations are large enough to leave."""


def fit(store: Path | None, plan: Plan | None, rows: int = small_run.ROWS, **options: Any) -> memfit.Job:
    model = build("wide")
    return memfit.fit(model, adamw(model), loss, draw(torch.Generator(), rows), plan=plan, store=store, **options)


QUICK = ("bf16",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in ("resident", "layer-major", "bf16", *small_run.FORMATS)
    ],
)
def test_the_room_that_a_store_claims_is_foretold(name: str, tmp_path: Path) -> None:
    plan, options = (small_run.PLANS | small_run.FORMATS)[name](small_run.profile("wide"))
    job = fit(tmp_path / "run", plan, **options)
    assert job.commits is not None
    claimed = (tmp_path / "run" / "homes-0.bin").stat().st_size
    assert claimed == job.commits.disk_bytes
    states = sum(len(slots) for own in job._assembly.states.values() for slots in own.slots.values())
    assert 0 <= claimed - store_bytes(job.plan, job.profile) < 2 * PAGE_BYTES * (states + 1)
    job.close(restore=False)


def test_a_limit_of_disk_counts_the_store_and_what_lies_beside_it(tmp_path: Path) -> None:
    found = small_run.profile("wide")
    resident, on_disk = Plan(), Plan(blocks=plans.on_disk(found))
    offloading = Plan(calls=plans.fates(found, CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK)))
    for number, plan in enumerate((resident, on_disk, offloading)):
        job = fit(tmp_path / f"free-{number}", plan, ROWS)
        needed = disk_bytes_with_store(plan, job.profile, job._assembly.planned.prepared.timeline.peak_in(Tier.DISK))
        claimed = store_bytes(plan, job.profile)
        # Homes on disk lie in the store: only gradients, which have no spare slot, and activations take more.
        assert (needed == claimed) == (plan is resident)
        job.close(restore=False)
        assert job.commits is not None
        enough = needed + job.commits.disk_bytes - claimed
        fit(tmp_path / f"enough-{number}", plan, ROWS, disk_limit=enough).close(restore=False)
        with pytest.raises(DoesNotFitError, match="disk_limit"):
            fit(tmp_path / f"short-{number}", plan, ROWS, disk_limit=job.commits.disk_bytes - 1)
        with pytest.raises(
            DoesNotFitError, match=r"of it claimed by the store, above disk_limit .* scheme=\"journal\""
        ):
            fit(tmp_path / f"short-{number}", plan, ROWS, disk_limit=needed - 1)
        assert not (tmp_path / f"short-{number}").exists()
    # Without a store a plan that keeps nothing on disk needs none of it.
    fit(None, resident, disk_limit=0).close()


def test_the_planner_keeps_to_a_limit_of_disk_with_a_store(tmp_path: Path) -> None:
    made = fit(tmp_path / "first", Plan())
    assert made.commits is not None
    claimed = made.commits.disk_bytes
    made.close(restore=False)
    job = fit(tmp_path / "run", None, limit="4GiB", disk_limit=claimed)
    assert all(home is not Tier.DISK for block in job.plan.blocks.values() for home in (block.gradient_home,))
    job.close(restore=False)
    # It goes on within the same limit: what is claimed already is not counted twice.
    job = fit(tmp_path / "run", None, limit="4GiB", disk_limit=claimed)
    job.close(restore=False)
    with pytest.raises(DoesNotFitError, match="disk"):
        fit(tmp_path / "other", None, limit="4GiB", disk_limit=claimed - 1)
