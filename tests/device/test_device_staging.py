"""Homes on disk beside an accelerator: pinned pieces, copies that nobody waits for, transfers of the same bytes in the order in which they were asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import devices
from memfit.core.layout import PINNED_STAGING_BYTES, STAGING_PIECE_BYTES
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.homes import DiskHome, Staging
from memfit.homes.factories import FileFactory
from memfit.step.lower import lower
from memfit.step.predict import predict
from memfit.step.sizes import STAGING_BYTES
from memfit.store import DiskStore, Region, RegionSpec
from memfit.tensors.trees import bytes_view, new_storage

PIECE = 64 * 1024
NBYTES = 5 * PIECE + 512


@pytest.fixture
def staged(device: torch.device, tmp_path: Path) -> Iterator[tuple[DiskHome, Staging]]:
    store = DiskStore.create(
        tmp_path / "homes", {"weights": RegionSpec(nbytes=NBYTES, slots=1, tag="weight")}, identity={}, durable=False
    )
    staging = Staging(device, stream=devices.of(device).new_stream(device), piece_bytes=PIECE)
    yield DiskHome(store.region("weights"), staging=staging), staging
    staging.close()
    store.close(delete=True)


def filled(device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=generator).to(device)


def test_reads_and_writes_of_the_same_bytes_keep_their_order_without_waits(
    device: torch.device, staged: tuple[DiskHome, Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write, read, write, read, all asked for before any is done, where the disk is held up at first."""
    home, _ = staged
    opened, write = threading.Event(), Region.write
    began, read = threading.Event(), Region.read

    def held_up(self: Region, *where: Any, **how: Any) -> Any:
        opened.wait()
        return write(self, *where, **how)

    def told(self: Region, *where: Any, **how: Any) -> Any:
        began.set()
        return read(self, *where, **how)

    monkeypatch.setattr(Region, "write", held_up)
    monkeypatch.setattr(Region, "read", told)
    first, second = filled(device, 1), filled(device, 2)
    found = [new_storage(NBYTES, device) for _ in range(2)]
    transfers = [
        home.write(0, NBYTES, first.untyped_storage()),
        home.read(0, NBYTES, found[0]),
        home.write(0, NBYTES, second.untyped_storage()),
        home.read(0, NBYTES, found[1]),
    ]
    # A read that overtakes the write begins at once: it is given the time to.
    has_overtaken = began.wait(0.5)
    opened.set()
    for transfer in transfers:
        transfer.wait()
    assert not has_overtaken
    assert torch.equal(bytes_view(found[0], 0, NBYTES), first)
    assert torch.equal(bytes_view(found[1], 0, NBYTES), second)


@pytest.mark.latest
def test_a_write_does_not_make_the_caller_wait_for_the_device(
    device: torch.device, staged: tuple[DiskHome, Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = staged
    opened, write = threading.Event(), Region.write

    def held_up(self: Region, *where: Any, **how: Any) -> Any:
        opened.wait()
        return write(self, *where, **how)

    monkeypatch.setattr(Region, "write", held_up)
    accelerator = devices.of(device)
    before = filled(device, 0)
    one = home.write(0, NBYTES, before.untyped_storage())  # the thread is held up by it
    side, values = accelerator.new_stream(device), filled(device, 3)
    source, host = (
        torch.empty_like(values),
        torch.empty(NBYTES, dtype=torch.uint8).pin_memory() if device.type == "cuda" else values.cpu(),
    )
    side.wait_stream(accelerator.current_stream(device))
    with accelerator.on(side):
        source.copy_(host if device.type != "cuda" else host.copy_(values.cpu()), non_blocking=True)
        done = side.record_event()
    accelerator.current_stream(device).wait_event(done)
    two = home.write(0, NBYTES, source.untyped_storage())
    if device.type == "late":
        assert not done.query()  # nobody had to have it done
    opened.set()
    one.wait()
    two.wait()
    back = new_storage(NBYTES, device)
    home.read(0, NBYTES, back).wait()
    assert torch.equal(bytes_view(back, 0, NBYTES), values)


def test_a_read_that_is_dropped_keeps_its_memory_until_the_copy_is_done(
    device: torch.device, staged: tuple[DiskHome, Staging]
) -> None:
    home, staging = staged
    wanted = filled(device, 4)
    home.write(0, NBYTES, wanted.untyped_storage()).wait()
    transfer = home.read(0, NBYTES, new_storage(NBYTES, device))
    transfer.join()  # type: ignore[attr-defined]
    del transfer
    others = [torch.full((NBYTES,), 7, dtype=torch.uint8, device=device) for _ in range(4)]
    staging.close()
    assert all(bool((other == 7).all()) for other in others)


def test_what_the_disk_could_not_do_is_told_to_who_waits(
    device: torch.device, staged: tuple[DiskHome, Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = staged
    values = filled(device, 5)

    def fails(self: Region, *where: Any, **how: Any) -> Any:
        raise memfit.StoreError("the disk is full")

    monkeypatch.setattr(Region, "write", fails)
    transfer = home.write(0, NBYTES, values.untyped_storage())
    with pytest.raises(memfit.StoreError, match="the disk is full"):
        transfer.wait()
    monkeypatch.undo()
    home.write(0, NBYTES, values.untyped_storage()).wait()  # the next one goes through
    back = new_storage(NBYTES, device)
    home.read(0, NBYTES, back).wait()
    assert torch.equal(bytes_view(back, 0, NBYTES), values)


def test_a_job_stages_through_pinned_pieces_that_are_bounded_and_foreseen(device: torch.device, tmp_path: Path) -> None:
    """The weight is larger than all pieces of a direction: before, a buffer of its size was taken for it."""
    model = nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 16)).to(device)
    weight = model[0].weight
    assert isinstance(weight, torch.Tensor)
    assert weight.nbytes > 2 * STAGING_PIECE_BYTES
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 1500, device=device)

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).square().mean()

    profile = memfit.profile(model, optimizer, loss, batch)
    on_disk = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    plan = Plan(blocks={block.name: on_disk for block in profile.blocks})
    with memfit.fit(model, optimizer, loss, batch, plan=plan, directory=tmp_path / "homes") as job:
        job.step(batch)
        files = job._assembly.house.factories[Tier.DISK]
        assert isinstance(files, FileFactory) and files.staging is not None
        assert files.staging.held_bytes == PINNED_STAGING_BYTES
        assert (
            predict(lower(job.schedule, plan, job.profile, device="cuda")).peak_in(Tier.HOST)
            == PINNED_STAGING_BYTES + STAGING_BYTES
        )
    with pytest.raises(memfit.DoesNotFitError, match="host"):
        memfit.fit(model, optimizer, loss, batch, plan=plan, host_limit="8MiB", directory=tmp_path / "homes")
