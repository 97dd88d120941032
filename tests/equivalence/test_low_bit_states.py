"""Low-bit optimizer states beside a plain loop whose states are rounded by hand after every step, bit for bit, wherever they rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import PlanError, UsageError
from memfit.core.format_catalog import BlockFormat, find_format
from memfit.core.hardware import Hardware, Link, TierSpec
from memfit.core.plan import BlockPlan, Order, Plan
from memfit.core.storage_formats import StateFormat
from memfit.core.tiers import Tier
from memfit.homes import update_pieces
from memfit.job import loading
from memfit.tensors.noise import RoundingNoise

WIDTH = 96
ENCODED = [f for f in StateFormat if f is not StateFormat.GIVEN]
TABLES = {
    StateFormat.INT8: ("dynamic8", "dynamic8-unsigned"),
    StateFormat.INT4: ("dynamic4", "linear4-unsigned"),
    StateFormat.FP8: ("fp8-block", "fp8-block"),
}
ON_DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)


class Net(nn.Module):
    """An embedding, three square layers of 9216 weights, a small head."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.rows(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def build() -> Net:
    torch.manual_seed(3)
    return Net()


def batch(step: int) -> Tensor:
    return torch.randint(0, 64, (8, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return (model(tokens) - tokens.unsqueeze(-1) / 64).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def plan_of(chosen: StateFormat, where: str) -> Plan:
    names = ["rows", "layers.0", "layers.1", "layers.2", "head"]
    homes = {} if where == "resident" else dict.fromkeys(names, ON_DISK)
    several = {"microbatches": 4, "order": Order.MICROBATCH_MAJOR} if where == "disk-4" else {}
    return Plan(blocks=homes, state_format=chosen, is_atomic=where == "atomic", **several)  # type: ignore[arg-type]


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, directory: Path, **options: Any) -> memfit.Job:
    allow = {f.allowance for f in ENCODED}
    directory.mkdir(exist_ok=True)
    return memfit.fit(
        model, optimizer, loss_of, batch(0), plan=plan, allow=allow, directory=directory / "homes", **options
    )


def round_by_hand(state: Tensor, chosen: StateFormat, *, is_signed: bool, name: str, step: int) -> Tensor:
    """A state as it comes back, by search among all levels."""
    flat = state.reshape(-1)
    if chosen is StateFormat.BF16:
        noise = RoundingNoise(seed=torch.initial_seed(), step=step).bits(name, 0, flat.numel(), flat.device)
        below = (flat.view(torch.int32) & -65536).view(torch.float32)
        rest = flat.view(torch.int32) & 0xFFFF
        above = ((flat.view(torch.int32) & -65536) + 65536).view(torch.float32)
        return torch.where(noise >= 65536 - rest, above, below).view(state.shape)
    table = find_format(TABLES[chosen][0 if is_signed else 1])
    assert isinstance(table, BlockFormat)
    levels = torch.tensor([float(v) for v in table.levels if is_signed or v >= 0])
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % table.block_size)).view(-1, table.block_size)
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    scale = largest if is_signed and chosen is not StateFormat.FP8 else largest.abs()
    normal = rows / scale.masked_fill(scale == 0, 1)
    nearest = (normal.unsqueeze(-1).double() - levels.double()).abs().argmin(-1)
    if not is_signed and levels[0] == 0:
        nearest = torch.where((nearest == 0) & (normal > 0), 1, nearest)
    return (levels[nearest] * scale).reshape(-1)[: flat.numel()].view(state.shape)


def train_by_hand(
    chosen: StateFormat, steps: int, *, microbatches: int = 1
) -> tuple[Net, dict[str, dict[str, Tensor]]]:
    """Plain PyTorch; after each step what may be encoded is rounded."""
    model = build()
    optimizer = adamw(model)
    for step in range(steps):
        optimizer.zero_grad()
        for part in batch(step).chunk(microbatches):
            factor = len(part) / 8
            (loss_of(model, part) * factor if microbatches > 1 else loss_of(model, part)).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            own = optimizer.state[parameter]
            if parameter.numel() < 4096 or name.startswith("rows"):
                continue
            for key, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
                own[key] = round_by_hand(own[key], chosen, is_signed=is_signed, name=f"{name}/{key}", step=step)
    return model, {n: dict(optimizer.state[p]) for n, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_pieces, "PIECE_ELEMENTS", 1024)


MICROBATCHES = {"resident": 1, "disk": 1, "disk-4": 4, "atomic": 1}


