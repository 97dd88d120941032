"""Jobs over ranks against one process and plain PyTorch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from distributed.processes import Ranks

TRAIN = "distributed.training:train"
HINDERED = "distributed.training:hindered"
LONG_S = 100.0  # longer than a test may wait: nothing here is ended by a timeout


@pytest.mark.parametrize("tier", ["device", "disk"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_those_of_one_process(ranks: Ranks, stage: int, tier: str) -> None:
    assert ranks.run(2, TRAIN, "tower", "adamw", stage, tier, 1, 2) == [[], []]


@pytest.mark.parametrize(
    ("size", "name", "optimizer", "stage", "tier", "k", "plan"),
    [
        (2, "tower", "adamw", 3, "disk", 3, {}),
        (2, "tower", "adamw", 1, "device", 3, {"tail": 5}),
        (2, "tower", "adamw", 3, "disk", 3, {"tail": 5}),
        (2, "tower", "adamw", 3, "disk", 2, {"is_atomic": True, "update": "after-backward"}),
        (2, "tied", "adamw", 3, "disk", 1, {}),
        (3, "tower", "adamw", 2, "disk", 1, {}),
        (3, "llama", "sgd", 3, "device", 1, {}),
        (4, "gpt2", "adamw", 3, "disk", 1, {}),
    ],
)
def test_weights_are_those_of_one_process_that_adds_the_ranks_in_order(
    ranks: Ranks, size: int, name: str, optimizer: str, stage: int, tier: str, k: int, plan: dict[str, Any]
) -> None:
    assert ranks.run(size, TRAIN, name, optimizer, stage, tier, k, 2, {}, plan) == [[]] * size


@pytest.mark.parametrize("stage", [0, 3])
def test_clipping_takes_the_norm_of_all_ranks(ranks: Ranks, stage: int) -> None:
    assert ranks.run(2, TRAIN, "tower", "sgd", stage, "disk", 1, 2, {"max_grad_norm": 0.1}) == [[], []]


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("an exception in the loss", "KeyError: 'of the loss'"),
        ("a refused allocation", "LimitBreachError: the limit was hit at 'forward C5 m1': emulated"),
    ],
)
def test_what_fails_on_one_rank_ends_the_step_of_all_with_its_text(ranks: Ranks, how: str, cause: str) -> None:
    first, second = ranks.run(2, HINDERED, how, timeout_s=LONG_S)
    assert second["raised"].startswith(cause)
    assert first["raised"].startswith(f"PeerError: rank 1: {cause}")
    for rank in (first, second):
        assert rank["after"].startswith("PeerError: the job is over on all ranks")
        assert rank["again"] == "1 losses"


def test_a_batch_that_one_rank_cannot_take_is_told_before_anything_moves(ranks: Ranks) -> None:
    first, second = ranks.run(2, HINDERED, "an invalid batch", timeout_s=LONG_S)
    assert "must have same reduction dim" in second["raised"]
    assert first["raised"] == f"PeerError: rank 1: {second['raised']}"
    assert (first["after"], second["after"]) == ("2 losses", "2 losses")


def test_a_rank_that_is_killed_in_a_step_is_named(ranks: Ranks) -> None:
    ranks.begin(3, HINDERED, "killed", timeout_s=LONG_S)
    answers = [ranks.answer(rank) for rank in range(3)]
    assert answers[1] == (False, "the process ended with -9")
    for is_good, answer in (answers[0], answers[2]):
        assert is_good, answer
        assert answer["raised"].startswith("PeerError: rank 1 was lost")
        assert answer["after"].startswith("PeerError: the job is over on all ranks")
