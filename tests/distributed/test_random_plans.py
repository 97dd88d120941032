"""Random (schedule, ranks): projections on the ranks are equal and the bits are those of one process, or all ranks refuse."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from distributed.processes import Ranks

FEW = 6


@pytest.fixture
def examples(request: pytest.FixtureRequest) -> int:
    """How many plans are drawn: `--examples`, or few."""
    return int(request.config.getoption("--examples") or FEW)


def test_random_plans_of_ranks_give_the_bits_of_one_process_or_are_refused_by_all(ranks: Ranks, examples: int) -> None:
    @settings(
        max_examples=examples, deadline=None, derandomize=examples == FEW, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    @given(size=strategies.sampled_from((2, 2, 3)), seed=strategies.integers(0, 1 << 30))
    def check(size: int, seed: int) -> None:
        found = ranks.run(size, "distributed.random_plans:many", [seed])
        outcomes = {outcome for (outcome,) in found}
        assert outcomes in ({""}, {"refused"}), (size, seed, outcomes)
        counts["" if outcomes == {""} else "refused"] += 1

    counts = {"": 0, "refused": 0}
    check()
    assert counts[""] > counts["refused"] > 0
