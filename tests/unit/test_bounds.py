"""A bound of a peak is never above what the schedule comes to, and reaches it where nothing moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.limits import MIB
from memfit.core.plan import CallPlan, Order, Plan
from memfit.core.profile import BlockProfile, CallProfile, Profile, StorageProfile, TensorProfile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.planner.search.bounds import PeakBounds
from memfit.planner.search.candidates import Candidate, list_candidates
from memfit.planner.search.pricing import price, price_all
from memfit.step.build import build_step
from memfit.step.bytes import peaks
from memfit.step.lower import lower
from memfit.step.predict import appraise
from unit.profiles import block, chain_profile, gpt_profile
from unit.test_mixing import card, question

LINK = Link(read_bytes_per_s=1e9, write_bytes_per_s=1e9)
MACHINE = Hardware(
    device="cpu",
    flops_per_s=1e11,
    tiers={Tier.DEVICE: TierSpec(nbytes=1 << 40), Tier.DISK: TierSpec(nbytes=1 << 40, link=LINK)},
)
PROFILES = {
    "gpt": gpt_profile(layers=3, width=256, vocabulary=4096, tokens=64, rows=(8, 4, 1), factor=16),
    "tied": gpt_profile(layers=2, width=256, vocabulary=512, is_tied=True, rows=(8, 2, 1)),
    "uneven": replace(gpt_profile(layers=2, width=256, batch_rows=7, tokens=64, rows=(7, 4, 2)), rows_are_alike=True),
    "chain": chain_profile(length=6),
}


def candidates(profile: Profile, *, clips_norm: bool) -> list[Candidate]:
    return [
        candidate
        for rows in profile.traces
        for candidate in list_candidates(
            profile, microbatches=-(-profile.batch_rows // rows), tiers=(Tier.DISK,), clips_norm=clips_norm
        )
    ]


@pytest.mark.thinned
@pytest.mark.parametrize("clips_norm", [False, True])
@pytest.mark.parametrize("name", PROFILES)
def test_no_candidate_s_peak_is_below_its_bound(name: str, *, clips_norm: bool) -> None:
    profile = PROFILES[name]
    bounds = PeakBounds(profile, staging_bytes=MIB)
    nearest = 0.0
    for candidate in candidates(profile, clips_norm=clips_norm):
        schedule = build_step(candidate.plan, profile, clips_norm=clips_norm)
        peak = appraise(lower(schedule, candidate.plan, profile, staging_bytes=MIB), MACHINE).peak_bytes
        bound = bounds.of(candidate.plan)
        assert bound <= peak, candidate.name
        nearest = max(nearest, bound / peak)
    assert nearest > 0.9  # a bound of 0 would hold, too


@pytest.mark.thinned
@pytest.mark.parametrize("clips_norm", [False, True])
@pytest.mark.parametrize("name", ["gpt", "tied"])
def test_no_candidate_is_faster_than_its_bound_says(name: str, *, clips_norm: bool) -> None:
    """On machines where links, computing or the host's cores decide; uniform plans and techniques."""
    profile = replace(PROFILES[name], agrees_on_host=True)
    nearest = 0.0
    for host, disk, flops, host_updates in ((1e9, 1e8, 1e13, 1e9), (1e8, 1e9, 1e12, 1e10), (1e10, 1e10, 1e13, 1e7)):
        hardware = card(host=host, disk=disk, flops=flops, host_updates=host_updates)
        asked = replace(question(profile, hardware, None), clips_norm=clips_norm)
        priced = price_all(asked)
        for one in priced[:: max(1, len(priced) // 60)]:
            seconds = asked.build(one).cost.seconds
            assert one.seconds_bound <= seconds * (1 + 1e-9), one.candidate.name
            nearest = max(nearest, one.seconds_bound / seconds)
    assert nearest > 0.9


@pytest.mark.parametrize("order", Order)
def test_what_code_between_calls_saved_is_let_go_of_in_turns_as_well(order: Order) -> None:
    """Two microbatches in turns, of four rows and of three: a tensor that an earlier call is run again from as well."""
    saved = StorageProfile(index=0, nbytes=10_000, segment=0, saved_outside=(1,), argument_of=(1,), last_use=1)
    calls = tuple(
        CallProfile(
            index=index,
            site=f"c{index}",
            blocks=("b",) if index == 0 else (),
            kind="call",
            is_repeated=True,
            has_backward=True,
            between_peak_bytes=100 if index == 2 else 0,
            backward_peak_bytes=100_000 if index == 2 else 0,
        )
        for index in range(4)
    )
    fewer = tuple(replace(call, backward_peak_bytes=3 * call.backward_peak_bytes // 4) for call in calls)
    traces = {
        4: TraceProfile(rows=4, calls=calls, storages=(saved,)),
        3: TraceProfile(rows=3, calls=fewer, storages=(replace(saved, nbytes=7_500),)),
    }
    weight = TensorProfile(name="b.w", shape=(8,), dtype="float32", nbytes=32, requires_grad=True)
    block = BlockProfile(name="b", kind="b", parameters=(weight,))
    profile = Profile(batch_rows=7, rows_are_alike=True, blocks=(block,), traces=traces)
    plan = Plan(microbatches=2, order=order, calls=(CallPlan(saved=Saved.RECOMPUTE),) * 4)
    step = lower(build_step(plan, profile, clips_norm=False), plan, profile, staging_bytes=0, device="gpu")
    bound = PeakBounds(profile, staging_bytes=0, device="gpu").of(plan)
    assert 0.9 * peaks(step)[Tier.DEVICE] < bound <= peaks(step)[Tier.DEVICE]


def test_a_frozen_block_that_no_call_reads_makes_no_visit() -> None:
    """Whose weights rest on disk and stay there: a bound that counted them would leave the plan out."""
    tower = block("vision", "tower", 16 * MIB, trains=False)
    profile = PROFILES["gpt"]
    profile = replace(profile, blocks=(*profile.blocks, tower))
    asked = question(profile, card(host=1e9, disk=1e8, flops=1e13, host_updates=1e9), None)
    away = [one for one in price_all(asked) if one.candidate.plan.block("vision").weight_home is Tier.DISK]
    assert away
    assert all(
        one.seconds_bound <= asked.build(one).cost.seconds * (1 + 1e-9) for one in away[:: max(1, len(away) // 20)]
    )


def test_a_check_of_a_plan_takes_what_it_takes_whatever_was_asked_before() -> None:
    """Segments of several calls beside calls by themselves: they differ where frozen weights rest in few bits."""
    profile = gpt_profile(layers=6, width=256, vocabulary=512, tokens=64, batch_rows=4, rows=(4, 2))
    blocks = tuple(
        replace(
            one,
            parameters=tuple(replace(p, requires_grad=False) for p in one.parameters),
            encoded=frozenset(p.name for p in one.parameters),
            encoded_bytes=one.weight_bytes // 7,
        )
        if one.kind == "layer"
        else one
        for one in profile.blocks
    )
    profile = replace(profile, blocks=blocks)
    count = len(profile.traces[4].calls)

    def plan(joined: tuple[int, ...]) -> Plan:
        calls = [CallPlan(saved=Saved.RECOMPUTE, joins_previous=index in joined) for index in range(count)]
        calls = [call if 1 <= index <= 6 else CallPlan() for index, call in enumerate(calls)]
        return Plan(microbatches=2, order=Order.MICROBATCH_MAJOR, calls=tuple(calls))

    found: dict[bool, list[int]] = {}
    for order in (False, True), (True, False):
        asked = replace(question(profile, MACHINE, None), checked_rows=4)
        for is_joined in order:
            one = Candidate(name="", plan=plan((2, 3, 5, 6) if is_joined else ()))
            found.setdefault(is_joined, []).append(asked.build(price(0, one, asked)).cost.peak_bytes)
    assert found[False][0] == found[False][1] != found[True][0] == found[True][1]
