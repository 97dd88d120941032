"""A batch that the plan is predicted not to fit gets a plan that does: same data, same random numbers, and the job goes on where there is none."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from equivalence.plain import PlainTrainer
from equivalence.zoo import Case
from faults.tower import HARDWARE, Tower, loss
from memfit.core.errors import DoesNotFitError, MemfitWarning, StoreError, UsageError
from memfit.core.limits import MIB
from memfit.core.plan import Plan
from memfit.devices.binding import Allocator, install
from memfit.job import breaches
from memfit.job.assembly import Assembly

LIMIT = 96 * MIB
SAMPLE = (16, 32)
TOWER = Tower(width=192, layers=4, times=4, dropout=0.1, shape=SAMPLE)
IMPOSSIBLE = (1, 40_000)
"""A row whose own activations pass the limit."""
SHAPES = (SAMPLE, (16, 192), (5, 32), (16, 384), SAMPLE, (2, 2048), (16, 384))


def mixed_loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Does not add up over rows."""
    return (model(data["x"]).mean(0) - data["y"].mean(0)).square().mean()


class Twins:
    """A job and plain PyTorch beside it, from the same weights and seed."""

    def __init__(self, directory: Path, loss: Any = loss, **options: Any) -> None:
        self.store = directory / "run"
        model = TOWER.build()
        known: dict[str, Any] = {
            "limit": LIMIT, "emulate_device": True, "hardware": HARDWARE, "on_breach": "replan", "store": self.store,
        }  # fmt: skip
        self.model = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.job = memfit.fit(model, optimizer, loss, TOWER.batch(0), **{**known, **options})
        with unlimited():
            reference = TOWER.build()
        self.plain = PlainTrainer(
            Case(model=reference, loss=loss, batch=TOWER.batch),
            torch.optim.AdamW(reference.parameters(), lr=1e-3),
        )
        torch.manual_seed(7)

    def step(self, number: int, shape: tuple[int, int]) -> Any:
        """The same step twice: loss by loss the same bits, and never above the limit."""
        found = self.job.step(TOWER.batch(number, shape))
        self.plain.microbatches = len(found.losses)
        # Plain has no limit.
        data = TOWER.batch(number, shape)
        with unlimited():
            self.plain.accumulate(data)
            self.plain.update()
        assert [float(loss) for loss in self.plain.losses] == list(found.losses)
        assert found.peak_bytes <= LIMIT
        return found

    def close(self) -> None:
        self.job.close()
        for (name, p), q in zip(self.model.named_parameters(), self.plain.model.parameters(), strict=True):
            assert torch.equal(p, q), name


def unlimited() -> Any:
    """Plain's own tensors are counted on a ledger that has no limit."""
    return installed().ledger("host")


def live_bytes() -> int:
    return installed().stats().live_bytes


def installed() -> Allocator:
    found = install()
    assert isinstance(found, Allocator)
    return found


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.slow
def test_every_shape_that_some_plan_fits_trains_as_plain_pytorch_does(tmp_path: Path) -> None:
    twins = Twins(tmp_path)
    job = twins.job
    told: list[breaches.BreachReport] = []
    for number, shape in enumerate(SHAPES):
        before = job.plan
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = twins.step(number, shape)
        new = job.breaches[len(told) :]
        assert [str(one.message) for one in said if one.category is MemfitWarning] == [one.in_words() for one in new]
        assert list(found.departures) == [one.in_words() for one in new]
        told += new
        for report in new:
            assert (report.step, report.is_predicted, report.before, report.after) == (
                number + 1,
                True,
                before,
                job.plan,
            )
            assert f"a batch of {shape[0]} rows" in report.cause
            cut = f"cut into {job.plan.microbatches}, not {before.microbatches} microbatches"
            assert (cut in report.in_words()) == (job.plan.microbatches != before.microbatches)
        assert new or job.plan == before
    assert len(told) >= 2
    assert len({report.after.microbatches for report in told}) > 1 or told[0].after.microbatches > 1
    assert told[0].step == 2
    assert {record.name for record in job.proof().phases} >= {"replan", "steady"}
    assert job.proof().measured_peak_bytes <= LIMIT
    twins.close()


