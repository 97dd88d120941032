"""What each pass puts where, on small models by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.core.errors import PlanError
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.schedule import Backward, Fetch, Forward, Schedule
from memfit.core.tiers import Tier
from memfit.planner.search.over_ranks_plans import share_out
from memfit.step.build import build_forward, build_step
from memfit.step.check import check_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from memfit.step.sizes import flat_gradient_bytes
from unit.profiles import chain_profile, gpt_profile

DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DEVICE, state_home=Tier.DISK)
HOME = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)


def built(plan: Plan, profile: Profile, *, clips_norm: bool = False) -> list[str]:
    return [str(a) for a in build_step(plan, profile, clips_norm=clips_norm)]


def away(profile: Profile, home: BlockPlan = DISK) -> dict[str, BlockPlan]:
    return {b.name: home for b in profile.blocks}


def computes(schedule: Schedule) -> str:
    return " | ".join(str(a) for a in schedule if isinstance(a, Forward | Backward))


def test_layer_major_order_takes_microbatches_down_and_back_up() -> None:
    schedule = build_step(Plan(microbatches=2), chain_profile(length=2), clips_norm=False)
    assert computes(schedule) == (
        "forward C0 m1 | forward C0 m0 | forward C1 m1 | forward C1 m0 | "
        "backward C1 m0 | backward C1 m1 | backward C0 m0 | backward C0 m1"
    )
    assert "seed m0-1" in schedule.text()


def test_microbatch_major_order_is_plain_accumulation() -> None:
    plan = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR)
    assert computes(build_step(plan, chain_profile(length=2), clips_norm=False)) == (
        "forward C0 m0 | forward C1 m0 | backward C1 m0 | backward C0 m0 | "
        "forward C0 m1 | forward C1 m1 | backward C1 m1 | backward C0 m1"
    )


def test_the_tail_runs_each_microbatch_to_its_loss_and_back_to_the_cut() -> None:
    schedule = build_step(Plan(microbatches=2, tail=1), chain_profile(length=3), clips_norm=False)
    assert computes(schedule) == (
        "forward C0 m1 | forward C0 m0 | "
        "forward C1 m0 | forward C2 m0 | backward C2 m0 | backward C1 m0 | "
        "forward C1 m1 | forward C2 m1 | backward C2 m1 | backward C1 m1 | "
        "backward C0 m0 | backward C0 m1"
    )


def test_calls_without_backward_are_passed_over() -> None:
    profile = chain_profile(length=3)
    trace = profile.traces[1]
    frozen = replace(trace, calls=(replace(trace.calls[0], has_backward=False), *trace.calls[1:]))
    texts = built(Plan(), replace(profile, traces={1: frozen}))
    assert "backward C1 m0" in texts
    assert "backward C0 m0" not in texts
    # It trains, but no traced call gives it a gradient: whatever comes is complete when backward has ended.
    assert texts[-6:] == ["update B0", "update B1", "clear B0", "clear B1", "clear B2", "commit"]


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_layer_major_order_fetches_each_block_twice_whatever_the_number_of_microbatches(microbatches: int) -> None:
    profile = gpt_profile(layers=4)
    schedule = build_step(Plan(microbatches=microbatches, blocks=away(profile), tail=5), profile, clips_norm=False)
    fetches = [sum(a == Fetch(b) for a in schedule) for b in range(len(profile.blocks))]
    # The norm and the head are the tail, where backward follows at once: the head comes once. With one microbatch nothing
    # makes the norm stay while the head runs, so that it comes twice as the layers do.
    assert fetches == [2, 2, 2, 2, 2, 2 if microbatches == 1 else 1, 1]


def test_microbatch_major_order_fetches_once_more_a_microbatch() -> None:
    profile = gpt_profile(layers=4)
    plan = Plan(microbatches=4, order=Order.MICROBATCH_MAJOR, blocks=away(profile))
    schedule = build_step(plan, profile, clips_norm=False)
    # The embedding stays between the end of one microbatch's backward and the next one's forward.
    assert sum(a == Fetch(0) for a in schedule) == 5
    assert sum(a == Fetch(1) for a in schedule) == 8


def test_a_tied_block_visits_once_for_each_of_its_far_calls_and_is_updated_after_the_last() -> None:
    profile = gpt_profile(layers=2, is_tied=True)
    texts = built(Plan(blocks=away(profile), tail=3, microbatches=2), profile)
    assert texts.count("fetch B0") == 3
    assert texts.index("update B0") > texts.index("backward C0 m1")


def test_a_tied_gradient_goes_home_from_the_tail_before_the_joint_backward() -> None:
    profile = gpt_profile(layers=2, is_tied=True)
    texts = built(Plan(blocks=away(profile, HOME), tail=3, microbatches=2), profile)
    first, second = (i for i, t in enumerate(texts) if t == "accumulate B0")
    assert texts.index("backward C4 m1") < first < texts.index("backward C2 m0")
    assert second > texts.index("backward C0 m1")


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_fetch_goes_as_many_layers_ahead_as_the_plan_says(prefetch: int) -> None:
    profile = chain_profile(length=5)
    texts = [str(a) for a in build_forward(Plan(blocks=away(profile), prefetch=prefetch), profile, 1)]
    ahead = texts.index("forward C4 m0") - texts.index("fetch B4")
    # Each layer between brings its forward, its release and another fetch.
    assert texts[texts.index("fetch B4") + 1] == f"forward C{4 - prefetch} m0"
    assert ahead > 2 * prefetch or prefetch == 0


def test_a_fetch_ahead_of_all_microbatches_begins_with_the_first_of_them() -> None:
    profile = chain_profile(length=3)
    texts = [str(a) for a in build_forward(Plan(blocks=away(profile)), profile, 3)]
    assert texts.index("fetch B1") < texts.index("forward C0 m2")
    assert texts.index("release B0") > texts.index("forward C0 m0")


def test_updates_overlap_the_backward_below_and_without_prefetch_do_not() -> None:
    profile = chain_profile(length=3)
    ahead = built(Plan(blocks=away(profile)), profile)
    assert (
        ahead.index("update B2") < ahead.index("backward C1 m0") < ahead.index("clear B2") < ahead.index("release B2")
    )
    direct = built(Plan(blocks=away(profile), prefetch=0), profile)
    at = direct.index("update B2")
    assert direct[at : at + 3] == ["update B2", "clear B2", "release B2"]


@pytest.mark.parametrize("backlog", [0, 1, 2, 3, 9])
def test_the_end_of_an_update_is_waited_for_as_many_actions_later_as_the_plan_says(backlog: int) -> None:
    profile = chain_profile(length=6)
    texts = built(Plan(blocks=away(profile), prefetch=4, update_backlog=backlog), profile)
    for block in range(6):
        between = texts[texts.index(f"update B{block}") : texts.index(f"clear B{block}")]
        assert sum(text.startswith("backward") for text in between) == min(backlog, block)
        assert texts.index(f"release B{block}", texts.index(f"update B{block}")) > texts.index(f"clear B{block}")


def test_an_update_on_the_host_begins_an_action_later_whatever_the_backlog() -> None:
    profile = chain_profile(length=6)
    there = BlockPlan(gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)
    for backlog in (1, 2, 5):
        texts = built(Plan(blocks={b.name: there for b in profile.blocks}, update_backlog=backlog), profile)
        for block in range(1, 6):
            between = texts[texts.index(f"accumulate B{block}") : texts.index(f"update B{block}")]
            assert sum(text.startswith("backward") for text in between) == 1


def test_an_update_never_precedes_a_backward_that_reads_the_weights() -> None:
    """A block read by two calls of which one has no gradient: its replay in a joined segment still reads it."""
    profile = chain_profile(length=3)
    trace = profile.traces[1]
    calls = (
        replace(trace.calls[0], blocks=("c.0", "c.2"), has_backward=False),
        trace.calls[1],
        trace.calls[2],
    )
    plan = Plan(calls=(CallPlan(saved=Saved.RECOMPUTE), CallPlan(saved=Saved.RECOMPUTE, joins_previous=True)))
    texts = built(plan, replace(profile, traces={1: replace(trace, calls=calls)}))
    assert texts.index("update B2") > texts.index("backward C0-1 m0")


def test_clipping_by_the_norm_keeps_all_updates_for_the_end() -> None:
    profile = chain_profile(length=2)
    assert built(Plan(), profile, clips_norm=True)[-6:] == [
        "norm", "update B0", "update B1", "clear B0", "clear B1", "commit",
    ]  # fmt: skip
    plan = Plan(blocks=away(profile, HOME), update=UpdateTime.AFTER_BACKWARD)
    texts = built(plan, profile)
    assert texts[-3:] == ["update B0", "update B1", "commit"]
    assert "norm" not in texts
    # Updates at the end stream the weights; nothing visits for them.
    assert texts.index("update B0") > max(i for i, t in enumerate(texts) if t.startswith("release"))


def test_accumulated_gradients_go_home_in_every_microbatch_and_are_used_in_the_last() -> None:
    profile = chain_profile(length=2)
    texts = built(Plan(microbatches=2, order=Order.MICROBATCH_MAJOR, blocks=away(profile, HOME)), profile)
    assert [t for t in texts if t.endswith(" B1") and t[0] in "au"] == ["accumulate B1", "accumulate B1", "update B1"]
    on_device = built(Plan(microbatches=2, order=Order.MICROBATCH_MAJOR), profile)
    assert on_device.index("update B1") > on_device.index("backward C1 m1")
    assert not any(t.startswith("accumulate") for t in on_device)


def test_a_spanning_block_never_visits_and_is_updated_when_backward_has_ended() -> None:
    profile = chain_profile(length=3)
    blocks = tuple(replace(b, is_spanning=b.name == "c.2") for b in profile.blocks)
    texts = built(Plan(blocks=away(profile)), replace(profile, blocks=blocks))
    assert "fetch B2" not in texts
    assert texts.index("update B2") > texts.index("backward C0 m0")


def test_offloads_leave_a_backlog_of_one_and_come_back_one_ahead() -> None:
    profile = chain_profile(length=6)
    plan = Plan(calls=(CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK),) * 6)
    texts = built(plan, profile)
    at = texts.index("offload C0 m0 disk")
    assert texts[at - 1 : at + 3] == ["forward C0 m0", "offload C0 m0 disk", "forward C1 m0", "offload C1 m0 disk"]
    assert texts[at + 3] == "drop C0 m0"
    assert texts[texts.index("reload C0 m0") + 1] == "backward C1 m0"


def test_what_backward_wants_at_once_does_not_leave() -> None:
    profile = chain_profile(length=6)
    plan = Plan(calls=(CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK),) * 6)
    texts = built(plan, profile)
    assert [t for t in texts if t.startswith("offload")] == [f"offload C{c} m0 disk" for c in range(4)]
    direct = built(replace(plan, prefetch=0), profile)
    assert [t for t in direct if t.startswith("offload")] == [f"offload C{c} m0 disk" for c in range(5)]


def test_a_segments_boundary_leaves_once_under_its_first_call() -> None:
    profile = chain_profile(length=8)
    fate = CallPlan(saved=Saved.RECOMPUTE, boundary_home=Tier.HOST)
    calls = tuple(replace(fate, joins_previous=c % 2 == 1) for c in range(8))
    texts = built(Plan(calls=calls), profile)
    assert [t for t in texts if t.startswith("offload")] == ["offload C0 m0 host", "offload C2 m0 host"]
    assert "forward C2-3 m0" in texts


def test_segments_keep_their_blocks_together() -> None:
    profile = chain_profile(length=4)
    fate = CallPlan(saved=Saved.RECOMPUTE)
    calls = tuple(replace(fate, joins_previous=c % 2 == 1) for c in range(4))
    texts = built(Plan(calls=calls, blocks=away(profile), prefetch=0), profile)
    at = texts.index("forward C0-1 m0")
    assert texts[at - 2 : at + 3] == ["fetch B0", "fetch B1", "forward C0-1 m0", "release B0", "release B1"]


def test_no_microbatch_at_all_is_refused() -> None:
    with pytest.raises(PlanError, match="at least one microbatch"):
        build_forward(Plan(), chain_profile(length=1), 0)


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="does not have"):
        build_step(Plan(blocks={"nowhere": DISK}), chain_profile(length=1), clips_norm=False)


# ---- updates on the host ----

ON_HOST = BlockPlan(gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)


def test_an_update_on_the_host_begins_a_backward_later_and_before_the_next_gradient_leaves() -> None:
    profile = gpt_profile(layers=2)
    plan = Plan(blocks=away(profile, ON_HOST))
    actions = built(plan, profile)
    begun = actions.index("backward C1 m0") + 1
    assert actions[begun : begun + 4] == ["update B2", "accumulate B1", "backward C0 m0", "update B1"]
    # Nothing comes behind the last backward beside which a gradient could cross; nor with one buffer.
    assert actions[-4:] == ["update B1", "accumulate B0", "update B0", "commit"]
    at_once = built(replace(plan, prefetch=0), profile)
    assert at_once[at_once.index("accumulate B1") + 1] == "update B1"


def test_gradients_cross_to_updates_on_the_host_beside_backward() -> None:
    """By arithmetic: a link on which a gradient takes less time than the backward of a layer stops nothing until the last one."""
    profile = gpt_profile(layers=4, vocabulary=64)
    plan = Plan(blocks=away(profile, replace(ON_HOST, weight_home=Tier.HOST)))
    step = lower(build_step(plan, profile, clips_norm=False), plan, profile, device="card")
    tiers = {Tier.DEVICE: TierSpec(nbytes=1 << 40)}
    layer = next(c for c in profile.traces[8].calls if c.is_repeated)
    size = max(flat_gradient_bytes(b) for b in profile.blocks)
    link = Link(read_bytes_per_s=1e12, write_bytes_per_s=2 * size)  # half a second
    tiers[Tier.HOST] = TierSpec(nbytes=1 << 40, link=link)
    hardware = Hardware(device="card", flops_per_s=layer.backward_flops, tiers=tiers, host_update_elements_per_s=1e18)
    stalls = predict(step, hardware).stalls_s
    # The norm and the embedding compute nothing in this profile: beside them the gradients of the
    # layer before and of the norm cross, and the embedding's own at the end.
    alone = sum(flat_gradient_bytes(b) for b in profile.blocks if b.name in ("ln_f", "h.0", "wte", "lm_head"))
    assert 0 < stalls["accumulate"] <= alone / link.write_bytes_per_s * (1 + 1e-9)
    assert alone < sum(flat_gradient_bytes(b) for b in profile.blocks) / 1.5


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        # Cut weights leave at once: the share at home is updated.
        (
            3,
            (
                "accumulate B2 | release B2 | fetch B0 | backward C1 m0 | update B2 | accumulate B1 | release B1 | "
                "backward C0 m0 | update B1 | accumulate B0 | update B0 | release B0 | commit"
            ),
        ),
        (
            1,
            (
                "accumulate B2 | backward C1 m0 | update B2 | accumulate B1 | backward C0 m0 | update B1 | accumulate B0 | "
                "update B0 | spread B0 | spread B1 | spread B2 | commit"
            ),
        ),
    ],
)
def test_ranks_exchange_a_gradient_beside_the_next_backward_and_update_behind_it(stage: int, expected: str) -> None:
    profile = chain_profile(length=3)
    plan = share_out(Plan(), 2, stage, [block.name for block in profile.blocks])
    actions = built(plan, profile)
    assert " | ".join(actions[actions.index("backward C2 m0") + 1 :]) == expected
    check_step(lower(build_step(plan, profile, clips_norm=False), plan, profile))
