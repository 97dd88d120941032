"""Tensors of the user's own that live beside a job: a step that does not fit beside them is refused before it begins."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import LimitBreachError
from memfit.core.limits import MIB, Limits
from memfit.devices.binding import install
from memfit.machine.limits_of_process import Room
from memfit.machine.machine import open_machine
from memfit.machine.meters import ProcessMeter
from memfit.tensors.trees import spanned_bytes

WIDTH, ROWS = 256, 64
PIECE_BYTES = MIB // 4


def _tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _alive() -> int:
    gc.collect()
    return install().stats().live_bytes


def _fit(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, where: str, tmp_path: Path) -> memfit.Job:
    if where == "device":
        limit = _alive() + 12 * MIB
        return memfit.fit(
            model, optimizer, _loss, batch, limit=limit, emulate_device=True, directory=tmp_path, plan=memfit.Plan()
        )
    limit = ProcessMeter(with_children=True).resident_bytes().whole_bytes + 60 * MIB
    return memfit.fit(model, optimizer, _loss, batch, limit=limit, directory=tmp_path, plan=memfit.Plan())


def _step_until_refused(job: memfit.Job, batch: Tensor, kept: list[Tensor], losses: list[float], pieces: int) -> None:
    while True:
        kept += [torch.ones(PIECE_BYTES // 4) for _ in range(pieces)]
        losses.append(job.step(batch).loss)


@pytest.mark.filterwarnings("ignore:memory leak")  # which it is, and goes on being until there is no room
@pytest.mark.parametrize("where", ["device", "process"])
def test_a_step_that_does_not_fit_beside_tensors_that_are_kept_is_not_begun(where: str, tmp_path: Path) -> None:
    """Plain PyTorch makes the steps that were made, and their bits are the same."""
    batch, pieces = torch.randn(ROWS, WIDTH), 8 if where == "process" else 1
    model, plain = _tower(), _tower()
    with _fit(model, torch.optim.AdamW(model.parameters()), batch, where, tmp_path) as job:
        losses: list[float] = [job.step(batch).loss]
        kept: list[Tensor] = []
        with pytest.raises(LimitBreachError, match="was not begun.*iB too few: .* that are not this job's") as caught:
            _step_until_refused(job, batch, kept, losses, pieces)
        assert not caught.value.torn
        assert len(losses) > 4, "it is refused where it does not fit, and not before"
        kept.clear()
        losses += [job.step(batch).loss for _ in range(2)]
    optimizer = torch.optim.AdamW(plain.parameters())
    for expected in losses:
        optimizer.zero_grad()
        loss = _loss(plain, batch)
        loss.backward()
        optimizer.step()
        assert loss.item() == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class _Remembers(nn.Module):
    """Keeps what it computed last, as modules do for their users to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.last = _tower(), None

    def forward(self, batch: Tensor) -> Tensor:
        out = self.tower(batch)
        self.last = out.detach().repeat(64, 1)
        return out


def test_nothing_is_in_the_way_of_a_job_that_is_alone(tmp_path: Path) -> None:
    """What the program itself keeps is in the prediction, and gradients that stay readable are the job's."""
    before, batch = _alive(), torch.randn(ROWS, WIDTH)
    model: Any = _Remembers()
    optimizer = torch.optim.AdamW(model.parameters())
    with memfit.fit(
        model, optimizer, _loss, batch, limit="2GiB", emulate_device=True, directory=tmp_path, keep_gradients=True
    ) as job:
        for _ in range(3):
            job.step(batch)
            assembly = job._runner.assembly
            assert abs(assembly.others_bytes(assembly.shapes.prepare(batch), batch) - before) < 64 << 10


def test_a_batch_that_is_cut_from_a_data_set_leaves_the_data_set_to_be_counted() -> None:
    data = torch.randn(4096, 1024)
    cpu = data.device
    assert spanned_bytes([data[:64], data[64:128]], cpu) == 2 * 64 * 1024 * 4
    assert spanned_bytes([data, data.t(), data[:64]], cpu) == data.nbytes
    assert spanned_bytes([data[:64, :1]], cpu) == (63 * 1024 + 1) * 4
    machine = open_machine(torch.device("cpu"), Limits.read("64GiB"))
    others = machine.budget().others_bytes
    assert machine.budget(beside=[data[:64]]).others_bytes == others - 64 * 1024 * 4


