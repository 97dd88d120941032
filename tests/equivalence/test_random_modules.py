"""Random small models under random plans, against plain accumulation: the same bits, whatever was drawn.

Twenty-five examples by default, always the same; `make fuzz` draws a thousand anew.
"""

from __future__ import annotations

import pytest
from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from equivalence.compare import assert_equal_training
from equivalence.drawn_jobs import STEP, draw_job, train_under
from equivalence.found_modules import FOUND
from equivalence.random_modules import ModelSpec, make_case, specs
from equivalence.stand_in import StandIn
from memfit.core.plan import UpdateTime


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
    with found.outcome():
        train_under(found.spec, found.plan, clips=found.clips, keeps=True)
