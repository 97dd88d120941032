"""Updates by the device whose pieces come and go: they have a stream of the updates' own, so that the caller's stream waits for none of their copies."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from equivalence.beside_plain import same_bits_beside_plain
from memfit import devices
from memfit.core.limits import DEVICE_RESERVE_BYTES
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.step import UpdatePlace
from memfit.core.tiers import Tier
from memfit.homes import MemoryHome
from memfit.homes.gradients import GradientHomes
from memfit.homes.home import DONE, TransferHandle
from memfit.homes.memory import StreamCopy
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.update_pieces import PieceUpdates
from memfit.homes.updates import UpdateWorker, _SubmittedUpdate
from memfit.homes.weights import BlockWeights
from memfit.optimizers import OptimizerDriver
from memfit.step.lower import lower
from memfit.step.predict import predict

NUMBERS, PIECE = 20_003, 4096
AWAY = BlockPlan(state_home=Tier.HOST)
THERE = BlockPlan(gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)


class Resting:
    """A block of one parameter whose states rest on the host and whose gradient is on the device, without an engine.

    Args:
        device: of the update.
        weights: where the weight is at home.
        like: another one, whose worker's streams this one's worker has.
    """

    def __init__(self, device: torch.device, weights: Tier, like: Resting | None = None) -> None:
        torch.manual_seed(0)
        self.device = device
        self.twin = nn.Parameter(torch.randn(NUMBERS, device=device))
        self.plain = torch.optim.AdamW([self.twin], lr=0.1)
        self.weight = nn.Parameter(self.twin.detach().clone())
        self.driver = OptimizerDriver(torch.optim.AdamW([self.weight], lr=0.1), {"weight": self.weight})
        self.block = BlockWeights(0, "block", [("weight", self.weight)])
        streams = tuple(devices.of(device).new_stream(device) for _ in range(2))
        self.comes, self.leaves = streams if like is None else (like.comes, like.leaves)
        self.homes: list[MemoryHome] = []
        self.block.move_in(self._home(self.block.nbytes, weights), None)
        self.gradients = GradientHomes([self.block], {}, keeps_norms=False)
        self.states = BlockStates(self.block, {"weight": self.driver.state_layout("weight", torch.float32)})
        self.states.home = self._home(self.states.nbytes, Tier.HOST)
        self.worker = UpdateWorker(PieceUpdates(self.driver, {0: self.states}, self.gradients))
        if like is not None:
            self.worker._streams, self.worker._last_writes = like.worker._streams, like.worker._last_writes

    def _home(self, nbytes: int, tier: Tier) -> MemoryHome:
        self.homes.append(MemoryHome(nbytes, tier=tier, device=self.device, stream=self.comes, writes=self.leaves))
        return self.homes[-1]

    def begin(self, after: TransferHandle = DONE) -> Any:
        """Computes a gradient and begins the update."""
        self.block.fetch()
        self.block.wait()
        self.weight.grad = self.weight.detach() * 2 + 1
        self.gradients.begin_step()
        self.gradients.accumulate(self.block)
        self.driver.begin_step()
        return self.worker.submit(self.block, after)

    def end(self, transfer: Any) -> torch.Tensor:
        """Returns the weight that the next kernel sees."""
        transfer.wait()
        self.driver.end_step()
        self.gradients.clear(self.block)
        self.block.release()
        self.block.fetch()
        self.block.wait()
        found = self.weight.detach() * 1
        self.block.release()
        return found

    def step_of_plain(self) -> torch.Tensor:
        """The same step of plain PyTorch on the device."""
        self.twin.grad = self.twin.detach() * 2 + 1
        self.plain.step()
        return self.twin.detach()

    def close(self) -> None:
        self.worker.close()
        for home in self.homes:
            home.close()


@pytest.fixture(params=["device", "host"])
def resting(device: torch.device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resting]:
    monkeypatch.setattr("memfit.homes.update_pieces.PIECE_ELEMENTS", PIECE)
    made = Resting(device, Tier(request.param))
    yield made
    torch.accelerator.synchronize(device)
    made.close()


def test_steps_of_one_block_whose_pieces_travel_are_those_of_plain_pytorch(resting: Resting) -> None:
    for _ in range(3):
        transfer = resting.begin()
        # What is computed meanwhile on the caller's stream takes memory and gives it back.
        beside = [torch.full((PIECE,), float("nan"), device=resting.device) for _ in range(4)]
        del beside
        found = resting.end(transfer)
        assert torch.equal(found, resting.step_of_plain())


def test_the_callers_stream_waits_for_no_copy_of_an_update_before_it_asks_for_it(resting: Resting) -> None:
    if resting.device.type != "late":
        pytest.skip("copies of a CUDA device take a time that others change")
    from accelerator import late

    resting.end(resting.begin())
    clock, here = late.native.now_s, torch.zeros(8, device=resting.device)
    nbytes = 2 * NUMBERS * 4  # two moments each way, at least
    torch.accelerator.synchronize(resting.device)
    with late.links(float(nbytes), pace="counted"):
        began_s = clock()
        transfer = resting.begin()
        computed_s = clock() - began_s  # the weight may come first: another second's half
        transfer._done.wait()  # all of it is enqueued
        here.add_(1)
        torch.accelerator.current_stream(resting.device).synchronize()
        beside_s = clock() - began_s - computed_s
        resting.end(transfer)
        torch.accelerator.current_stream(resting.device).synchronize()
        whole_s = clock() - began_s - computed_s
    assert beside_s < 0.6 and whole_s > 1.0


def test_the_last_writes_of_an_update_hold_up_no_read_of_the_next(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads take no time here, and writes two seconds: the second update has read while the first one writes."""
    if device.type != "late":
        pytest.skip("copies of a CUDA device take a time that others change")
    from accelerator import late

    first = Resting(device, Tier.DEVICE)
    second = Resting(device, Tier.DEVICE, like=first)
    for one in (first, second):
        one.end(one.begin())
    copies: list[tuple[bool, torch.Event]] = []
    copy = MemoryHome._copy

    def noted(self: MemoryHome, *given: Any, is_read: bool) -> Any:
        found = copy(self, *given, is_read=is_read)
        assert isinstance(found, StreamCopy)
        copies.append((is_read, found.event))
        return found

    monkeypatch.setattr(MemoryHome, "_copy", noted)
    with late.links(1e12, float(NUMBERS * 4), pace="slept"):
        earlier = first.begin()
        earlier._done.wait()  # all of it is enqueued
        writes = [event for is_read, event in copies if not is_read]
        copies.clear()
        later = second.begin()
        later._done.wait()
        for event in [event for is_read, event in copies if is_read]:
            event.synchronize()
        assert writes and not writes[-1].query()
        found = first.end(earlier), second.end(later)
        torch.accelerator.synchronize(device)
    assert torch.equal(found[0], found[1])
    for one in (first, second):
        one.close()