def test_a_batch_that_no_plan_fits_is_refused_with_the_least_and_the_job_goes_on(tmp_path: Path) -> None:
    twins = Twins(tmp_path)
    job = twins.job
    twins.step(0, SAMPLE)
    before, state, live = job.plan, torch.get_rng_state(), live_bytes()
    gc.disable()
    try:
        with pytest.raises(DoesNotFitError, match=r"(?s)1 rows .* No other plan fits .* goes on") as caught:
            job.step(TOWER.batch(1, IMPOSSIBLE))
        smallest = caught.value.smallest_limit_bytes
        del caught
        assert live_bytes() - live < MIB  # neither the error nor what it held is in a cycle
    finally:
        gc.enable()
    assert smallest is not None
    assert smallest > LIMIT
    assert torch.equal(state, torch.get_rng_state())
    assert (job.plan, job.breaches, job.steps) == (before, [], 1)
    twins.step(1, SAMPLE)
    twins.close()


def test_under_error_the_refusal_tells_of_replan_and_the_job_goes_on(tmp_path: Path) -> None:
    twins = Twins(tmp_path, on_breach="error")
    before = twins.job.plan
    with pytest.raises(DoesNotFitError, match=r'fit\(store=\.\.\., on_breach="replan"\)'):
        twins.job.step(TOWER.batch(0, (16, 384)))
    assert twins.job.plan == before
    twins.step(0, SAMPLE)
    twins.close()


@pytest.mark.slow
def test_a_loss_that_does_not_add_up_is_never_cut(tmp_path: Path) -> None:
    twins = Twins(tmp_path, loss=mixed_loss)
    twins.step(0, SAMPLE)
    with pytest.warns(MemfitWarning, match="for a batch that does not fit under the plan so far"):
        twins.step(1, (16, 256))
    assert twins.job.plan.microbatches == 1
    before = twins.job.plan
    # Some cut of it fits, as the other loss shows, but not the whole.
    for _ in range(2):
        with pytest.raises(DoesNotFitError, match="No other plan fits it either") as caught:
            twins.job.step(TOWER.batch(2, (64, 256)))
        assert "a loss and a model that allow the batch to be split" in str(caught.value.__cause__)
    assert twins.job.plan == before
    twins.step(2, SAMPLE)
    twins.close()


def test_rows_that_are_fewer_than_microbatches_change_no_number_for_the_others(tmp_path: Path) -> None:
    twins = Twins(tmp_path, plan=Plan(microbatches=16))
    twins.step(0, SAMPLE)
    with pytest.warns(MemfitWarning):
        assert len(twins.step(1, (1, 3072)).losses) == 1
    assert len(twins.step(2, SAMPLE).losses) == 16
    twins.close()


