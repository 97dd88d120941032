"""Both arenas: contents stay bitwise through every move, and positions never overlap."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from memfit.allocator import Allocator, install
from memfit.allocator.arena import Arena, BufferArena
from memfit.core.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    found = install()
    yield found
    for ledger in ("device", "host"):
        found.set_limit(None, ledger)


@pytest.fixture
def arena(allocator: Allocator) -> Iterator[Arena]:
    made = Arena(64 * KIB, allocator)
    yield made
    gc.collect()
    made.close()


def test_an_arena_counts_its_capacity_as_mapped_once_and_its_tensors_as_live(allocator: Allocator) -> None:
    before = allocator.stats("host")
    arena = Arena(MIB, allocator, ledger="host")
    empty = allocator.stats("host")
    assert empty.mapped_bytes - before.mapped_bytes == MIB
    assert empty.live_bytes == before.live_bytes
    tensor = arena.allocate(4000, dtype=torch.float32)
    full = allocator.stats("host")
    assert full.mapped_bytes == empty.mapped_bytes
    assert full.live_bytes - empty.live_bytes == 4000
    assert arena.address <= tensor.data_ptr() < arena.address + MIB
    with pytest.raises(UsageError, match=r"1 blocks .* live in the arena"):
        arena.close()
    del tensor
    arena.close()
    arena.close()
    assert allocator.stats("host").mapped_bytes == before.mapped_bytes
    with pytest.raises(UsageError, match="closed"):
        arena.allocate(64)


def test_a_tensor_that_dies_frees_its_block_without_a_call(arena: Arena) -> None:
    tensor = arena.allocate(8 * KIB)
    view = tensor[100:200].view(10, 10)
    storage_of_view = view.untyped_storage()
    del tensor
    gc.collect()
    assert arena.statistics().live_blocks == 1
    del storage_of_view
    assert arena.statistics().live_blocks == 1
    del view
    assert arena.statistics().live_blocks == 0


def test_planned_positions_are_taken_as_told_and_overlaps_are_refused(arena: Arena) -> None:
    tensor = arena.allocate(6000, offset=8 * KIB, shape=(30, 50), dtype=torch.float32)
    assert tensor.data_ptr() == arena.address + 8 * KIB
    assert tensor.shape == (30, 50)
    for offset, nbytes, why in (
        (8 * KIB, 64, "overlap"),
        (12 * KIB, 64, "overlap"),  # the block takes two pages
        (4 * KIB, 5000, "overlap"),
        (100, 64, "alignment"),
        (60 * KIB, 5000, "inside"),
        (-4096, 64, "inside"),
    ):
        with pytest.raises(UsageError, match=why):
            arena.allocate(nbytes, offset=offset)
    assert arena.statistics().live_blocks == 1
    neighbour = arena.allocate(4096, offset=16 * KIB)
    assert neighbour.data_ptr() == arena.address + 16 * KIB
    with pytest.raises(UsageError, match="do not hold"):
        arena.allocate(10, shape=(3,), dtype=torch.float32)


def test_best_fit_takes_the_smallest_hole_and_first_fit_the_lowest(allocator: Allocator) -> None:
    for fit, expected in (("best", 24 * KIB), ("first", 0)):
        arena = Arena(64 * KIB, allocator, fit=fit)  # type: ignore[arg-type]
        sizes = [16 * KIB, 8 * KIB, 4 * KIB, 8 * KIB]
        held = [arena.allocate(size) for size in sizes]
        arena.release(held[0])
        arena.release(held[2])
        assert arena.allocate(4 * KIB).data_ptr() == arena.address + expected


def test_a_storage_visits_and_leaves_again_and_again_at_the_same_address(arena: Arena) -> None:
    weight = torch.randn(1000)
    home = weight.clone()
    row = weight.view(10, 100)[3]
    storage = weight.untyped_storage()
    storage.resize_(0)
    version = weight._version
    addresses = set()
    for _ in range(5):
        assert arena.visit(storage, 4000, offset=4 * KIB) == 4 * KIB
        weight.data.copy_(home)
        assert torch.equal(row, home.view(10, 100)[3])
        addresses.add(weight.data_ptr())
        arena.leave(storage)
        assert storage.nbytes() == 0
        assert arena.statistics().live_blocks == 0
    assert addresses == {arena.address + 4 * KIB}
    assert weight._version == version
    with pytest.raises(UsageError, match="no bytes in this arena"):
        arena.leave(storage)
    with pytest.raises(UsageError, match="must be empty"):
        arena.visit(home.untyped_storage(), 4000)


def test_defragmenting_keeps_every_view_bitwise_and_the_version_counters(arena: Arena) -> None:
    gaps = [arena.allocate(4 * KIB) for _ in range(8)]
    kept = [arena.allocate(4 * KIB, dtype=torch.float32) for _ in range(8)]
    for tensor in [*gaps, *kept]:
        arena.release(tensor)
    # One hole, one block of 5 pages: each later move of it overlaps where it was.
    gap = arena.allocate(4 * KIB, offset=0)
    long = arena.allocate(20 * KIB, offset=4 * KIB, dtype=torch.float32)
    other = arena.allocate(100, offset=40 * KIB, dtype=torch.int32)
    long.normal_()
    other.random_()
    leaf = long.detach().requires_grad_()
    product = (leaf * leaf)[7:]  # autograd has saved a view that no Python name holds
    deep = long.view(5, 1024)[2].view(32, 32).t()
    copies = [view.clone() for view in (long, other, deep, leaf)]
    versions = [view._version for view in (long, other, deep, leaf)]
    arena.release(gap)
    assert arena.statistics().fragmentation > 0
    with pytest.raises(torch.OutOfMemoryError, match=r"defragment\(\) would make room"):
        arena.allocate(36 * KIB)
    assert arena.defragment() == 20 * KIB + 100
    assert [long.data_ptr() - arena.address, other.data_ptr() - arena.address] == [0, 20 * KIB]
    assert arena.statistics().fragmentation == 0
    assert [view._version for view in (long, other, deep, leaf)] == versions
    for view, copy in zip((long, other, deep, leaf), copies, strict=True):
        assert torch.equal(view, copy)
    filler = arena.allocate(40 * KIB)
    filler.fill_(255)
    product.sum().backward()
    expected = 2 * copies[3]
    expected[:7] = 0
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, expected)
    assert arena.defragment() == 0


def test_a_refused_size_fits_after_defragmenting(arena: Arena) -> None:
    held = [arena.allocate(4 * KIB) for _ in range(16)]
    for index, tensor in enumerate(held):
        tensor.fill_(index)
    for tensor in held[::2]:
        arena.release(tensor)
    with pytest.raises(torch.OutOfMemoryError):
        arena.allocate(32 * KIB)
    arena.defragment()
    large = arena.allocate(32 * KIB)
    large.fill_(99)
    assert [int(tensor[0]) for tensor in held[1::2]] == list(range(1, 16, 2))
    with pytest.raises(torch.OutOfMemoryError, match="release tensors or make a larger arena"):
        arena.allocate(64)


def test_an_arena_that_is_dropped_stays_until_its_last_tensor_dies(allocator: Allocator) -> None:
    before = allocator.stats().arena_bytes
    arena = Arena(MIB, allocator)
    tensor = arena.allocate(MIB)
    del arena
    gc.collect()
    tensor.fill_(3)
    assert allocator.stats().arena_bytes - before == MIB
    assert int(tensor.long().sum()) == 3 * MIB
    del tensor
    assert allocator.stats().arena_bytes == before


def test_an_arena_beyond_the_limit_is_refused(allocator: Allocator) -> None:
    allocator.trim()
    allocator.set_limit(allocator.stats().mapped_bytes + MIB)
    with pytest.raises(torch.OutOfMemoryError, match="limit of the device ledger"):
        Arena(2 * MIB, allocator)
    Arena(MIB, allocator).close()
    for capacity, alignment in ((0, 4096), (100, 32), (100, 96)):
        with pytest.raises(UsageError):
            Arena(capacity, allocator, alignment_bytes=alignment)


def test_threads_share_an_arena(allocator: Allocator) -> None:
    arena = Arena(4 * MIB, allocator, alignment_bytes=64)
    failures: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for round_ in range(60):
                tensor = arena.allocate(1000 + 64 * round_)
                tensor.fill_(value)
                assert bool((tensor == value).all())
                if round_ % 2:
                    arena.release(tensor)
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert arena.statistics().live_blocks == 0


def test_the_textbook_arena_keeps_live_tensors_through_defragmentation() -> None:
    arena = BufferArena(torch.zeros(1000))
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


def test_the_textbook_arena_refuses_what_is_not_its_live_block() -> None:
    arena = BufferArena(torch.zeros(100))
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
        BufferArena(torch.zeros(10, 10))
    assert second.storage_offset() == 40


def test_the_textbook_arena_refuses_to_move_views_that_it_cannot_find() -> None:
    arena = BufferArena(torch.zeros(100))
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


def test_what_autograd_saved_of_the_textbook_arena_moves_or_stops_the_move() -> None:
    arena = BufferArena(torch.zeros(100))
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
    arena = BufferArena(torch.zeros(100))
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