def test_small_parameters_are_updated_together(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where pieces travel: no group has more elements than the block's largest piece, and the bits are those of plain PyTorch."""
    monkeypatch.setattr("memfit.homes.update_pieces.PIECE_ELEMENTS", 512)
    groups: list[list[tuple[str, int]]] = []
    whole = PieceUpdates.groups

    def noted(self: PieceUpdates, block: BlockWeights) -> Any:
        found = list(whole(self, block))
        groups.extend([(piece.slot.name, piece.count) for piece in group] for group in found)
        return found

    monkeypatch.setattr(PieceUpdates, "groups", noted)

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)) for _ in range(3)]
        model = nn.Sequential(*layers).to(device)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        return model, torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)

    batch = torch.randn(4, 32, device=device)
    same = same_bits_beside_plain(parts, loss_of, batch, lambda _: AWAY, tmp_path)
    assert same == [True] * len(same)
    joined = [group for group in groups if len(group) > 1]
    assert joined and all(sum(count for _, count in group) <= 512 for group in groups)
    assert {name.split(".")[-1] for group in joined for name, _ in group} == {"weight", "bias"}


def test_an_update_that_depends_on_what_the_caller_still_enqueues_stays_in_its_order(resting: Resting) -> None:
    """A gate may be opened behind kernels that the caller has enqueued since."""
    streams: list[torch.Stream] = []

    class Opened(TransferHandle):
        def wait(self) -> None:
            streams.append(torch.accelerator.current_stream(resting.device))

    resting.end(resting.begin())
    resting.end(resting.begin(Opened()))
    assert streams and {s.stream_id for s in streams} == {torch.accelerator.current_stream(resting.device).stream_id}


# ---------------------------------------------------------------------------------------------------- jobs


