"""How these tests start memfit: profile, plan by hand, fit.

In: a case and a variant of `plans`. Out: a function that makes the job, as `compare.assert_equal_training` wants it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from equivalence import plans, zoo
from equivalence.compare import JobLike, MakeJob
from equivalence.plain import MakeOptimizer, adamw
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.storage_formats import ComputeDtype
from memfit.engine.caches import CacheUse
from memfit.planner.problem import Problem

ADAMW = adamw()


def profile_of(case: zoo.Case, make_optimizer: MakeOptimizer = ADAMW, microbatches: int = 1) -> Profile:
    """A case's profile; leaves the default generator alone."""
    optimizer = make_optimizer(case.model)
    return memfit.profile(case.model, optimizer, case.loss, case.batch(0), microbatches=[microbatches])


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


Traces = dict[object, tuple[Profile, CacheUse]]
_known: Traces = {}


@contextmanager
def traced_once(name: object, known: Traces = _known) -> Iterator[None]:
    """Within, what goes by this name is traced once for each number of microbatches and each arithmetic; then `known` tells what was found.

    A trace is most of the time that a small job takes. The first one is of the very model that is then trained, so what it leaves on a model is seen;
    other jobs differ in homes and fates, of which a trace knows nothing.
    """

    def profile(
        problem: Problem,
        batch: Any,
        counts: Sequence[int],
        *,
        chunk_tokens: int | None,
        compute: ComputeDtype = ComputeDtype.GIVEN,
        checks_repeat: bool = True,
        like: Profile | None = None,
    ) -> Profile:
        key = (name, tuple(counts), chunk_tokens, compute)
        if key not in known:
            how: dict[str, Any] = {"checks_repeat": checks_repeat, "like": like}
            traced = trace(problem, batch, counts, chunk_tokens=chunk_tokens, compute=compute, **how)
            known[key] = traced, problem.caches.use
        found, problem.caches.use = known[key]
        problem.caches.is_decided = True
        return found

    trace = Problem.profile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Problem, "profile", profile)
        yield


def fit_known(name: str, variant: plans.Variant, directory: Path, **options: Any) -> MakeJob:
    """As `fit_variant`, for a case as the zoo makes it under AdamW with all parameters in one group; it is traced once (see `traced_once`)."""
    fit = fit_variant(name, variant, directory, **options)

    def make(case: zoo.Case, optimizer: torch.optim.Optimizer) -> JobLike:
        assert type(optimizer) is torch.optim.AdamW and len(optimizer.param_groups) == 1
        with traced_once(name):
            return fit(case, optimizer)

    return make


def fit_case(case: zoo.Case, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    """Fits as a user does; `options` may bring another loss."""
    optimizer = adamw()(case.model) if optimizer is None else optimizer
    return memfit.fit(case.model, optimizer, options.pop("loss", case.loss), case.batch(0), **options)
