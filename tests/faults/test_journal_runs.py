"""Whole runs whose store keeps a journal: bit for bit the runs of two generations, whenever the process ends."""

from __future__ import annotations

import errno
import gc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from faults import small_run
from faults.small_run import adamw, build, draw, loss, profile, train
from faults.test_resume import Loop, assert_same
from memfit.core.errors import MemfitWarning, PlanError, StoreError, UnsupportedError, UsageError
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.step import Step
from memfit.core.tiers import Tier
from memfit.engine.engine import Engine
from memfit.engine.measured_step import StepRecorder
from memfit.engine.work import Outcome, StepInput
from memfit.runs.exporting import export_run
from memfit.store import DiskStore, verify
from memfit.store.files import store_error

pytestmark = pytest.mark.usefixtures("generators_as_before")


def plan_of(model: str, name: str) -> tuple[Plan, dict[str, Any]]:
    """One of the plans of the small runs, with updates after backward."""
    plan, options = small_run.PLANS[name](profile(model))
    if model == "tied-and-frozen":  # its buffer would tell microbatches from the whole batch
        plan = replace(plan, microbatches=1, tail=None)
    return replace(plan, update=UpdateTime.AFTER_BACKWARD), options


def partly_in_memory() -> tuple[Plan, dict[str, Any]]:
    """The clipped plan with one block's weights in memory, and so with two rooms of its own in the store; the other two move."""
    plan, options = plan_of("tied-and-frozen", "clipped")
    blocks = dict(plan.blocks)
    blocks["embedding"] = BlockPlan(gradient_home=Tier.DISK, state_home=Tier.DISK)
    return replace(plan, blocks=blocks), options


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        pytest.param("tied-and-frozen", "bf16", marks=pytest.mark.slow),
        pytest.param("gpt2", "layer-major", marks=pytest.mark.slow),
        pytest.param("gpt2", "clipped", marks=pytest.mark.slow),
    ],
)
def test_a_run_with_a_journal_is_the_run_of_two_generations(model: str, plan: str, tmp_path: Path) -> None:
    decided, options = plan_of(model, plan)
    whole = train(model, decided, tmp_path / "whole", total=4, **options)
    train(model, decided, tmp_path / "parts", total=4, stop=2, scheme="journal", **options)
    assert_same(train(model, decided, tmp_path / "parts", total=4, **options), whole)
    assert verify(tmp_path / "parts").is_whole


def test_turns_are_operations_of_the_step_and_done_as_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[list[str], list[str]]] = []
    run = Engine.run

    def measured(engine: Engine, step: Step, work: StepInput) -> Outcome:
        recorder = StepRecorder()
        with engine.recording(recorder):
            outcome = run(engine, step, work)
        if work.journal is not None:
            listed = [str(operation.action) for operation in step]
            found.append((listed, [moment.action for moment in recorder.timeline().moments]))
        return outcome

    monkeypatch.setattr(Engine, "run", measured)
    plan, options = partly_in_memory()
    train("tied-and-frozen", plan, tmp_path / "run", scheme="journal", total=3, **options)
    assert len(found) == 3
    for listed, done in found:
        assert done == listed
        decided = listed.index("decide")
        updates = [i for i, text in enumerate(listed) if text.startswith("update")]
        keeps = [i for i, text in enumerate(listed) if text.startswith("keep")]
        assert decided < min(updates) and max(updates) < min(keeps) and len(keeps) == 2
    orders = [[text for text in listed if text.startswith("keep")] for listed, _ in found]
    assert orders[0] == orders[2] != orders[1], "the two that move exchange their room each step"


class Killed(BaseException):
    """The process ends here."""


def killed_at(
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    plan: Plan,
    options: dict[str, Any],
    model: str = "tied-and-frozen",
) -> list[str]:
    """Trains in this process until its store's commit of this number is made, and gives the job up there; what each commit was."""
    made: list[str] = []
    commit = DiskStore.commit

    def counted(store: DiskStore, step: int, flips: Any = (), **settings: Any) -> None:
        if store.scheme != "journal":  # activations have a working home
            return commit(store, step, flips, **settings)
        if len(made) > number:
            raise Killed
        commit(store, step, flips, **settings)
        journal = settings.get("journal")
        made.append("sealed" if journal is None else "decided" if journal.fills else "moved")
        if len(made) > number:
            raise Killed
        return None

    with monkeypatch.context() as patched:
        patched.setattr(DiskStore, "commit", counted)
        with pytest.raises(Killed):
            train(model, plan, directory, scheme="journal", **{"total": 4, **options})
    gc.collect()  # the lock goes with the job
    return made


def go_on(
    directory: Path, plan: Plan, options: dict[str, Any], *, is_under_way: bool, model: str = "tied-and-frozen"
) -> small_run.Result:
    with pytest.warns(MemfitWarning, match="had been decided") if is_under_way else nullcontext():
        return train(model, plan, directory, **{"total": 4, **options})


