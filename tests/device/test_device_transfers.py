"""Transfers one by one: each is behind the compute that it needs and before the compute that needs it, keeps its memory, and is waited for by somebody.

Most of the mutations in `mutations.py` are noticed here, where a test takes milliseconds.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import devices
from memfit.core.plan import BlockPlan, Order, Plan
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier
from memfit.homes import DONE, DiskHome, MemoryHome, TransferGroup, TransferHandle
from memfit.homes.weights import BlockWeights
from memfit.tensors.trees import bytes_view

NUMBERS = 1 << 18
NBYTES = 4 * NUMBERS


def host_home(device: torch.device, nbytes: int = NBYTES) -> MemoryHome:
    return MemoryHome(nbytes, tier=Tier.HOST, device=device, stream=devices.of(device).new_stream(device))


def numbers(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((NUMBERS,), float(value), device=device)


def held(home: MemoryHome) -> list[float]:
    """The different numbers that the host's bytes hold now; nothing is waited for."""
    return bytes_view(home.bytes, 0, home.nbytes).view(torch.float32).unique().tolist()


# ---------------------------------------------------------------------------------------------------- a home


def test_a_copy_home_is_behind_what_made_it_and_before_what_comes_after(device: torch.device) -> None:
    home, made = host_home(device), numbers(1, device)
    made += 2
    home.write(0, NBYTES, made.untyped_storage()).wait()
    made.fill_(5)  # after the copy
    torch.accelerator.synchronize(device)
    assert held(home) == [3.0]
    home.close()


def test_a_copy_to_the_device_is_behind_what_used_the_memory_and_before_what_reads_it(device: torch.device) -> None:
    home, made = host_home(device), numbers(3, device)
    home.write(0, NBYTES, made.untyped_storage()).wait()
    room = numbers(7, device)
    used = room * 2
    home.read(0, NBYTES, room.untyped_storage()).wait()
    assert torch.equal(room, made) and used.sum().item() == 14 * NUMBERS
    home.close()


def test_copies_both_ways_on_two_streams_take_turns_where_they_touch_the_same_bytes(device: torch.device) -> None:
    """Halves are written and read, and one is written again, which its read must not see."""
    comes, leaves = (devices.of(device).new_stream(device) for _ in range(2))
    home = MemoryHome(NBYTES, tier=Tier.HOST, device=device, stream=comes, writes=leaves)
    half, made, room = NBYTES // 2, numbers(3, device), torch.empty(NUMBERS, device=device)
    again = numbers(8, device)
    # Nobody waits in between: only the home orders these.
    handles = [home.write(start, half, made.untyped_storage(), start) for start in (0, half)]
    handles += [home.read(start, half, room.untyped_storage(), start) for start in (0, half)]
    handles.append(home.write(0, half, again.untyped_storage()))
    TransferGroup(handles).wait()
    assert torch.equal(room, made)
    torch.accelerator.synchronize(device)
    assert held(home) == [3.0, 8.0]
    home.close()


def test_memory_under_a_copy_goes_with_its_transfer(device: torch.device) -> None:
    home, made = host_home(device), numbers(3, device)
    transfer = home.write(0, NBYTES, made.untyped_storage())
    del made
    transfer.wait()
    del transfer
    other = numbers(9, device)  # may be the same memory
    torch.accelerator.synchronize(device)
    assert held(home) == [3.0]
    assert other.sum().item() == 9 * NUMBERS
    home.close()


def test_pinned_memory_is_given_up_when_its_copies_are_done(device: torch.device) -> None:
    home, made = host_home(device), numbers(3, device)
    transfer = home.write(0, NBYTES, made.untyped_storage())
    home.close()
    assert held(home) == [3.0]
    transfer.wait()


