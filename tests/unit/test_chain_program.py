"""The chain program against the judge: drawn mixtures, and all plans of tiny chains."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.core.plan import BlockPlan, CallPlan, Order, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.planner.search.chain import COMPUTE, ChainPrices, chain_bound_s, clock_bound_s, flows_of, frame_bound_s
from memfit.planner.search.mixed_units import HomeRules, Mixture, find_units, list_homes, list_policies, mixed_plan
from memfit.planner.search.mixing import ByteRoom, MixtureProgram
from memfit.planner.search.polish import Ahead
from memfit.planner.search.slot_prices import Judge, uniform
from unit.test_mixing import RECOMPUTE, TIERS, card, large_profile, question

# Prices of one unit are shifted to others, and the first and the last have neighbours of another
# kind: what the program says of a whole mixture may be above the judge's seconds by so much.
ROWS_MAY_SAY_MORE = 2e-3
# Byte prices are probed one by one, of which transients are not a sum.
BOUND_MAY_SAY_MORE = 5e-3
BYTES_MAY_SAY_MORE = 0.03
OFFLOAD = CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.HOST)
AWAY = BlockPlan(weight_home=Tier.HOST, state_home=Tier.HOST)
THERE = BlockPlan(gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)
FRAMES = [
    Plan(prefetch=1),
    Plan(prefetch=2),
    Plan(prefetch=2, microbatches=2, order=Order.LAYER_MAJOR),
    Plan(prefetch=2, microbatches=2, order=Order.MICROBATCH_MAJOR),
]


def judge_of(frame: Plan, *, layers: int, host: float = 22e9) -> Judge:
    profile = large_profile(layers)
    return Judge(question(profile, card(host=host), None), frame, find_units(profile), indices=itertools.count())


@settings(max_examples=12, deadline=None)
@given(data=st.data(), frame=st.sampled_from(FRAMES), host=st.sampled_from([4e9, 22e9, 80e9]))
def test_no_mixture_is_faster_than_the_rows_say(data: st.DataObject, frame: Plan, host: float) -> None:
    """Drawn policies and homes of four layers and two ends, three links, four frames."""
    judge = judge_of(frame, layers=4, host=host)
    homes = list_homes(HomeRules(tiers=TIERS, gradients_wait=frame.microbatches > 1, may_update_on_host=True))
    rows = frame.microbatches
    trace = judge.question.profile.traces[4 // rows]
    policies = list_policies(trace, frozenset(judge.units.calls), TIERS)
    some_homes = tuple(dict.fromkeys([BlockPlan(), *(data.draw(st.sampled_from(homes)) for _ in range(3))]))
    some_policies = tuple(dict.fromkeys([CallPlan(), *(data.draw(st.sampled_from(policies)) for _ in range(2))]))
    prices = ChainPrices(judge, some_policies, some_homes)
    assert prices.agrees
    for _ in range(4):
        mixture = Mixture(
            policies=tuple(data.draw(st.sampled_from(some_policies)) for _ in range(4)),
            homes=tuple(data.draw(st.sampled_from(some_homes)) for _ in range(4)),
            ends=tuple(data.draw(st.sampled_from(some_homes)) for _ in judge.units.ends),
        )
        assert clock_bound_s(prices, mixture) <= judge(mixture).built.cost.seconds * (1 + ROWS_MAY_SAY_MORE)


@pytest.mark.parametrize(("frame", "host"), [(FRAMES[0], 22e9), (FRAMES[1], 4e9), (FRAMES[2], 22e9)])
def test_the_bound_is_below_every_plan_that_fits_and_above_the_mixture_programs(frame: Plan, host: float) -> None:
    """All 729 plans of two layers and an end, at nine limits each."""
    judge = judge_of(frame, layers=2, host=host)
    policies, homes = (CallPlan(), RECOMPUTE, OFFLOAD), (BlockPlan(), AWAY, THERE)
    prices = ChainPrices(judge, policies, homes)
    shares = judge.prices(policies, homes)
    plans = [
        judge(Mixture(policies=(p, r), homes=(g, h), ends=(e, *[BlockPlan()] * (len(judge.units.ends) - 1))))
        for p, r in itertools.product(policies, repeat=2)
        for g, h, e in itertools.product(homes, repeat=3)
    ]
    peaks = sorted(plan.built.cost.peak_bytes for plan in plans)
    closer = 0
    for limit in peaks[:: len(peaks) // 8]:
        best_s = min(plan.built.cost.seconds for plan in plans if plan.built.cost.peak_bytes <= limit)
        bound_s = chain_bound_s(prices, int(limit * (1 + BYTES_MAY_SAY_MORE)), {})
        assert 0 < bound_s <= best_s * (1 + BOUND_MAY_SAY_MORE)
        simple = MixtureProgram(shares).best_shares(
            ByteRoom(device=limit, slack={}, tiers={}), stall_weight=0.0, is_bound=True
        )
        assert simple is not None
        closer += chain_bound_s(prices, limit, {}) > simple.seconds * 1.005
    assert closer >= 4


def test_what_fits_nowhere_has_an_infinite_bound_and_no_limit_leaves_computing() -> None:
    judge = judge_of(Plan(prefetch=2), layers=3)
    prices = ChainPrices(judge, (CallPlan(), RECOMPUTE), (BlockPlan(), AWAY))
    assert math.isinf(chain_bound_s(prices, 1 << 20, {}))
    kept = judge(uniform(judge.units, CallPlan(), BlockPlan()))
    computing = kept.built.cost.busy_s["compute"]
    assert computing * (1 - 1e-9) <= chain_bound_s(prices, None, {}) <= kept.built.cost.seconds * (1 + 1e-9)


def test_a_bound_above_a_known_plan_is_none() -> None:
    """A judge whose plans are said to take nothing shows the program to be wrong."""
    judge = judge_of(Plan(prefetch=2), layers=2)
    policies, homes = (CallPlan(), RECOMPUTE), (BlockPlan(), AWAY)
    ahead = Ahead.said_by(judge.frame)
    assert frame_bound_s({ahead: judge}, ahead, policies, homes) > 0
    kept = uniform(judge.units, CallPlan(), BlockPlan())
    known = judge(kept)
    quick = replace(known.built, cost=replace(known.built.cost, seconds=1e-9))
    judge.judged[kept] = replace(known, built=quick)
    assert frame_bound_s({ahead: judge}, ahead, policies, homes) == 0.0


def test_flows_hold_all_that_lanes_do() -> None:
    """Each lane's seconds, summed over queues and places, are what the clock has it work."""
    judge = judge_of(Plan(prefetch=2), layers=3)
    units, asked = judge.units, judge.question
    mixture = Mixture(policies=(RECOMPUTE, OFFLOAD, CallPlan()), homes=(AWAY, THERE, BlockPlan()), ends=(AWAY, THERE))
    step = asked.lower(mixed_plan(judge.frame, asked.profile, units, mixture))
    flows = flows_of(step, asked.pace)
    busy_s = judge(mixture).built.cost.busy_s
    by_lane: dict[str, float] = {}
    for queue, places in flows.work_s.items():
        by_lane[queue.lane] = by_lane.get(queue.lane, 0.0) + sum(places.values())
    assert by_lane == pytest.approx({lane: s for lane, s in busy_s.items() if s > 0}, rel=1e-9)
    # Forwards and backwards, one after the other, in the order of the calls and back.
    forward = [place.call for place in flows.places if not place.is_backward]
    assert forward == sorted(forward)
    assert [place.call for place in flows.places if place.is_backward] == sorted(forward, reverse=True)
    assert set(flows.work_s[COMPUTE]) <= set(range(len(flows.places) + 1))
