"""A loader that is left after any batch gives what it would have given; its order is a matter of seed and epoch alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memfit
from memfit.core.errors import UsageError

ITEMS = 23


def loader(**options: object) -> memfit.ResumableLoader:
    known = {"batch_size": 4, "seed": 1, **options}
    return memfit.ResumableLoader(list(range(ITEMS)), **known)  # type: ignore[arg-type]


def epochs(found: memfit.ResumableLoader, count: int) -> list[list[int]]:
    return [batch.tolist() for _ in range(count) for batch in found]


@given(leave_after=st.integers(0, 15), keeps_last=st.booleans(), shuffle=st.booleans())
def test_a_loader_goes_on_behind_the_batch_that_was_given_last(
    leave_after: int, keeps_last: bool, shuffle: bool
) -> None:
    whole = epochs(loader(keeps_last=keeps_last, shuffle=shuffle), 3)
    first = loader(keeps_last=keeps_last, shuffle=shuffle)
    given_batches: list[list[int]] = []
    while len(given_batches) < leave_after:
        for batch in first:
            given_batches.append(batch.tolist())
            if len(given_batches) == leave_after:
                break
    second = loader(keeps_last=keeps_last, shuffle=shuffle)
    second.load_state_dict(first.state_dict())
    while len(given_batches) < len(whole):
        given_batches += [batch.tolist() for batch in second]
    assert given_batches == whole


def test_an_epoch_gives_each_item_once_and_the_next_another_order() -> None:
    found = loader(keeps_last=True)
    first, second = ([item for batch in epochs(found, 1) for item in batch] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(ITEMS))
    assert first != second
    assert found.epoch == 2
    assert len(found) == 6
    assert len(loader()) == 5


def test_the_generators_of_the_process_are_left_alone() -> None:
    before = torch.get_rng_state()
    epochs(loader(), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_that_cannot_be_and_a_state_that_does_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="23 items give no batch of 24"):
        loader(batch_size=24)
    with pytest.raises(UsageError, match="at least 1 and 0"):
        loader(batch_size=0)
    state = loader().state_dict()
    with pytest.raises(UsageError, match="the loader's seed is 2, and was 1 in the run"):
        loader(seed=2).load_state_dict(state)
    for wrong in ({"epoch": -1}, {"batch": 6}, {"batch": "1"}, {"epoch": True}):
        with pytest.raises(UsageError, match="cannot go on"):
            loader().load_state_dict({**state, **wrong})
