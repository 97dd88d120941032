"""Plans as people write them in Python: words for choices, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

from memfit.core.errors import PlanError
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier


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
        (
            BlockPlan,
            {"state_home": "Cloud 9"},
            r"state_home of BlockPlan is one of \['device', 'host', 'disk', .*not 'Cloud 9'",
        ),
        (BlockPlan, {"update_on": "disk"}, r"update_on of BlockPlan is one of \['device', 'host'\]"),
        (Plan, {"microbatches": "4"}, "microbatches of Plan is no word: '4'"),
    ],
)
def test_other_words_are_refused_by_name(kind: Any, given: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        kind(**given)


def test_where_an_update_runs_is_part_of_a_plan_that_older_ones_leave_out() -> None:
    on_host = BlockPlan(gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)
    plan = Plan(blocks={"a": on_host, "b": BlockPlan(state_home=Tier.HOST)})
    assert Plan.from_json(plan.to_json()) == plan
    older = json.loads(plan.to_json())
    for block in older["blocks"].values():
        del block["update_on"]
    read = Plan.from_json(json.dumps(older))
    assert [read.block(name).update_on for name in "ab"] == [Tier.DEVICE, Tier.DEVICE]
    assert [on_host.updates_on_host(device) for device in ("cuda", "cpu")] == [True, False]


@pytest.mark.parametrize("missing", ["gradient_home", "state_home"])
def test_an_update_on_the_host_needs_its_gradients_and_states_there(missing: str) -> None:
    homes: Any = {"gradient_home": Tier.HOST, "state_home": Tier.DISK, "update_on": Tier.HOST, missing: Tier.DEVICE}
    with pytest.raises(PlanError, match="block 'a' is updated on the host"):
        Plan(blocks={"a": BlockPlan(**homes)}).check(["a"], 1)


def test_a_plan_s_parts_that_travel_are_found_in_another_process_by_their_hash() -> None:
    """Strings hash otherwise there, and a part keeps its hash once it was asked for."""
    parts = (BlockPlan(weight_home=Tier.HOST), CallPlan(saved=Saved.RECOMPUTE))
    assert len({*parts}) == 2  # asked
    asks = (
        "import pickle, sys; from memfit.core.plan import BlockPlan, CallPlan; parts = pickle.load(sys.stdin.buffer); "
        "print({BlockPlan(weight_home='host'): 1}.get(parts[0]), {CallPlan(saved='recompute'): 2}.get(parts[1]))"
    )
    for seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", asks],
            input=pickle.dumps(parts),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        assert told.stdout.split() == [b"1", b"2"]
    assert copy.deepcopy(parts) == parts
