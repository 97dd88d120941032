"""Rows of ranks, and how the command line starts them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from memfit.core.errors import UsageError
from memfit.job.rank_training import join_ranks, launch, own_rows


def test_the_rows_of_all_ranks_are_those_of_the_batch() -> None:
    batch = {"x": torch.arange(14).reshape(7, 2), "names": [*"abcdefg"]}
    parts = [own_rows(batch, rank, 3)(batch) for rank in range(3)]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert [name for part in parts for name in part["names"]] == batch["names"]


def test_fewer_rows_than_ranks_and_batches_without_rows_are_refused() -> None:
    with pytest.raises(UsageError, match="a batch of 2 rows is too small for 3 ranks"):
        own_rows(torch.zeros(2, 5), 0, 3)
    with pytest.raises(UsageError, match="cannot be told what counts the rows"):
        own_rows({"x": 5}, 0, 2)


def test_a_process_alone_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert join_ranks() == (0, 1)


def test_ranks_are_started_by_torchrun_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Process:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            seen.append((command, env))

        def wait(self) -> int:
            if len(seen) == 1:
                seen.append("interrupted")
                raise KeyboardInterrupt
            return 7

    monkeypatch.setattr("memfit.job.rank_training.subprocess.Popen", Process)
    assert launch(2, ["train", "--ranks", "2"]) == 7
    command, env = seen[0]
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[3:] == ["--standalone", "--nproc-per-node=2", "-m", "memfit", "train", "--ranks", "2"]
    assert int(env["OMP_NUM_THREADS"]) >= 1