@pytest.mark.parametrize(
    "first",
    [pytest.param(1, marks=pytest.mark.slow), 6],
    ids=["from the first step on", "from the middle of the second"],
)
def test_a_run_goes_on_bit_for_bit_after_every_commit_of_a_step(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, options = partly_in_memory()
    whole = train("tied-and-frozen", plan, tmp_path / "whole", total=4, **options)
    seen = list[str]()
    while seen.count("sealed") < 3:
        directory = tmp_path / f"killed-{first}"
        seen = killed_at(first, monkeypatch, directory, plan, options)
        found = go_on(directory, plan, options, is_under_way=seen[-1] != "sealed")
        assert found.first == seen.count("sealed") - 1
        assert_same(found, whole)
        assert verify(directory).is_whole
        first += 1
    assert seen == ["sealed"] + ["decided", "moved", "moved", "sealed"] * 2


class Failing:
    """The store's commits fail, one after the other as often as is said, when a step has this many moves made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, after: int, times: int) -> None:
        self.moves, self.times, commit = 0, times, DiskStore.commit

        def failing(store: DiskStore, step: int, flips: Any = (), **settings: Any) -> None:
            journal = settings.get("journal")
            is_move = journal is not None and not journal.fills
            if is_move and self.moves >= after and self.times:
                self.times -= 1
                raise store_error("the disk is full", errno.ENOSPC)
            self.moves += is_move
            commit(store, step, flips, **settings)

        monkeypatch.setattr(DiskStore, "commit", failing)


def test_a_step_whose_updates_fail_is_finished_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, options = partly_in_memory()
    wanted = Loop(tmp_path / "wanted", plan=plan, **options).register()
    found = Loop(tmp_path / "found", plan=plan, scheme="journal", **options).register()
    first = [draw(torch.Generator().manual_seed(n)) for n in range(3)]
    for loop in (wanted, found):
        torch.manual_seed(3)
        if loop is found:
            failing = Failing(monkeypatch, after=1, times=2)
            with pytest.raises(StoreError, match="disk is full") as caught:
                loop.job.step(first[0])
            assert any("finishes its updates" in note for note in caught.value.__notes__)
            assert loop.job.steps == 0
            with pytest.raises(StoreError, match="disk is full"):
                loop.job.evaluate(first[0])
            assert not failing.times
            loop.job.evaluate(first[0])  # finishes the updates: these are weights of a step, and not torn
        results = [loop.job.step(batch) for batch in first]
        assert loop.job.steps == 3
        assert bool(results[0].departures) == (loop is found)
        loop.losses = [result.loss for result in results]  # type: ignore[attr-defined]
        loop.job.close()
    assert found.losses == wanted.losses  # type: ignore[attr-defined]
    for name, value in wanted.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], value), name
    again = Loop(tmp_path / "found", plan=plan, **options).register()
    assert again.job.steps == 3
    again.die()


def test_what_a_journal_cannot_keep_is_refused(tmp_path: Path) -> None:
    plan, options = partly_in_memory()
    made = build("tied-and-frozen")
    with pytest.raises(UsageError, match="name its directory"):
        memfit.fit(made, adamw(made), loss, draw(torch.Generator()), scheme="journal")
    for durability in (2, "exit"):
        with pytest.raises(UsageError, match='durability="step"'):
            Loop(tmp_path / "run", plan=plan, scheme="journal", durability=durability, **options)
    for other, told in (
        (replace(plan, update=UpdateTime.IN_BACKWARD), "after-backward"),
        (replace(plan, blocks={}), "gradient_home='disk'"),
    ):
        with pytest.raises(PlanError, match=told):
            Loop(tmp_path / "run", plan=other, scheme="journal", **options)
    assert not (tmp_path / "run").exists()
    loop = Loop(tmp_path / "run", plan=plan, scheme="journal", **options).register()
    assert loop.job.commits is not None and loop.job.commits.scheme == "journal"
    loop.job.step(draw(loop.generator))

    def halve() -> None:
        with loop.job.weights("layers.1"), torch.no_grad():
            for p in loop.model.get_submodule("layers.1").parameters():
                p.mul_(0.5)

    with pytest.raises(UnsupportedError, match="cannot be changed between steps"):
        halve()
    with pytest.raises(UnsupportedError, match="cannot be changed between steps"):
        loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    loop.job.step(draw(loop.generator))
    loop.job.close()
    with pytest.raises(StoreError, match="was begun with scheme='journal'"):
        Loop(tmp_path / "run", scheme="generations")
    with pytest.raises(PlanError, match="has no other room for it"):
        Loop(
            tmp_path / "run", plan=replace(plan, blocks=dict.fromkeys(plan.blocks, BlockPlan(gradient_home=Tier.DISK)))
        )


def test_a_step_under_way_is_told_and_exported_when_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, options = partly_in_memory()
    decided, moved = tmp_path / "decided", tmp_path / "moved"
    assert killed_at(1, monkeypatch, decided, plan, options)[-1] == "decided"
    assert "step 0, and step 1 is decided in the journal" in verify(decided).in_words()
    with pytest.raises(UnsupportedError, match="go on with the run once"):
        export_run(decided, tmp_path / "out")
    assert killed_at(3, monkeypatch, moved, plan, options) == ["sealed", "decided", "moved", "moved"]
    export_run(moved, tmp_path / "out")
    made = build("tied-and-frozen")
    loaded = memfit.job.loading.load(tmp_path / "out", made, adamw(made))
    assert loaded.steps == 1
    with pytest.warns(MemfitWarning, match="had been decided"):
        Loop(moved, plan=plan, **options).die()


def test_the_planner_finds_a_plan_that_goes_with_a_journal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(600, 600) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(4, 600)
    sizes: dict[str, int] = {}
    for scheme in ("journal", "generations"):
        job = memfit.fit(
            model,
            optimizer,
            lambda m, x: m(x).square().mean(),
            batch,
            limit="4GiB",
            store=tmp_path / scheme,
            scheme=scheme,
        )
        job.step(batch)
        assert job.commits is not None
        sizes[scheme] = job.commits.disk_bytes
        if scheme == "journal":
            assert all(job.plan.block(name).rests_on_disk for name in job.block_names)
        job.close()
    parameters = sum(p.numel() for p in model.parameters())
    block = parameters // len(layers)
    # Weights and AdamW's moments once, a block of them to move through, gradients, the record.
    assert sizes["journal"] == pytest.approx(16 * parameters + 12 * block, rel=0.1)
    assert sizes["generations"] == pytest.approx(24 * parameters, rel=0.01)
