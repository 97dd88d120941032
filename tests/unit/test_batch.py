"""Batches as trees: rows are counted once, sliced without a copy, and never guessed."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from memfit.core.errors import UsageError
from memfit.trace.batch import UncuttableError, batch_rows, slice_batch


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


def test_slices_of_every_kind_of_tree_are_views_of_the_same_kind_and_put_together_are_the_batch() -> None:
    x, scalar = torch.randn(5, 3), torch.tensor(2.0)
    batch: dict[str, Any] = {
        "plain": x, "nested": [x, (x, Pair(x, 1))], "sample": Sample(x, "a"), "own": UserDict({"x": x}), "scale": scalar, "none": None,
    }  # fmt: skip
    assert batch_rows(batch) == 5
    first, second = slice_batch(batch, 0, 2), slice_batch(batch, 2, 5)
    for read in (
        lambda b: b["plain"],
        lambda b: b["nested"][0],
        lambda b: b["nested"][1][1].left,
        lambda b: b["sample"].x,
        lambda b: b["own"]["x"],
    ):
        assert torch.equal(torch.cat([read(first), read(second)]), x)
        assert read(second).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert first["scale"] is scalar
    assert isinstance(first["own"], UserDict)
    assert isinstance(first["nested"][1][1], Pair)
    assert (first["sample"].name, first["none"]) == ("a", None)


def test_tensors_that_disagree_are_both_named() -> None:
    with pytest.raises(UncuttableError, match=r"batch\['x'\] has 4, batch\['y'\]\[0\] has 3"):
        batch_rows({"x": torch.zeros(4), "y": [torch.zeros(3)]})


def test_batches_without_rows_and_ranges_outside_are_refused() -> None:
    for batch in ({}, [torch.tensor(1.0)], [torch.zeros(0, 3)]):
        with pytest.raises(UsageError):
            batch_rows(batch)
    for start, stop in ((0, 5), (2, 2), (-1, 2)):
        with pytest.raises(UsageError, match="not a part"):
            slice_batch(torch.zeros(4), start, stop)


def test_data_that_cannot_be_cut_into_rows_is_refused_by_its_place() -> None:
    class Holder:
        def __init__(self) -> None:
            self.x = torch.zeros(4)

    class Deep:
        __slots__ = ("held",)

        def __init__(self) -> None:
            self.held = {"a": [Holder()]}

    with pytest.raises(UncuttableError, match=r"batch\[1\] is a Holder"):
        batch_rows([torch.zeros(4), Holder()])
    with pytest.raises(UncuttableError, match=r"batch\[1\] is a Deep"):
        batch_rows([torch.zeros(4), Deep()])
    with pytest.raises(UncuttableError, match="PackedSequence"):
        batch_rows(pack_padded_sequence(torch.zeros(4, 2, 3), torch.tensor([4, 2])))
    with pytest.raises(UncuttableError, match="sparse"):
        batch_rows(torch.eye(3).to_sparse())
