"""Random small models under random plans, against plain accumulation: the same bits, whatever was drawn.

Fifty examples by default, always the same; `make fuzz` draws a thousand anew.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from equivalence.compare import assert_equal_training
from equivalence.found_modules import FOUND
from equivalence.plain import sgd
from equivalence.random_modules import ROWS, ModelSpec, make_case, random_plans, specs
from equivalence.stand_in import StandIn
from equivalence.with_memfit import Traces, fit_with, profile_of, traced_once
from equivalence.zoo import Case
from memfit.core.errors import UnsupportedError
from memfit.core.plan import Order, Plan, UpdateTime

STEP = sgd(lr=0.5)


@given(spec=specs(), microbatches=st.integers(1, 3))
@settings(max_examples=15)
def test_drawn_models_are_legal_in_plain_pytorch_and_their_steps_repeat(spec: ModelSpec, microbatches: int) -> None:
    options = {"microbatches": microbatches}
    report = assert_equal_training(
        lambda: make_case(spec),
        STEP,
        lambda case, optimizer: StandIn(case, optimizer, "", options),
        microbatches=microbatches,
        steps=2,
    )
    assert report.losses[0] == report.losses[0], "NaN would hide everything"


@pytest.mark.timeout(0)
@given(data=st.data())
def test_random_models_under_random_plans_equal_plain_accumulation_bit_for_bit(data: st.DataObject) -> None:
    drawn = draw_job(data)
    clips = drawn.plan.update is UpdateTime.AFTER_BACKWARD and data.draw(st.booleans(), label="clips")
    keeps = data.draw(st.booleans(), label="keeps gradients")
    event(f"{drawn.plan.microbatches} microbatches")
    note(drawn.plan.to_json())
    train_under(drawn.spec, drawn.plan, clips=clips, keeps=keeps, traced=drawn)


@pytest.mark.parametrize("name", sorted(FOUND))
def test_what_the_search_once_found_stays_right(name: str) -> None:
    found = FOUND[name]
    train_under(found.spec, found.plan, clips=found.clips, keeps=True)


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


def draw_job(data: st.DataObject) -> Drawn:
    """Draws a model and a plan for it."""
    spec = data.draw(specs(), label="model")
    microbatches = data.draw(st.integers(1, ROWS - 1), label="microbatches")
    case, known = make_case(spec), Traces()
    with traced_once(spec, known):
        profile = profile_of(case, STEP, microbatches)
    plan = data.draw(random_plans(profile, microbatches), label="plan")
    return Drawn(spec=spec, plan=plan, case=case, known=known)


def train_under(spec: ModelSpec, plan: Plan, *, clips: bool, keeps: bool, traced: Drawn | None = None) -> None:
    """Trains a drawn model under a plan; where the plan's tail is refused, then without a tail: that is the way out it names."""
    try:
        if traced is None:
            _train_both(spec, plan, clips=clips, keeps=keeps)
        else:
            with traced_once(spec, traced.known):
                _train_both(spec, plan, clips=clips, keeps=keeps, first=traced.case)
    except UnsupportedError as refusal:
        # Code between calls of the tail may read what the layers read.
        if plan.tail is None or "tail=None" not in str(refusal):
            raise
        _train_both(spec, replace(plan, tail=None), clips=clips, keeps=keeps)


def _train_both(spec: ModelSpec, plan: Plan, *, clips: bool, keeps: bool, first: Case | None = None) -> None:
    """Trains two cases, `first` by memfit if it is given."""
    cases = iter([first] if first is not None else [])
    reorders = plan.microbatches > 1 and plan.order is Order.LAYER_MAJOR
    # Where sums may round otherwise the gradients have to be seen. Elsewhere a job that frees them early has to be right, too.
    keeps = keeps or (reorders and bool(make_case(spec).shared))
    max_grad_norm = 0.1 if clips else None
    with tempfile.TemporaryDirectory() as directory:
        assert_equal_training(
            lambda: next(cases, None) or make_case(spec),
            STEP,
            fit_with(plan, Path(directory), max_grad_norm=max_grad_norm, keep_gradients=keeps),
            microbatches=plan.microbatches,
            max_grad_norm=max_grad_norm,
            steps=2,
            has_gradients=keeps,
            may_reorder=reorders,
            by_terms=True,
        )
