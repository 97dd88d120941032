"""The disk's meter: seconds that a direction is busy, by a clock of the test; factors of links; what a job learns of its disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.core.hardware import Hardware, Link, LinkTraffic, Rate, TierSpec, rates_of
from memfit.core.plan import BlockPlan, Plan
from memfit.core.step import Step
from memfit.core.tiers import Tier
from memfit.core.work_kinds import WorkKind
from memfit.devices.binding import install
from memfit.job import comparing
from memfit.job.comparing import median_traffic
from memfit.machine import described
from memfit.machine.described import correction_path, load_correction
from memfit.step.build import build_step
from memfit.step.lower import lower
from memfit.step.predict import GROUPS, calibrated, fit_factors, fit_links, group_seconds, link_traffic, predict
from memfit.store import DiskIO, FileHandle, aligned_memory, open_file
from memfit.store import io as channel
from unit.profiles import gpt_profile

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")


# --- busy seconds, by a clock that only the test moves ------------------------------------------------------------------------------


class Hand:
    """A clock that stands still but for what `move` of a piece adds to it, and, with a gate, a place where pieces meet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, meet: int = 1) -> None:
        self.now_s = 100.0
        self._lock = threading.Lock()
        self._gate = threading.Barrier(meet)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(channel, "move", self.move)

    def move(self, *_: Any, **__: Any) -> None:
        if self._gate.wait(30) == 0:
            with self._lock:
                self.now_s += 2.0
        self._gate.wait(30)


@pytest.fixture(name="handle")
def make_handle(tmp_path: Path) -> Iterator[FileHandle]:
    handle = open_file(tmp_path / "file", create=True)
    handle.allocate(0, 2 * MIB)
    yield handle
    handle.close()


def test_a_direction_is_busy_while_a_piece_is_under_way_and_not_while_its_queue_is_empty(
    monkeypatch: pytest.MonkeyPatch, handle: FileHandle
) -> None:
    hand, memory = Hand(monkeypatch), aligned_memory(MIB)
    with DiskIO(read_threads=1, write_threads=1, piece_bytes=256 * KIB, staging_bytes=16 * KIB) as io:
        io.read(handle, 0, memory).wait()
        hand.now_s += 1000.0  # nothing is asked for
        io.read(handle, 0, memory, 64 * KIB).wait()  # too small to say anything of a byte
        io.read(handle, 0, memory, 256 * KIB).wait()
        io.write(handle, 0, memory, 512 * KIB).wait()
        used = io.used()
    assert used["read"] == LinkTraffic(nbytes=5 * 256 * KIB, seconds=5 * 2.0)
    assert used["write"] == LinkTraffic(nbytes=2 * 256 * KIB, seconds=2 * 2.0)


def test_pieces_of_several_threads_that_go_at_once_are_counted_once(
    monkeypatch: pytest.MonkeyPatch, handle: FileHandle
) -> None:
    Hand(monkeypatch, meet=2)
    memory = aligned_memory(MIB)
    with DiskIO(read_threads=2, write_threads=1, piece_bytes=256 * KIB, staging_bytes=16 * KIB) as io:
        io.read(handle, 0, memory).wait()
        assert io.used()["read"] == LinkTraffic(nbytes=MIB, seconds=2 * 2.0)


def test_a_transfer_that_fails_leaves_the_meter_right(monkeypatch: pytest.MonkeyPatch, handle: FileHandle) -> None:
    hand, memory = Hand(monkeypatch), aligned_memory(256 * KIB)
    with DiskIO(read_threads=1, write_threads=1, piece_bytes=256 * KIB, staging_bytes=16 * KIB) as io:

        def failing(*_: Any, **__: Any) -> None:
            hand.now_s += 3.0
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(channel, "move", failing)
        failed = io.read(handle, 0, memory)
        failed.join()
        assert failed.failure is not None
        monkeypatch.setattr(channel, "move", hand.move)
        hand.now_s += 1000.0
        io.read(handle, 0, memory).wait()
        assert io.used()["read"] == LinkTraffic(nbytes=256 * KIB, seconds=3.0 + 2.0)


def test_of_several_steps_the_one_in_the_middle_counts_by_its_seconds_a_byte() -> None:
    steps = [
        LinkTraffic(nbytes=10, seconds=5.0),
        LinkTraffic(nbytes=40, seconds=8.0),
        LinkTraffic(),
        LinkTraffic(nbytes=1000, seconds=1.0),  # buffered by the drive
    ]
    assert median_traffic({"disk read": steps, "disk write": [LinkTraffic()]}) == {"disk read": steps[1]}


# --- factors of links ---------------------------------------------------------------------------------------------------------------


def machine(link: Link | None = None) -> Hardware:
    link = link or Link(read_bytes_per_s=1e9, write_bytes_per_s=2e9, both_write_bytes_per_s=4e8, latency_s=1e-4)
    return Hardware(
        device="cpu",
        flops_per_s=1e13,
        tiers={Tier.DEVICE: TierSpec(nbytes=1 << 40), Tier.DISK: TierSpec(nbytes=1 << 40, link=link)},
        rates={WorkKind.STEPS: Rate(1e24), WorkKind.OPERATIONS: Rate(1e12)},
    )


def step_on_disk(width: int = 512) -> Step:
    profile = gpt_profile(layers=4, width=width)
    on_disk = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK)
    plan = Plan(blocks={block.name: on_disk for block in profile.blocks})
    return lower(build_step(plan, profile, clips_norm=False), plan, profile)