def test_a_room_counts_tensors_of_others_and_lets_a_little_come_before_the_first_step() -> None:
    allocator, kept = install(), torch.empty(64 * MIB, dtype=torch.uint8)
    assert allocator.stats().live_bytes >= kept.nbytes, "no fewer are alive than the room is told"
    room = Room(300 * MIB, 64 * MIB, lambda: 100 * MIB, allocator)
    room.note_planned(16 * MIB, 100 * MIB, 20 * MIB)
    peak = (300 - 100 - 16 - 20) * MIB
    assert room.planned_bytes == peak
    assert room.excess(peak, lambda: 28 * MIB) is None, "a second batch"
    assert "3.0 MiB too few: 31.0 MiB are alive" in (room.excess(peak, lambda: 31 * MIB) or "")
    room.begin()
    room.end(scratch_bytes=0)
    assert room.excess(150 * MIB, lambda: 45 * MIB) is None
    assert "are alive" in (room.excess(150 * MIB, lambda: 50 * MIB) or "")


def test_a_first_step_is_begun_by_the_sum_that_its_plan_was_chosen_by() -> None:
    """Weights of another allocator were outside of tensors until they moved home: nothing of the reserve."""
    held = [180 * MIB]
    room = Room(300 * MIB, 64 * MIB, lambda: held[0], install())
    room.begin_plan()
    room.note_planned(16 * MIB, 130 * MIB, 0)  # without 50 MiB of weights
    assert room.reserve_left_bytes == 16 * MIB
    planned = 300 * MIB - 130 * MIB - room.reserve_left_bytes
    held[0] = 40 * MIB  # homes that nothing was written to are not resident
    room.begin_plan()
    assert room.planned_bytes == planned
    assert room.left_bytes == (300 - 130) * MIB


def test_a_forward_is_not_begun_beside_what_another_job_has_saved_for_its_backward(tmp_path: Path) -> None:
    """A generator and its judge under one limit: what was begun goes on, and the judge's turn comes after it."""
    torch.manual_seed(1)
    noise, limit = torch.randn(1024, WIDTH), _alive() + 18 * MIB
    networks, plain = (_tower(), _tower()), _tower()
    jobs: list[memfit.Job] = []
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks]
    for name, network, optimizer in zip("gd", networks, optimizers, strict=True):
        how: dict[str, Any] = {"limit": limit, "emulate_device": True, "directory": tmp_path / name, "lines": True}
        jobs.append(memfit.fit(network, optimizer, _loss, noise, **how))
    generator, judge = networks
    with jobs[0].lines(), jobs[1].lines():
        fake = generator(noise)
        with pytest.raises(LimitBreachError, match="another job has saved") as caught:
            judge(fake.detach())
        assert not caught.value.torn
        fake.square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        del fake
        judge(noise).square().mean().backward()
        optimizers[1].step()
    for job in jobs:
        job.close()
    _loss(plain, noise).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for network in networks:
        assert all(torch.equal(a, b) for a, b in zip(network.parameters(), plain.parameters(), strict=True))


def test_what_lines_gave_last_is_not_in_the_way_of_what_they_give_next(tmp_path: Path) -> None:
    """An output lives until the next one takes its name: no reason to refuse that one."""
    wide = nn.Sequential(nn.Linear(8, 4096))
    batch, limit = torch.randn(512, 8), _alive() + 46 * MIB
    optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)
    kept: list[Tensor] = []
    with memfit.fit(
        wide, optimizer, _loss, batch, limit=limit, emulate_device=True, directory=tmp_path, lines=True
    ) as job:
        with job.lines():
            for _ in range(3):
                out = wide(batch)
                out.mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        with job.lines(), pytest.raises(LimitBreachError, match="are not this job's"):
            kept.extend(wide(batch).detach() for _ in range(3))
