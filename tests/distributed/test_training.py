"""Jobs over ranks against one process and plain PyTorch, bit for bit."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import pytest

from distributed.processes import RankFailedError, Ranks

TRAIN = "distributed.training:train"
HINDERED = "distributed.training:hindered"
LONG_S = 100.0  # longer than a test may wait: nothing here is ended by a timeout


@pytest.mark.thinned
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
        (2, "tower", "adamw", 1, "disk", 1, {"is_atomic": True}),
        (2, "tied", "adamw", 3, "disk", 1, {}),
        (3, "tower", "adamw", 2, "disk", 1, {}),
        pytest.param(3, "llama", "sgd", 3, "device", 1, {}, marks=pytest.mark.slow),
        pytest.param(4, "gpt2", "adamw", 3, "disk", 1, {}, marks=pytest.mark.slow),
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
        ("a limit breach", "LimitBreachError: the limit of 48.0 MiB was hit at 'forward C5 m1':"),
        ("a full disk", "StoreError: could not write"),
    ],
)
def test_what_fails_on_one_rank_ends_the_step_of_all_with_its_text(ranks: Ranks, how: str, cause: str) -> None:
    first, second = ranks.run(2, HINDERED, how, timeout_s=LONG_S)
    assert second["raised"].startswith(cause)
    assert first["raised"].startswith(f"PeerError: rank 1: {cause}")
    for rank in (first, second):
        assert rank["after"].startswith("PeerError: the job is over on all ranks")
        assert rank["again"] == "1 losses"
        assert rank["left"] == 0


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("an unused block", ""),
        ("fewer rows than microbatches", "'# microbatches 1'"),
        ("no rows", "UsageError: the batch is empty"),
    ],
)
def test_where_one_rank_does_something_else_the_step_is_right_or_refused_on_all_and_the_job_goes_on(
    ranks: Ranks, how: str, told: str
) -> None:
    for first, second, differing in ranks.run(2, "distributed.training:disagrees", how, timeout_s=LONG_S):
        assert told in first
        assert bool(told) == bool(first)
        assert (second, differing) == ("", [])


def test_gradients_that_overflow_on_one_rank_are_skipped_by_all(ranks: Ranks) -> None:
    first, second = ranks.run(2, "distributed.training:skipped", timeout_s=LONG_S)
    assert first == second
    (before, scale), (at, halved), (behind, _) = first[0][3:]
    assert (before, at, behind) == (False, True, False)
    assert halved == scale / 2


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


def test_the_command_line_trains_on_ranks_and_only_the_first_one_tells(ranks: Ranks, tmp_path: Path) -> None:
    for made, *more in ((1,), (2,), (1, "--fresh")):  # typed again, the run goes on
        (code, told, files, written), (other_code, nothing, _, others) = ranks.run(
            2, "distributed.command_calls:train", 1, str(tmp_path), *more, timeout_s=LONG_S
        )
        assert (code, other_code, nothing) == (0, 0, ""), told
        assert "data parallel" in told or "ZeRO" in told
        assert f"committed: step {made} in {tmp_path / 'run'}" in told
        assert "model.safetensors" in files and "tokenizer.json" in files
        assert (written, others) == (1, 0), "one writer of a file"


def test_the_sharded_example_trains_on_two_ranks_what_one_process_trains(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(EXAMPLES / "one_process.py"), run_name="__main__")
    alone = capsys.readouterr().out
    assert ranks.run(2, "distributed.command_calls:example", str(EXAMPLES / "sharded.py")) == [alone] * 2


EXAMPLES = Path(__file__).parents[2] / "examples"
AGAINST = "distributed.training:against"
IN_BF16: dict[str, Any] = {"allow": {"bf16"}, "plan": {"compute_dtype": "bfloat16"}}


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("reference", "name", "optimizer", "stage", "tier", "k", "options"),
    [
        ("ddp", "tower", "adamw", 0, "device", 1, {}),
        ("zero redundancy optimizer", "tower", "adamw", 1, "device", 1, {}),
        ("fsdp", "tower", "adamw", 3, "device", 3, {}),
        ("fsdp", "llama", "adamw", 3, "disk", 3, {}),
        ("fsdp", "gpt2", "sgd", 3, "disk", 1, {}),
        ("fsdp in bf16", "llama", "adamw", 3, "disk", 3, IN_BF16),
        ("fsdp in bf16", "llama", "adamw", 2, "device", 1, IN_BF16),
    ],
)
def test_weights_are_those_of_torchs_own_ways_on_two_ranks(
    ranks: Ranks, reference: str, name: str, optimizer: str, stage: int, tier: str, k: int, options: dict[str, Any]
) -> None:
    assert ranks.run(
        2, "distributed.test_training:call", AGAINST, (reference, name, optimizer, stage, tier, k), options
    ) == [[], []]


def call(rank: int, size: int, function: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls a function on a rank, with keywords."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(rank, size, *args, **options)


@pytest.mark.parametrize(
    ("size", "kind", "stage", "tier"),
    [(2, "muon", 3, "disk"), (3, "muon", 1, "device"), (2, "int8", 3, "disk"), (2, "host", 3, "host")],
)
def test_whole_parameters_few_bits_and_a_host_are_as_on_one_process(
    ranks: Ranks, size: int, kind: str, stage: int, tier: str
) -> None:
    assert ranks.run(size, "distributed.training:like_one_job", kind, stage, tier) == [[]] * size


@pytest.mark.parametrize(("size", "stage", "tier"), [(2, 3, "disk"), (3, 1, "device")])
def test_ranks_have_other_numbers_of_rows_and_the_loss_is_of_all(
    ranks: Ranks, size: int, stage: int, tier: str
) -> None:
    found = ranks.run(size, "distributed.training:uneven", stage, tier)
    assert [told for told, _ in found] == [[]] * size
    assert all(losses == found[0][1] for _, losses in found)


@pytest.mark.parametrize("tail", [None, 5])
def test_a_loss_that_counts_is_divided_by_the_counts_of_all_ranks(ranks: Ranks, tail: int | None) -> None:
    assert ranks.run(2, "distributed.training:counted", tail) == [[], []]


def test_models_that_differ_are_refused_with_the_name_of_a_weight(ranks: Ranks) -> None:
    for text in ranks.run(2, "distributed.training:other_weights"):
        assert text.startswith("DisagreementError: ranks")
        assert "weight 'embed.weight': checksum" in text


def test_a_save_is_one_set_of_files_that_any_number_of_ranks_goes_on_from(ranks: Ranks, tmp_path: Path) -> None:
    def go(size: int, to: str, source: str | None, steps: int, stage: int, tier: str) -> list[int]:
        found = None if source is None else str(tmp_path / source)
        return ranks.run(size, "distributed.training:elastic", str(tmp_path / to), found, steps, stage, tier)

    assert go(4, "a", None, 2, 3, "disk") == [2] * 4
    assert go(2, "b", "a", 0, 1, "device") == [2] * 2
    assert go(3, "c", "b", 0, 3, "disk") == [2] * 3
    for name in ("model.safetensors", "optimizer.safetensors"):
        first = (tmp_path / "a" / name).read_bytes()
        assert (tmp_path / "b" / name).read_bytes() == first
        assert (tmp_path / "c" / name).read_bytes() == first


def test_a_save_holds_what_closing_gives_back(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, "distributed.training:save_after", str(tmp_path / "a"), "adamw", 2, 3, "disk")
    assert found == [[], []]


def test_calls_that_differ_are_refused_on_all_ranks_and_the_job_goes_on(ranks: Ranks) -> None:
    first, second = ranks.run(2, HINDERED, "a save on one rank", timeout_s=LONG_S)
    for rank in (first, second):
        assert rank["raised"].startswith(
            "DisagreementError: the ranks have called different things (rank 0: step; rank 1: job.save)"
        )
        assert rank["after"] == "2 losses"


def test_an_error_of_one_ranks_loop_ends_the_others_next_call(ranks: Ranks) -> None:
    found = ranks.run(2, "distributed.training:leaves_by_error", timeout_s=LONG_S)
    # Told in the step, or, if it was heard of before that began, as what has ended the job.
    assert found[0].startswith("PeerError: ")
    assert "rank 1: LookupError: of the loop" in found[0]
    assert found[1] == "LookupError: of the loop"


def test_a_model_whose_training_state_fits_no_rank_is_trained_by_two(ranks: Ranks) -> None:
    for found in ranks.run(2, "distributed.training:under_a_limit", 0.85):
        assert {(tier, states) for tier, _, states in found["over"]} == {("device", "data")}
        assert found["predicted"] <= found["limit"]
        assert found["measured"] <= found["limit"]
        assert found["measured"] <= found["predicted"]


@pytest.mark.parametrize(
    ("size", "stage", "tier", "counts"),
    [
        (2, 0, "device", [1]),
        (2, 1, "disk", [1]),
        (2, 2, "device", [1]),
        (2, 3, "disk", [1, 4]),
        (3, 3, "device", [1]),
    ],
)
def test_bytes_from_other_ranks_are_those_predicted_whatever_the_number_of_microbatches(
    ranks: Ranks, size: int, stage: int, tier: str, counts: list[int]
) -> None:
    seen = set[int]()
    for k in counts:
        found = ranks.run(size, "distributed.training:received", stage, tier, k)
        predicted = found[0][1]
        for purpose in {*predicted, *(p for counted, _ in found for p in counted)}:
            # A rank is predicted as the mean of all; each block rounds once.
            total = sum(counted.get(purpose, 0) for counted, _ in found)
            assert size * predicted[purpose] <= total <= size * predicted[purpose] + 100
        seen.add(sum(predicted.values()))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("size", "stage", "tier", "k"), [(2, 0, "device", 1), (2, 3, "device", 2), (3, 2, "device", 1), (2, 1, "disk", 1)]
)
def test_every_action_takes_what_is_predicted_and_no_more_whoever_keeps_what_was_exchanged(
    ranks: Ranks, size: int, stage: int, tier: str, k: int
) -> None:
    found = ranks.run(size, "distributed.training:peaks", stage, tier, k)
    # Shares differ by a page or two: the largest is predicted.
    assert [(a, p, b) for rank in found for a, p, b in rank if b > p] == []
    assert set.intersection(*({a for a, _, _ in rank} for rank in found)) == set()


def test_what_fits_no_rank_in_any_way_is_refused_on_all_with_the_smallest(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1: DoesNotFitError\('no plan fits the rank with the least room"):
        ranks.run(2, "distributed.training:under_a_limit", 0.1)


@pytest.mark.slow  # nothing computes in it, but the links are as slow as the sleep
@pytest.mark.parametrize("share", [0.5, 1.0, 1.5])
def test_what_ranks_send_passes_beside_compute_and_waits_are_those_predicted(ranks: Ranks, share: float) -> None:
    for found in ranks.run(2, "rank_overlap:measure", share, 2):
        longer = max(found["compute"], found["links"])
        assert found["step predicted"] <= 1.1 * longer
        assert found["step measured"] <= 1.15 * longer
        predicted, measured = (sum(found[f"waits {how}"].values()) for how in ("predicted", "measured"))
        assert abs(predicted - measured) <= 0.1 * measured + 0.05