@pytest.mark.parametrize(("read", "write", "both"), [(1.5, 1.5, 4e8), (0.4, 0.4, 4e8), (0.4, 3.0, None)])
def test_factors_of_the_disk_that_were_put_in_are_found_and_predict_the_step(
    read: float, write: float, both: float | None
) -> None:
    """What the other direction costs is in the prediction too, and so not in the factors."""
    step = step_on_disk()
    thought = machine(Link(read_bytes_per_s=1e9, write_bytes_per_s=2e9, both_write_bytes_per_s=both))
    slower = None if both is None else both / write
    true = machine(Link(read_bytes_per_s=1e9 / read, write_bytes_per_s=2e9 / write, both_write_bytes_per_s=slower))
    on_true = predict(step, true)
    found = fit_links(step, replace(on_true, traffic=link_traffic(on_true)), thought)
    assert found == pytest.approx({"disk read": read, "disk write": write}, rel=0.03)
    again = calibrated(thought, found)
    assert predict(step, again).seconds == pytest.approx(on_true.seconds, rel=0.03)
    assert abs(predict(step, thought).seconds / on_true.seconds - 1) > 0.1
    assert rates_of(again) == rates_of(thought)


def test_what_a_lane_is_predicted_to_take_is_all_that_its_queue_serves() -> None:
    step = step_on_disk()
    predicted = predict(step, machine())
    found = link_traffic(predicted)
    assert found["disk read"].nbytes == sum(predicted.bytes_read.values())
    assert found["disk write"].nbytes == sum(predicted.bytes_written.values())
    assert group_seconds(step, machine())["disk read"] == pytest.approx(found["disk read"].seconds)


def test_a_step_that_moved_little_or_was_not_metered_says_nothing_of_the_disk() -> None:
    step = step_on_disk()
    predicted = predict(step, machine())
    few = {"disk read": LinkTraffic(nbytes=MIB, seconds=1.0), "host read": LinkTraffic(nbytes=1 << 30, seconds=1.0)}
    assert fit_links(step, replace(predicted, traffic=few), machine()) == {}
    assert set(fit_factors(step, predicted, machine())) == set(GROUPS)


# --- a job's own disk ---------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x))


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def save_machine(directory: Path) -> tuple[Hardware, Path]:
    """This machine as a probe would name it, with a disk that moves a byte in a microsecond."""
    slow = Link(read_bytes_per_s=1e6, write_bytes_per_s=1e6)
    origin = {**described.identity_of(CPU), "measured": "once", "disk": described.disk_name(directory)}
    found = replace(machine(slow), origin=origin)
    path = described.saved_path(described.identity_of(CPU))
    described.save(found, path)
    return found, path


def run(directory: Path, monkeypatch: pytest.MonkeyPatch, taken: list[dict[str, LinkTraffic]]) -> Any:
    monkeypatch.setattr(comparing, "_BUSY_MACHINE", float("inf"))
    real = comparing.median_traffic
    monkeypatch.setattr(comparing, "median_traffic", lambda found: taken.append(real(found)) or taken[-1])
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(6)))
    on_disk = BlockPlan(weight_home=Tier.DISK, state_home=Tier.DISK, gradient_home=Tier.DISK)
    plan = Plan(blocks={str(index): on_disk for index in range(6)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.ones(8, 512)
    with memfit.fit(model, optimizer, squared, batch, enforce=False, plan=plan, directory=directory / "homes") as job:
        for _ in range(5):
            job.step(batch)
        return job.compared.result()


def test_a_job_meters_its_disk_and_the_next_one_is_predicted_with_what_it_gave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMFIT_HARDWARE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MEMFIT_CORRECTIONS", raising=False)
    install()
    thought, path = save_machine(tmp_path)
    taken: list[dict[str, LinkTraffic]] = []
    first = run(tmp_path, monkeypatch, taken)
    # Bytes by another road: six layers come for forward, backward and update, momentum once; what is new goes once.
    layer = (512 * 512 + 512) * 4
    assert taken[0]["disk write"].nbytes >= 2 * 6 * layer
    assert taken[0]["disk read"].nbytes >= 3 * 6 * layer
    for way in ("read", "write"):
        took = taken[0][f"disk {way}"]
        # A microsecond a byte was thought, without anything else: the factor is the measured one's share of it.
        share = max(took.seconds / took.nbytes / 1e-6, 1 / 20)
        assert first.factors[f"disk {way}"] == pytest.approx(min(share, 20.0), rel=0.02)
    kept = load_correction(thought, correction_path(path))
    assert kept.factors["disk read"] == pytest.approx(first.factors["disk read"])
    corrected = described.load_saved(CPU)
    assert corrected is not None
    assert corrected.link(Tier.DISK).read_bytes_per_s == pytest.approx(1e6 / first.factors["disk read"])


def test_of_another_disk_than_the_probes_nothing_is_learnt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_HARDWARE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MEMFIT_CORRECTIONS", raising=False)
    install()
    thought, path = save_machine(tmp_path)
    thought = replace(thought, origin={**thought.origin, "disk": "another"})
    described.save(thought, path)
    found = run(tmp_path, monkeypatch, [])
    assert "disk read" in found.factors
    assert set(load_correction(thought, correction_path(path)).factors) <= set(GROUPS)
