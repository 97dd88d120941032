"""Random lifetimes and random comings and goings, against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.core.errors import UsageError
from memfit.devices.buffer_arena import Arena, plan_offsets

Lifetime = tuple[int, int, int]

lifetime = st.tuples(st.integers(0, 20), st.integers(1, 8), st.integers(0, 300)).map(
    lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2])
)


def live_sum_bytes(lifetimes: list[Lifetime]) -> int:
    """The most live bytes, moment by moment."""
    return max(sum(size for start, end, size in lifetimes if start <= moment < end) for moment in range(30))


@given(lifetimes=st.lists(lifetime, max_size=25), alignment=st.sampled_from([1, 16, 64]))
def test_no_two_live_buffers_overlap_and_the_capacity_holds_them(lifetimes: list[Lifetime], alignment: int) -> None:
    offsets, capacity = plan_offsets(lifetimes, alignment)
    assert len(offsets) == len(lifetimes)
    assert capacity == max((o + size for o, (_, _, size) in zip(offsets, lifetimes, strict=True) if size), default=0)
    assert capacity >= live_sum_bytes(lifetimes)
    assert all(offset % alignment == 0 and offset >= 0 for offset in offsets)
    for moment in range(30):
        taken: set[int] = set()
        for offset, (start, end, size) in zip(offsets, lifetimes, strict=True):
            if start <= moment < end:
                bytes_of_it = set(range(offset, offset + size))
                assert not taken & bytes_of_it
                taken |= bytes_of_it
    assert (offsets, capacity) == plan_offsets(lifetimes, alignment)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_nested_lifetimes_like_forward_and_backward_pack_without_a_hole(sizes: list[int]) -> None:
    count = len(sizes)
    lifetimes = [(index, 2 * count - index, size) for index, size in enumerate(sizes)]
    _, capacity = plan_offsets(lifetimes, 1)
    assert capacity == sum(sizes)


@given(lifetimes=st.lists(lifetime.filter(lambda drawn: drawn[2] > 0), min_size=1, max_size=5))
def test_the_packing_of_few_buffers_is_close_to_the_best_of_all(lifetimes: list[Lifetime]) -> None:
    """A packing that pushes every buffer down is first fit in some order: trying all orders finds the least one."""

    def first_fit(order: tuple[int, ...]) -> int:
        places: dict[int, int] = {}
        for index in order:
            start, end, size = lifetimes[index]
            rivals = [
                (places[other], places[other] + lifetimes[other][2])
                for other in places
                if lifetimes[other][0] < end and start < lifetimes[other][1]
            ]
            candidates = [0, *(high for _, high in rivals)]
            places[index] = min(c for c in candidates if all(c + size <= low or high <= c for low, high in rivals))
        return max(places[index] + lifetimes[index][2] for index in places)

    best = min(first_fit(order) for order in itertools.permutations(range(len(lifetimes))))
    assert best <= plan_offsets(lifetimes, 1)[1] <= 1.5 * best


@pytest.mark.parametrize("wrong", [(3, 2, 10), (2, 2, 10), (0, 1, -1)])
def test_an_invalid_lifetime_is_refused(wrong: Lifetime) -> None:
    with pytest.raises(UsageError, match="buffer 1"):
        plan_offsets([(0, 1, 1), wrong])


@pytest.mark.usefixtures("older_objects_are_passed_over")
@settings(max_examples=20)  # each looks through all objects of the process
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20), keep=st.integers(0, 2**20 - 1))
def test_defragmenting_closes_every_hole_and_changes_no_value(sizes: list[int], keep: int) -> None:
    total = sum(sizes)
    arena = Arena(torch.zeros(total))
    held = [arena.allocate(size) for size in sizes]
    for index, tensor in enumerate(held):
        tensor.copy_(torch.arange(tensor.numel()) + 100.0 * index)
    kept = [index for index in range(len(sizes)) if keep >> index & 1]
    for index, tensor in enumerate(held):
        if index not in kept:
            arena.release(tensor)
    copies = {index: held[index].clone() for index in kept}
    arena.defragment()
    free = total - sum(sizes[index] for index in kept)
    if free:
        arena.allocate(free).fill_(-1.0)
    with pytest.raises(torch.OutOfMemoryError):
        arena.allocate(1)
    assert all(torch.equal(held[index], copies[index]) for index in kept)
