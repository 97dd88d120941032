"""One rank fails: every other one ends in a `PeerError` that says why, long before the group's timeout, and memory can be given back."""

from __future__ import annotations

import pytest

from distributed.processes import Ranks

CALLS = "distributed.failing_calls"
LONG_S = 100.0  # longer than a test may wait: nothing here is ended by a timeout


@pytest.mark.parametrize("how", ["while others wait", "while others compute"])
def test_the_cause_of_one_rank_is_the_error_of_all(ranks: Ranks, how: str) -> None:
    first, second, third = ranks.run(3, f"{CALLS}:one_fails", how, timeout_s=LONG_S)
    assert second == ("ValueError: the cause in its own words", "True")
    assert first == third == ("PeerError: rank 1: ValueError: the cause in its own words", "True")


def test_a_killed_rank_is_told_by_number_and_the_others_can_leave(ranks: Ranks) -> None:
    ranks.begin(3, f"{CALLS}:one_fails", "killed", timeout_s=LONG_S)
    answers = [ranks.answer(rank) for rank in range(3)]
    assert answers[1] == (False, "the process ended with -9")
    for is_good, answer in (answers[0], answers[2]):
        assert is_good, answer
        assert answer[0].startswith("PeerError: rank 1 was lost")
        assert answer[1] == "True"


def test_ranks_that_are_left_make_a_group_of_their_own(ranks: Ranks) -> None:
    found = ranks.run(3, f"{CALLS}:survivors_go_on", ranks.port, "survivors", timeout_s=LONG_S)
    assert found == [[2], [0], [2]]