def test_a_copy_leaves_the_threads_stream_and_device_as_they_were(device: torch.device) -> None:
    far = torch.device(device.type, torch.accelerator.device_count() - 1)
    found: list[bool] = []

    def work() -> None:  # in a thread, whose current stream and device are its own
        own = torch.Stream(far)
        torch.accelerator.set_stream(own)
        torch.accelerator.set_device_index(0)
        home = host_home(far)
        home.write(0, NBYTES, numbers(1, far).untyped_storage()).wait()
        found.append(torch.accelerator.current_device_index() == 0)
        found.append(torch.accelerator.current_stream(far) == own)
        home.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True, True]


def test_threads_that_share_the_copy_stream_come_back_to_their_own(device: torch.device) -> None:
    accelerator = devices.of(device)
    shared, own = accelerator.new_stream(device), [accelerator.new_stream(device) for _ in range(2)]
    inside, leave = [threading.Event() for _ in own], [threading.Event() for _ in own]
    after: dict[int, torch.Stream] = {}

    def work(number: int) -> None:
        torch.accelerator.set_stream(own[number])
        with accelerator.on(shared):
            inside[number].set()
            leave[number].wait()
        after[number] = accelerator.current_stream(device)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for number, thread in enumerate(threads):  # in: 0, 1; out: 0, 1
        thread.start()
        inside[number].wait()
    for number, thread in enumerate(threads):
        leave[number].set()
        thread.join()
    assert [after[number] == own[number] for number in range(2)] == [True, True]


def test_all_transfers_are_waited_for_though_one_fails(device: torch.device) -> None:
    home, made = host_home(device), numbers(3, device)
    room = torch.zeros_like(made)
    home.write(0, NBYTES, made.untyped_storage()).wait()
    together = TransferGroup([Failing("the first"), home.read(0, NBYTES, room.untyped_storage()), Failing("the last")])
    with pytest.raises(memfit.StoreError, match="the first"):
        together.wait()
    assert torch.equal(room, made)
    home.close()


class Failing:
    def __init__(self, says: str) -> None:
        self._says = says

    def wait(self) -> None:
        raise memfit.StoreError(self._says)


# ---------------------------------------------------------------------------------------------------- a block


@contextmanager
def block_at_home(device: torch.device) -> Iterator[tuple[BlockWeights, torch.Tensor, MemoryHome]]:
    """A block that is away, and its weight's values."""
    layer = nn.Linear(512, 512, device=device)
    expected = layer.weight.detach().clone()
    block = BlockWeights(0, "layer", list(layer.named_parameters()))
    home = host_home(device, block.nbytes)
    block.move_in(home)
    try:
        yield block, expected, home
    finally:
        home.close()


def test_a_visit_that_nobody_used_ends_after_its_copy(device: torch.device) -> None:
    with block_at_home(device) as (block, _, _):
        block.fetch()
        block.release()
        assert numbers(9, device).sum().item() == 9 * NUMBERS  # the same memory


def test_a_block_that_is_given_up_while_it_comes_goes_after_its_copy(device: torch.device) -> None:
    with block_at_home(device) as (block, _, _):
        block.fetch()
        block.give_up()
        assert numbers(9, device).sum().item() == 9 * NUMBERS


@pytest.mark.parametrize("is_coming", [False, True])
def test_a_block_that_moves_out_has_its_values(device: torch.device, is_coming: bool) -> None:
    with block_at_home(device) as (block, expected, _):
        if is_coming:
            block.fetch()
        block.move_out()
        assert torch.equal(block.slots[0].parameter, expected)


