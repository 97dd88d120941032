"""A step that meets the limit is made again under a tighter plan: same batch, same random numbers, no data lost, and an end to trying."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from faults.tower import HARDWARE, Tower, loss
from memfit.core.errors import LimitBreachError, MemfitWarning, StoreError, UsageError
from memfit.core.limits import MIB
from memfit.core.plan import Plan
from memfit.runs.run_store import RunStore
from memfit.store.journal import Journal

TOWER = Tower(width=96, layers=6, times=4, dropout=0.1, shape=(4096,))
LIMIT = 200 * MIB


def start(directory: Path, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, memfit.Job]:
    model = TOWER.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    known: dict[str, Any] = {"limit": LIMIT, "emulate_device": True, "hardware": HARDWARE, "on_breach": "replan"}
    directory.mkdir(exist_ok=True)
    arguments: dict[str, Any] = {"loss": loss, "store": directory / "run", **known, **options}
    job = memfit.fit(model, optimizer, sample=TOWER.batch(0), **arguments)
    return model, optimizer, job


class Hogging:
    """The loss, which takes memory of its own in a step that was begun, once it is told how much."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.hog = torch.empty(0, dtype=torch.uint8)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self.nbytes and not self.hog.nbytes and not memfit.is_planning():
            self.hog = torch.empty(self.nbytes, dtype=torch.uint8)
        return loss(model, batch)