def _cases(places: Iterable[str], *quick: tuple[StateFormat, str]) -> list[Any]:
    """Every format in every place; all but a few run with --slow."""
    return [
        pytest.param(chosen, where, marks=[] if (chosen, where) in quick else [pytest.mark.slow])
        for where in places
        for chosen in ENCODED
    ]


@pytest.mark.parametrize(
    ("chosen", "where"),
    _cases(
        MICROBATCHES,
        (StateFormat.INT8, "disk-4"),
        (StateFormat.INT4, "resident"),
        (StateFormat.FP8, "disk"),
        (StateFormat.BF16, "atomic"),
    ),
)
def test_training_equals_plain_training_with_rounded_states(chosen: StateFormat, where: str, tmp_path: Path) -> None:
    model = build()
    optimizer = adamw(model)
    steps = 3
    with fit(model, optimizer, plan_of(chosen, where), tmp_path) as job:
        for step in range(steps):
            assert job.step(batch(step)).departures == ()
        live = optimizer.state_dict()["state"]
    plain, states = train_by_hand(chosen, steps, microbatches=MICROBATCHES[where])
    for index, (name, parameter) in enumerate(plain.named_parameters()):
        assert torch.equal(model.get_parameter(name), parameter), name
        mine = optimizer.state[model.get_parameter(name)]
        for key, value in states[name].items():
            assert mine[key].dtype == torch.float32
            assert torch.equal(mine[key], value), (name, key)
            assert torch.equal(live[index][key], value), (name, key)


def test_the_rounding_is_there() -> None:
    exact, _ = train_by_hand(StateFormat.BF16, 0)
    assert exact.head.weight.shape == (8, WIDTH)
    first, _ = train_by_hand(StateFormat.INT8, 3)
    second, _ = train_by_hand(StateFormat.INT4, 3)
    assert not torch.equal(first.get_parameter("layers.0.weight"), second.get_parameter("layers.0.weight"))


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        pytest.param(lambda model: torch.optim.Adam(model.parameters(), amsgrad=True), marks=pytest.mark.slow),
        pytest.param(lambda model: torch.optim.Adamax(model.parameters()), marks=pytest.mark.slow),
        pytest.param(lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.5), marks=pytest.mark.slow),
        pytest.param(lambda model: torch.optim.Adadelta(model.parameters()), marks=pytest.mark.slow),
        lambda model: torch.optim.Muon([layer.weight for layer in model.layers]),
    ],
    ids=["sgd", "amsgrad", "adamax", "rmsprop", "adadelta", "muon"],
)
def test_what_other_optimizers_call_their_means_is_encoded_too(make: Any, tmp_path: Path) -> None:
    updated: list[dict[str, Tensor]] = []
    for where in ("resident", "disk"):
        model = build()
        optimizer = make(model)
        with fit(model, optimizer, plan_of(StateFormat.INT8, where), tmp_path / where) as job:
            for step in range(2):
                job.step(batch(step))
            coded = {
                s.key for own in job._assembly.states.values() for slots in own.slots.values() for s in slots if s.codec
            }
            assert coded
        updated.append({name: p.detach().clone() for name, p in model.named_parameters()})
        assert all(p.isfinite().all() for p in updated[-1].values())
    assert all(torch.equal(updated[0][name], updated[1][name]) for name in updated[0])


