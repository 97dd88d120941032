"""Frames of saved tensors: what they hold, when they let go, and what travels to other tiers."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from equivalence.saved_harness import (
    CPU,
    HIDDEN_BYTES,
    POLICIES,
    RECOMPUTE,
    ROWS,
    TO_DISK,
    TO_HOST,
    WIDTH,
    Block,
    blocks,
    make_offloader,
    under,
)
from memfit.core.errors import StoreError
from memfit.core.tiers import Tier
from memfit.engine.offload import Offloader
from memfit.homes import ByteHome, Staging, TransferHandle, TransferThen
from memfit.homes.offloaded import HostPool, OffloadedStorage, ScratchPool
from memfit.store import DiskIO, ScratchFile

pytestmark = pytest.mark.usefixtures("older_objects_are_passed_over")  # they collect


@pytest.fixture
def offloader(tmp_path: Path) -> Iterator[Offloader]:
    with make_offloader(tmp_path) as made:
        yield made


# ---- memory


class LiveStorages(TorchDispatchMode):
    """Counts bytes of storages that operations made under it and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, tuple[weakref.ref[torch.UntypedStorage], Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.multiprocessing.reductions import StorageWeakRef

        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._found.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))  # type: ignore[arg-type]
        return result

    def live_bytes(self, without: Sequence[torch.Tensor] = ()) -> int:
        skip = {t.untyped_storage()._cdata for t in without}
        return sum(n for key, (ref, n) in self._found.items() if key not in skip and not ref.expired())  # type: ignore[attr-defined]


def _plain_chain() -> nn.Sequential:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            # Saves: linear's input, the sine's input, the tanh's output, the exp's output.
            return self.linear(hidden).sin().tanh().exp()

    return nn.Sequential(*(Chain() for _ in range(3)))


@pytest.mark.parametrize(
    ("policy", "hidden_held"),
    [
        # Each of 3 calls saves its input, the product, a tanh and its own output; the loss holds the last output.
        ("keep", 1 + 3 * 3),
        ("recompute", 1 + 3),
        # The product is kept, too.
        ("select", 1 + 3 + 3),
        # Nothing but the program's own last output, and the first input, which the test holds.
        ("offload to disk", 1 + 1),
        ("boundary away", 1 + 1),
        ("segments of 3", 1 + 1),
        ("segments of 2", 1 + 2),
    ],
)
def test_what_is_alive_after_forward_is_what_the_policy_promises(
    policy: str, hidden_held: int, offloader: Offloader
) -> None:
    model = _plain_chain()
    with under(POLICIES[policy], model, offloader) as driver:
        with LiveStorages() as live:
            values = torch.randn(ROWS, WIDTH)
            output = model(values)
        driver.end_forward()
        ours = sum(frame.held_bytes() for frame in driver.frames)
        alive_bytes = live.live_bytes(list(model.parameters()))
        assert alive_bytes == hidden_held * HIDDEN_BYTES
        if policy == "recompute":
            assert ours == 3 * HIDDEN_BYTES
        driver.backward(output.sum())
        del output, values
        driver.finish()
        assert live.live_bytes(_parameters_and_gradients(model)) == 0
    if policy == "offload to disk":
        # Inputs of three, product, tanh, and outputs; input of one is the output of another: each storage leaves once.
        assert offloader.written_bytes == offloader.read_bytes == (1 + 3 * 3) * HIDDEN_BYTES
        assert offloader.demand_reloads == 0


