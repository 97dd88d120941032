"""Runs on ranks that are committed to a store: what a crash leaves is the last step that every rank has."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

from distributed.processes import RankFailedError, Ranks
from distributed.training import same
from memfit.core.errors import StoreError
from memfit.runs.exporting import export_run, remove_run, verify_run

GO_ON = "distributed.storing:go_on"
LONG_S = 100.0  # longer than a test may wait: nothing here is ended by a timeout


def test_a_run_goes_on_on_any_number_of_ranks_and_from_any_home_with_the_same_bits(
    ranks: Ranks, tmp_path: Path
) -> None:
    run, made = str(tmp_path / "run"), list[int]()
    # (ranks, steps, ZeRO's stage, tier): other numbers of ranks, other homes, other cuts.
    for size, until, stage, tier in ((4, 2, 3, "disk"), (2, 3, 1, "device"), (3, 4, 3, "disk"), (3, 5, 3, "disk")):
        found = ranks.run(size, GO_ON, run, until, stage, tier, made)
        assert found == [(len(made), [])] * size
        made += [size] * (until - len(made))


@pytest.mark.parametrize(
    ("instant", "least", "stage", "tier"),
    [
        pytest.param("unprepared", 1, 3, "disk", marks=pytest.mark.slow),
        ("prepared", 1, 3, "device"),
        ("voted", 2, 1, "disk"),
        pytest.param("renamed", 2, 3, "disk", marks=pytest.mark.slow),
    ],
)
def test_a_commit_in_which_a_rank_is_killed_is_one_of_all_ranks_or_of_none(
    ranks: Ranks, tmp_path: Path, instant: str, least: int, stage: int, tier: str
) -> None:
    run = str(tmp_path / "run")
    ranks.begin(2, "distributed.storing:killed_in_a_commit", run, instant, stage, tier, timeout_s=LONG_S)
    (is_good, raised), (_, ended) = (ranks.answer(rank) for rank in range(2))
    assert is_good, raised
    assert "rank 1 was lost" in raised
    assert ended == "the process ended with -9"
    for done, differing in ranks.run(2, GO_ON, run, 3, stage, tier, [2, 2]):
        # A commit that every rank is prepared for is finished: so it may count before the vote ends.
        assert done in ({1} if instant == "unprepared" else {least, 2})
        assert differing == []


def test_a_full_disk_of_one_rank_keeps_all_at_the_commit_before_and_the_run_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks.run(2, "distributed.storing:full_disk", str(tmp_path / "run"), timeout_s=LONG_S)
    assert second[0].startswith("StoreError: could not write the manifest of step 1")
    assert first[0] == f"PeerError: rank 1: {second[0]}"
    assert first[1] == second[1] == []


@pytest.mark.parametrize(("size", "stage", "tier"), [(2, 3, "disk"), (3, 1, "device")])
def test_a_run_of_ranks_is_exported_whole_in_both_forms(
    ranks: Ranks, tmp_path: Path, size: int, stage: int, tier: str
) -> None:
    """Read by safetensors' and torch.distributed.checkpoint's own loaders, in one process."""
    expected, *_ = ranks.run(size, "distributed.storing:ended", str(tmp_path / "run"), stage, tier)
    export_run(tmp_path / "run", tmp_path / "out")
    found = {f"model.{name}": value for name, value in load_file(tmp_path / "out" / "model.safetensors").items()}
    for name, value in load_file(tmp_path / "out" / "optimizer.safetensors").items():
        found[f"optim.state.{name}"] = value
    export_run(tmp_path / "run", tmp_path / "checkpoint", form="dcp")
    loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
    with warnings.catch_warnings():
        # It warns that there is one process.
        warnings.simplefilter("ignore", UserWarning)
        load_checkpoint(loaded, checkpoint_id=tmp_path / "checkpoint")
    assert same(loaded, expected) == []
    assert same(found, {name: value for name, value in expected.items() if not name.endswith(".step")}) == []


def test_a_run_of_ranks_is_verified_and_removed_without_its_program(ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ranks.run(2, GO_ON, str(run), 2, 3, "device", []) == [(0, [])] * 2
    assert verify_run(run).is_whole
    assert verify_run(run).step == 2
    files = [path for path in sorted((run / "set-1" / "rank-1").iterdir()) if path.suffix != ".json"]
    largest = max(files, key=lambda path: path.stat().st_size)
    written = largest.read_bytes()
    largest.write_bytes(bytes(byte ^ 1 for byte in written))
    found = verify_run(run)
    assert {block.name.partition(":")[0] for block in found.blocks if block.damaged} == {"rank 1"}
    assert "rank-1" in found.in_words()
    largest.write_bytes(written)
    # A store that was brought back alone is of another commit than the rest.
    shutil.copytree(run / "set-1" / "rank-0", tmp_path / "old")
    assert ranks.run(2, GO_ON, str(run), 4, 3, "device", [2, 2]) == [(2, [])] * 2
    shutil.rmtree(run / "set-1" / "rank-0")
    shutil.copytree(tmp_path / "old", run / "set-1" / "rank-0")
    with pytest.raises(StoreError, match="of different commits"):
        verify_run(run)
    (run / "notes.txt").write_text("mine")
    assert remove_run(run)
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    assert not remove_run(run)


def test_a_run_of_ranks_is_refused_by_a_process_alone_and_the_other_way_round(ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert ranks.run(2, GO_ON, str(run), 1, 3, "device", []) == [(0, [])] * 2
    assert json.loads((run / "ranks.json").read_text())["ranks"] == 2
    with pytest.raises(RankFailedError, match="is one on several ranks: start two processes"):
        ranks.run(1, GO_ON, str(run), 1, 0, "device", [2])
    assert ranks.run(1, GO_ON, str(tmp_path / "alone"), 1, 0, "device", []) == [(0, [])]
    with pytest.raises(RankFailedError, match="is one of a single process"):
        ranks.run(2, GO_ON, str(tmp_path / "alone"), 1, 3, "device", [1])


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a_run_that_ended_before_its_first_step_goes_on(ranks: Ranks, tmp_path: Path, tier: str) -> None:
    """Its states have no values: what their memory held before differs from rank to rank."""
    ranks.run(2, "distributed.storing:left_before_a_step", str(tmp_path / "run"), 0, tier)
    assert ranks.run(2, GO_ON, str(tmp_path / "run"), 2, 0, tier, []) == [(0, [])] * 2
