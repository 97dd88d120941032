"""How these tests start memfit: profile, plan by hand, fit.

In: a case and a variant of `plans`. Out: a function that makes the job, as `compare.assert_equal_training` wants it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

import memfit
from equivalence import plans, zoo
from equivalence.compare import JobLike, MakeJob
from equivalence.plain import adamw
from memfit.core.plan import Plan
from memfit.core.profile import Profile


def profile_of(case: zoo.Case) -> Profile:
    """A case's profile under AdamW; leaves the default generator alone."""
    return memfit.profile(case.model, adamw()(case.model), case.loss, case.batch(0))


@cache
def profile_by_name(name: str) -> Profile:
    """The profile of a zoo model, traced once a process."""
    return profile_of(zoo.ZOO[name]())


def fit_with(plan: Plan, directory: Path, **options: Any) -> MakeJob:
    """Makes jobs that follow `plan`, with disk homes under `directory`."""

    def make(case: zoo.Case, optimizer: torch.optim.Optimizer) -> JobLike:
        return memfit.fit(
            case.model,
            optimizer,
            case.loss,
            case.batch(0),
            plan=plan,
            allow=case.allow,
            weight=case.weight,
            directory=directory / "homes",
            **options,
        )

    return make


def fit_variant(name: str, variant: plans.Variant, directory: Path, **options: Any) -> MakeJob:
    """Makes jobs that train the zoo's `name` as `variant` says."""
    plan = variant.plan(profile_by_name(name))
    return fit_with(plan, directory, max_grad_norm=variant.max_grad_norm, **options)


def fit_case(case: zoo.Case, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    """Fits as a user does; `options` may bring another loss."""
    optimizer = adamw()(case.model) if optimizer is None else optimizer
    return memfit.fit(case.model, optimizer, options.pop("loss", case.loss), case.batch(0), **options)
