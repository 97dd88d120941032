"""Plans as people write them in Python: words for choices, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.core.errors import PlanError
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, Saved, Tier
from memfit.core.precision import ComputeDtype


def test_choices_may_be_given_as_their_words() -> None:
    words: dict[str, Any] = {"compute_dtype": "bfloat16", "order": "microbatch-major"}
    call: Any = {"saved": "offload", "saved_home": "host"}
    block: Any = {"weight_home": "disk"}
    made = Plan(microbatches=2, calls=(CallPlan(**call),), blocks={"a": BlockPlan(**block)}, **words)
    assert made == Plan(
        microbatches=2,
        calls=(CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.HOST),),
        blocks={"a": BlockPlan(weight_home=Tier.DISK)},
        compute_dtype=ComputeDtype.BFLOAT16,
        order=Order.MICROBATCH_MAJOR,
    )
    assert made.compute_dtype.has_masters
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (Plan, {"order": "sideways"}, r"order of Plan is one of \['layer-major', 'microbatch-major'\], not 'sideways'"),
        (CallPlan, {"saved": "lost"}, "saved of CallPlan is one of"),
        (BlockPlan, {"state_home": "cloud"}, "state_home of BlockPlan is one of"),
        (Plan, {"microbatches": "4"}, "microbatches of Plan is no word: '4'"),
    ],
)
def test_other_words_are_refused_by_name(kind: Any, given: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        kind(**given)
