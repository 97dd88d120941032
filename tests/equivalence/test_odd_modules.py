"""Torch's less ordinary modules under two plans: bit for bit plain PyTorch's, or refused in words that name the cause."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from equivalence import odd_modules, plans, zoo
from equivalence.compare import assert_equal_training
from equivalence.plain import adamw
from equivalence.with_memfit import fit_case, fit_with, profile_of
from memfit.core.errors import MemfitError, UnsupportedError
from memfit.core.plan import Plan

WIDTH = zoo.WIDTH
QUICK = ("gru", "weight-norm", "scalars", "listed", "strided", "partly-frozen", "masked")


@pytest.fixture(autouse=True)
def _torch_s_own_advice() -> Iterator[None]:
    """Old norms, scripts and lazy modules tell of their successors when they are made."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="Lazy modules|LSTM with projections")
        yield


def _pairs() -> list[object]:
    return [
        pytest.param(name, plan, id=f"{name}-{plan}", marks=[] if name in QUICK and is_split else [pytest.mark.slow])
        for name in odd_modules.ODD
        for plan, is_split in (("disk", False), ("disk-recompute-4", True))
        if (not is_split or name not in odd_modules.WHOLE_BATCH_ONLY)
    ]


@pytest.mark.parametrize(("name", "plan"), _pairs())
def test_odd_modules_train_bit_for_bit(name: str, plan: str, tmp_path: Path) -> None:
    build, variant = odd_modules.ODD[name], plans.BY_NAME[plan]
    found = variant.plan(profile_of(build()))
    assert_equal_training(
        build,
        adamw(),
        fit_with(found, tmp_path, keep_gradients=True),
        microbatches=variant.microbatches,
        by_terms=True,
    )


@pytest.mark.parametrize("name", odd_modules.REFUSED)
def test_what_cannot_be_trained_is_refused_in_words(name: str) -> None:
    build, words = odd_modules.REFUSED[name]
    case = build()
    with pytest.raises(MemfitError, match=words):
        fit_case(case, torch.optim.SGD(case.model.parameters(), lr=0.1))


def test_weights_that_the_forward_changes_stay_on_the_device_or_are_refused(tmp_path: Path) -> None:
    build = odd_modules.ODD["max-norm"]
    profile = profile_of(build())
    assert profile.written_weights == ("embedding.weight",)
    assert_equal_training(build, adamw(), fit_with(Plan(blocks=plans.on_disk(profile)), tmp_path, keep_gradients=True))
    for plan in (Plan(calls=(plans.RECOMPUTE,)), Plan(microbatches=2)):
        with pytest.raises(UnsupportedError, match=r"changes its parameter 'embedding\.weight' in place"):
            fit_case(build(), plan=plan)
    with pytest.raises(UnsupportedError, match="without store="):
        fit_case(build(), store=tmp_path / "run")


def test_statistics_that_thaw_while_batches_are_cut_are_refused_before_the_step() -> None:
    case = odd_modules.partly_frozen()
    with fit_case(case, plan=Plan(microbatches=2)) as job:
        job.step(case.batch(0))
        weights = {name: p.clone() for name, p in case.model.named_parameters()}
        case.model.train()
        with pytest.raises(UnsupportedError, match="statistics over the batch"):
            job.step(case.batch(1))
        assert all(torch.equal(p, weights[name]) for name, p in case.model.named_parameters())
        for module in case.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        job.step(case.batch(1))
