"""A bound of a peak is never above what the schedule comes to, and reaches it where nothing moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.profile import Profile
from memfit.core.tiers import Tier
from memfit.core.units import MIB
from memfit.planning.bounds import PeakBounds
from memfit.planning.candidates import Candidate, list_candidates
from memfit.planning.pricing import price_all
from memfit.prediction.predict import appraise
from memfit.scheduling.build import build_step
from memfit.scheduling.lower import lower
from unit.profiles import chain_profile, gpt_profile
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
