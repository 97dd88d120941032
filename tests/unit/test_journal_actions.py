"""A journal's actions in a schedule: where they stand, what they wait for, what the checker refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.core.errors import PlanError
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.schedule import Schedule, parse_action
from memfit.core.step import Token
from memfit.core.tiers import Tier
from memfit.step.build import build_step, place_turns
from memfit.step.lower import lower
from memfit.step.predict import predict
from unit.checking import check_schedule
from unit.profiles import chain_profile

PROFILE = chain_profile(length=4)
HOME = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
PLAN = Plan(blocks={b.name: HOME for b in PROFILE.blocks}, update=UpdateTime.AFTER_BACKWARD)
PLAIN = build_step(PLAN, PROFILE, clips_norm=False)
TURNS = ((2,), (0, 3), (1,))


def edited(**places: int) -> Schedule:
    """The step in turns, each of these actions (`_` for a blank) moved to a place counted from `decide`."""
    built = place_turns(PLAIN, TURNS)
    texts = [str(a) for a in built]
    decided = texts.index("decide")
    for name, place in places.items():
        text = name.replace("_", " ")
        texts.remove(text)
        texts.insert(decided + place, text)
    return replace(built, actions=tuple(parse_action(t) for t in texts))


def test_updates_follow_the_turns_and_all_are_asked_for_before_the_first_is_kept() -> None:
    built = place_turns(PLAIN, TURNS)
    texts = [str(a) for a in built]
    assert texts[texts.index("decide") :] == [
        "decide", "update B2", "update B0", "update B3", "update B1", "keep B2", "keep B0 B3", "keep B1", "commit",
    ]  # fmt: skip
    assert texts[: texts.index("decide")] == [str(a) for a in PLAIN][: texts.index("decide")]
    assert Schedule.parse(built.text()) == built
    check_schedule(built, PLAN, PROFILE)


def test_an_update_changes_nothing_before_the_turn_before_it_is_kept() -> None:
    step = lower(place_turns(PLAIN, TURNS), PLAN, PROFILE)
    by_text = {str(o.action): o for o in step}
    assert by_text["keep B0 B3"].waits == (Token("update", "B0"), Token("update", "B3"))
    kept = {text: o.gives for text, o in by_text.items() if text.startswith("keep")}
    for update, before in (("B2", None), ("B0", "keep B2"), ("B3", "keep B2"), ("B1", "keep B0 B3")):
        gates = [token for token in by_text[f"update {update}"].after if token.kind == "keep"]
        assert gates == ([] if before is None else [kept[before]])
    assert {token.kind for token in by_text["decide"].waits} == {"accumulate"}
    plain = lower(PLAIN, PLAN, PROFILE)
    assert predict(step).peak_bytes == predict(plain).peak_bytes


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (edited(decide=1), "action .*, decide: a block is already updated"),
        (edited(keep_B2=1), "keep B2: B2 is not updated"),
        (edited(keep_B2=0), "keep B2: the step is not decided"),
        (place_turns(PLAIN, ((2,), (0, 3))), r"commit: new versions of blocks \[1\] have not been kept"),
        (place_turns(PLAIN, ((2,), (0, 2))), r"keep B0 B2: B2 cannot be kept \(again\)"),
    ],
)
def test_what_would_lose_a_step_is_refused(schedule: Schedule, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check_schedule(schedule, PLAN, PROFILE)


def test_updates_in_backward_and_gradients_on_the_device_have_no_turns() -> None:
    early = build_step(replace(PLAN, update=UpdateTime.IN_BACKWARD), PROFILE, clips_norm=False)
    with pytest.raises(PlanError, match="come after backward"):
        place_turns(early, TURNS)
    resident = build_step(Plan(update=UpdateTime.AFTER_BACKWARD), PROFILE, clips_norm=False)
    with pytest.raises(PlanError, match="every gradient at home"):
        place_turns(resident, TURNS)