class Convolutions(nn.Module):
    """Of pictures with their channels last, depthwise and 1 x 1 weights have gradients whose strides are not the weights'."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1), nn.ReLU())
                for _ in range(3)
            ]
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            pictures = pictures + layer(pictures)
        return pictures


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("settings", [{}, {"capturable": True}], ids=["counts on the host", "counts on the device"])
def test_steps_of_a_job_with_states_on_the_host_are_those_of_plain_pytorch(
    device: torch.device, settings: dict[str, bool], tmp_path: Path
) -> None:
    """Gradients of other strides are laid out; states that are loaded between steps take the place of those of the updates' own memory."""

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Convolutions().to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)  # pyright: ignore[reportArgumentType]

    batch = torch.randn(4, 16, 8, 8).to(device).to(memory_format=torch.channels_last)
    plain, optimizer = parts()
    found, of_job = parts()
    profile = memfit.profile(found, of_job, loss_of, batch)
    plan = Plan(blocks={block.name: BlockPlan(state_home=Tier.HOST) for block in profile.blocks})
    is_other = False
    with memfit.fit(found, of_job, loss_of, batch, plan=plan, directory=tmp_path / "homes") as job:
        for _ in range(3):
            job.step(batch)
            of_job.load_state_dict(of_job.state_dict())
            optimizer.zero_grad()
            loss_of(plain, batch).backward()
            is_other = is_other or any(p.grad is not None and p.grad.stride() != p.stride() for p in plain.parameters())
            optimizer.step()
    assert is_other
    same = [torch.equal(a, b) for a, b in zip(found.parameters(), plain.parameters(), strict=True)]
    assert same == [True] * len(same)


