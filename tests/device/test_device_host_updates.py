"""Updates on the host's cores: the bits of updates on the device, in every way in which weights, gradients and states may rest.

The emulated device computes with the processor's own kernels, so that an update there and one on the host give equal bits; on CUDA the last place may differ
(`core.numerics`, "updates on the host"), and the comparison is one of nearness.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import devices
from memfit.core.layout import MOVED_PIECES
from memfit.core.limits import MIB
from memfit.core.numerics import check_exact, declare, regroups_sums
from memfit.core.plan import BlockPlan, Order, Plan, UpdateTime
from memfit.core.schedule import Clear, Commit, Update
from memfit.core.storage_formats import ComputeDtype, StateFormat
from memfit.core.tiers import Tier
from memfit.devices.binding import install
from memfit.engine.update_phase import UpdatePhase
from memfit.homes import MemoryHome
from memfit.homes.gradients import GradientHomes
from memfit.homes.masters import RoundedMasters, SplitMasters, rest_nbytes
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.staging import PinnedRing
from memfit.homes.update_pieces import PieceUpdates
from memfit.homes.updates import UpdateWorker
from memfit.homes.weights import BlockWeights
from memfit.optimizers import OptimizerDriver
from memfit.planner.plan_checks import check_meaning
from memfit.step.lower import lower
from memfit.tensors.noise import RoundingNoise, round_stochastically
from memfit.tensors.trees import bytes_view, typed_view

HOST, DISK, DEVICE = Tier.HOST, Tier.DISK, Tier.DEVICE


class Net(nn.Module):
    """Layers of several parameters each, one of more elements than a piece has."""

    def __init__(self, wide: int = (1 << 13) + 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.wide = nn.Linear(64, wide)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        return self.wide(rows)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def plan_of(model: nn.Module, optimizer: Any, rows: torch.Tensor, home: BlockPlan, changes: dict[str, Any]) -> Plan:
    profile = memfit.profile(model, optimizer, loss_of, rows)
    return replace(Plan(blocks={block.name: home for block in profile.blocks if not block.is_spanning}), **changes)


def trained(
    device: torch.device,
    home: BlockPlan,
    *,
    make: Any = torch.optim.AdamW,
    steps: int = 3,
    allow: frozenset[str] = frozenset(),
    max_grad_norm: float | None = None,
    directory: Path | None = None,
    store: Path | None = None,
    scheme: Any = None,
    **changes: Any,
) -> list[torch.Tensor]:
    """Losses, weights and states after some steps."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = make(model.parameters(), lr=1e-2)
    rows = torch.randn(4, 64, device=device)
    plan = plan_of(model, optimizer, rows, home, changes)
    kept: dict[str, Any] = {} if scheme is None else {"scheme": scheme}
    with memfit.fit(
        model,
        optimizer,
        loss_of,
        rows,
        plan=plan,
        allow=allow,
        max_grad_norm=max_grad_norm,
        directory=directory,
        store=store,
        **kept,
    ) as job:
        losses = [torch.as_tensor(job.step(rows).loss) for _ in range(steps)]
    gc.collect()
    states = [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
    found = [*losses, *model.parameters(), *(v for v in states if isinstance(v, torch.Tensor))]
    return [t.detach().cpu() for t in found]


def plain(
    device: torch.device,
    *,
    make: Any = torch.optim.AdamW,
    steps: int = 3,
    max_grad_norm: float | None = None,
    wide: int = (1 << 13) + 5,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net(wide).to(device)
    optimizer = make(model.parameters(), lr=1e-2)
    rows = torch.randn(4, 64, device=device)
    losses: list[torch.Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        losses.append(loss)
    states = [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
    found = [*losses, *model.parameters(), *(v for v in states if isinstance(v, torch.Tensor))]
    return [t.detach().cpu() for t in found]


def assert_alike(device: torch.device, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    if device.type == "late":
        assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)
    else:
        torch.testing.assert_close(found, wanted)


HOMES = {
    "weights on the device": BlockPlan(gradient_home=HOST, state_home=HOST, update_on=HOST),
    "all on the host": BlockPlan(weight_home=HOST, gradient_home=HOST, state_home=HOST, update_on=HOST),
    "weights on disk": BlockPlan(weight_home=DISK, gradient_home=HOST, state_home=HOST, update_on=HOST),
    "states on disk": BlockPlan(gradient_home=HOST, state_home=DISK, update_on=HOST),
    "gradients on disk": BlockPlan(weight_home=HOST, gradient_home=DISK, state_home=HOST, update_on=HOST),
    "all on disk": BlockPlan(weight_home=DISK, gradient_home=DISK, state_home=DISK, update_on=HOST),
}
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "after backward": {"update": UpdateTime.AFTER_BACKWARD},
    "clipped": {"max_grad_norm": 0.01, "update": UpdateTime.AFTER_BACKWARD},
    "two": {"microbatches": 2, "order": Order.MICROBATCH_MAJOR},
    "two by layer": {"microbatches": 2, "order": Order.LAYER_MAJOR},
    "bf16": {"compute_dtype": ComputeDtype.BFLOAT16, "allow": frozenset({"bf16"})},
    "bf16 split": {"compute_dtype": ComputeDtype.BFLOAT16, "splits_masters": True, "allow": frozenset({"bf16"})},
    "bf16 alone": {"compute_dtype": ComputeDtype.BFLOAT16, "drops_masters": True, "allow": frozenset({"bf16-weights-sr"})},
    "fp16": {"compute_dtype": ComputeDtype.FLOAT16, "allow": frozenset({"fp16"})},
    "fp16 weights": {"compute_dtype": ComputeDtype.FLOAT16_WEIGHTS, "allow": frozenset({"fp16-weights"})},
    "int8": {"state_format": StateFormat.INT8, "allow": frozenset({"int8-state"})},
    "bf16 states": {"state_format": StateFormat.BF16, "allow": frozenset({"bf16-state"})},
}  # fmt: skip
EXACT = {"one", "after backward", "clipped"}
DEFAULT = {
    ("weights on the device", "clipped"), ("weights on the device", "bf16"), ("weights on the device", "int8"),
    ("weights on the device", "bf16 alone"), ("all on the host", "one"), ("all on the host", "bf16 split"), ("all on the host", "fp16"),
    ("all on disk", "two by layer"),
}  # fmt: skip


def _cases() -> Iterator[Any]:
    for homes in HOMES:
        for way in WAYS:
            marks = [] if (homes, way) in DEFAULT else [pytest.mark.slow]
            yield pytest.param(homes, way, marks=marks, id=f"{homes}-{way}")


@cache
def with_nothing_away(device: torch.device, way: str) -> list[torch.Tensor]:
    """What the same plan gives with all homes and updates on the device: homes have no effect on bits."""
    return trained(device, BlockPlan(), **WAYS[way])


@pytest.mark.parametrize(("homes", "way"), list(_cases()))
def test_an_update_on_the_host_gives_the_bits_of_one_on_the_device(
    device: torch.device, homes: str, way: str, tmp_path: Path
) -> None:
    found = trained(device, HOMES[homes], directory=tmp_path / "host", **WAYS[way])
    norm = WAYS[way].get("max_grad_norm")
    wanted = plain(device, max_grad_norm=norm) if way in EXACT else with_nothing_away(device, way)
    assert_alike(device, found, wanted)


# ---------------------------------------------------------------------------------------------------- one block, by hand


NUMBERS, PIECE = 20_003, 4096


class Bench:
    """A block of one parameter whose updates run on the host, without an engine: every transfer is asked for by the test.

    Args:
        device: where the weight visits or lives.
        weights: its home.
        masters: "none", "whole", "split" or "rounded".
    """

    def __init__(self, device: torch.device, weights: Tier, masters: str = "none") -> None:
        torch.manual_seed(0)
        self.device, self.masters = device, masters
        # What plain PyTorch does on the processor.
        self.twin = nn.Parameter(torch.randn(NUMBERS))
        self.plain = torch.optim.AdamW([self.twin], lr=0.1)
        self.weight = nn.Parameter(self.twin.detach().to(device))
        self.driver = OptimizerDriver(torch.optim.AdamW([self.weight], lr=0.1), {"weight": self.weight})
        compute = ComputeDtype.GIVEN if masters == "none" else ComputeDtype.BFLOAT16
        if masters != "none":
            self.driver.use_masters(torch.float32)
        self.block = BlockWeights(0, "block", [("weight", self.weight)], compute)
        self.block.updates_on_host = True
        accelerator = devices.of(device)
        self.copies, self.sends = accelerator.new_stream(device), accelerator.new_stream(device)
        self.homes: list[MemoryHome] = []
        home = self._home(self.block.nbytes, weights)
        self.block.move_in(home, self._masters(home))
        self.gradient = self._home(self.block.master_nbytes, HOST)
        self.gradients = GradientHomes([self.block], {0: self.gradient}, keeps_norms=False)
        self.states = BlockStates(self.block, {"weight": self.driver.state_layout("weight", torch.float32)})
        self.states.home = self._home(self.states.nbytes, HOST)
        self.ring = PinnedRing(device)
        noise = RoundingNoise(seed=1) if masters == "rounded" else None
        self.pieces = PieceUpdates(self.driver, {0: self.states}, self.gradients, noise=noise, moved=self.ring)
        self.worker = UpdateWorker(self.pieces)

    def _home(self, nbytes: int, tier: Tier) -> MemoryHome:
        stream = self.sends if tier is DEVICE else self.copies
        self.homes.append(MemoryHome(nbytes, tier=tier, device=self.device, stream=stream))
        return self.homes[-1]

    def _masters(self, home: MemoryHome) -> Any:
        match self.masters:
            case "none":
                return None
            case "whole":
                return self._home(self.block.master_nbytes, HOST)
            case "split":
                return SplitMasters(self.block, home, self._home(rest_nbytes(self.block), HOST))
            case _:
                return RoundedMasters(self.block, home)

    def gradient_comes(self) -> None:
        """Of half the weight's square's sum, a step's gradient: the weight itself, and one."""
        self.block.fetch()
        self.block.wait()
        self.weight.grad = self.weight.detach() + 1
        self.gradients.begin_step()
        self.gradients.accumulate(self.block)
        self.gradients.wait()

    def update(self) -> Any:
        """Begins the update; the visit ends at once."""
        self.driver.begin_step()
        transfer = self.worker.submit(self.block)
        self.block.release()
        return transfer

    def end(self, transfer: Any) -> torch.Tensor:
        """The weight that the next kernel sees."""
        transfer.wait()
        self.driver.end_step()
        self.block.fetch()
        self.block.wait()
        return (self.weight.detach() * 1).cpu().float()

    def step_of_plain(self) -> torch.Tensor:
        """The same step on the processor, for weights that are their own masters."""
        self.twin.grad = self.twin.detach() + 1
        self.plain.step()
        return self.twin.detach()

    def close(self) -> None:
        self.worker.close()
        self.ring.close()
        for home in self.homes:
            home.close()


@pytest.fixture
def bench(device: torch.device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("memfit.homes.update_pieces.PIECE_ELEMENTS", PIECE)
    weights, _, masters = request.param.partition(", ")
    made = Bench(device, Tier(weights), masters or "none")
    yield made
    torch.accelerator.synchronize(device)
    made.close()


OF_ITSELF = pytest.mark.parametrize("bench", ["device", "host"], indirect=True)


@OF_ITSELF
def test_steps_of_one_block_are_those_of_plain_pytorch(bench: Bench) -> None:
    for _ in range(3):
        bench.gradient_comes()
        found = bench.end(bench.update())
        wanted = bench.step_of_plain()
        assert_alike(bench.device, [found], [wanted])


def in_fp32(bench: Bench, steps: int) -> torch.Tensor:
    """Weights that are rounded from masters after some steps, by the plain optimizer on the processor; gradients are those of the rounded weight."""
    noise = RoundingNoise(seed=1)

    def rounded() -> torch.Tensor:
        if bench.masters == "rounded":
            return round_stochastically(
                bench.twin.detach(), noise.bits("weight/weight", 0, NUMBERS, torch.device("cpu"))
            )
        return bench.twin.detach().bfloat16()

    weight = bench.twin.detach().bfloat16()
    if bench.masters == "rounded":
        bench.twin.data = weight.float()
    for _ in range(steps):
        bench.twin.grad = (weight + 1).float()
        bench.plain.step()
        weight = rounded()
        if bench.masters == "rounded":
            bench.twin.data = weight.float()
    return weight.float()


@pytest.mark.parametrize(
    "bench", [f"{home}, {how}" for home in ("device", "host") for how in ("whole", "split", "rounded")], indirect=True
)
def test_steps_of_one_block_with_masters_are_those_of_masters_in_fp32(bench: Bench) -> None:
    bench.gradient_comes()
    bench.end(bench.update())
    bench.gradient_comes()
    assert_alike(bench.device, [bench.end(bench.update())], [in_fp32(bench, 2)])


@pytest.mark.parametrize("bench", ["device"], indirect=True)
def test_a_weight_comes_down_behind_what_wrote_it(bench: Bench) -> None:
    bench.gradient_comes()
    with torch.no_grad():
        bench.weight.add_(3)  # a kernel of the caller's stream
        bench.twin.grad = bench.twin.detach() + 1
        bench.twin.add_(3)
    found = bench.end(bench.update())
    bench.plain.step()
    assert_alike(bench.device, [found], [bench.twin.detach()])


@pytest.mark.parametrize("bench", ["device", "device, whole"], indirect=True)
def test_pinned_pieces_are_freed_when_their_copies_are_done(bench: Bench) -> None:
    bench.gradient_comes()
    block, pieces = bench.block, bench.pieces
    bench.driver.begin_step()
    torch.accelerator.synchronize(bench.device)
    (coming,) = pieces.begin_together(block, (next(pieces.cut(block)),))
    if bench.masters == "whole":
        pieces.apply(block, coming)
        storage = bench.ring._ring[0].storage
        sent = typed_view(storage, 0, torch.bfloat16, (PIECE,)).clone()
        bench.ring.close()
        typed_view(storage, 0, torch.bfloat16, (PIECE,)).zero_()  # as whoever has the memory next
        torch.accelerator.synchronize(bench.device)
        assert torch.equal(block.slots[0].flat_view(block.storage)[:PIECE].cpu(), sent)
    else:
        assert coming.moved is not None
        storage = coming.moved.storage
        bench.ring.close()
        landed = typed_view(storage, 0, torch.float32, (PIECE,)).clone()
        torch.accelerator.synchronize(bench.device)
        assert torch.equal(landed, bench.twin.detach()[:PIECE])


def test_the_host_reads_a_home_on_the_host_when_the_copies_into_it_are_done(device: torch.device) -> None:
    home = MemoryHome(4 * PIECE, tier=HOST, device=device, stream=devices.of(device).new_stream(device))
    made = torch.full((PIECE,), 3.0, device=device)
    written, here = home.write(0, 4 * PIECE, made.untyped_storage()), torch.zeros(PIECE)
    read = home.read(0, 4 * PIECE, here.untyped_storage())
    written.wait()
    torch.accelerator.synchronize(device)  # what an update does before it touches a piece
    read.wait()
    assert torch.equal(here, torch.full((PIECE,), 3.0))
    home.close()


@pytest.mark.parametrize("bench", ["host, rounded", "host, split"], indirect=True)
def test_a_master_is_made_of_a_weight_on_the_host_when_that_has_come(bench: Bench) -> None:
    block, (slot,), masters = bench.block, bench.block.slots, bench.block.master_home
    assert block.home is not None and masters is not None
    torch.accelerator.synchronize(bench.device)
    ones = torch.ones(NUMBERS, dtype=torch.bfloat16, device=bench.device)
    if bench.masters == "split":
        assert isinstance(masters, SplitMasters)
        bytes_view(masters.rest.bytes, 0, masters.rest.nbytes).zero_()  # type: ignore[attr-defined]
    written = block.home.write(slot.offset_bytes, ones.nbytes, ones.untyped_storage())
    here = torch.zeros(PIECE)
    read = masters.read(slot.master_offset_bytes, here.nbytes, here.untyped_storage())
    written.wait()
    torch.accelerator.synchronize(bench.device)
    read.wait()
    assert torch.equal(here, torch.ones(PIECE))


def test_an_update_on_the_host_leaves_visits_and_gradients_of_the_device_alone() -> None:
    """And one on the device does not."""
    log: list[str] = []

    class Update:
        def wait(self) -> None:
            log.append("updated")

    for on_host in (True, False):
        gradients: Any = SimpleNamespace(
            accumulate=lambda block: None,
            awaits_accumulate=lambda block: False,
            wait=lambda: None,
            clear=lambda block: log.append("clear"),
            here=SimpleNamespace(has=lambda block: False),
        )
        updates: Any = SimpleNamespace(submit=lambda *_, **__: Update(), catch_up=lambda: None)
        unwritten: Any = {"has_masters": False, "master_home": None, "written_since_watch": list}
        block: Any = SimpleNamespace(updates_on_host=on_host, wait=lambda: None, **unwritten)
        it = UpdatePhase([block], gradients, updates, [], log.append)
        it.update(0)
        it.do(Clear(0))
        it.wait_for_device(0)
        it.do(Commit())
        assert log == (["clear", "updated"] if on_host else ["updated", "clear"])
        log.clear()


# ---------------------------------------------------------------------------------------------------- which optimizers


def on_host(optimizer: torch.optim.Optimizer) -> Any:
    (parameter,) = optimizer.param_groups[0]["params"]
    return OptimizerDriver(optimizer, {"weight": parameter}).on_host


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.AdamW([p], capturable=True), "capturable=True"),
        (lambda p: torch.optim.AdamW([p], lr=torch.tensor(0.1, device=p.device), foreach=False), "'lr' of AdamW"),
        (lambda p: torch.optim.SGD([nn.Parameter(p.bfloat16())]), "updated in torch.bfloat16"),
        (lambda p: torch.optim.AdamW([p]), None),
    ],
    ids=["capturable", "lr", "bfloat16", "AdamW"],
)
def test_updates_that_cannot_run_on_the_host_are_known_in_words(
    device: torch.device, make: Any, said: str | None
) -> None:
    found = on_host(make(nn.Parameter(torch.zeros(64, device=device)))).obstacle()
    assert said in found if said is not None else found == ""


class Rounding(torch.optim.SGD):
    """As SGD, with a last place of its own on the device."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            if parameter.device.type != "cpu":
                parameter.nextafter_(torch.full_like(parameter, torch.inf))


def test_a_trial_tells_whether_both_processors_give_the_same_bits(device: torch.device) -> None:
    weight = nn.Parameter(torch.zeros(64, 64, device=device))
    if device.type == "late":
        assert on_host(torch.optim.AdamW([weight])).agrees() and on_host(torch.optim.SGD([weight])).agrees()
    assert not on_host(Rounding([weight], lr=0.1)).agrees()
    assert not on_host(torch.optim.Adafactor([weight])).agrees()  # its sums may be added in another order


def test_numerics_tells_of_updates_that_round_otherwise(device: torch.device) -> None:
    torch.manual_seed(0)
    model, rows = Net().to(device), torch.randn(4, 64, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = plan_of(model, optimizer, rows, HOMES["all on the host"], {})
    profile = memfit.profile(model, optimizer, loss_of, rows)
    assert profile.agrees_on_host == (device.type == "late") or device.type == "cuda"
    assert declare(plan, replace(profile, agrees_on_host=True)).is_exact
    other = replace(profile, agrees_on_host=False)
    assert [change.technique for change in declare(plan, other).changes] == ["updates on the host"]
    assert regroups_sums(plan, other)
    with pytest.raises(memfit.UsageError, match="updates on the host"):
        check_exact(plan, other, "exact")
    with pytest.raises(memfit.PlanError, match="is a tensor on the device; or say update_on='device'"):
        check_meaning(plan, replace(profile, host_update_obstacle="'lr' is a tensor on the device"), is_committed=False)


# ---------------------------------------------------------------------------------------------------- bytes of the host


MOST = {"weights on the device": 0, "all on the host": 0, "states on disk": 4, "all on disk": 4}
"""Pieces of 2 MiB that come or go beside what is worked on, at least; by arithmetic: of one of AdamW's two moments."""


def _measured() -> Iterator[Any]:
    default = {("weights on the device", "after backward"), ("all on the host", "bf16 alone"), ("all on disk", "int8")}
    for homes in MOST:
        for way in ("after backward", "bf16 alone", "int8"):
            marks = [] if (homes, way) in default else [pytest.mark.slow]
            yield pytest.param(homes, way, marks=marks, id=f"{homes}-{way}")


@pytest.mark.parametrize(("homes", "way"), list(_measured()))
def test_updates_take_no_more_of_the_host_than_predicted(
    device: torch.device, homes: str, way: str, tmp_path: Path
) -> None:
    """By another road: the allocator under torch's CPU memory, from the end of backward, when no kernel runs, to the end of the step."""
    try:
        allocator = install()
    except memfit.TierUnavailableError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    model, rows = Net().to(device), torch.randn(4, 64, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {**WAYS[way], "update": UpdateTime.AFTER_BACKWARD}
    allow = options.pop("allow", frozenset())
    plan = plan_of(model, optimizer, rows, HOMES[homes], options)
    found: list[int] = []

    def look(action: object) -> None:
        if isinstance(action, Update | Clear):
            return
        if isinstance(action, Commit):
            found.append(allocator.stats().peak_bytes - base[0])
        allocator.reset_peak()
        base[0] = allocator.stats().live_bytes

    base = [0]
    with memfit.fit(model, optimizer, loss_of, rows, plan=plan, allow=allow, directory=tmp_path / "homes") as job:
        step = lower(job.schedule, job.plan, job.profile, device=device.type)
        for _ in range(2):  # the first makes states in smaller pieces, in the second the pinned memory grows
            job.step(rows)
        job._assembly.engine._observe = look
        job.step(rows)
        house, ring = job._assembly.house, job._assembly.updates._pieces._moved
        rests = sum(home.nbytes for _, home in house.placed.values() if home.tier is HOST)
        assert ring is not None
        resting = {change.owner: change.nbytes for change in step.resting if change.tier is HOST}
        buffers = resting.pop("disk buffers", 0) + resting.pop("pinned pieces", 0)
        predicted = sum(c.nbytes for c in step.resting if c.tier is HOST) - buffers
        assert rests <= rests + ring.held_bytes <= predicted <= rests + MOVED_PIECES * 2 * MIB
    at_most = most = 0
    for operation in step:
        at_most += sum(c.nbytes for c in operation.changes if (c.tier, c.owner) == (HOST, "updates"))
        most = max(most, at_most)
    assert MOST[homes] * MIB // 2 <= most
    assert found and max(found) <= most + MIB // 8, (max(found) / MIB, most / MIB)


# ---------------------------------------------------------------------------------------------------- stores


@pytest.mark.parametrize("homes", ["weights on the device", "all on the host"])
def test_a_run_with_updates_on_the_host_is_taken_up_where_it_was(
    device: torch.device, homes: str, tmp_path: Path
) -> None:
    trained(device, HOMES[homes], steps=2, store=tmp_path / "run")
    found = trained(device, HOMES[homes], steps=1, store=tmp_path / "run")
    wanted = plain(device)
    assert_alike(device, found[1:], wanted[3:])  # without the losses


def test_a_journal_is_kept_of_updates_on_the_host(device: torch.device, tmp_path: Path) -> None:
    home = HOMES["all on disk"]
    found = trained(device, home, store=tmp_path / "run", scheme="journal", update=UpdateTime.AFTER_BACKWARD)
    assert_alike(device, found, plain(device))


def test_a_step_that_a_journal_finishes_is_updated_on_the_host_from_what_was_committed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    apply, pieces = PieceUpdates.apply, iter(range(100))

    def failing(updates: PieceUpdates, block: Any, coming: Any) -> list[Any]:
        leaving = apply(updates, block, coming)
        if next(pieces) == 1:
            raise memfit.StoreError("the disk is full")
        return leaving

    torch.manual_seed(0)
    model, rows = Net(64).to(device), torch.randn(4, 64, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    home = replace(HOMES["weights on the device"], gradient_home=DISK)
    plan = plan_of(model, optimizer, rows, home, {"update": UpdateTime.AFTER_BACKWARD})
    monkeypatch.setattr(PieceUpdates, "apply", failing)
    with memfit.fit(
        model, optimizer, loss_of, rows, plan=plan, store=tmp_path / "run", scheme="journal", durability="step"
    ) as job:
        with pytest.raises(memfit.StoreError, match="the disk is full"):
            job.step(rows)
        job.step(rows)  # finished from the journal
        job.step(rows)
    assert_alike(device, [p.detach().cpu() for p in model.parameters()], plain(device, steps=2, wide=64)[2:10])
