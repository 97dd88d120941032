"""One rank fails: every other one ends in a `PeerError` that says why, long before the group's timeout, and memory can be given back."""

from __future__ import annotations

import os
import signal

import pytest

from distributed.lives import free_port
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


@pytest.mark.parametrize(
    ("instant", "victim", "has_store"),
    [("before", 1, False), ("before", 0, True), ("group", 2, False), ("group", 0, True), ("again", 1, False), ("pair", 1, False)],
)  # fmt: skip
def test_a_rank_that_is_killed_while_ranks_meet_or_make_sockets_is_told_by_number(
    ranks: Ranks, instant: str, victim: int, has_store: bool
) -> None:
    port = free_port() if has_store else 0
    ranks.begin(3, f"{CALLS}:signalled", instant, "SIGKILL", victim, port, timeout_s=LONG_S)
    answers = [ranks.answer(rank) for rank in range(3)]
    assert answers.pop(victim) == (False, "the process ended with -9")
    for is_good, answer in answers:
        assert is_good, answer
        # Before the ranks have met, only sockets tell of one, and whose they were.
        assert answer.startswith(
            f"PeerError: {'a rank was lost' if instant == 'before' else f'rank {victim} was lost'}"
        )
        assert f"rank {victim}" in answer
        assert "Timed out" not in answer


@pytest.mark.parametrize("instant", ["before", "group"])
def test_a_rank_that_is_stopped_is_waited_for_as_long_as_the_program_says_of_its_process_group(
    ranks: Ranks, instant: str
) -> None:
    ranks.begin(2, f"{CALLS}:signalled", instant, "SIGSTOP", 1, 0, timeout_s=6.0)
    is_good, answer = ranks.answer(0)
    os.kill(ranks.pid(1), signal.SIGKILL)
    assert ranks.answer(1) == (False, "the process ended with -9")
    assert is_good, answer
    if instant == "before":
        assert answer.startswith(
            "PeerError: a rank was lost, or hangs before all ranks were in memfit: rank 1: Timed out"
        )
    else:
        assert answer.startswith("PeerError: rank 1 is stopped (SIGSTOP): ")
