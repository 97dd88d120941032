"""Collectives of `memfit.communicator` between 2 to 4 processes over Gloo, against arithmetic."""

from __future__ import annotations

import pytest
import torch

import memfit
from distributed.processes import Ranks

CALLS = "distributed.collective_calls"


def test_the_sum_of_two_lists_is_on_both_ranks_and_the_inputs_stay(ranks: Ranks) -> None:
    assert ranks.run(2, f"{CALLS}:worked_example") == [([2, 2, 4], [1, 2, 3]), ([2, 2, 4], [1, 0, 1])]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective_on_lists_is_arithmetic(ranks: Ranks, size: int) -> None:
    found = ranks.run(size, f"{CALLS}:lists")
    firsts, seconds = [r + 1 for r in range(size)], [10 * r for r in range(size)]
    for rank, got in enumerate(found):
        assert got["allreduce"] == [sum(firsts), sum(seconds)]
        assert got["max"] == [size, 10 * (size - 1)]
        assert got["min"] == [1, 0]
        assert got["product"] == [torch.tensor(firsts).prod().item(), 0]
        assert got["own function"] == [int("".join(map(str, firsts))), int("".join(map(str, seconds)))]
        assert got["mixed"] == [0.5 + size - 1]
        assert got["reduce"] == ([sum(firsts), sum(seconds)] if rank == 1 else None)
        assert got["reduce_scatter"] == [sum(range(size)), size * rank]
        assert got["broadcast"] == [7, 8.5]
        assert got["allgather"] == [[r] * r for r in range(size)]
        assert got["gather"] == ([[r, 0] for r in range(size)] if rank == 1 else None)
        assert got["scatter"] == [rank] * rank
        assert got["alltoall"] == [[r, rank] for r in range(size)]
        assert got["empty"] == []
        assert got["own"] == [rank + 1, 10 * rank]


@pytest.mark.parametrize(
    ("size", "numel", "dtype"),
    [
        (2, 10, "float32"),
        (2, 100_001, "bfloat16"),
        (3, 40_001, "float32"),
        (3, 7, "int64"),
        (4, 3, "float64"),
        (4, 50_003, "float32"),
    ],
)
def test_every_collective_on_tensors_is_arithmetic_in_rank_order(
    ranks: Ranks, size: int, numel: int, dtype: str
) -> None:
    for checks in ranks.run(size, f"{CALLS}:tensors", numel, dtype):
        assert all(checks), checks


def test_calls_that_differ_between_ranks_are_errors_on_all_of_them(ranks: Ranks) -> None:
    found = ranks.run(2, f"{CALLS}:disagreements")
    for texts in zip(*found, strict=True):
        assert all(texts), texts
    assert "a tensor (2,) of float32" in found[0][0]
    assert "a tensor (3,) of float32" in found[0][0]


def test_a_process_alone_is_a_communicator_of_one() -> None:
    c = memfit.communicator.create()
    assert (c.rank, c.size) == (0, 1)
    own = torch.arange(3.0)
    assert torch.equal(c.allreduce(own), own)
    assert c.allgather([1, 2]) == [[1, 2]]
    assert c.alltoall([[5]]) == [[5]]
    assert c.reduce_scatter([[1, 2]], op=sum) == [1, 2]
    assert c.broadcast([3]) == [3]
    c.close()


def test_what_is_no_buffer_is_refused_by_name() -> None:
    c = memfit.communicator.create()
    for wrong in ("text", {"a": 1}, [[1], [2]], 5):
        with pytest.raises(memfit.UsageError, match="a buffer is a tensor or a list of numbers"):
            c.allreduce(wrong)
    with pytest.raises(memfit.UsageError, match="op is one of"):
        c.allreduce([1], op="average")
    with pytest.raises(memfit.UsageError, match="no rank 3"):
        c.broadcast([1], root=3)
    c.close()
