"""A commit is priced as many bytes as it writes: those of the homes in memory, counted at the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from faults import small_run
from memfit.core.numerics import ALLOWANCES
from memfit.core.plan import BlockPlan, Plan
from memfit.core.storage_formats import ComputeDtype, StateFormat
from memfit.core.tiers import Tier
from memfit.homes.disk import DiskHome
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


def test_a_write_while_a_commit_writes_the_same_weight_is_in_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `.data`, which no version counter sees, as another thread may write at that moment."""

    def fit() -> tuple[nn.Sequential, memfit.Job]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD([*model[1].parameters()], lr=0.1)
        return model, memfit.fit(
            model, optimizer, lambda m, b: m(b).square().mean(), torch.ones(4, 64), plan=Plan(), store=tmp_path / "run"
        )

    model, job = fit()
    job.step(torch.ones(4, 64))
    frozen, write, late = model[0].get_parameter("weight"), DiskHome.write, list[bool]()

    class Meanwhile:
        """A transfer of the weight, during whose wait it changes."""

        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def wait(self) -> None:
            self.handle.wait()
            late.append(True)
            frozen.data.add_(1.0)

    def begin(home: DiskHome, offset: int, nbytes: int, source: torch.UntypedStorage, *args: Any) -> Any:
        handle = write(home, offset, nbytes, source, *args)
        is_first = source._cdata == frozen.untyped_storage()._cdata and not late
        return Meanwhile(handle) if is_first else handle

    monkeypatch.setattr(DiskHome, "write", begin)
    frozen.data.add_(1.0)
    job.commit()
    assert late
    job.commit()
    expected = frozen.detach().clone()
    job.close(commit=False)
    monkeypatch.undo()
    model, job = fit()
    with job:
        assert torch.equal(model[0].get_parameter("weight"), expected)
