"""What memfit refuses to take in hand, each with what its message must say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from equivalence import plans, zoo
from equivalence.compare import number, same_bits
from equivalence.plain import PlainTrainer, adamw, sgd
from equivalence.with_memfit import fit_case, fit_with, profile_by_name
from memfit.core.errors import (
    DoesNotFitError,
    MemfitError,
    PlanError,
    StoreError,
    StoreInUseError,
    UnsupportedError,
    UsageError,
)
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier

NAME = "kwargs"
DISK = plans.BY_NAME["disk"]


# What cannot be taken in hand


def test_an_impossible_limit_says_the_smallest_that_would_work_and_what_stands_in_the_way() -> None:
    case = zoo.ZOO[NAME]()
    with pytest.raises(DoesNotFitError) as caught:
        fit_case(case, limit="1MiB")
    smallest = caught.value.smallest_limit_bytes
    assert smallest is not None
    assert smallest > 1 << 20
    message = str(caught.value)
    assert "1.00 MiB" in message or "1.0 MiB" in message
    assert "smallest" in message
    # What stands in the way: the interpreter and its libraries alone are more than this limit.
    assert any(word in message for word in ("interpreter", "libraries", "resident", "process")), message


def test_the_refused_model_is_left_as_it_was() -> None:
    case, untouched = zoo.ZOO[NAME](), zoo.ZOO[NAME]()
    with pytest.raises(DoesNotFitError):
        fit_case(case, limit="1MiB")
    for name, parameter in case.model.named_parameters():
        assert torch.equal(parameter, untouched.model.get_parameter(name)), name
    # No hook is left behind: the model trains plainly as if memfit had never seen it.
    trainers = [PlainTrainer(c, sgd()(c.model)) for c in (case, untouched)]
    for trainer in trainers:
        trainer.accumulate(case.batch(0))
    ours, plain = (trainer.gradients() for trainer in trainers)
    for name, expected in plain.items():
        gradient = ours[name]
        assert gradient is not None, name
        assert expected is not None, name
        assert same_bits(gradient, expected), name


@pytest.mark.parametrize("limit", ["8q", "a lot", -1, True, 1.5])
def test_a_limit_that_is_no_size_is_refused(limit: Any) -> None:
    with pytest.raises(UsageError, match=r"size|limit"):
        fit_case(zoo.ZOO[NAME](), limit=limit)


@pytest.mark.parametrize("thing", [lambda x: x, nn.Linear, None, [nn.Linear(2, 2)]])
def test_what_is_no_module_is_refused_by_its_type(thing: Any) -> None:
    case = zoo.ZOO[NAME]()
    with pytest.raises(UsageError, match=r"nn\.Module") as caught:
        memfit.fit(thing, adamw()(case.model), case.loss, case.batch(0))
    assert type(thing).__name__ in str(caught.value) or getattr(thing, "__name__", "") in str(caught.value)


@pytest.mark.parametrize("thing", [None, "adamw", torch.optim.AdamW])
def test_what_is_no_optimizer_is_refused(thing: Any) -> None:
    case = zoo.ZOO[NAME]()
    with pytest.raises(UsageError, match=r"[Oo]ptimizer"):
        memfit.fit(case.model, thing, case.loss, case.batch(0))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda out: out, "6, 32"),
        (lambda out: out.mean((1, 2)), "shape"),
        (lambda out: out.mean().item(), "float"),
        (lambda out: None, "None"),
        (lambda out: {"loss": out.mean()}, "dict"),
        (lambda out: out.detach().mean(), "grad"),
    ],
)
def test_a_loss_that_is_no_scalar_to_go_back_from_is_refused(make: Callable[[Tensor], Any], said: str) -> None:
    case = zoo.ZOO[NAME]()
    with pytest.raises(UsageError, match="loss") as caught:
        fit_case(case, loss=lambda model, batch: make(model(batch["inputs"])))
    assert said in str(caught.value)


def test_a_loss_with_a_number_a_row_is_told_to_take_its_mean() -> None:
    with pytest.raises(
        UsageError, match=r"not \d+ numbers \(a tensor of shape \(\d+,\)\): take its mean\(\) or sum\(\)"
    ):
        fit_case(zoo.ZOO[NAME](), loss=lambda model, batch: model(batch["inputs"]).mean((1, 2)))


def test_a_criterion_of_torchs_in_the_place_of_the_loss_is_shown_how_to_be_one() -> None:
    with pytest.raises(UsageError, match=r"lambda model, batch: criterion\(model\(batch\[0\]\), batch\[1\]\)"):
        fit_case(zoo.ZOO[NAME](), loss=nn.CrossEntropyLoss())


def test_a_step_where_gradients_are_off_says_so_and_the_job_goes_on() -> None:
    case = zoo.ZOO[NAME]()
    with fit_case(case) as job:
        for off in (torch.no_grad(), torch.inference_mode()):
            with off, pytest.raises(UsageError, match="gradients are off where job.step is called"):
                job.step(case.batch(0))
        assert number(job.step(case.batch(0)).loss) > 0


def test_a_model_that_a_job_has_is_refused_with_what_frees_it() -> None:
    case = zoo.ZOO[NAME]()
    with (
        fit_case(case),
        pytest.raises(UsageError, match=r"a live job, at step 0, has its parameters: call close\(\) of that job first"),
    ):
        memfit.fit(case.model, torch.optim.SGD(case.model.parameters()), case.loss, case.batch(0))


def test_what_trains_beside_the_model_is_to_be_taken_in_or_frozen() -> None:
    case, other = zoo.ZOO[NAME](), nn.Linear(1, 1)

    def loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
        return other(case.loss(model, batch).reshape(1)).sum()

    with pytest.raises(UnsupportedError, match=r"one nn.Module.*or, where that is not to be trained here, freeze it"):
        fit_case(case, loss=loss)
    other.requires_grad_(False)
    with fit_case(case, loss=loss) as job:
        assert number(job.step(case.batch(0)).loss) != 0


def test_an_optimizer_over_foreign_parameters_is_refused() -> None:
    case = zoo.ZOO[NAME]()
    foreign = nn.Parameter(torch.zeros(3, 5))
    optimizer = torch.optim.AdamW([*case.model.parameters(), foreign])
    with pytest.raises(UsageError, match=r"[Oo]ptimizer") as caught:
        fit_case(case, optimizer)
    assert "3, 5" in str(caught.value)
    assert "model" in str(caught.value)


def test_lbfgs_is_refused_with_the_reason() -> None:
    case = zoo.ZOO[NAME]()
    with pytest.raises(UnsupportedError, match="LBFGS") as caught:
        fit_case(case, torch.optim.LBFGS(case.model.parameters()))
    assert any(word in str(caught.value) for word in ("closure", "whole", "several times", "again")), str(caught.value)


def test_a_split_of_batch_statistics_is_refused() -> None:
    case = zoo.ZOO["batch-norm"]()
    with pytest.raises(UnsupportedError, match=r"batch statistics|statistics over the batch|BatchNorm"):
        fit_case(case, plan=Plan(microbatches=2))


def test_a_split_that_changes_the_loss_is_refused_until_it_is_allowed() -> None:
    def contrastive(model: nn.Module, batch: zoo.Batch) -> Tensor:
        pooled = model(batch["inputs"]).mean(1)
        return functional.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))

    case = zoo.ZOO[NAME]()
    with pytest.raises(UnsupportedError, match="nonadditive-loss"):
        fit_case(case, loss=contrastive, plan=Plan(microbatches=2)).step(case.batch(0))
    allowed = zoo.ZOO[NAME]()
    job = fit_case(allowed, loss=contrastive, plan=Plan(microbatches=2), allow={"nonadditive-loss"})
    assert number(job.step(allowed.batch(0)).loss) > 0
    job.close()


def test_what_cannot_be_allowed_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="everything") as caught:
        fit_case(zoo.ZOO[NAME](), allow={"everything"})
    assert "nonadditive-loss" in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(blocks={"blocks.9": BlockPlan()}), r"blocks\.9"),
        (Plan(tail=999), "999"),
        ("{", "JSON"),
        ('{"format": 1, "microbatchs": 2}', "microbatchs"),
        (Plan(blocks={"blocks.0": BlockPlan(weight_home=Tier.HOST)}), "host"),
    ],
)
def test_a_plan_that_does_not_suit_the_model_or_machine_is_refused(plan: Any, said: str) -> None:
    with pytest.raises(MemfitError, match=said):
        fit_case(zoo.ZOO[NAME](), plan=plan)


def test_more_microbatches_than_rows_are_refused() -> None:
    with pytest.raises((PlanError, UsageError), match=r"9.*8|8.*9"):
        fit_case(zoo.ZOO[NAME](), plan=Plan(microbatches=9))


# The directory of disk homes


def test_a_directory_whose_parent_is_missing_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such" / "place"
    with pytest.raises(StoreError) as caught:
        fit_case(zoo.ZOO[NAME](), plan=DISK.plan(profile_by_name(NAME)), directory=missing)
    assert str(missing) in str(caught.value) or str(missing.parent) in str(caught.value)


def test_a_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("not a directory")
    with pytest.raises(StoreError) as caught:
        fit_case(zoo.ZOO[NAME](), plan=DISK.plan(profile_by_name(NAME)), directory=path)
    assert str(path) in str(caught.value)
    assert path.read_text() == "not a directory"


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "homes"
    path.mkdir(mode=0o555)
    if os.access(path, os.W_OK):  # root may write anywhere but in the kernel's own file systems
        path = Path("/proc/self/task")
    with pytest.raises(StoreError) as caught:
        fit_case(zoo.ZOO[NAME](), plan=DISK.plan(profile_by_name(NAME)), directory=path)
    assert str(path) in str(caught.value)


def test_a_directory_in_use_by_a_live_job_is_refused_and_free_again_when_that_job_is_closed(tmp_path: Path) -> None:
    plan = DISK.plan(profile_by_name(NAME))
    case = zoo.ZOO[NAME]()
    job = fit_with(plan, tmp_path)(case, adamw()(case.model))
    job.step(case.batch(0))
    other = zoo.ZOO[NAME]()
    with pytest.raises(StoreInUseError) as caught:
        fit_with(plan, tmp_path)(other, adamw()(other.model))
    assert str(tmp_path / "homes") in str(caught.value)
    # The first job did not suffer.
    assert number(job.step(case.batch(1)).loss) > 0
    job.close()
