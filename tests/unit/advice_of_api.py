"""Cures that refusals of loaders, questions and comparisons name, followed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import memfit
from memfit.core.plan import Plan
from memfit.planner.advise import advise
from memfit.planner.extremes import batches_like, find_largest, find_smallest_limit
from unit.advice import BATCH, ON_DISK, Scene, follows, loss

ITEMS = [*range(10)]


def items_of(loader: memfit.ResumableLoader) -> int:
    return sum(len(batch) for batch in loader)


@follows("job/loader.py", "give at least 1 and 0")
def a_loader_of_sizes_that_can_be(s: Scene) -> None:
    s.refused(lambda: memfit.ResumableLoader(ITEMS, batch_size=0, workers=-1))
    assert items_of(memfit.ResumableLoader(ITEMS, batch_size=1, workers=0)) == 10


@follows("job/loader.py", "use smaller batches, or keeps_last=True")
def a_smaller_batch_or_the_last_one(s: Scene) -> None:
    s.refused(lambda: memfit.ResumableLoader(ITEMS, batch_size=11))
    assert items_of(memfit.ResumableLoader(ITEMS, batch_size=10)) == 10
    assert items_of(memfit.ResumableLoader(ITEMS, batch_size=11, keeps_last=True)) == 10


@follows("job/loader.py", "give the state that state_dict() of such a loader gave")
def a_state_of_a_loader(s: Scene) -> None:
    loader = memfit.ResumableLoader(ITEMS, batch_size=5)
    state = loader.state_dict()
    s.refused(lambda: loader.load_state_dict({**state, "batch": 7}))
    next(iter(loader))
    again = memfit.ResumableLoader(ITEMS, batch_size=5)
    again.load_state_dict(loader.state_dict())
    assert items_of(again) == 5


@follows("job/loader.py", "make the loader as it was, or begin another run")
def the_loader_of_the_run_or_another_run(s: Scene) -> None:
    five, two = (memfit.ResumableLoader(ITEMS, batch_size=size) for size in (5, 2))
    with s.fit(store=s.directory / "run") as job:
        job.register("loader", five)
        job.step(BATCH)
    s.begin()
    with s.fit(store=s.directory / "run") as job:
        s.refused(lambda: job.register("loader", two))
        job.register("loader", five)
        assert job.step(BATCH).is_finite
    s.begin()
    with s.fit(store=s.directory / "other") as job:
        job.register("loader", two)
        assert job.step(BATCH).is_finite


def rows(count: int) -> Tensor:
    return BATCH[:1].repeat(count, 1)


def largest(s: Scene, sizes: Any = rows, **asked: Any) -> int:
    asked = {"start": 2, "at_most": 2, "limit": "8GiB", "hardware": "laptop-cpu", **asked}
    return find_largest(s.model, s.optimizer, loss, sizes, **asked).size


def smallest(s: Scene, **asked: Any) -> int | None:
    asked = {"step_seconds": 60.0, "hardware": "laptop-cpu", **asked}
    return find_smallest_limit(s.model, s.optimizer, loss, BATCH, **asked).budget.limit_bytes


@follows("planner/extremes.py", "give integers, a start of at least 1")
def a_start_below_the_end(s: Scene) -> None:
    s.refused(lambda: largest(s, start=3))
    s.refused(lambda: largest(s, start=0))
    assert largest(s, start=1) == 2


@follows("planner/extremes.py", "the smallest limit is looked for: leave limit= out")
def no_limit_or_the_largest_size(s: Scene) -> None:
    s.refused(lambda: smallest(s, limit="8GiB"))
    assert smallest(s)
    assert largest(s, limit="8GiB") == 2


@follows("planner/extremes.py", "what counts the rows of the sample was not found")
def a_function_that_makes_batches(s: Scene) -> None:
    s.refused(lambda: batches_like((BATCH, torch.ones(3))))
    asked = (
        s.model,
        s.optimizer,
        lambda model, batch: loss(model, batch[0]),
        lambda count: (rows(count), torch.ones(3)),
    )
    assert find_largest(*asked, start=2, at_most=2, limit="8GiB", hardware="laptop-cpu").size == 2


@follows("planner/extremes.py", "give the seconds that a step may take")
def seconds_above_nothing(s: Scene) -> None:
    s.refused(lambda: largest(s, step_seconds=0))
    assert largest(s, step_seconds=60.0) == 2


@follows("planner/extremes.py", "give no plan, or a technique")
def sizes_of_plans_that_are_chosen(s: Scene) -> None:
    s.refused(lambda: largest(s, plan=Plan()))
    assert largest(s) == largest(s, plan="checkpoint-every-block") == 2


@follows("planner/extremes.py", "without a limit every size fits")
def a_limit_or_seconds_or_both(s: Scene) -> None:
    here: dict[str, Any] = {"limit": None, "hardware": None}  # a described machine has an end
    s.refused(lambda: largest(s, **here))
    assert largest(s, **here, step_seconds=60.0) == 2
    assert largest(s, limit="8GiB", step_seconds=60.0) == 2


@follows("job/equivalence.py", "it compares steps of plain PyTorch with those of job.step")
def a_comparison_of_steps(s: Scene) -> None:
    s.refused(lambda: memfit.verify(s.model, s.optimizer, loss, BATCH, lines=True))
    assert memfit.verify(s.model, s.optimizer, loss, BATCH).kind == "bitwise"


@follows("job/equivalence.py", "give it a small model of the same kind")
def a_small_model_of_its_own(s: Scene) -> None:
    s.fit(plan=ON_DISK)
    s.refused(lambda: memfit.verify(s.model, s.optimizer, loss, BATCH))
    small = nn.Sequential(nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 8))
    assert memfit.verify(small, torch.optim.AdamW(small.parameters()), loss, BATCH).kind == "bitwise"


@follows("planner/advise.py", "is chosen for job.step: leave it out with lines=True")
def advice_for_lines_without_a_technique(s: Scene) -> None:
    def asked(**wishes: Any) -> int:
        return advise(
            s.model, s.optimizer, loss, BATCH, limit="8GiB", hardware="laptop-cpu", lines=True, **wishes
        ).predicted_peak_bytes

    s.refused(lambda: asked(plan="checkpoint-every-block"))
    assert asked() > 0