def test_a_centered_rmsprop_keeps_its_means_as_they_are(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.RMSprop(model.parameters(), centered=True)
    with fit(model, optimizer, plan_of(StateFormat.INT8, "resident"), tmp_path) as job:
        assert not any(s.codec for own in job._assembly.states.values() for slots in own.slots.values() for s in slots)
        job.step(batch(0))


@pytest.mark.parametrize(
    ("chosen", "where"), _cases(["resident", "disk"], (StateFormat.INT8, "disk"), (StateFormat.INT4, "resident"))
)
def test_a_save_holds_decoded_states_and_training_goes_on_bit_for_bit(
    chosen: StateFormat, where: str, tmp_path: Path
) -> None:
    straight = build()
    with fit(straight, adamw(straight), plan_of(chosen, where), tmp_path / "straight") as job:
        for step in range(4):
            job.step(batch(step))
    model = build()
    optimizer = adamw(model)
    with fit(model, optimizer, plan_of(chosen, where), tmp_path / "first") as job:
        for step in range(2):
            job.step(batch(step))
        job.save(tmp_path / "saved")
        live = optimizer.state_dict()["state"]
    again = build()
    resumed = adamw(again)
    assert loading.load(tmp_path / "saved", again, resumed).steps == 2
    for index, parameter in enumerate(again.parameters()):
        for key, value in live[index].items():
            assert torch.equal(resumed.state[parameter][key], value)
    if chosen is StateFormat.BF16:
        return  # its noise is counted by the job's steps, which begin anew
    with fit(again, resumed, plan_of(chosen, where), tmp_path / "second") as job:
        for step in range(2, 4):
            job.step(batch(step))
    for name, parameter in straight.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


@pytest.mark.parametrize("chosen", [StateFormat.GIVEN, *ENCODED])
def test_bytes_at_home_and_moved_are_those_that_are_predicted(chosen: StateFormat, tmp_path: Path) -> None:
    model = build()
    with fit(model, adamw(model), plan_of(chosen, "disk"), tmp_path) as job:
        job.step(batch(0))
        read, written = (dict(moved) for moved in job.bytes_moved)
        job.step(batch(1))
        after_read, after_written = job.bytes_moved
        from memfit.step.lower import lower
        from memfit.step.predict import predict

        timeline = predict(lower(job.schedule, job.plan, job.profile))
        expected = sum(
            2 * 4 * p.numel() if p.numel() < 4096 or name.startswith("rows") else 2 * _bytes(chosen, p.numel())
            for name, p in model.named_parameters()
        )
        assert sum(job.profile.state_bytes.values()) == expected
        assert timeline.bytes_written["state"] == after_written["state"] - written["state"] == expected
        assert timeline.bytes_read["state"] == after_read["state"] - read.get("state", 0) == expected
        at_home = sum(own.nbytes for own in job._assembly.states.values())
        assert expected <= at_home < expected + 4096 * 2 * len(list(model.parameters()))
        assert sum(job.profile.state_home_bytes.values()) == at_home


def _bytes(chosen: StateFormat, numel: int) -> int:
    match chosen:
        case StateFormat.GIVEN:
            return 4 * numel
        case StateFormat.INT4:
            return math.ceil(numel / 128) * (4 + 64)
        case StateFormat.BF16:
            return 2 * numel
        case _:
            return math.ceil(numel / 256) * (4 + 256)


def test_a_plan_with_low_bit_states_needs_to_be_allowed(tmp_path: Path) -> None:
    model = build()
    plan = plan_of(StateFormat.INT4, "resident")
    with pytest.raises(UsageError, match='allow={"int4-state"}'):
        memfit.fit(model, adamw(model), loss_of, batch(0), plan=plan, allow={"int8-state"})


def test_the_format_is_in_the_plan_s_text() -> None:
    plan = plan_of(StateFormat.FP8, "disk")
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="int3"):
        Plan.from_json(plan.to_json().replace('"fp8"', '"int3"'))


def _slow_disk() -> Iterator[Hardware]:
    for speed in (1e7, 1e14):
        link = Link(read_bytes_per_s=speed, write_bytes_per_s=speed)
        yield Hardware(
            device="cuda",
            flops_per_s=1e13,
            tiers={
                Tier.DEVICE: TierSpec(nbytes=1 << 40),
                Tier.HOST: TierSpec(nbytes=1 << 40, link=link),
                Tier.DISK: TierSpec(nbytes=1 << 40, link=link),
            },
        )


def test_a_format_is_chosen_where_it_is_allowed_and_faster_and_nowhere_else(tmp_path: Path) -> None:
    slow, fast = _slow_disk()
    found: dict[str, StateFormat] = {}
    for name, hardware, allow in (
        ("not allowed", slow, set[str]()),
        ("slow", slow, {"int8-state"}),
        ("slow, two", slow, {"int8-state", "int4-state"}),
        ("fast", fast, {"int8-state", "int4-state"}),
        ("all fits", slow, {"int8-state"}),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024))
        job = memfit.fit(
            model,
            torch.optim.AdamW(model.parameters()),
            lambda net, rows: net(rows).square().mean(),
            torch.randn(2, 1024),
            limit="400MiB" if name == "all fits" else "40MiB",
            emulate_device=True,
            hardware=hardware,
            allow=allow,
            directory=tmp_path / "homes",
        )
        found[name] = job.plan.state_format
        assert ("Optimizer states rest in" in job.reason) == (found[name] is not StateFormat.GIVEN)
        job.close()
        del job, model  # the next one would have to live beside them
    assert found == {
        "not allowed": StateFormat.GIVEN,
        "slow": StateFormat.INT8,
        "slow, two": StateFormat.INT8,  # in either all fits on the device: the more exact one
        "fast": StateFormat.GIVEN,
        "all fits": StateFormat.GIVEN,
    }