def test_an_update_of_whole_parameters_stays_in_the_order_of_the_callers_kernels(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is that of parameters, which a stream of its own would keep; and the clock is told so."""
    streams: list[Any] = []
    stream_of = UpdateWorker._stream_of
    monkeypatch.setattr(
        UpdateWorker, "_stream_of", lambda *a, **settings: streams.append(stream_of(*a, **settings)) or streams[-1]
    )
    model, batch = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(device), torch.randn(4, 16, device=device)
    for make, place in ((torch.optim.Adafactor, UpdatePlace.IN_ORDER), (torch.optim.AdamW, UpdatePlace.BESIDE)):
        optimizer = make(model.parameters(), lr=1e-2)
        profile = memfit.profile(model, optimizer, loss_of, batch)
        plan = Plan(blocks={block.name: BlockPlan(state_home=Tier.HOST) for block in profile.blocks})
        streams.clear()
        with memfit.fit(model, optimizer, loss_of, batch, plan=plan, directory=tmp_path / make.__name__) as job:
            job.step(batch)
            step = lower(job.schedule, job.plan, job.profile, device=device.type)
        assert {o.update_place for o in step} - {None} == {place}
        assert streams and all((stream is None) == (place is UpdatePlace.IN_ORDER) for stream in streams)


NARROW = 8
"""Weights of this width are next to nothing; between two of `WIDE` they have pieces of their own."""
WIDE = 724


def of_widths(*sizes: tuple[int, int]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(first, second, bias=False) for first, second in sizes])


def requested(device: torch.device, when: str) -> int:
    return int(devices.of(device).statistics(device).get(f"requested_bytes.all.{when}", 0))


LASTING: dict[str, tuple[list[tuple[int, int]], list[bool], dict[str, Any]]] = {
    "others that rest between": (
        [(WIDE, WIDE), (WIDE, NARROW), (NARROW, WIDE), (WIDE, WIDE)],
        [True, False, False, True],
        {"rows": 1},
    ),
    "of each": ([(WIDE, WIDE), (WIDE, WIDE), (WIDE, WIDE)], [True, True, True], {"rows": 1, "update_backlog": 2}),
    "the last rests, clears at once": (
        [(WIDE, WIDE), (WIDE, WIDE), (WIDE, NARROW)],
        [True, True, False],
        {"rows": 2, "microbatches": 2, "tail": 1},
    ),
    "the last rests, a backlog": (
        [(WIDE, WIDE), (WIDE, WIDE), (WIDE, NARROW)],
        [True, True, False],
        {"rows": 2, "microbatches": 2, "tail": 1, "update_backlog": 2},
    ),
}


@pytest.mark.parametrize("case", LASTING)
def test_what_lasts_of_an_update_is_predicted(
    device: torch.device, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that the device's allocator counts in a second step, in which states are there."""
    begin = _SubmittedUpdate.begin

    def behind(self: _SubmittedUpdate) -> Any:
        if not self._begun:
            time.sleep(0.2)  # the caller has asked for all that it may meanwhile, however busy the machine is
        return begin(self)

    monkeypatch.setattr(_SubmittedUpdate, "begin", behind)
    sizes, are_away, settings = LASTING[case]
    rows = settings["rows"]
    gc.collect()
    devices.of(device).empty_cache()
    before = requested(device, "current")
    model, batch = of_widths(*sizes).to(device), torch.randn(rows, WIDE).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = [block.name for block in memfit.profile(model, optimizer, loss_of, batch).blocks]
    homes = [BlockPlan(state_home=Tier.HOST) if is_away else BlockPlan() for is_away in are_away]
    decided = {name: value for name, value in settings.items() if name != "rows"}
    plan = Plan(blocks=dict(zip(names, homes, strict=True)), **decided)
    found = 0
    with memfit.fit(model, optimizer, loss_of, batch, plan=plan, directory=tmp_path / "homes") as job:
        predicted = predict(lower(job.schedule, job.plan, job.profile, device=device.type)).peak_bytes
        job.step(batch)
        torch.accelerator.synchronize(device)
        devices.of(device).reset_peaks(device)

        def look(_action: object) -> None:
            nonlocal found
            found = max(found, requested(device, "peak") - before)

        job._assembly.engine._observe = look
        job.step(batch)
    beside = DEVICE_RESERVE_BYTES if device.type == "cuda" else 0
    assert found <= predicted + 4096 + beside
    if device.type == "late":
        assert found >= 0.99 * predicted


@pytest.mark.parametrize("time", UpdateTime)
@pytest.mark.parametrize("homes", [(THERE, AWAY), (AWAY, THERE), (AWAY, AWAY, THERE), (AWAY, THERE, AWAY)])
def test_memory_of_last_writes_stays_where_others_are_updated_on_the_host(
    device: torch.device, homes: tuple[BlockPlan, ...], time: UpdateTime, tmp_path: Path
) -> None:
    """Each of the two has a stream, and only the device's updates leave writes behind."""

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = of_widths(*[(64, 64)] * len(homes)).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    batch = torch.randn(4, 64, device=device)
    same = same_bits_beside_plain(parts, loss_of, batch, homes.__getitem__, tmp_path, update=time)
    assert same == [True] * len(homes)


def test_a_block_that_the_optimizer_does_not_hold_is_left_alone(device: torch.device, tmp_path: Path) -> None:
    """Its parameters want gradients and nobody updates them: a head is trained alone."""
    model, batch = of_widths((16, 16), (16, 16)).to(device), torch.randn(4, 16, device=device)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(list(model.parameters())[1:], lr=1e-2)
    names = [block.name for block in memfit.profile(model, optimizer, loss_of, batch).blocks]
    for home in (BlockPlan(), BlockPlan(weight_home=Tier.DISK), BlockPlan(weight_home=Tier.HOST)):
        plan = Plan(blocks=dict.fromkeys(names, home))
        with memfit.fit(model, optimizer, loss_of, batch, plan=plan, directory=tmp_path / "homes") as job:
            job.step(batch)
        found = [torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
        assert found == [True, False]


class Odd(nn.Module):
    """Parameters of two dtypes in turns, a large one and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(96, 64, dtype=torch.float64) * 0.1)
        dtypes = [torch.float64, torch.float32] * 3
        self.small = nn.ParameterList([nn.Parameter(torch.randn(64, dtype=dtype)) for dtype in dtypes])
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = rows.double() @ self.large.T @ self.large
        for scale in self.small:
            found = found * (1 + 0.01 * scale.double())
        return rows + found.float()


@pytest.mark.parametrize("weights", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("states", [Tier.HOST, Tier.DISK])
def test_parameters_of_two_dtypes_that_the_host_updates_are_those_of_plain(
    device: torch.device, weights: Tier, states: Tier, tmp_path: Path
) -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(Odd(), Odd()).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    home = BlockPlan(weight_home=weights, gradient_home=Tier.HOST, state_home=states, update_on=Tier.HOST)
    same = same_bits_beside_plain(parts, loss_of, torch.randn(4, 64, device=device), lambda _: home, tmp_path)
    assert same == [True] * len(same)
