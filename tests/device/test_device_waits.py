"""Who waits for whom above single transfers: staging to the disk, saved tensors, caches, updates; what the host reads of pinned memory; limits."""

from __future__ import annotations

import gc
import queue
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import devices
from memfit.core.limits import DEVICE_RESERVE_BYTES, MIB
from memfit.core.plan import BlockPlan, Plan, UpdateTime
from memfit.core.schedule import Clear, Commit
from memfit.core.tiers import Tier
from memfit.engine.caches import OffloadedCaches
from memfit.engine.offload import Offloader
from memfit.engine.update_phase import UpdatePhase, Visits
from memfit.homes import ByteHome
from memfit.homes.offloaded import HostPool, OffloadedStorage, ScratchPool
from memfit.homes.staging import Staged, Staging
from memfit.homes.update_pieces import PieceUpdates, Travel
from memfit.homes.updates import Gate, UpdateWorker
from memfit.job.loading import _restore_random
from memfit.machine import hard_limit, probing
from memfit.machine.meters import AcceleratorMeter
from memfit.store import DiskIO, ScratchFile

NUMBERS = 1 << 18


def numbers(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((NUMBERS,), float(value), device=device)


def allocated(device: torch.device) -> int:
    return torch.accelerator.memory_allocated(device)


# ---------------------------------------------------------------------------------------------------- staging to the disk


@contextmanager
def staging(device: torch.device, where: Path) -> Iterator[tuple[ScratchPool, Staging]]:
    io = DiskIO()
    scratch = ScratchFile(where, io=io)
    pieces = Staging(
        device, stream=devices.of(device).new_stream(device), piece_bytes=NUMBERS
    )  # a quarter of a moved storage
    try:
        yield ScratchPool(scratch, pieces), pieces
    finally:
        pieces.close()
        scratch.close()
        io.close()


def test_staging_copies_behind_compute_and_before_it(device: torch.device, tmp_path: Path) -> None:
    with staging(device, tmp_path) as (store, _):
        made, other = numbers(1, device), numbers(11, device)
        made += 2
        rests = [OffloadedStorage(store, t.untyped_storage()) for t in (made, other)]
        rests[0].wait()
        made.fill_(5)
        rooms = [numbers(7, device), numbers(8, device)]
        used = [room * 2 for room in rooms]
        for transfer in [rest.begin_read(room.untyped_storage()) for rest, room in zip(rests, rooms, strict=True)]:
            transfer.wait()
        assert [room.sum().item() for room in (*rooms, *used)] == [v * NUMBERS for v in (3, 11, 14, 16)]


def _wait(gate: threading.Event) -> None:
    gate.wait()


@contextmanager
def busy(pieces: Staging) -> Iterator[None]:
    """The threads of the staging begin with something that takes until soon after the body begins."""
    gate = threading.Event()
    for direction in (pieces._outward, pieces._inward):
        direction.submit(Staged(()), lambda _: _wait(gate))
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    yield
    timer.join()


def test_what_staging_takes_away_stays_until_it_is_copied(device: torch.device, tmp_path: Path) -> None:
    with staging(device, tmp_path) as (store, pieces):
        made = numbers(3, device)
        with busy(pieces):
            rest = OffloadedStorage(store, made.untyped_storage())
            rest.wait()
            made.fill_(5)
        room = numbers(0, device)
        rest.begin_read(room.untyped_storage()).wait()
        assert room.sum().item() == 3 * NUMBERS


def test_staging_is_closed_when_all_is_written(device: torch.device, tmp_path: Path) -> None:
    with staging(device, tmp_path) as (store, pieces):
        made = numbers(3, device)
        with busy(pieces):
            home = store.home(made.nbytes)
            home.write(0, made.nbytes, made.untyped_storage())
            pieces.close()
            assert home._written.has_ended  # type: ignore[attr-defined]


class Slow:
    """A scratch file that writes as late as it may: when somebody waits, or reads."""

    def __init__(self, scratch: Any) -> None:
        self._scratch = scratch

    def put(self, memory: Any, label: str) -> Any:
        done: list[Any] = []

        def write() -> Any:
            if not done:
                done.append(self._scratch.put(memory, label=label))
                done[0].written.wait()
            return done[0]

        return SimpleNamespace(write=write, written=SimpleNamespace(wait=write), give_back=lambda: write().give_back())

    def get(self, extent: Any, memory: Any, label: str) -> Any:
        return self._scratch.get(extent.write(), memory, label=label)


def test_staging_is_used_again_when_it_is_written(device: torch.device, tmp_path: Path) -> None:
    with staging(device, tmp_path) as (store, _):
        store._scratch = Slow(store._scratch)  # type: ignore[assignment]
        given = [torch.arange(NUMBERS, dtype=torch.float32).to(device) + value for value in (3, 11)]
        rests = [OffloadedStorage(store, t.untyped_storage()) for t in given]
        for wanted, rest in zip(given, rests, strict=True):
            room = numbers(0, device)
            rest.begin_read(room.untyped_storage()).wait()
            assert torch.equal(room, wanted)


# ---------------------------------------------------------------------------------------------------- saved tensors


def test_a_saved_tensor_leaves_the_device_and_comes_back(device: torch.device) -> None:
    store = HostPool(device, stream=devices.of(device).new_stream(device))
    offloader = Offloader({Tier.HOST: store}, device=device)
    base = allocated(device)
    made = numbers(1, device)
    made += 2
    moved = offloader.register(made, Tier.HOST, place="here")
    assert moved is not None
    moved.leave()
    del made
    moved.drop()
    assert allocated(device) == base
    other = numbers(9, device)  # the same memory
    moved.reload()
    back = torch.empty(0, device=device).set_(moved.bring(), 0, (NUMBERS,))  # type: ignore[call-overload]
    assert back.sum().item() == 3 * NUMBERS and other.sum().item() == 9 * NUMBERS
    del back, moved
    store.close()


@pytest.mark.parametrize("direction", ["away", "back"])
def test_a_saved_tensor_that_nobody_needs_any_more_ends_its_transfer_first(
    device: torch.device, direction: str
) -> None:
    """On a store whose transfers keep nothing alive, as the protocol allows."""
    ended: list[str] = []

    class Handle:
        def __init__(self, what: str) -> None:
            self._what = what

        def wait(self) -> None:
            ended.append(self._what)

    class Home(ByteHome):
        tier, nbytes = Tier.HOST, 4 * NUMBERS

        def write(self, offset: int, nbytes: int, source: Any, source_offset: int = 0) -> Handle:
            return Handle("away")

        def read(self, offset: int, nbytes: int, into: Any, into_offset: int = 0) -> Handle:
            return Handle("back")

        def close(self) -> None:
            assert ended[-1] == direction

    class Pool:
        def home(self, nbytes: int) -> Home:
            return Home()

    offloader = Offloader({Tier.HOST: Pool()}, device=device)
    made = numbers(1, device)
    moved = offloader.register(made, Tier.HOST, place="here")
    assert moved is not None
    moved.leave()
    if direction == "back":
        del made
        moved.drop()
        moved.reload()
    del moved
    gc.collect()
    assert ended[-1:] == [direction]


# ---------------------------------------------------------------------------------------------------- caches


def test_a_cache_leaves_the_device_and_is_there_again_when_caches_are_closed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import DynamicCache

    monkeypatch.setattr("memfit.engine.caches.PAGE_BYTES", 32 << 10)  # two pages a token
    store = HostPool(device, stream=devices.of(device).new_stream(device))
    caches, cache = OffloadedCaches(store, 0), DynamicCache()
    parts: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    base = allocated(device)
    most = 0
    for token in range(6):
        for layer in range(2):
            new = torch.full((1, 4, 64, 64), float(10 * layer + token))
            parts[layer].append(new)
            keys, values = cache.update(new.to(device), new.to(device) + 1, layer)
            caches.look_for((cache,), {})
            assert torch.equal(keys.cpu(), torch.cat(parts[layer], dim=-2))
            most = max(most, 2 * keys.nbytes)
            del keys, values
    # One layer is here, the other away; what wrote its pages keeps nothing.
    assert allocated(device) - base <= 2 * most
    caches.close()
    for layer, given in parts.items():
        held: Any = cache.layers[layer]
        assert torch.equal(held.values.cpu(), torch.cat(given, dim=-2) + 1)
    del cache
    gc.collect()
    store.close()


# ---------------------------------------------------------------------------------------------------- updates


class Block:
    """Notes what is done to it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.name, self.index, self.slots, self.travels, self.is_here = "block", 0, (), True, True
        self.updates_on_host = self.has_masters = False
        self.master_home = None

    def written_since_watch(self) -> list[str]:
        return []

    def versions(self) -> tuple[int, ...]:
        return ()

    def take_back_changes(self) -> None:
        return None

    def fetch(self) -> None:
        self._log.append("fetch")

    def release(self) -> None:
        self._log.append("release")

    def wait(self) -> None:
        self._log.append("wait")


@pytest.mark.parametrize("move", ["fetch", "release", "ensure"])
def test_a_block_moves_after_its_update(move: str) -> None:
    log: list[str] = []
    block: Any = Block(log)
    block.is_here = move != "ensure"
    visits = Visits([block], lambda _: log.append("settle"), log.append)
    if move == "ensure":
        visits.ensure([0], is_foreseen=True)
        assert log == ["settle", "fetch", "wait"]
    else:
        getattr(visits, move)(0)
        assert log == ["settle", move]


class Gradients:
    """Homes of gradients in which the last ones cannot be written."""

    def __init__(self, log: list[str], *, fails: bool) -> None:
        self._log, self._fails = log, fails

    def awaits_accumulate(self, block: Any) -> bool:
        return False

    def accumulate(self, block: Any) -> None:
        self._log.append("accumulate")

    def wait(self) -> None:
        if self._fails:
            raise memfit.StoreError("the disk is full")

    def clear(self, block: Any) -> None:
        self._log.append("clear")

    @property
    def here(self) -> Any:
        return self

    def has(self, block: Any) -> bool:
        return False


class Worker:
    """Ends an update when somebody waits for it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def submit(self, block: Any, after: Any, *, is_beside: bool) -> Any:
        self._log.append("submit")
        return self

    def wait(self) -> None:
        self._log.append("updated")

    def catch_up(self) -> None:
        self._log.append("caught up")


def update_phase(log: list[str], *, fails: bool = False) -> UpdatePhase:
    gradients: Any = Gradients(log, fails=fails)
    worker: Any = Worker(log)
    block: Any = Block(log)
    return UpdatePhase([block], gradients, worker, [], log.append)


def test_an_update_does_not_begin_where_a_gradient_could_not_be_written() -> None:
    log: list[str] = []
    with pytest.raises(memfit.StoreError, match="the disk is full"):
        update_phase(log, fails=True).update(0)
    assert "submit" not in log


def test_a_visit_that_nobody_waited_for_ends_before_the_update_begins() -> None:
    log: list[str] = []
    update_phase(log).update(0)
    assert log == ["wait", "submit"]


def test_gradients_are_cleared_and_a_step_ends_after_the_updates() -> None:
    log: list[str] = []
    it = update_phase(log)
    it.update(0)
    it.do(Clear(0))
    assert log[-2:] == ["updated", "clear"]
    it.update(0)
    it.do(Commit())
    assert log[-2:] == ["updated", "caught up"]


def test_an_update_changes_nothing_before_its_gate_opens() -> None:
    applied, began = threading.Event(), threading.Event()

    class Pieces:
        def due(self, block: Any) -> list[Any]:
            return [block]

        def groups(self, block: Any) -> list[tuple[int]]:
            return [(1,)]

        def begin_together(self, block: Any, group: tuple[int]) -> tuple[int]:
            began.set()
            return group

        def apply_together(self, block: Any, coming: tuple[int]) -> list[Any]:
            applied.set()
            return []

        def forget_standing(self) -> None:
            pass

    pieces: Any = Pieces()
    block: Any = SimpleNamespace(index=0, device=torch.device("cpu"), updates_on_host=False)
    worker, gate = UpdateWorker(pieces), Gate()
    transfer = worker.submit(block, gate)
    assert began.wait(10)  # what it reads comes meanwhile
    assert not applied.wait(0.1)
    gate.open()
    transfer.wait()
    assert applied.is_set()
    worker.close()


class HeldPieces:
    """Three pieces a block; the first of all is held until `go` is set. Kinds: made by the host; by the device, and
    what it needs rests there, comes from host memory or from files."""

    def __init__(self, kinds: dict[int, str]) -> None:
        self._kinds = kinds
        self.began, self.go = threading.Event(), threading.Event()
        self.log: list[tuple[int, int]] = []
        self.begun: list[tuple[int, int, int]] = []

    def due(self, block: Any) -> list[Any]:
        return [block]

    def groups(self, block: Any) -> list[tuple[int]]:
        return [(piece,) for piece in range(3)]

    def travel(self, block: Any) -> Travel:
        return Travel.NONE if self._kinds[block.index] == "rests" else Travel.PIECES

    def homes(self, block: Any) -> list[Any]:
        return [
            SimpleNamespace(tier=Tier.DISK if self._kinds[block.index] == "files" else Tier.HOST, orders_reads=True)
        ]

    def lay_out(self, block: Any) -> None:
        pass

    def lend_numbers(self, block: Any, stream: Any) -> None:
        pass

    def begin_together(self, block: Any, group: tuple[int]) -> tuple[int]:
        self.begun.append((block.index, group[0], len(self.log)))
        return group

    def apply_together(self, block: Any, coming: tuple[int]) -> list[Any]:
        if not self.log:
            self.began.set()
            assert self.go.wait(10)
        self.log.append((block.index, coming[0]))
        return []

    def forget_standing(self) -> None:
        pass


def block_on(device: torch.device, index: int, *, by_host: bool) -> Any:
    return SimpleNamespace(index=index, device=device, update_device=device, updates_on_host=by_host)


@pytest.mark.parametrize(
    ("kinds", "order"),
    [
        # Behind the piece under way: the main thread waits for it, and the host has long to work.
        (("host", "rests"), [0, 1, 1, 1, 0, 0]),
        (("host", "memory"), [0, 1, 1, 1, 0, 0]),
        (("host", "host", "rests"), [0, 2, 2, 2, 0, 0, 1, 1, 1]),
        (("host", "rests", "memory"), [0, 1, 1, 1, 2, 2, 2, 0, 0]),
        # The worker itself waits for files: those in their turn.
        (("host", "files"), [0, 0, 0, 1, 1, 1]),
        # Pieces on the device would be there beside its own memory.
        (("memory", "rests"), [0, 0, 0, 1, 1, 1]),
        (("files", "rests"), [0, 0, 0, 1, 1, 1]),
        (("host", "files", "memory"), [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        (("files", "host", "memory"), [0, 0, 0, 2, 2, 2, 1, 1, 1]),
        (("host", "files", "host", "memory", "rests"), [0, 0, 0, 1, 1, 1, 3, 3, 3, 4, 4, 4, 2, 2, 2]),
        (("host", "memory", "files", "rests"), [0, 1, 1, 1, 0, 0, 2, 2, 2, 3, 3, 3]),
    ],
)
def test_an_update_by_the_device_without_files_goes_before_the_next_piece_of_the_hosts(
    device: torch.device, kinds: tuple[str, ...], order: list[int]
) -> None:
    pieces = HeldPieces(dict(enumerate(kinds)))
    worker = UpdateWorker(pieces)  # pyright: ignore[reportArgumentType]
    transfers = [worker.submit(block_on(device, i, by_host=kind == "host")) for i, kind in enumerate(kinds[:1])]
    assert pieces.began.wait(10)
    transfers += [worker.submit(block_on(device, i, by_host=kind == "host")) for i, kind in enumerate(kinds) if i]
    pieces.go.set()
    for transfer in transfers:
        transfer.wait()
    worker.close()
    assert [index for index, _ in pieces.log] == order
    for index in range(len(kinds)):
        assert [piece for i, piece in pieces.log if i == index] == [0, 1, 2]


def test_pieces_of_what_goes_first_come_while_the_ones_before_them_are_made(device: torch.device) -> None:
    pieces = HeldPieces({0: "host", 1: "memory", 2: "memory"})
    worker = UpdateWorker(pieces)  # pyright: ignore[reportArgumentType]
    blocks: list[Any] = [block_on(device, i, by_host=not i) for i in range(3)]
    transfers = [worker.submit(blocks[0])]
    assert pieces.began.wait(10)
    transfers += [worker.submit(block) for block in blocks[1:]]
    pieces.go.set()
    for transfer in transfers:
        transfer.wait()
    worker.close()
    made_before = {(block, piece): made for block, piece, made in pieces.begun}
    # The host's second piece came before its first one was made; then one ahead, also from block to block.
    assert [made_before[0, 1], made_before[1, 0]] == [0, 1]
    assert [made_before[place] for place in ((1, 1), (1, 2), (2, 0), (2, 1), (2, 2))] == [1, 2, 3, 4, 5]


class Jobs:
    """A queue of which the first look without waiting is held until `given` is set."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.asked, self.given = threading.Event(), threading.Event()
        self.put, self.get = self._queue.put, self._queue.get

    def get_nowait(self) -> Any:
        if not self.asked.is_set():
            self.asked.set()
            assert self.given.wait(10)
        return self._queue.get_nowait()


@pytest.mark.parametrize("kind", ["rests", "memory"])
def test_what_goes_first_and_is_asked_for_while_the_worker_looks_has_its_pieces_in_order(
    device: torch.device, kind: str
) -> None:
    pieces = HeldPieces({0: "host", 1: kind})
    worker, jobs = UpdateWorker(pieces), Jobs()  # pyright: ignore[reportArgumentType]
    worker._jobs = jobs  # type: ignore[assignment]
    blocks: list[Any] = [block_on(device, i, by_host=not i) for i in range(2)]
    pieces.go.set()
    first = worker.submit(blocks[0])
    assert jobs.asked.wait(10)
    second = worker.submit(blocks[1])
    jobs.given.set()
    second.wait()
    first.wait()
    worker.close()
    assert [piece for i, piece in pieces.log if i] == [0, 1, 2]


def test_what_fails_of_an_update_that_goes_first_is_raised_where_it_is_waited_for(device: torch.device) -> None:
    class Fails(HeldPieces):
        def apply_together(self, block: Any, coming: tuple[int]) -> list[Any]:
            found = super().apply_together(block, coming)
            if block.index == 1 and coming == (1,):
                raise memfit.StoreError("it does not go")
            return found

    pieces = Fails({0: "host", 1: "rests"})
    worker = UpdateWorker(pieces)  # pyright: ignore[reportArgumentType]
    blocks: list[Any] = [block_on(device, i, by_host=not i) for i in range(2)]
    first = worker.submit(blocks[0])
    assert pieces.began.wait(10)
    second = worker.submit(blocks[1])
    pieces.go.set()
    with pytest.raises(memfit.StoreError, match="it does not go"):
        second.wait()
    first.wait()
    worker.close()
    assert pieces.log == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2)]


# ---------------------------------------------------------------------------------------------------- what the host reads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        return rows


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def made(device: torch.device) -> tuple[Any, torch.optim.Optimizer, torch.Tensor, Plan]:
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows = torch.randn(4, 64, device=device)
    profile = memfit.profile(model, optimizer, loss_of, rows)
    home = BlockPlan(weight_home=Tier.HOST, gradient_home=Tier.DEVICE, state_home=Tier.HOST)
    return model, optimizer, rows, Plan(blocks={block.name: home for block in profile.blocks})


HOMES = {
    "host": BlockPlan(gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST),
    "rests": BlockPlan(),
    "memory": BlockPlan(weight_home=Tier.HOST, gradient_home=Tier.HOST, state_home=Tier.HOST),
    "states": BlockPlan(state_home=Tier.HOST),
    "files": BlockPlan(weight_home=Tier.HOST, state_home=Tier.DISK),
}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    "kinds",
    [
        ("host", "rests"),
        ("host", "memory", "states", "host"),
        ("files", "host", "memory", "rests"),
        ("states", "files", "host"),
    ],
    ids=" ".join,
)
def test_layers_that_both_processors_update_are_those_of_plain_pytorch(
    device: torch.device, tmp_path: Path, optimizer: Any, microbatches: int, kinds: tuple[str, ...]
) -> None:
    def parts() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]).to(device)
        return model, optimizer(model.parameters(), lr=1e-2)

    def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).square().mean()

    torch.manual_seed(1)
    batches = [torch.randn(4, 64, device=device) for _ in range(3)]
    expected, own = parts()
    for rows in batches:
        own.zero_grad()
        for part in rows.chunk(microbatches):
            (loss(expected, part) / microbatches).backward()
        own.step()
    model, own = parts()
    profile = memfit.profile(model, own, loss, batches[0], microbatches=(microbatches,))
    of_blocks = {block.name: HOMES[kind] for block, kind in zip(profile.blocks, cycle(kinds), strict=False)}
    assert set(of_blocks.values()) == {HOMES[kind] for kind in kinds}
    plan = Plan(microbatches=microbatches, blocks=of_blocks)
    with memfit.fit(model, own, loss, batches[0], plan=plan, directory=tmp_path / "homes") as job:
        for rows in batches:
            job.step(rows)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def plain(device: torch.device, steps: int) -> list[torch.Tensor]:
    """Weights and states of plain PyTorch."""
    model, optimizer, rows, _ = made(device)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    with torch.no_grad():
        model.layers[1].bias.add_(1)
    return values(model, optimizer)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    return [t.detach().cpu() for t in (*model.parameters(), *states)]


def test_a_save_has_what_the_step_before_it_wrote(device: torch.device, tmp_path: Path) -> None:
    model, optimizer, rows, plan = made(device)
    with memfit.fit(model, optimizer, loss_of, rows, plan=plan) as job:
        job.step(rows)
        with job.weights(), torch.no_grad():
            model.layers[1].bias.add_(1)
        job.save(tmp_path / "saved")
    other, its_optimizer, _, plan = made(device)
    with memfit.fit(other, its_optimizer, loss_of, rows, plan=plan, resume=tmp_path / "saved"):
        pass
    assert [torch.equal(a, b) for a, b in zip(values(other, its_optimizer), plain(device, 1), strict=True)] == [
        True
    ] * 12


def test_a_commit_has_what_the_step_before_it_wrote(device: torch.device, tmp_path: Path) -> None:
    model, optimizer, rows, plan = made(device)
    with memfit.fit(model, optimizer, loss_of, rows, plan=plan, store=tmp_path / "run") as job:
        job.step(rows)
        with job.weights(), torch.no_grad():
            model.layers[1].bias.add_(1)
        job.commit()
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
    other, its_optimizer, _, plan = made(device)
    with memfit.fit(other, its_optimizer, loss_of, rows, plan=plan, store=tmp_path / "copy") as job:
        assert job.steps == 1
    assert [torch.equal(a, b) for a, b in zip(values(other, its_optimizer), plain(device, 1), strict=True)] == [
        True
    ] * 12


def test_a_step_that_is_finished_from_its_journal_begins_with_nothing_of_the_update_that_failed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pieces of that update are on their way to pinned homes, into which the host reads the committed values."""
    model, optimizer, rows, plan = made(device)
    blocks = {name: replace(home, gradient_home=Tier.DISK) for name, home in plan.blocks.items()}
    plan = replace(plan, update=UpdateTime.AFTER_BACKWARD, blocks=blocks)
    apply, pieces = PieceUpdates.apply, iter(range(100))

    def failing(updates: PieceUpdates, block: Any, coming: Any) -> list[Any]:
        leaving = apply(updates, block, coming)
        if next(pieces) == 1:
            raise memfit.StoreError("the disk is full")
        return leaving

    monkeypatch.setattr(PieceUpdates, "apply", failing)
    with memfit.fit(model, optimizer, loss_of, rows, plan=plan, store=tmp_path / "run", scheme="journal") as job:
        with pytest.raises(memfit.StoreError, match="the disk is full"):
            job.step(rows)
        assert any("finished from its journal" in text for text in job.step(rows).departures)
        with job.weights(), torch.no_grad():
            model.layers[1].bias.add_(1)
    assert [torch.equal(a, b) for a, b in zip(values(model, optimizer), plain(device, 1), strict=True)] == [True] * 12


# ---------------------------------------------------------------------------------------------------- limits


@pytest.fixture
def meter(device: torch.device) -> Iterator[AcceleratorMeter]:
    torch.accelerator.empty_cache()
    meter = AcceleratorMeter(device)
    try:
        yield meter
    finally:
        meter.set_limit(None)


def test_a_job_that_ends_lifts_its_own_limit_and_no_other_jobs(meter: AcceleratorMeter) -> None:
    meter.set_limit(512 * MIB)
    hard_limit._lift_limit(meter, 256 * MIB)
    assert meter.limit_bytes() == 512 * MIB
    hard_limit._lift_limit(meter, 512 * MIB)
    assert meter.limit_bytes() is None


def test_probes_fit_the_reserve_of_every_plan(
    device: torch.device, meter: AcceleratorMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "mm", lambda a, b, out: out)  # a probe's seconds are not the subject
    meter.set_limit(torch.accelerator.memory_reserved(device) + DEVICE_RESERVE_BYTES)
    assert probing._probe_flops(device, torch.float32) > 0


def test_a_load_restores_the_generator_of_the_models_device(device: torch.device, tmp_path: Path) -> None:
    far = torch.device(device.type, torch.accelerator.device_count() - 1)
    accelerator = devices.of(device)
    state = accelerator.rng_state(far)
    torch.rand(1, device=far)
    _restore_random([torch.get_rng_state(), state], far, tmp_path)
    assert torch.equal(accelerator.rng_state(far), state)
