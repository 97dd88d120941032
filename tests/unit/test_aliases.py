"""Other people's words are understood where a choice is read, and those of the glossary are among them; what is written are memfit's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.core.errors import PlanError
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, own_allowances, own_field, own_word
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"


@pytest.mark.parametrize(
    ("word", "own"),
    [
        ("rematerialization", Saved.RECOMPUTE),
        ("activation checkpointing", Saved.RECOMPUTE),
        ("Gradient-Checkpointing", Saved.RECOMPUTE),
        ("activation_checkpointing", Saved.RECOMPUTE),
        ("selective checkpointing", Saved.SELECT),
        ("SwapOut", Saved.OFFLOAD),
        ("SwapOut / SwapIn", Saved.OFFLOAD),
        ("recompute", Saved.RECOMPUTE),
        ("KEEP", Saved.KEEP),
        ("forget", None),
    ],
)
def test_what_a_call_saves_is_read_in_the_readers_words(word: str, own: Saved | None) -> None:
    given: Any = word
    if own is None:
        with pytest.raises(PlanError, match="is one of"):
            CallPlan(saved=given)
        return
    assert CallPlan(saved=given).saved is own
    plan = Plan.from_json(json.dumps({"format": 1, "calls": [{"saved": word}]}))
    assert plan.calls == (CallPlan(saved=own),)
    assert f'"saved": "{own}"' in plan.to_json()


def test_a_plan_in_other_peoples_words_is_the_plan_in_ours() -> None:
    theirs = {
        "format": 1,
        "gradient_accumulation_steps": 4,
        "order": "breadth-first",
        "compute_dtype": "bf16",
        "blocks": {"layer": {"weight_home": "nvme", "optimizer_state_home": "cpu", "grad_home": "RAM"}},
        "calls": [{"activations": "remat", "boundary_home": "gpu"}],
    }
    ours = Plan(
        microbatches=4,
        order=Order.LAYER_MAJOR,
        compute_dtype=ComputeDtype.BFLOAT16,
        blocks={"layer": BlockPlan(weight_home=Tier.DISK, state_home=Tier.HOST, gradient_home=Tier.HOST)},
        calls=(CallPlan(saved=Saved.RECOMPUTE, boundary_home=Tier.DEVICE),),
    )
    read = Plan.from_json(json.dumps(theirs))
    assert read == ours
    written = json.loads(read.to_json())
    assert written["microbatches"] == 4
    assert "gradient_accumulation_steps" not in written
    assert Plan.from_json(read.to_json()) == ours


def test_one_decision_in_two_words_is_refused() -> None:
    with pytest.raises(PlanError, match="named twice"):
        Plan.from_json('{"format": 1, "microbatches": 2, "gradient_accumulation_steps": 4}')


def test_what_is_allowed_may_be_named_otherwise_and_what_is_unknown_stays_to_be_refused() -> None:
    assert own_allowances({"bfloat16", "8-bit optimizer", "fp16", "nonsense"}) == {
        "bf16",
        "int8-state",
        "fp16",
        "nonsense",
    }
    text: Any = "bf16"
    assert own_allowances(text) == "bf16"


def test_the_glossarys_other_words_for_choices_are_understood() -> None:
    purposes = {"recompute": "saved", "select": "saved"}
    found = 0
    for line in GLOSSARY.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[0] in purposes:
            for alias in cells[2].split(","):
                assert own_word(purposes[cells[0]], alias.strip()) == cells[0], alias
                found += 1
        if len(cells) == 3 and cells[0] == "accumulate":
            assert own_word("order", cells[2]) == "microbatch-major"
    assert found >= 4
    assert own_field("micro-steps") == "microbatches"
