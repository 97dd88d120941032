"""The arena: contents stay bitwise through every move, and blocks never overlap."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

import memfit
from memfit.core.errors import UsageError
from memfit.devices.buffer_arena import Arena, plan_offsets


def test_the_arena_is_reached_by_a_public_name() -> None:
    assert memfit.arena.Arena is Arena


def test_planned_offsets_are_taken_as_told_and_overlaps_are_refused() -> None:
    arena = Arena(torch.zeros(100))
    tensor = arena.allocate(3, 10, offset=20)
    assert (tensor.storage_offset(), tensor.shape) == (20, (3, 10))
    for offset, elements, why in ((49, 2, "overlap"), (0, 21, "overlap"), (-1, 2, "inside"), (90, 11, "inside")):
        with pytest.raises(UsageError, match=why):
            arena.allocate(elements, offset=offset)
    assert arena.allocate(20, offset=0).storage_offset() == 0
    assert arena.allocate(50, offset=50).storage_offset() == 50


def test_a_plan_of_lifetimes_runs_in_a_buffer_of_its_capacity() -> None:
    lifetimes = [(0, 6, 5), (1, 3, 40), (2, 5, 20), (3, 4, 30), (5, 8, 40), (6, 8, 25)]
    offsets, capacity = plan_offsets(lifetimes)
    arena = Arena(torch.zeros(capacity))
    live: dict[int, torch.Tensor] = {}
    for moment in range(9):
        for index, (_, end, _) in enumerate(lifetimes):
            if end == moment:
                assert bool((live[index] == index + 1).all())
                arena.release(live.pop(index))
        for index, (start, _, size) in enumerate(lifetimes):
            if start == moment:
                live[index] = arena.allocate(size, offset=offsets[index]).fill_(index + 1)
    assert not live


def test_best_fit_takes_the_smallest_hole_and_first_fit_the_lowest() -> None:
    for fit, expected in (("best", 24), ("first", 0)):
        arena = Arena(torch.zeros(64), fit=fit)  # type: ignore[arg-type]
        held = [arena.allocate(size) for size in (16, 8, 4, 8)]
        arena.release(held[0])
        arena.release(held[2])
        assert arena.allocate(4).storage_offset() == expected


def test_live_tensors_keep_their_contents_through_defragmentation() -> None:
    arena = Arena(torch.zeros(1000))
    held = [arena.allocate(10, 10) for _ in range(10)]
    for tensor in held:
        tensor.normal_()
    assert all(tensor._base is not None for tensor in held)
    views = [tensor.t()[3:, 1] for tensor in held]
    bits = [tensor.view(torch.int32) for tensor in held]
    copies = [tensor.clone() for tensor in held]
    for tensor in held[::2]:
        arena.release(tensor)
    before = arena.statistics()
    assert (before.free_bytes, before.largest_free_bytes, before.fragmentation) == (2000, 400, 0.8)
    with pytest.raises(torch.OutOfMemoryError, match="would make room"):
        arena.allocate(500)
    identities = [id(tensor) for tensor in held]
    versions = [tensor._version for tensor in held]
    assert arena.defragment() == 5 * 400
    assert arena.statistics().largest_free_bytes == 2000
    assert identities == [id(tensor) for tensor in held]
    assert versions == [tensor._version for tensor in held]
    arena.allocate(500).fill_(7.0)
    for index in range(1, 10, 2):
        assert torch.equal(held[index], copies[index])
        assert torch.equal(views[index], copies[index].t()[3:, 1])
        assert torch.equal(bits[index], copies[index].view(torch.int32))
    held[1].fill_(5.0)  # views still see what is written through the tensor
    assert bool((views[1] == 5.0).all())


def test_a_tensor_that_is_no_live_block_of_the_arena_is_refused() -> None:
    arena = Arena(torch.zeros(100))
    first, second = arena.allocate(40), arena.allocate(40)
    with pytest.raises(UsageError):
        arena.release(first[3:])
    with pytest.raises(UsageError):
        arena.release(torch.zeros(40))
    arena.release(first)
    with pytest.raises(UsageError, match="released before"):
        arena.release(first)
    with pytest.raises(UsageError):
        arena.allocate(0)
    with pytest.raises(UsageError):
        Arena(torch.zeros(10, 10))
    assert second.storage_offset() == 40


def test_nothing_moves_while_a_view_cannot_be_found() -> None:
    arena = Arena(torch.zeros(100))
    gap, block = arena.allocate(10), arena.allocate(20)
    block.fill_(1.0)
    arena.release(gap)
    gc.freeze()  # hides all objects of this moment from the search
    try:
        with pytest.raises(UsageError, match="cannot be found from Python"):
            arena.defragment()
    finally:
        gc.unfreeze()
    assert block.storage_offset() == 10
    assert bool((block == 1.0).all())
    assert arena.defragment() == 80
    assert block.storage_offset() == 0


class Refusing(torch.Tensor):
    """Answers nothing, as a weight that is away."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UsageError("asked")


def test_tensors_of_others_that_refuse_to_answer_do_not_stop_a_move() -> None:
    other = torch.zeros(3).as_subclass(Refusing)
    arena = Arena(torch.zeros(100))
    gap, block = arena.allocate(10), arena.allocate(20)
    block.fill_(1.0)
    arena.release(gap)
    assert arena.defragment() == 80
    assert bool((block == 1.0).all())
    with pytest.raises(UsageError, match="asked"):
        other.untyped_storage()


def test_a_tensor_that_autograd_saved_moves_or_stops_the_move() -> None:
    arena = Arena(torch.zeros(100))
    gap, block = arena.allocate(10), arena.allocate(20)
    block.fill_(1.0)
    weight = torch.ones(20, requires_grad=True)
    result = weight * block.detach()  # saves a view that has no name any more
    arena.release(gap)
    with contextlib.suppress(UsageError):  # whether torch keeps the nameless view's Python object is its own affair
        arena.defragment()
    arena.allocate(50).data.fill_(9.0)
    result.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(20))


def test_views_of_a_wider_type_are_moved_only_where_they_fit() -> None:
    arena = Arena(torch.zeros(100))
    gap = arena.allocate(1)
    skipped = arena.allocate(1)
    block = arena.allocate(4)
    block.fill_(2.0)
    wide = block.view(torch.float64)
    arena.release(skipped)
    with pytest.raises(UsageError, match="float64 cannot move from byte 8 to 4"):
        arena.defragment()
    assert block.storage_offset() == 2
    arena.release(gap)
    assert arena.defragment() == 16
    assert wide.storage_offset() == 0
    assert torch.equal(wide.view(torch.float32), torch.full((4,), 2.0))