@pytest.mark.parametrize("end", ["release", "give_up"])
def test_a_visit_that_is_broken_off_ends_its_transfer_while_it_has_memory(
    device: torch.device, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With homes whose transfers keep nothing alive, as the protocol allows."""
    ended: list[int] = []
    with block_at_home(device) as (block, _, home):

        class TransferHandle:
            def wait(self) -> None:
                ended.append(block.storage.nbytes())

        monkeypatch.setattr(home, "read", lambda *_: TransferHandle())
        block.fetch()
        getattr(block, end)()
    assert ended == [block.nbytes]


# ---------------------------------------------------------------------------------------------------- a step


class Net(nn.Module):
    """Two blocks; the second one's weight is updated in two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.wide = nn.Linear(64, 9000)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        return self.wide(rows)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


@pytest.fixture
def unawaited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Transfers of homes that were let go before anyone waited for them: what went wrong with them nobody would hear."""
    found: list[str] = []

    class Noted:
        def __init__(self, transfer: TransferHandle, says: str) -> None:
            self._transfer, self._says = transfer, says

        def wait(self) -> None:
            self._says = ""
            self._transfer.wait()

        def __del__(self) -> None:
            if self._says:
                found.append(self._says)

    def noting(kind: type, name: str) -> None:
        plain: Callable[..., TransferHandle] = getattr(kind, name)

        def noted(home: Any, offset: int, nbytes: int, *more: Any) -> TransferHandle:
            transfer = plain(home, offset, nbytes, *more)
            return (
                transfer
                if transfer is DONE
                else Noted(transfer, f"{kind.__name__}.{name} of {nbytes} bytes at {offset}")
            )

        monkeypatch.setattr(kind, name, noted)

    for kind in (MemoryHome, DiskHome):
        noting(kind, "read")
        noting(kind, "write")
    return found


def trained(
    device: torch.device, tier: Tier, where: Path, kind: type[torch.optim.Optimizer] = torch.optim.Adam, **changes: Any
) -> list[torch.Tensor]:
    """Weights, states and gradients after two steps whose gradients go home."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = kind(model.parameters(), lr=1e-2)  # pyright: ignore[reportCallIssue]
    rows = torch.randn(4, 64, device=device)
    profile = memfit.profile(model, optimizer, loss_of, rows)
    home = BlockPlan(weight_home=tier, gradient_home=tier, state_home=tier)
    plan = replace(Plan(blocks={block.name: home for block in profile.blocks}), **changes)
    allow = {"bf16"} if "compute_dtype" in changes else frozenset[str]()
    with memfit.fit(
        model,
        optimizer,
        loss_of,
        rows,
        plan=plan,
        directory=where / tier,
        keep_gradients=True,
        max_grad_norm=0.5,
        allow=allow,
    ) as job:
        for _ in range(2):
            job.step(rows)
        found = [job.gradient(name) for name, _ in model.named_parameters()]
        with job.weights(), torch.no_grad():
            model.wide.weight.add_(1.0)
    states = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [t.detach().cpu() for t in (*model.parameters(), *states, *found) if t is not None]


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize(
    "changes",
    [
        {"microbatches": 2, "order": Order.MICROBATCH_MAJOR},
        {"compute_dtype": ComputeDtype.BFLOAT16},
        {"compute_dtype": ComputeDtype.BFLOAT16, "splits_masters": True},
    ],
    ids=["summed", "whole", "split"],
)
def test_what_travels_is_what_stays_and_all_transfers_are_waited_for(
    device: torch.device, tier: Tier, changes: dict[str, Any], unawaited: list[str], tmp_path: Path
) -> None:
    away, stays = trained(device, tier, tmp_path, **changes), trained(device, Tier.DEVICE, tmp_path, **changes)
    assert [torch.equal(a, b) for a, b in zip(away, stays, strict=True)] == [True] * len(stays)
    gc.collect()
    assert unawaited == []


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor], ids=["pieces", "whole parameters"])
def test_updates_of_a_step_inside_a_stream_use_that_stream_alone(
    device: torch.device, kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Their pieces come, are computed and go home in another thread, whose own current stream is the default one."""
    expected = trained(device, Tier.DEVICE, tmp_path, kind)
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        found = trained(device, Tier.HOST, tmp_path, kind)
        assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)
        gc.collect()
    stream.synchronize()  # before memory of the default stream's is given up
