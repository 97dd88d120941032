"""The checker names what is wrong and points at it: one edit of a legal schedule for each rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.core.errors import PlanError
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.schedule import Schedule, parse_action
from memfit.core.tiers import Tier
from memfit.step.build import build_forward, build_step
from unit.checking import check_schedule
from unit.profiles import chain_profile, gpt_profile

PROFILE = chain_profile(length=5)
NAMES = [b.name for b in PROFILE.blocks]
DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DEVICE, state_home=Tier.DISK)
HOME = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
OFFLOAD = (CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK),) * 5
FUSED = Plan(microbatches=2, tail=4, blocks=dict.fromkeys(NAMES, DISK), calls=OFFLOAD)
CLIPPED = Plan(blocks=dict.fromkeys(NAMES, HOME))


def edited(plan: Plan, *edits: str, clips_norm: bool = False, profile: Profile = PROFILE) -> Schedule:
    """Edits: "-x" leaves x out, "x > y" moves x behind y, "x < y" moves it before y, "x + y" adds x behind y."""
    schedule = build_step(plan, profile, clips_norm=clips_norm)
    texts = [str(a) for a in schedule]
    for edit in edits:
        if edit.startswith("-"):
            texts.remove(edit[1:])
            continue
        what, sign, where = edit.partition(" > ") if " > " in edit else edit.partition(" < ")
        if not sign:
            what, sign, where = edit.partition(" + ")
        if sign != " + ":
            texts.remove(what)
        texts.insert(texts.index(where) + (sign != " < "), what)
    return replace(schedule, actions=tuple(parse_action(t) for t in texts))


@pytest.mark.parametrize(
    ("edit", "action", "reason"),
    [
        ("-fetch B1", "forward C1 m1", "weights of blocks"),
        ("release B1 < forward C1 m0", "forward C1 m0", "weights of blocks"),
        ("fetch B1 + forward C1 m1", "fetch B1", "already there"),
        ("release B3 + release B1", "release B3", "not there"),
        ("-start m1", "forward C0 m1", "has not started"),
        ("forward C1 m1 < forward C0 m1", "forward C1 m1", "is at segment 0"),
        ("-seed m1", "backward C4 m1", "no backward is running"),
        ("-joint m0-1", "backward C3 m0", "no backward is running"),
        ("joint m0-1 < forward C4 m1", "joint m0-1", "tails of all microbatches"),
        ("joint m0-1 + backward C0 m1", "joint m0-1", "no backward is left"),
        ("joint m0-1 < backward C4 m1", "joint m0-1", "a backward is running"),
        ("joint m0 + backward C4 m1", "joint m0", "takes all microbatches"),
        ("seed m1 < forward C4 m1", "seed m1", "forwards have not all run"),
        ("backward C3 m1 < backward C3 m0", "backward C3 m1", "autograd comes to backward C3 m0 next"),
        ("backward C2 m0 < backward C3 m1", "backward C2 m0", "autograd comes to backward C3 m1 next"),
        ("-offload C1 m1 disk", "drop C1 m1", "not offloaded"),
        ("-reload C1 m1", "backward C1 m1", "was not reloaded"),
        ("-drop C1 m1", "reload C1 m1", "not dropped"),
        ("reload C1 m0 > backward C1 m0", "backward C1 m0", "was not reloaded"),
        ("offload C1 m1 disk < forward C1 m1", "offload C1 m1 disk", "forward has not run"),
        ("update B3 < backward C3 m1", "update B3", "not complete"),
        ("update B3 + update B3", "update B3", "already updated"),
        ("clear B3 < update B3", "clear B3", "not updated"),
        ("clear B3 + clear B3", "clear B3", "already cleared"),
        ("norm + update B3", "norm", "no norm"),
        ("accumulate B3 + update B3", "accumulate B3", "home is the device"),
        ("-update B0", "clear B0", "not updated"),
        ("-clear B0", "commit", "have not been cleared"),
        ("commit + commit", "commit", "already committed"),
    ],
)
def test_an_illegal_edit_of_a_fused_step_is_pointed_at(edit: str, action: str, reason: str) -> None:
    schedule = edited(FUSED, edit)
    with pytest.raises(PlanError, match=reason) as error:
        check_schedule(schedule, FUSED, PROFILE)
    head, *context = str(error.value).splitlines()
    index = int(head.split()[1].rstrip(","))
    assert head.startswith(f"action {index}, {action}: ")
    assert str(schedule.actions[index]) == action
    assert [line.split()[-len(action.split()) :] for line in context if line.startswith("  >")] == [action.split()]


@pytest.mark.parametrize(
    ("edit", "action", "reason"),
    [
        ("-accumulate B3", "norm", "have not gone home"),
        ("-norm", "update B0", "norm is not known"),
        ("norm < backward C0 m0", "norm", "still to come"),
        ("update B2 < norm", "update B2", "norm is not known"),
        ("accumulate B2 < backward C2 m0", "accumulate B2", "no gradient on the device"),
        ("clear B2 + update B2", "clear B2", "not the device"),
    ],
)
def test_an_illegal_edit_of_a_clipped_step_is_pointed_at(edit: str, action: str, reason: str) -> None:
    with pytest.raises(PlanError, match=rf"^action \d+, {action}: .*{reason}"):
        check_schedule(edited(CLIPPED, edit, clips_norm=True), CLIPPED, PROFILE, clips_norm=True)


def test_a_text_without_its_tail_or_its_turns_is_refused_in_words() -> None:
    """As texts were written before these stood in them."""
    text = build_step(FUSED, PROFILE, clips_norm=False).text()
    untold = Schedule.parse(text.replace("# tail C4\n", ""))
    with pytest.raises(PlanError, match=r"has no tail, the plan a tail from C4 on: its text needs .*'# tail C<call>'"):
        check_schedule(untold, FUSED, PROFILE)
    with pytest.raises(PlanError, match=r"has a tail from C4 on, the plan no tail"):
        check_schedule(replace(untold, tail=4), replace(FUSED, tail=None), PROFILE)
    alone = Schedule.parse(text.replace(" interleaved", ""))
    with pytest.raises(PlanError, match="do not take turns: its header line must be"):
        check_schedule(alone, FUSED, PROFILE)
    with pytest.raises(PlanError, match=r"line 1: unknown header '# microbatches 2 somehow'"):
        Schedule.parse(text.replace("interleaved", "somehow"))


@pytest.mark.parametrize("edit", ["update B4 < backward C3 m1", "release B4 < backward C3 m1"])
def test_nothing_leaves_and_nothing_is_updated_while_a_tail_runs_back(edit: str) -> None:
    plan = replace(FUSED, tail=3)
    moved = edit.partition(" < ")[0]
    with pytest.raises(PlanError, match=rf"^action \d+, {moved}: the tail is running back"):
        check_schedule(edited(plan, edit), plan, PROFILE)


def test_a_schedule_that_ends_too_early_is_refused() -> None:
    with pytest.raises(PlanError, match="ends too early: there is no commit"):
        check_schedule(edited(Plan(), "-commit"), Plan(), PROFILE)


def test_an_update_in_backward_needs_its_block_on_the_device() -> None:
    plan = Plan(blocks=dict.fromkeys(NAMES, DISK), prefetch=0)
    with pytest.raises(PlanError, match="needs the weights on the device"):
        check_schedule(edited(plan, "release B4 < update B4"), plan, PROFILE)


def test_seeding_all_together_is_wrong_where_each_is_seeded_alone() -> None:
    plan = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR)
    whole = build_step(Plan(microbatches=2), PROFILE, clips_norm=False)
    with pytest.raises(PlanError, match="take turns"):
        check_schedule(whole, plan, PROFILE)
    with pytest.raises(PlanError, match="seeded alone"):
        check_schedule(replace(whole, is_interleaved=False), plan, PROFILE)


def test_the_schedule_of_another_model_is_refused() -> None:
    schedule = build_step(Plan(), chain_profile(length=3), clips_norm=False)
    with pytest.raises(PlanError, match="blocks are not the model's"):
        check_schedule(schedule, Plan(), PROFILE)
    untied = gpt_profile(layers=1)
    with pytest.raises(PlanError, match="blocks are not"):
        check_schedule(build_step(Plan(), untied, clips_norm=False), Plan(), gpt_profile(layers=1, is_tied=True))


def test_another_number_of_microbatches_is_refused() -> None:
    schedule = build_step(Plan(microbatches=2), PROFILE, clips_norm=False)
    with pytest.raises(PlanError, match="2 microbatches, the plan 1"):
        check_schedule(schedule, Plan(), PROFILE)


def test_a_forward_only_pass_may_not_go_back() -> None:
    forward = build_forward(FUSED, PROFILE, 2)
    check_schedule(forward, FUSED, PROFILE, is_training=False)
    with pytest.raises(PlanError, match="forward-only pass has no backward"):
        check_schedule(build_step(Plan(), PROFILE, clips_norm=False), Plan(), PROFILE, is_training=False)
