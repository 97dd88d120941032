"""What a person may do to a model, an optimizer or a batch while a job holds them: each refused by name, and the job goes on where it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equivalence import plans, zoo
from equivalence.compare import assert_equal_training
from equivalence.plain import adamw, sgd
from equivalence.with_memfit import fit_case, fit_variant, fit_with, profile_of
from memfit.core.errors import DoesNotFitError, UnsupportedError, UsageError
from memfit.core.plan import Plan
from memfit.devices.binding import Allocator, install

NAME = "kwargs"


def _job(plan: str, directory: Path) -> tuple[zoo.Case, torch.optim.Optimizer, Any]:
    case = zoo.ZOO[NAME]()
    optimizer = sgd(lr=0.1)(case.model)
    job = fit_variant(NAME, plans.BY_NAME[plan], directory)(case, optimizer)
    job.step(case.batch(0))
    return case, optimizer, job


@pytest.mark.parametrize("plan", ["resident", "disk"])
def test_a_parameter_that_was_added_is_named_and_the_job_goes_on_without_it(plan: str, tmp_path: Path) -> None:
    case, _, job = _job(plan, tmp_path)
    case.model.get_submodule("blocks.1").late = nn.Parameter(torch.zeros(3))
    with pytest.raises(UsageError, match=r"new parameter 'blocks\.1\.late'.*close the job and fit again"):
        job.step(case.batch(1))
    del case.model.get_submodule("blocks.1").late
    assert job.step(case.batch(1)).is_finite
    job.close()


def test_a_parameter_that_was_removed_is_named(tmp_path: Path) -> None:
    case, _, job = _job("disk", tmp_path)
    case.model.get_submodule("blocks.1.mix.up").register_parameter("bias", None)
    with pytest.raises(UsageError, match=r"'blocks\.1\.mix\.up\.bias' was removed"):
        job.step(case.batch(1))


@pytest.mark.parametrize("plan", ["resident", "disk"])
def test_a_parameter_group_that_is_added_is_refused_by_what_is_in_it(plan: str, tmp_path: Path) -> None:
    case, optimizer, job = _job(plan, tmp_path)
    with pytest.raises(UnsupportedError, match=r"add_param_group.*does not know.*memfit\.fit again"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(UsageError, match=r"updates 'entry\.weight' already"):
        optimizer.add_param_group({"params": [case.model.get_parameter("entry.weight")]})
    assert len(optimizer.param_groups) == 1
    assert job.step(case.batch(1)).is_finite
    with pytest.raises(UsageError, match=r"job\.step\(batch\)"):
        optimizer.step()
    job.close()


def test_a_loss_that_is_not_finite_is_reported_as_such(tmp_path: Path) -> None:
    case, _, job = _job("disk", tmp_path)
    batch = {name: tensor.clone() for name, tensor in case.batch(1).items()}
    batch["inputs"][0, 0, 0] = torch.nan
    assert not job.step(batch).is_finite
    job.close()


def test_a_larger_batch_that_does_not_fit_is_refused_with_both_sizes_and_the_job_goes_on(tmp_path: Path) -> None:
    allocator = install()
    assert isinstance(allocator, Allocator)
    case = zoo.ZOO[NAME]()
    limit = allocator.stats().mapped_bytes + (128 << 20)
    job = fit_case(case, plan=Plan(), limit=limit, emulate_device=True, directory=tmp_path / "homes")
    job.step(case.batch(0))
    batch = case.batch(1)
    large = {name: torch.cat([tensor] * 4096) for name, tensor in batch.items()}
    with pytest.raises(DoesNotFitError, match=r"a batch of 32768 rows .*\[32768, 6, 32\].* would take .* are left"):
        job.step(large)
    del large
    # A smaller one is planned for on the spot.
    assert job.step({name: tensor[:3] for name, tensor in batch.items()}).rows == 3
    assert job.step(batch).is_finite
    job.close()


def _checkpointing(*, is_reentrant: bool) -> zoo.Case:
    """`gradient_checkpointing_enable` is its older name, which warns."""
    case = zoo.ZOO["gpt2-untied"]()
    case.model.activation_checkpointing_enable({"use_reentrant": is_reentrant})  # type: ignore[operator]
    return case


# torch's reentrant kind warns where no input asks for a gradient, as in a forward without any.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(
    ("is_reentrant", "plan"),
    [
        (False, "disk"),
        (True, "recompute"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(False, "resident"), (False, "recompute"), (True, "resident"), (True, "disk")]
        ),
    ],
)
def test_activation_checkpointing_of_transformers_is_trained_exactly_or_refused_clearly(
    plan: str, tmp_path: Path, *, is_reentrant: bool
) -> None:
    def build() -> zoo.Case:
        return _checkpointing(is_reentrant=is_reentrant)

    variant = plans.BY_NAME[plan]
    try:
        assert_equal_training(
            build,
            adamw(),
            fit_with(variant.plan(profile_of(build())), tmp_path, keep_gradients=True),
            steps=2,
            may_reorder=False,
        )
    except UnsupportedError as error:
        assert is_reentrant, error  # noqa: PT017, the other kind composes
        assert "checkpoint" in str(error)  # noqa: PT017
