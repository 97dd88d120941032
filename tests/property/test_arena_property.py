"""Random lifetimes and random comings and goings, against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.allocator import install
from memfit.allocator.arena import Arena, BufferArena
from memfit.core.errors import UsageError
from memfit.scheduling.offsets import Lifetime, most_live_bytes, plan_offsets

CAPACITY_BYTES = 16384

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
    assert most_live_bytes(lifetimes) == live_sum_bytes(lifetimes)
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
def test_what_is_no_lifetime_is_refused(wrong: Lifetime) -> None:
    with pytest.raises(UsageError, match="buffer 1"):
        plan_offsets([(0, 1, 1), wrong])


Held = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # in the arena, a view of it, and a copy outside


def brute_force_fits(arena: Arena, live: list[Held], nbytes: int) -> bool:
    taken = bytearray(CAPACITY_BYTES)
    for tensor, _, _ in live:
        low = tensor.data_ptr() - arena.address
        width = -(-tensor.numel() // 64) * 64
        taken[low : low + width] = b"x" * width
    return any(not any(taken[low : low + nbytes]) for low in range(0, CAPACITY_BYTES - nbytes + 1, 64))


def check(arena: Arena, live: list[Held]) -> None:
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor, _, _ in live)
    assert all(high <= low for (_, high), (low, _) in itertools.pairwise(spans))
    now = arena.statistics()
    assert (now.live_blocks, now.live_bytes) == (len(live), sum(copy.numel() for _, _, copy in live))
    for tensor, view, copy in live:
        assert torch.equal(tensor, copy)
        assert torch.equal(view, copy[copy.numel() // 2 :])


def come(arena: Arena, live: list[Held], nbytes: int, number: int) -> None:
    fits = brute_force_fits(arena, live, nbytes)
    if not fits:
        with pytest.raises(torch.OutOfMemoryError):
            arena.allocate(nbytes)
        return
    tensor = arena.allocate(nbytes)
    tensor.copy_(torch.arange(nbytes).add(number).to(torch.uint8))
    live.append((tensor, tensor[nbytes // 2 :], tensor.clone()))


@given(moves=st.lists(st.tuples(st.sampled_from("aaarrd"), st.integers(1, 3000), st.integers(0, 50)), max_size=40))
def test_contents_survive_any_order_of_comings_goings_and_moves(moves: list[tuple[str, int, int]]) -> None:
    allocator = install()
    before = allocator.stats().arena_bytes
    arena = Arena(CAPACITY_BYTES, allocator, alignment_bytes=64)
    live: list[Held] = []
    for number, (move, nbytes, choice) in enumerate(moves):
        if move == "a":
            come(arena, live, nbytes, number)
        elif move == "r" and live:
            if choice % 2:
                arena.release(live[choice % len(live)][0])
            del live[choice % len(live)]  # the death of the last tensor frees as well as release does
        elif move == "d":
            arena.defragment()
            assert arena.statistics().fragmentation == 0
        check(arena, live)
    live.clear()
    arena.close()
    assert allocator.stats().arena_bytes == before


@settings(max_examples=20)  # each looks through all objects of the process
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20), keep=st.integers(0, 2**20 - 1))
def test_the_textbook_arena_closes_every_hole_and_changes_no_value(sizes: list[int], keep: int) -> None:
    total = sum(sizes)
    arena = BufferArena(torch.zeros(total))
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
