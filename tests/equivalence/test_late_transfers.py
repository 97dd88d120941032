"""Transfers that happen at the last moment: whoever uses bytes without having waited for them computes something else.

Real transfers mostly arrive before they are used, whether somebody waited or not. Here a read leaves NaN where it will fill memory when it is waited
for, and a write takes its bytes only then; so a missing wait is seen every time, not once in a thousand steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equivalence import plans, zoo
from equivalence.compare import assert_equal_training
from equivalence.drawn_jobs import draw_job, train_under
from equivalence.found_modules import FOUND
from equivalence.late import Late
from equivalence.plain import adamw
from equivalence.with_memfit import fit_known
from memfit.core.plan import UpdateTime
from memfit.homes import DiskHome, TransferHandle
from memfit.tensors.trees import bytes_view


@pytest.fixture(scope="module", autouse=True)
def transfers_are_late() -> object:
    patch = pytest.MonkeyPatch()
    read, write = DiskHome.read, DiskHome.write

    def late_read(
        self: DiskHome, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0
    ) -> TransferHandle:
        bytes_view(into, into_offset, nbytes).fill_(0xFF)  # NaN in every format
        return Late(lambda: read(self, offset, nbytes, into, into_offset))

    def late_write(
        self: DiskHome, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0
    ) -> TransferHandle:
        return Late(lambda: write(self, offset, nbytes, source, source_offset))

    patch.setattr(DiskHome, "read", late_read)
    patch.setattr(DiskHome, "write", late_write)
    yield
    patch.undo()


@pytest.mark.parametrize("plan", ["disk", "disk-recompute-4", "microbatch-major-4", "clipped", "atomic", "everything"])
def test_everything_that_is_used_was_waited_for(plan: str, tmp_path: Path) -> None:
    variant = plans.BY_NAME[plan]
    report = assert_equal_training(
        zoo.ZOO["gpt2"],
        adamw(),
        fit_known("gpt2", variant, tmp_path, keep_gradients=True),
        microbatches=variant.microbatches,
        max_grad_norm=variant.max_grad_norm,
        may_reorder=variant.reorders,
    )
    assert report.reordered <= zoo.ZOO["gpt2"]().shared


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if place % 3 else ()) for place, n in enumerate(sorted(FOUND))]
)
def test_what_the_search_once_found_waits(name: str) -> None:
    found = FOUND[name]
    with found.outcome():
        train_under(found.spec, found.plan, clips=found.clips, keeps=True)


@pytest.mark.timeout(0)
@given(data=st.data())
@settings(max_examples=6)
def test_random_models_under_random_plans_wait(data: st.DataObject) -> None:
    drawn = draw_job(data)
    clips = drawn.plan.update is UpdateTime.AFTER_BACKWARD
    train_under(drawn.spec, drawn.plan, clips=clips, keeps=True, traced=drawn)
