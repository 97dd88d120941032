"""Microbatches of unequal rows: each by its own trace, or by the line between two that were traced."""

from __future__ import annotations

from dataclasses import replace

from memfit.core.plan import Order, Plan
from memfit.core.profile import Profile
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import predict
from memfit.step.sizes import traces_of
from unit.profiles import gpt_profile

ROWS = 7


def uneven(*rows: int) -> Profile:
    """Seven rows, with traces of these sizes."""
    return replace(gpt_profile(layers=2, batch_rows=ROWS, rows=rows), rows_are_alike=True)


def peak_at(action: str, profile: Profile, plan: Plan) -> int:
    lowered = lower(build_step(plan, profile, clips_norm=False), plan, profile, staging_bytes=0)
    return next(moment.peak_bytes for moment in predict(lowered).moments if moment.action == action)


def test_a_size_between_two_traced_ones_is_what_its_own_trace_says_where_all_grows_by_the_row() -> None:
    """The hand-made model is straight in its rows: (3) lies between (1) and (4)."""
    assert traces_of(uneven(4, 1), 2) == traces_of(uneven(4, 3), 2) == (uneven(4).traces[4], uneven(3).traces[3])


def test_in_turns_all_microbatches_together_hold_what_the_batch_does() -> None:
    """At the last seed everything that was saved is there: 4 rows and 3, not twice 4."""
    plan = Plan(microbatches=2, order=Order.LAYER_MAJOR)
    seeds = [
        peak_at("seed m0-1", profile, plan) for profile in (uneven(4, 1), replace(uneven(4, 1), rows_are_alike=False))
    ]
    storages = uneven(1).traces[1].storages
    assert seeds[1] - seeds[0] == sum(s.nbytes for s in storages)


def test_where_microbatches_follow_each_other_only_the_batch_itself_is_less() -> None:
    plan = Plan(microbatches=2, order=Order.MICROBATCH_MAJOR)
    firsts = [
        peak_at("seed m0", profile, plan) for profile in (uneven(4, 1), replace(uneven(4, 1), rows_are_alike=False))
    ]
    assert firsts[1] - firsts[0] == uneven(1).traces[1].storages[0].nbytes


def test_without_a_smaller_trace_the_smaller_microbatch_counts_as_the_larger() -> None:
    assert len({id(trace) for trace in traces_of(uneven(4), 2)}) == 1