def test_a_step_that_meets_the_limit_is_made_again_under_a_tighter_plan(tmp_path: Path) -> None:
    hogging = Hogging()
    model, optimizer, job = start(tmp_path, plan=Plan(), loss=hogging)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    job.register("scheduler", scheduler)
    before = job.plan
    torch.manual_seed(1)
    peak = job.step(TOWER.batch(0)).peak_bytes
    scheduler.step()
    # From the middle of the next step on a third of what the plan needs is not there any more.
    hogging.nbytes = LIMIT - peak * 2 // 3
    with pytest.warns(MemfitWarning, match="step 2 met the limit and was made again under a tighter plan. Cause:"):
        found = job.step(TOWER.batch(1))
    scheduler.step()
    assert job.steps == 2
    (report,) = job.breaches
    assert report.step == 2
    assert report.before == before
    assert report.after == job.plan != before
    assert report.foreign_bytes >= hogging.nbytes
    assert report.in_words() in found.departures
    last = job.step(TOWER.batch(2))
    assert not last.departures
    job.close()
    # The reference: the same steps, the later ones under the plan that came out, with the same random numbers.
    reference = TOWER.build()
    other = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    torch.manual_seed(1)
    for steps, plan in ((range(1), before), (range(1, 3), report.after)):
        with memfit.fit(reference, other, loss, TOWER.batch(0), plan=plan, emulate_device=True) as plain:
            for step in steps:
                if step == 0:
                    torch.manual_seed(1)
                assert plain.step(TOWER.batch(step)).loss == (None, found.loss, last.loss)[step] or step == 0
                schedule.step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_step_that_does_not_fit_beside_what_others_hold_gets_another_plan_before_it_begins(tmp_path: Path) -> None:
    _, _, job = start(tmp_path, plan=Plan())
    peak = job.step(TOWER.batch(0)).peak_bytes
    before = job.plan
    hog = torch.empty(LIMIT - peak * 2 // 3, dtype=torch.uint8)
    with pytest.warns(MemfitWarning, match="does not fit under the plan so far: another one took its place"):
        job.step(TOWER.batch(1))
    assert (job.steps, job.plan != before) == (2, True)
    assert job.breaches[0].foreign_bytes >= hog.nbytes
    job.close()


def test_without_a_tighter_plan_the_breach_is_raised_and_the_commit_is_whole(tmp_path: Path) -> None:
    model: Any
    model, _, job = start(tmp_path)
    torch.manual_seed(1)
    job.step(TOWER.batch(0))
    keep = [torch.empty(MIB, dtype=torch.uint8) for _ in range(int(LIMIT * 0.55) // MIB)]
    more: list[Tensor] = []

    def eat(*_: Any) -> None:
        """Takes memory that no trace saw until there is none left, whatever the plan left free, and keeps it."""
        while not memfit.is_planning():
            more.append(torch.empty(MIB, dtype=torch.uint8))

    # In the first layer: what is there of the job then is too little for any plan.
    model[0].dropout.register_forward_hook(eat)  # type: ignore[index, union-attr]
    with pytest.raises(LimitBreachError) as caught:
        job.step(TOWER.batch(1))
    assert any("tighter plan" in note for note in caught.value.__notes__)
    assert more, "the plan that met the limit got as far as the leak"
    del keep, more[:]
    with pytest.raises(UsageError, match="closed"):
        job.step(TOWER.batch(1))
    _, _, again = start(tmp_path)
    assert again.steps == 1
    again.step(TOWER.batch(1))
    again.close()


def test_a_store_that_cannot_be_gone_back_to_ends_the_job_with_the_breach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hogging = Hogging()
    _, _, job = start(tmp_path, plan=Plan(), loss=hogging)
    torch.manual_seed(1)
    hogging.nbytes = LIMIT - job.step(TOWER.batch(0)).peak_bytes * 2 // 3

    def broken(_: RunStore) -> None:
        raise StoreError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(RunStore, "go_back", broken)
        with pytest.raises(LimitBreachError) as caught:
            job.step(TOWER.batch(1))
    assert any("the disk is gone" in note for note in caught.value.__notes__)
    with pytest.raises(UsageError, match="closed"):
        job.step(TOWER.batch(1))
    del hogging.hog
    _, _, again = start(tmp_path)
    assert again.steps == 1
    again.close(restore=False)


def test_replan_wants_a_store_that_commits_each_step(tmp_path: Path) -> None:
    model = TOWER.build()
    arguments = (model, torch.optim.AdamW(model.parameters()), loss, TOWER.batch(0))
    with pytest.raises(UsageError, match='store=, and keep durability="step"'):
        memfit.fit(*arguments, on_breach="replan")
    with pytest.raises(UsageError, match='store=, and keep durability="step"'):
        memfit.fit(*arguments, on_breach="replan", store=tmp_path / "run", durability=2)
    with pytest.raises(UsageError, match='"error" or "replan"'):
        memfit.fit(*arguments, on_breach="ignore")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_breach_among_the_updates_of_a_journal_is_finished_under_the_tighter_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step was decided: its gradients are those of the plan before, and it is not computed again."""
    wanted, _, job = start(tmp_path / "wanted", scheme="journal")
    plan = job.plan
    torch.manual_seed(1)
    losses = [job.step(TOWER.batch(step)).loss for step in range(2)]
    job.close()
    model, _, job = start(tmp_path / "found", scheme="journal", plan=plan)
    torch.manual_seed(1)
    assert job.step(TOWER.batch(0)).loss == losses[0]
    hogs: list[Tensor] = []
    moved = Journal.moved

    def breach(journal: Journal, blocks: Any, record: Any) -> None:
        if not hogs:
            # The user's own, from here on. How much is there just now depends on the plan, which goes by what the disk can do today.
            room = LIMIT - job._machine.meter.live_bytes() - 4 * MIB
            hogs.append(torch.empty(min(LIMIT // 2, room), dtype=torch.uint8))
            raise torch.OutOfMemoryError("no room")
        moved(journal, blocks, record)

    monkeypatch.setattr(Journal, "moved", breach)
    with pytest.warns(MemfitWarning) as told:
        found = job.step(TOWER.batch(1))
    assert [any(words in str(one.message) for one in told) for words in ("had been decided", "met the limit")] == [
        True
    ] * 2
    assert (found.loss, job.steps, len(job.breaches)) == (losses[1], 2, 1)
    job.close()
    for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(p, q)
