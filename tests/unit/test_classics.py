"""Techniques of the field by name: legal plans with the decisions of their sources, never faster than the chosen plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.core.errors import DoesNotFitError, UsageError
from memfit.core.limits import Budget
from memfit.core.plan import Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.planner.given_plans import read_given
from memfit.planner.search.candidates import Candidate, list_candidates
from memfit.planner.search.classics import CLASSICS, list_classics
from memfit.planner.search.planner import choose_plan
from memfit.step.build import build_step
from unit.checking import check_schedule
from unit.profiles import gpt_profile
from unit.test_mixing import card

TIERS = (Tier.HOST, Tier.DISK)


def profile_of(layers: int = 9) -> Profile:
    return gpt_profile(layers=layers, width=320, vocabulary=4096, tokens=64, batch_rows=4, rows=(4, 2, 1), factor=16)


def classics(profile: Profile, *, microbatches: int = 1, tiers: tuple[Tier, ...] = TIERS) -> dict[str, Candidate]:
    found = list_classics(
        profile, card(), microbatches=microbatches, tiers=tiers, clips_norm=False, compute=ComputeDtype.GIVEN
    )
    return {candidate.classic: candidate for candidate in found}


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_every_technique_is_a_legal_plan_and_says_where_it_is_from(microbatches: int) -> None:
    profile = profile_of()
    found = classics(profile, microbatches=microbatches)
    assert found.keys() == CLASSICS.keys()
    for name, candidate in found.items():
        check_schedule(build_step(candidate.plan, profile, clips_norm=False), candidate.plan, profile)
        assert candidate.plan.microbatches == microbatches
        assert CLASSICS[name].says and CLASSICS[name].source


def test_techniques_decide_what_their_sources_say() -> None:
    found = {name: candidate.plan for name, candidate in classics(profile_of()).items()}
    layers = range(1, 10)
    assert found["accumulate"] == Plan(update=UpdateTime.AFTER_BACKWARD)
    assert found["fused-update"] == Plan()
    assert {found["checkpoint-every-block"].call(i).saved for i in layers} == {Saved.RECOMPUTE}
    assert found["checkpoint-every-block"].call(0).saved is found["checkpoint-every-block"].call(10).saved is Saved.KEEP
    # Nine layers in three segments of three.
    assert found["sqrt"].segments(12)[1:4] == ((1, 3), (4, 6), (7, 9))
    assert {(found["vdnn"].call(i).saved, found["vdnn"].call(i).saved_home) for i in layers} == {
        (Saved.OFFLOAD, Tier.HOST)
    }
    offload = found["zero-offload"].block("h.0")
    assert (offload.weight_home, offload.gradient_home, offload.state_home) == (Tier.DEVICE, Tier.HOST, Tier.HOST)
    assert offload.update_on is Tier.HOST
    infinity = found["zero-infinity"]
    assert (infinity.block("h.0").weight_home, infinity.block("h.0").state_home) == (Tier.DISK, Tier.DISK)
    assert infinity.call(3).boundary_home is Tier.HOST
    turns = classics(profile_of(), microbatches=2)["layer-to-layer"].plan
    assert turns.order is Order.LAYER_MAJOR
    assert classics(profile_of(), microbatches=2)["accumulate"].plan.order is Order.MICROBATCH_MAJOR


def test_swapping_where_hidden_turns_into_recomputing_by_arithmetic() -> None:
    """A layer's saved bytes over the link against its forward: a tenth more or less on either side."""
    profile = profile_of()
    trace = profile.traces[4]
    forward_s = trace.calls[1].forward_flops / 1e14
    even = trace.saved_bytes(1) / forward_s
    for faster, policy in ((1.1, Saved.OFFLOAD), (0.9, Saved.RECOMPUTE)):
        hardware = card(host=even * faster)
        (plan,) = (
            c.plan
            for c in list_classics(
                profile, hardware, microbatches=1, tiers=TIERS, clips_norm=False, compute=ComputeDtype.GIVEN,
                only="capuchin",
            )
        )  # fmt: skip
        assert {plan.call(i).saved for i in range(1, 10)} == {policy}


