"""Jobs that hypothesis draws: a model of `random_modules`, a plan for it, and the training of both beside plain accumulation.

In: hypothesis' data. Out: a `Drawn`; `train_under` trains it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st

from equivalence.compare import assert_equal_training
from equivalence.listed_order import following
from equivalence.plain import sgd
from equivalence.random_modules import ROWS, ModelSpec, make_case, random_plans, specs
from equivalence.with_memfit import Traces, fit_with, profile_of, traced_once
from equivalence.zoo import Case
from memfit.core.errors import UnsupportedError
from memfit.core.plan import Order, Plan
from memfit.core.tiers import Tier

STEP = sgd(lr=0.5)
MakeCase = Callable[[ModelSpec], Case]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A drawn model and plan.

    Attributes:
        case: the model as it was traced, which the plan had to know. It is the one to be trained, so that it is traced once.
        known: what its trace found.
    """

    spec: ModelSpec
    plan: Plan
    case: Case
    known: Traces


def draw_job(data: st.DataObject, make: MakeCase = make_case, away: Sequence[Tier] = (Tier.DISK,)) -> Drawn:
    """Draws a model, which `make` builds, and a plan for it with homes on the device and in the tiers `away`."""
    spec = data.draw(specs(), label="model")
    microbatches = data.draw(st.integers(1, ROWS - 1), label="microbatches")
    case, known = make(spec), Traces()
    with traced_once(spec, known):
        profile = profile_of(case, STEP, microbatches)
    plan = data.draw(random_plans(profile, microbatches, away), label="plan")
    return Drawn(spec=spec, plan=plan, case=case, known=known)


def train_under(
    spec: ModelSpec, plan: Plan, *, clips: bool, keeps: bool, traced: Drawn | None = None, make: MakeCase = make_case
) -> None:
    """Trains a drawn model under a plan; where the plan's tail is refused, then without a tail: that is the way out it names."""
    try:
        if traced is None:
            _train_both(spec, plan, clips=clips, keeps=keeps, make=make)
        else:
            with traced_once(spec, traced.known):
                _train_both(spec, plan, clips=clips, keeps=keeps, make=make, first=traced.case)
    except UnsupportedError as refusal:
        # Code between calls of the tail may read what the layers read.
        if plan.tail is None or "tail=None" not in str(refusal):
            raise
        _train_both(spec, replace(plan, tail=None), clips=clips, keeps=keeps, make=make)


def _train_both(
    spec: ModelSpec, plan: Plan, *, clips: bool, keeps: bool, make: MakeCase, first: Case | None = None
) -> None:
    """Trains two cases, `first` by memfit if it is given. Each step's operations are held against its list."""
    cases = iter([first] if first is not None else [])
    reorders = plan.microbatches > 1 and plan.order is Order.LAYER_MAJOR
    # Where sums may round otherwise the gradients have to be seen. Elsewhere a job that frees them early has to be right, too.
    keeps = keeps or (reorders and bool(make_case(spec).shared))
    max_grad_norm = 0.1 if clips else None
    with tempfile.TemporaryDirectory() as directory:
        assert_equal_training(
            lambda: next(cases, None) or make(spec),
            STEP,
            following(fit_with(plan, Path(directory), max_grad_norm=max_grad_norm, keep_gradients=keeps)),
            microbatches=plan.microbatches,
            max_grad_norm=max_grad_norm,
            steps=2,
            has_gradients=keeps,
            may_reorder=reorders,
            by_terms=True,
        )