def broken_once(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The next assemblies fail once they have moved in."""
    begin = Assembly.start
    left = [times]

    def start(assembly: Assembly, interrupts: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise StoreError("the disk is full")
        begin(assembly, interrupts)

    monkeypatch.setattr(Assembly, "start", start)


@pytest.mark.slow
def test_a_plan_that_cannot_be_taken_up_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(tmp_path)
    twins.step(0, SAMPLE)
    before = twins.job.plan
    with monkeypatch.context() as patched:
        broken_once(patched, 1)
        with pytest.raises(
            DoesNotFitError, match=r"could not take its place \(StoreError: the disk is full\).* goes on"
        ):
            twins.job.step(TOWER.batch(1, (16, 384)))
    assert twins.job.plan == before
    twins.step(1, SAMPLE)
    with pytest.warns(MemfitWarning):
        twins.step(2, (16, 384))
    twins.close()


@pytest.mark.slow
def test_where_no_plan_can_be_taken_up_the_job_ends_and_the_commit_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(tmp_path)
    twins.step(0, SAMPLE)
    with monkeypatch.context() as patched:
        broken_once(patched, 2)
        with pytest.raises(DoesNotFitError, match=r"The plan before could not be taken up again .* step 1 is whole"):
            twins.job.step(TOWER.batch(1, (16, 384)))
    with pytest.raises(UsageError, match="closed"):
        twins.job.step(TOWER.batch(1))
    again = Twins(tmp_path)
    assert again.job.steps == 1
    again.plain = twins.plain
    torch.set_rng_state(twins.plain.random.state)
    again.step(1, SAMPLE)
    again.close()


def test_a_job_holds_no_batch_that_it_was_given(tmp_path: Path) -> None:
    given: list[weakref.ref[Tensor]] = []

    def new(step: int, shape: tuple[int, int]) -> dict[str, Tensor]:
        made = TOWER.batch(step, shape)
        given.extend(weakref.ref(part) for part in made.values())
        return made

    model = TOWER.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    known: dict[str, Any] = {
        "limit": LIMIT, "emulate_device": True, "hardware": HARDWARE, "on_breach": "replan", "store": tmp_path / "run",
    }  # fmt: skip
    job = memfit.fit(model, optimizer, loss, new(0, SAMPLE), **known)
    for number, shape in enumerate((SAMPLE, (5, 32), (16, 384), SAMPLE)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MemfitWarning)
            job.step(new(number, shape))
        job.evaluate(new(number, (4, 32)))
        assert [part() for part in given] == [None] * len(given), shape
    assert job.breaches, "one of them took another plan"
    job.close()


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [frozenset({"bf16"}), frozenset({"bf16", "int8-state"}), frozenset({"fp16"})])
def test_formats_that_bytes_rest_in_stay_what_they_are_and_a_run_that_goes_on_is_planned_the_same(
    tmp_path: Path, allowed: frozenset[str]
) -> None:
    known: dict[str, Any] = {
        "limit": LIMIT, "emulate_device": True, "hardware": HARDWARE, "on_breach": "replan", "allow": allowed,
    }  # fmt: skip
    given = Plan(compute_dtype="float16") if "fp16" in allowed else None  # type: ignore[arg-type]

    def start(name: str, plan: Plan | None) -> memfit.Job:
        model = TOWER.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(7)
        return memfit.fit(model, optimizer, loss, TOWER.batch(0), plan=plan, store=tmp_path / name, **known)

    losses: dict[str, list[float]] = {"whole": [], "resumed": []}
    plans: dict[str, list[Plan]] = {"whole": [], "resumed": []}
    for name in ("whole", "resumed"):
        job = start(name, given)
        for number, shape in enumerate((SAMPLE, (16, 192), SAMPLE, (16, 384))):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MemfitWarning)
                losses[name].append(job.step(TOWER.batch(number, shape)).loss)
            plans[name].append(job.plan)
            if name == "resumed":
                job.close(restore=False)
                del job  # what is alive beside a job is in the way of its plans
                job = start(name, None)
        job.close(restore=False)
        del job
    first, *_, last = plans["whole"]
    assert first != last
    assert (first.compute_dtype, first.state_format, first.splits_masters, first.drops_masters) == (
        last.compute_dtype, last.state_format, last.splits_masters, last.drops_masters,
    )  # fmt: skip
    assert plans["whole"] == plans["resumed"]
    assert losses["whole"] == losses["resumed"]


@pytest.mark.slow
def test_a_run_with_a_journal_is_planned_anew_as_well(tmp_path: Path) -> None:
    twins = Twins(tmp_path, scheme="journal")
    for number, shape in enumerate(SHAPES):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MemfitWarning)
            twins.step(number, shape)
    assert twins.job.breaches
    twins.close()