@pytest.mark.parametrize("policy", ["recompute", "offload to disk"])
def test_memory_falls_while_backward_walks_through_a_call(policy: str, offloader: Offloader) -> None:
    class Long(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                hidden = hidden.exp()
                hidden.register_hook(look)
            return hidden

    held: list[int] = []

    def look(gradient: torch.Tensor) -> None:
        held.append(driver.frames[0].held_bytes())

    model = nn.Sequential(Long())
    values = (torch.randn(ROWS, WIDTH) * 0.01).requires_grad_()
    with under(POLICIES[policy], model, offloader) as driver:
        loss = model(values * 0.01).sum()
        driver.end_forward()
        driver.backward(loss)
    first = held.index(max(held))
    falling = held[first:]
    assert len(falling) >= 4
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == len(falling), falling


def test_the_last_product_is_not_run_again() -> None:
    class Inside(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inside(hidden)

    model = nn.Sequential(Inside(dropout=0.0))
    products: list[int] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addmm.default:
                products.append(1)
            return func(*args, **(kwargs or {}))

    with under([RECOMPUTE], model) as driver:
        loss = model(torch.randn(4, 8)).sum()
        with Count():
            driver.backward(loss)
    assert len(products) == 1  # of two


def _parameters_and_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [t for p in model.parameters() for t in (p, p.grad) if t is not None]


@pytest.mark.thinned
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("runs_backward", [True, False])
def test_everything_dies_by_reference_counting(policy: str, runs_backward: bool, offloader: Offloader) -> None:
    model, values = blocks(3, width=WIDTH), torch.randn(ROWS, WIDTH)
    driver = under(POLICIES[policy], model, offloader)
    gc.collect()
    gc.disable()
    try:
        with LiveStorages() as live, driver:
            output = model(values)
            driver.end_forward()
            references = [weakref.ref(frame) for frame in driver.frames]
            if runs_backward:
                driver.backward(output.sum())
                driver.finish()
            else:
                driver.frames.clear()  # an abandoned step: nobody calls finish
                driver._group = None
            del output
            # Its spare buffers are alive, and were seen by the watcher.
            host = offloader._pools[Tier.HOST]
            assert isinstance(host, HostPool)
            host.close()
            held_bytes = live.live_bytes([values, *_parameters_and_gradients(model)])
        assert all(reference() is None for reference in references)
        assert not offloader.live_storages()
        assert held_bytes == 0
    finally:
        gc.enable()


def test_under_no_grad_nothing_is_held(offloader: Offloader) -> None:
    model = blocks(3)
    for policy in POLICIES.values():
        with under(policy, model, offloader) as driver, torch.no_grad():
            model(torch.randn(4, 8))
            assert [frame.held_bytes() for frame in driver.frames] == [0] * 3


# ---- moved storages


def test_a_storage_saved_by_several_calls_and_views_leaves_once_and_comes_back_once(offloader: Offloader) -> None:
    class Views(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden[::2, 1:].exp().sum() + hidden.T.sin().sum() + hidden.expand(2, *hidden.shape).cos().sum()

    model = nn.Sequential(Views())
    values = torch.randn(ROWS, WIDTH, requires_grad=True)
    hidden = values * 1
    (plain,) = torch.autograd.grad(model(hidden) + model(hidden), values)
    with under([TO_HOST], model, offloader, reloads=False) as driver:
        hidden = values * 1
        loss = model(hidden) + model(hidden)
        del hidden
        driver.end_forward()
        assert offloader.written_bytes == HIDDEN_BYTES + 2 * (ROWS // 2) * (WIDTH - 1) * 4
        driver.backward(loss)
        assert values.grad is not None
        assert torch.equal(values.grad, plain)
        assert offloader.demand_reloads == 3
        assert offloader.read_bytes == offloader.written_bytes


def test_memory_that_was_given_up_and_reused_is_not_taken_for_the_old(offloader: Offloader) -> None:
    model = nn.Sequential(nn.Tanh())
    values = torch.randn(ROWS, WIDTH, requires_grad=True)
    with under([TO_DISK], model, offloader) as driver:
        total = torch.zeros(())
        expected = torch.zeros_like(values)
        for scale in range(1, 6):
            total = total + model(values * scale).sum()
            driver.end_forward()  # frees storages, whose addresses the next round is likely to get
            expected += scale * (1 - torch.tanh(values.detach() * scale) ** 2)
        assert len({id(p) for p in offloader.live_storages()}) == 5
        driver.backward(total)
    assert values.grad is not None
    torch.testing.assert_close(values.grad, expected)


def test_small_and_special_tensors_stay(tmp_path: Path) -> None:
    with make_offloader(tmp_path, minimum_bytes=64 * 1024) as offloader:
        small, large = torch.randn(128, 127), torch.randn(128, 128)
        place = {"place": "x"}
        assert offloader.register(small, TO_DISK.saved_home, **place) is None
        assert offloader.register(large, TO_DISK.saved_home, **place) is not None
        complex_ = torch.randn(128, 128, dtype=torch.complex64)
        assert offloader.register(complex_.conj(), TO_DISK.saved_home, **place) is None
        assert offloader.register(large.to_sparse(), TO_DISK.saved_home, **place) is None
        assert offloader.register(large.to("meta"), TO_DISK.saved_home, **place) is None


# ---- tiers


def test_the_host_never_reserves_more_than_moved_storages_once_needed_at_the_same_time() -> None:
    host = HostPool(CPU)
    for kibs in ([3, 5], [3, 5], [8], [1, 2, 4], [5, 3]):
        storages = [torch.UntypedStorage(kib * 1024) for kib in kibs]
        rests = [OffloadedStorage(host, storage) for storage in storages]
        assert host.live_bytes == sum(kibs) * 1024
        assert host.reserved_bytes <= host.peak_bytes == 8 * 1024
        for rest in rests:
            rest.free()
    assert host.live_bytes == 0
    host.close()
    assert host.reserved_bytes == 0


def test_a_staged_store_brings_back_what_it_was_given_through_one_buffer_a_direction(tmp_path: Path) -> None:
    io = DiskIO(read_threads=1, write_threads=1)
    scratch = ScratchFile(tmp_path, io)
    staging = Staging(CPU, piece_bytes=64 * 1024)  # most are longer
    pool = ScratchPool(scratch, staging)
    tensors = [torch.randn(size) for size in (1000, 50_000, 7, 20_000)]
    rests = []
    for tensor in tensors:
        rests.append(OffloadedStorage(pool, tensor.clone().untyped_storage()))
        rests[-1].wait()
    backs = [torch.UntypedStorage(tensor.nbytes) for tensor in tensors]
    transfers = [rest.begin_read(back) for rest, back in zip(rests, backs, strict=True)]
    for tensor, back, transfer in zip(tensors, backs, transfers, strict=True):
        transfer.wait()
        assert torch.equal(torch.empty(0).set_(back, 0, tensor.shape), tensor)  # type: ignore[call-overload]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("memfit-staging")]
    assert len(threads) == 2
    assert staging.held_bytes == 2 * 2 * 64 * 1024
    for rest in rests:
        rest.free()
    staging.close()
    assert scratch.statistics().live_bytes == 0
    scratch.close()
    io.close()


class FailingHome(ByteHome):
    """A home whose writes or reads fail."""

    def __init__(self, home: ByteHome, fails_at: str) -> None:
        self.tier, self.nbytes = home.tier, home.nbytes
        self._home, self._fails_at = home, fails_at

    def write(self, offset: int, nbytes: int, source: torch.UntypedStorage, source_offset: int = 0) -> TransferHandle:
        handle = self._home.write(offset, nbytes, source, source_offset)
        return handle if self._fails_at != "write" else TransferThen(handle, self._fail_to_write)

    def _fail_to_write(self) -> None:
        raise StoreError("the disk is full")

    def read(self, offset: int, nbytes: int, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        if self._fails_at == "read":
            raise StoreError("the disk is gone")
        return self._home.read(offset, nbytes, into, into_offset)

    def close(self) -> None:
        self._home.close()


class FailingPool(HostPool):
    """Makes homes that fail."""

    def __init__(self, fails_at: str) -> None:
        super().__init__(CPU)
        self.fails_at = fails_at

    def home(self, nbytes: int) -> ByteHome:
        return FailingHome(super().home(nbytes), self.fails_at)


@pytest.mark.parametrize("fails_at", ["write", "read"])
def test_a_failing_tier_is_an_error_and_leaves_nothing_behind(fails_at: str) -> None:
    pool = FailingPool(fails_at)
    offloader = Offloader({Tier.HOST: pool}, device=CPU, minimum_bytes=256)
    model = blocks(2, width=WIDTH)
    with under([TO_HOST], model, offloader, reloads=False) as driver:
        loss = model(torch.randn(ROWS, WIDTH)).sum()
        if fails_at == "write":
            with pytest.raises(StoreError, match="full"):
                driver.end_forward()
        else:
            driver.end_forward()
            with pytest.raises(StoreError, match="gone"):
                driver.backward(loss)
        del loss
    assert not offloader.live_storages()
    assert pool.live_bytes == 0
