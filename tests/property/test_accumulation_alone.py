"""Where accumulation alone fits, nothing more is chosen unless it is predicted to be faster (WORKED_EXAMPLES 14).

Every plan that only accumulates is built here and priced; a choice that recomputes or sends anything away is held
against them. Choices that only accumulate are not compared with each other.
"""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.limits import Budget
from memfit.core.numerics import weighed_seconds
from memfit.core.plan import Order, Plan, UpdateTime
from memfit.core.profile import Profile
from memfit.core.saved_policies import Saved
from memfit.core.step import Timeline
from memfit.core.tiers import Tier
from memfit.planner.search.planner import choose_plan
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from unit.profiles import gpt_profile

_ROWS = (4, 2, 1)
# Plans whose seconds are nearer than this share are equally fast.
_ROUNDING = 1e-9


@st.composite
def _profiles(draw: Any) -> Profile:
    return gpt_profile(
        layers=draw(st.integers(1, 2)),
        width=draw(st.sampled_from([64, 256])),
        vocabulary=draw(st.sampled_from([512, 4096])),
        tokens=draw(st.sampled_from([32, 128])),
        batch_rows=4,
        rows=_ROWS,
        is_tied=draw(st.booleans()),
        factor=draw(st.sampled_from([4, 16])),
    )


@st.composite
def _machines(draw: Any) -> Hardware:
    """Machines from a processor with a slow disk to an accelerator with a fast one."""
    link_bytes_per_s = draw(st.sampled_from([1e8, 1e9, 2.5e10]))
    return Hardware(
        device="cpu",
        flops_per_s=draw(st.sampled_from([1e10, 1e12, 1e14])),
        tiers={
            Tier.DEVICE: TierSpec(nbytes=1 << 40),
            Tier.DISK: TierSpec(
                nbytes=1 << 40, link=Link(read_bytes_per_s=link_bytes_per_s, write_bytes_per_s=link_bytes_per_s)
            ),
        },
    )


def _only_accumulates(plan: Plan) -> bool:
    """Tells that all that a call saves is kept, and all rests on the device."""
    homes = [
        home for block in plan.blocks.values() for home in (block.weight_home, block.gradient_home, block.state_home)
    ]
    return all(call.saved is Saved.KEEP for call in plan.calls) and all(home is Tier.DEVICE for home in homes)


def _accumulations(profile: Profile, machine: Hardware) -> list[tuple[Plan, Timeline]]:
    """Every plan of microbatches, order and update time, and what it is predicted to take."""
    found: list[tuple[Plan, Timeline]] = []
    for count, order, update in itertools.product((1, 2, 4), Order, UpdateTime):
        plan = Plan(microbatches=count, order=order, update=update)
        step = lower(build_step(plan, profile, clips_norm=False), plan, profile, staging_bytes=0)
        found.append((plan, predict(step, machine)))
    return found


@given(_profiles(), _machines(), st.data())
def test_where_accumulation_alone_fits_nothing_more_is_chosen_unless_it_is_faster(
    profile: Profile, machine: Hardware, data: st.DataObject
) -> None:
    alone = _accumulations(profile, machine)
    limit_bytes = data.draw(st.sampled_from(sorted({timeline.peak_bytes for _, timeline in alone})), label="limit")
    choice = choose_plan(profile, Budget(limit_bytes=limit_bytes), machine, staging_bytes=0)
    assert choice.timeline.peak_bytes <= limit_bytes
    # Plans that regroup sums are compared by a little more than their seconds.
    least = min(
        weighed_seconds(timeline.seconds, regroups=plan.microbatches > 1)
        for plan, timeline in alone
        if timeline.peak_bytes <= limit_bytes
    )
    assert _only_accumulates(choice.plan) or choice.weighed_s < least * (1 - _ROUNDING)