def test_no_technique_that_fits_is_faster_than_the_chosen_plan() -> None:
    profile, hardware = profile_of(layers=4), card(flops=1e12)
    plain = choose_plan(profile, Budget(limit_bytes=None), hardware, tiers=TIERS).timeline.peak_bytes
    fits = 0
    for share in (0.35, 0.5, 0.8, 1.2):
        budget = Budget(limit_bytes=round(plain * share))
        choice = choose_plan(profile, budget, hardware, tiers=TIERS, compares=True, numerics="auto")
        assert {point.name for point in choice.classics} == CLASSICS.keys()
        for point in choice.classics:
            assert point.fits == (point.peak_bytes <= round(plain * share))
            fits += point.fits
            # Plans that regroup sums are weighed: those of one microbatch are compared as they are.
            if point.fits and point.microbatches == 1:
                assert choice.weighed_s <= point.seconds * (1 + 1e-12), point.name
            if point.fits:
                only = choose_plan(profile, budget, hardware, tiers=TIERS, classic=point.name)
                assert choice.weighed_s <= only.weighed_s * (1 + 1e-12), point.name
    assert fits >= 12


def test_a_technique_by_name_is_the_only_one_that_is_looked_at() -> None:
    profile, hardware = profile_of(layers=4), card()
    free = Budget(limit_bytes=None)
    for name in CLASSICS:
        choice = choose_plan(profile, free, hardware, tiers=TIERS, classic=name)
        assert choice.name.startswith(f"{name}, ")
        assert choice.plan == classics(profile)[name].plan
    with pytest.raises(DoesNotFitError, match=r"no plan of the technique 'accumulate' fits(?s:.)*Try no plan"):
        choose_plan(profile, Budget(limit_bytes=1 << 20), hardware, tiers=TIERS, classic="accumulate")


def test_a_technique_that_needs_what_is_not_there_is_refused_with_those_that_can_be_had() -> None:
    profile = profile_of(layers=2)
    without_host = replace(card(), device="cpu")
    for tiers, hardware in (((Tier.DISK,), without_host), ((), card())):
        with pytest.raises(UsageError, match=r"zero-offload.*cannot be had here.*checkpoint-every-block"):
            choose_plan(profile, Budget(limit_bytes=None), hardware, tiers=tiers, classic="zero-offload")
    assert "vdnn" not in classics(profile, tiers=())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"numerics": "exact"}, r"plan='zero-offload' regroups sums.*numerics='exact'"),
        ({"scheme": "journal"}, r"plan='zero-offload' says where everything rests, and so does a journal"),
    ],
)
def test_a_technique_beside_what_it_does_not_go_with_is_refused_by_name(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        choose_plan(
            profile_of(layers=2), Budget(limit_bytes=None), card(), tiers=TIERS, classic="zero-offload", **asked
        )


def test_plans_are_given_as_files_or_by_name(tmp_path: Path) -> None:
    assert read_given(None).plan is read_given(None).classic is None
    assert read_given("zero-offload").classic == read_given(Path("zero-offload")).classic == "zero-offload"
    with pytest.raises(UsageError, match=r"did you mean 'zero-offload'\?"):
        read_given("zero-ofload")
    path = tmp_path / "plan.json"
    path.write_text(Plan(prefetch=3).to_json(), encoding="utf-8")
    assert read_given(str(path)).plan == read_given(path).plan == Plan(prefetch=3)


@settings(max_examples=8)
@given(parts=st.tuples(st.floats(0.05, 1.1), st.floats(0.05, 1.1)), more=st.booleans())
def test_more_room_and_more_tiers_are_never_slower(parts: tuple[float, float], more: bool) -> None:
    """Of uniform plans and techniques, which are looked at whole: pairs of limits, and of tiers."""
    profile, hardware = profile_of(layers=2), card(flops=1e12)
    plain = 150 << 20
    smaller, larger = sorted(round(plain * part) for part in parts)
    tiers = (TIERS, TIERS) if not more else ((Tier.DISK,), TIERS)

    def seconds(limit: int, among: tuple[Tier, ...]) -> float:
        try:
            return choose_plan(profile, Budget(limit_bytes=limit), hardware, tiers=among).weighed_s
        except DoesNotFitError:
            return float("inf")

    assert seconds(larger, tiers[1]) <= seconds(smaller, tiers[0])


def test_where_all_blocks_are_too_small_to_move_no_plan_says_that_they_do() -> None:
    """Their plans differ in the buffers of what leaves of calls alone."""
    profile = gpt_profile(layers=3, width=64, vocabulary=64, tokens=256)
    listed = list(list_candidates(profile, microbatches=1, tiers=TIERS, clips_norm=False))
    assert not any(candidate.plan.blocks for candidate in listed)
    assert all("all on the device" in candidate.name for candidate in listed)
    kept = [candidate for candidate in listed if "; keep; " in candidate.name]
    assert [candidate.plan.prefetch for candidate in kept] == [1]
    buffers = {candidate.plan.prefetch for candidate in listed if "offload to disk" in candidate.name}
    assert buffers == {0, 1, 3}
    assert len({candidate.name for candidate in listed}) == len(listed)
