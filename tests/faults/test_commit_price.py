"""A commit is priced as many bytes as it writes: those of the homes in memory, counted at the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import memfit
from faults import small_run
from memfit.core.numerics import ALLOWANCES
from memfit.core.plan import BlockPlan, Plan
from memfit.core.storage_formats import ComputeDtype, StateFormat
from memfit.core.tiers import Tier
from memfit.step.sizes import commit_bytes

BF16 = Plan(compute_dtype=ComputeDtype.BFLOAT16)
PLANS = {
    "fp32": Plan(),
    "states on disk": Plan(),
    "masters": BF16,
    "split masters": replace(BF16, splits_masters=True),
    "no masters": replace(BF16, drops_masters=True),
    "int8 states": Plan(state_format=StateFormat.INT8),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_commit_writes_what_it_is_priced(name: str, tmp_path: Path) -> None:
    plan, model = PLANS[name], small_run.build("wide")
    if name == "states on disk":
        found = small_run.profile("wide")
        plan = replace(plan, blocks={block.name: BlockPlan(state_home=Tier.DISK) for block in found.blocks})
    batch = small_run.draw(small_run.torch.Generator())
    with memfit.fit(
        model, small_run.adamw(model), small_run.loss, batch, plan=plan, store=tmp_path / "run", allow=set(ALLOWANCES)
    ) as job:
        run = job._assembly.setup.run
        assert run is not None
        job.step(batch)
        before = run.io.statistics().by_tag
        job.commit()
        after = run.io.statistics().by_tag
        written = {tag: part.written_bytes - before[tag].written_bytes for tag, part in after.items() if tag in before}
        # What does not train has not changed, and is neither priced nor written.
        priced = commit_bytes(job.plan, job.profile) - job.profile.buffer_bytes
        assert sum(written.get(tag, 0) for tag in ("weight", "master", "state")) == priced > 0
