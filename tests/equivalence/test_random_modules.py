"""Random small models under random plans, against plain accumulation: the same bits, whatever was drawn.

Fifty examples by default, always the same; `make fuzz` draws a thousand anew.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from equivalence.compare import assert_equal_training
from equivalence.found_modules import FOUND
from equivalence.plain import sgd
from equivalence.random_modules import ModelSpec, make_case, random_plans, specs
from equivalence.stand_in import StandIn
from equivalence.with_memfit import fit_with, profile_of
from memfit.core.errors import UnsupportedError
from memfit.core.plan import Order, Plan, UpdateTime


@given(spec=specs(), microbatches=st.integers(1, 3))
@settings(max_examples=15)
def test_drawn_models_are_legal_in_plain_pytorch_and_their_steps_repeat(spec: ModelSpec, microbatches: int) -> None:
    options = {"microbatches": microbatches}
    report = assert_equal_training(
        lambda: make_case(spec),
        sgd(lr=0.5),
        lambda case, optimizer: StandIn(case, optimizer, "", options),
        microbatches=microbatches,
        steps=2,
    )
    assert report.losses[0] == report.losses[0], "NaN would hide everything"


@pytest.mark.timeout(0)
@given(data=st.data())
def test_random_models_under_random_plans_equal_plain_accumulation_bit_for_bit(data: st.DataObject) -> None:
    spec = data.draw(specs(), label="model")
    plan = data.draw(random_plans(profile_of(make_case(spec))), label="plan")
    clips = plan.update is UpdateTime.AFTER_BACKWARD and data.draw(st.booleans(), label="clips")
    keeps = data.draw(st.booleans(), label="keeps gradients")
    event(f"{plan.microbatches} microbatches")
    note(plan.to_json())
    train_under(spec, plan, clips=clips, keeps=keeps)


@pytest.mark.parametrize("name", sorted(FOUND))
def test_what_the_search_once_found_stays_right(name: str) -> None:
    found = FOUND[name]
    train_under(found.spec, found.plan, clips=found.clips, keeps=True)


def train_under(spec: ModelSpec, plan: Plan, *, clips: bool, keeps: bool) -> None:
    """Trains a drawn model under a plan; where the plan's tail is refused, then without a tail: that is the way out it names."""
    try:
        _train_both(spec, plan, clips=clips, keeps=keeps)
    except UnsupportedError as refusal:
        # Code between calls of the tail may read what the layers read.
        if plan.tail is None or "tail=None" not in str(refusal):
            raise
        _train_both(spec, replace(plan, tail=None), clips=clips, keeps=keeps)


def _train_both(spec: ModelSpec, plan: Plan, *, clips: bool, keeps: bool) -> None:
    reorders = plan.microbatches > 1 and plan.order is Order.LAYER_MAJOR
    # Where sums may round otherwise the gradients have to be seen. Elsewhere a job that frees them early has to be right, too.
    keeps = keeps or (reorders and bool(make_case(spec).shared))
    max_grad_norm = 0.1 if clips else None
    with tempfile.TemporaryDirectory() as directory:
        assert_equal_training(
            lambda: make_case(spec),
            sgd(lr=0.5),
            fit_with(plan, Path(directory), max_grad_norm=max_grad_norm, keep_gradients=keeps),
            microbatches=plan.microbatches,
            max_grad_norm=max_grad_norm,
            steps=2,
            has_gradients=keeps,
            may_reorder=reorders,
            by_terms=True,
        )
