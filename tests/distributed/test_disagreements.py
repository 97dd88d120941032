"""Ranks that ask for different things: all of them are told so, in words that say where they differ, before anything has moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.processes import Ranks

CALLS = "distributed.differing_calls"
LONG_S = 100.0  # longer than a test may wait: nothing here is ended by a timeout


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("limit", "limit= is left out"),
        ("plan", "plan= is left out"),
        ("store", "store=None"),
        ("directories", "/run-0'; there: 'store="),
        ("norms", "max_grad_norm=0.5'; there: 'max_grad_norm=1.5"),
        ("bf16", "allow=['bf16']"),
        ("lr", "['lr']: 0.01"),
        ("states", "'step' of 'embed.weight': checksum"),
    ],
)
def test_fits_that_ask_for_different_things_are_refused_on_all_ranks_which_can_fit_again(
    ranks: Ranks, tmp_path: Path, how: str, words: str
) -> None:
    first, second = ranks.run(2, f"{CALLS}:fits", how, str(tmp_path), timeout_s=LONG_S)
    assert first.startswith("DisagreementError: ranks 0 and 1 are about to do different things")
    assert second.startswith("DisagreementError: ranks 1 and 0 are about to do different things")
    assert words in first
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("a schedule of one rank", "['lr']: 0.5"),
        ("a load", "rank 1: job.load"),
        ("forms", "form='weights'"),
        ("a frozen weight", "'embed.weight' had requires_grad=True and has False"),
    ],
)
def test_what_one_rank_does_by_itself_is_told_to_all_and_the_job_goes_on(
    ranks: Ranks, tmp_path: Path, how: str, words: str, stage: int
) -> None:
    for refused, after in ranks.run(2, f"{CALLS}:steps_after", how, stage, str(tmp_path / "save"), timeout_s=LONG_S):
        assert words in refused
        assert after == ""


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_that_are_changed_to_other_values_on_one_rank_end_the_job_of_all(
    ranks: Ranks, tmp_path: Path, stage: int
) -> None:
    for refused, after in ranks.run(2, f"{CALLS}:steps_after", "weights", stage, str(tmp_path), timeout_s=LONG_S):
        assert refused.startswith("DisagreementError: ranks")
        assert "'head.weight' changed: checksum" in refused
        assert after.startswith("TornStepError: the step is torn: weights were changed in other ways on other ranks")


def test_what_fails_on_all_ranks_alike_leaves_their_job(ranks: Ranks, tmp_path: Path) -> None:
    for how, error in (
        ("a limit", "UsageError: the job was made without a limit"),
        ("a load of nothing", "StoreError"),
    ):
        for refused, after in ranks.run(2, f"{CALLS}:steps_after", how, 3, str(tmp_path), timeout_s=LONG_S):
            assert refused.startswith(error)
            assert after == ""


@pytest.mark.parametrize(
    ("how", "size", "words"),
    [
        ("visible", 2, "weight 'last.weight': checksum"),
        ("uneven", 2, "first.weight (8, 8)"),
        ("groups", 3, "a process group of ranks [0, 1] in the model"),
        ("dtensor", 2, "UnsupportedError: '0.weight' is a DTensor"),
    ],
)
def test_models_of_which_each_rank_has_a_part_are_refused_in_words(
    ranks: Ranks, how: str, size: int, words: str
) -> None:
    """Clipped by each rank's own norm, what all parts have whole would drift apart."""
    told = ranks.run(size, f"{CALLS}:parts", how, timeout_s=LONG_S)
    assert words in told[0]
    for text in told:
        assert "are not supported yet" in text
        assert "quantized" not in text
