"""Plans that are exchanged on several ranks while they train: other limits, a breach on one of them, kills in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.processes import Ranks

LONG_S = 100.0  # longer than a test may wait: nothing here is ended by a timeout
RUN = "distributed.replanning:changed_limits"


@pytest.mark.parametrize(
    ("size", "stage", "tier"),
    [
        (2, 1, "device"),
        pytest.param(3, 3, "device", marks=pytest.mark.slow),
        pytest.param(2, 3, "disk", marks=pytest.mark.slow),
    ],
)
def test_limits_that_change_on_some_ranks_change_the_plan_of_all_and_no_bit(
    ranks: Ranks, tmp_path: Path, size: int, stage: int, tier: str
) -> None:
    """Another rank each time: less for the last one, more for all, less for all."""
    shares = [[0.0] * size, [0.0] * (size - 1) + [0.4], [0.0] * size, [0.6] * size]
    found = ranks.run(size, RUN, str(tmp_path / "run"), stage, tier, shares)
    assert all(each["differing"] == [] for each in found)
    assert all(all(each["holds"]) for each in found), "each rank stays under its own limit"
    assert all(each["plans"] == found[0]["plans"] for each in found)
    assert all(each["words"] == found[0]["words"] for each in found)
    first, again, tighter, *_ = found[0]["plans"]
    assert first == again and tighter != first
    assert found[0]["words"][0].startswith("step 2 is under a limit that the plan so far does not fit")
    assert f"the limit of rank {size - 1} is" in found[0]["words"][0]


@pytest.mark.slow
def test_a_larger_limit_brings_back_a_faster_plan_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, RUN, str(tmp_path / "run"), 1, "device", [[0.4, 0.4], [0.0, 0.0], [0.0, 0.0]])
    for each in found:
        assert each["differing"] == []
        assert "another plan is predicted to be faster under it" in each["words"][1]
        assert each["plans"][2] == each["plans"][3] != each["plans"][1]


@pytest.mark.parametrize(
    ("on_breach", "words"),
    [("replan", "No other plan fits it either"), ("error", "the job's plan does not fit 1.0 MiB")],
)
def test_a_limit_under_which_nothing_fits_one_rank_is_refused_in_the_same_words_by_all_and_the_job_goes_on(
    ranks: Ranks, tmp_path: Path, on_breach: str, words: str
) -> None:
    first, second = ranks.run(2, "distributed.replanning:refused_limits", str(tmp_path / "run"), on_breach)
    assert first["told"] == second["told"]
    (told,) = first["told"]
    assert told.startswith("DoesNotFitError") and "rank 1: " in told and words in told
    assert first["differing"] == second["differing"] == []


@pytest.mark.parametrize(
    "instant",
    [
        pytest.param("before its store is closed", marks=pytest.mark.slow),
        pytest.param("before the new stores are made", marks=pytest.mark.slow),
        "before the first commit",
    ],
)
def test_a_kill_while_the_plan_is_exchanged_leaves_the_last_common_step(
    ranks: Ranks, tmp_path: Path, instant: str
) -> None:
    run = str(tmp_path / "run")
    ranks.begin(2, "distributed.replanning:killed_in_the_exchange", run, instant, timeout_s=LONG_S)
    (is_good, raised), (_, ended) = (ranks.answer(rank) for rank in range(2))
    assert is_good, raised
    assert "rank 1 was lost" in raised
    assert ended == "the process ended with -9"
    assert ranks.run(2, "distributed.replanning:resumed", run, 3) == [(2, [])] * 2


@pytest.mark.parametrize(
    ("size", "stage", "tier", "rank"),
    [
        (3, 1, "disk", 0),
        pytest.param(2, 3, "disk", 1, marks=pytest.mark.slow),
        pytest.param(2, 0, "device", 1, marks=pytest.mark.slow),
    ],
)
def test_a_breach_on_one_rank_is_made_again_by_all_under_a_tighter_plan_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, size: int, stage: int, tier: str, rank: int
) -> None:
    found = ranks.run(size, "distributed.replanning:breached", str(tmp_path / "run"), stage, tier, rank, "alone")
    for each in found:
        assert each["raised"] == ""
        assert each["differing"] == []
        (told,) = each["words"]
        assert f"Cause: rank {rank}: LimitBreachError: the limit of " in told
        assert each["words"] == found[0]["words"]
        assert each["plan"] == found[0]["plan"] != each["first"]


@pytest.mark.parametrize(
    ("how", "stage", "words"),
    [
        ("and another rank fails", 1, "KeyError: 'of the loss'"),
        ("and another rank fails in a trace", 1, "KeyError: 'of the loss'"),
        ("and another rank fails when it is made again", 0, "KeyError: 'of the loss'"),
        pytest.param("and another rank is killed", 1, "rank 0 was lost", marks=pytest.mark.slow),
    ],
)
def test_a_breach_beside_another_failure_ends_the_job_on_all_ranks(
    ranks: Ranks, tmp_path: Path, how: str, stage: int, words: str
) -> None:
    run = str(tmp_path / "run")
    ranks.begin(2, "distributed.replanning:breached", run, stage, "device", 1, how, timeout_s=LONG_S)
    answers = [ranks.answer(rank) for rank in range(2)]
    for is_good, found in answers if "fails" in how else answers[1:]:
        assert is_good, found
        assert words in found["raised"]
    assert ranks.run(2, "distributed.replanning:resumed", run, 3) == [(1, [])] * 2
