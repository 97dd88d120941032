"""`fit(compile="blocks")`: the bits of layers that are compiled by hand, measured, told, and plain again at the end."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn import functional

import memfit
from memfit.core.compiled_calls import CompiledBytes, CompiledShare, at_shares
from memfit.core.errors import MemfitWarning, TierUnavailableError, UnsupportedError, UsageError
from memfit.core.plan import CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.devices.binding import install
from memfit.planner import compiled_blocks
from memfit.planner.compiled_blocks import BlockCost
from memfit.step.lower import lower
from memfit.step.predict import predict
from memory.measured_steps import Interval, measure_step
from unit.profiles import gpt_profile

WIDTH, ROWS = 16, 6
# What is aligned, and numbers.
SLACK_BYTES = 1 << 14


class Layer(nn.Module):
    """Point-wise operations behind a product."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, hidden: Tensor, *, scale: float) -> Tensor:
        return hidden + scale * torch.tanh(functional.gelu(self.mix(hidden)) + 1.0)


class Net(nn.Module):
    """Three equal layers between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.entry(hidden)
        for layer in self.layers:
            hidden = layer(hidden, scale=0.5)
        return self.head(hidden)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()


def parts() -> tuple[Net, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(ROWS, WIDTH)


@pytest.fixture
def without_measuring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiles without code of its own, and takes whatever was measured for a gain."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled_blocks, "_why_not", lambda plain, compiled: "")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.compiles
@pytest.mark.usefixtures("without_measuring")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.14 looks there while it compiles
@pytest.mark.parametrize("saved", [Saved.KEEP, Saved.RECOMPUTE])
def test_blocks_that_fit_compiles_train_as_layers_compiled_by_hand(saved: Saved) -> None:
    plain, optimizer, batch = parts()
    for layer in plain.layers:
        layer.compile(backend="aot_eager")
    for _ in range(2):
        optimizer.zero_grad()
        loss(plain, batch).backward()
        optimizer.step()
    torch._dynamo.reset()
    model, optimizer, batch = parts()
    torch.manual_seed(3)
    drawn = torch.get_rng_state()
    plan = Plan(calls=(CallPlan(), *(CallPlan(saved=saved) for _ in range(3))))
    counts = torch._dynamo.utils.counters  # type: ignore[attr-defined]
    with memfit.fit(model, optimizer, loss, batch, plan=plan, compile="blocks") as job:
        assert torch.equal(torch.get_rng_state(), drawn), "measuring draws from streams that are put back"
        assert "3 blocks Layer" in job.reason and "steps earn back" in job.reason
        assert "compiled blocks (reordered)" in str(job.numerics)
        graphs = counts["stats"]["unique_graphs"]
        for _ in range(2):
            job.step(batch)
        assert counts["stats"]["unique_graphs"] == graphs, "the copy's code serves the blocks"
        assert not counts["graph_break"]
    assert all(layer._compiled_call_impl is None for layer in model.layers)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.compiles
@pytest.mark.usefixtures("without_measuring")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_verify_compares_compiled_blocks_with_plain_ones_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager_decomp_partition")
    found = memfit.verify(*parts()[:2], loss, parts()[2], compile="blocks", steps=2)
    assert found.kind in ("bitwise", "rounding"), found
    assert "layer.compile()" in found.declared


@pytest.mark.compiles
@pytest.mark.usefixtures("without_measuring")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_run_that_goes_on_with_other_blocks_compiled_says_so(tmp_path: Path) -> None:
    with memfit.fit(*parts()[:2], loss, parts()[2], compile="blocks", limit="4GiB", store=tmp_path) as job:
        job.step(parts()[2])
    with memfit.fit(*parts()[:2], loss, parts()[2], compile="blocks", limit="4GiB", store=tmp_path) as job:
        assert job.reason.count("Compiled:") == 1
        job.step(parts()[2])
    with (
        pytest.warns(MemfitWarning, match="had 3 blocks compiled, and goes on with 0"),
        memfit.fit(*parts()[:2], loss, parts()[2], limit="4GiB", store=tmp_path) as job,
    ):
        assert "Compiled:" not in job.reason and job.steps == 2


def test_what_gains_nothing_or_takes_more_memory_stays_plain() -> None:
    cost = BlockCost(
        forward_s=1.0,
        backward_s=2.0,
        saved_bytes=100,
        forward_peak_bytes=150,
        backward_peak_bytes=100,
    )
    why_not = compiled_blocks._why_not
    assert not why_not(cost, replace(cost, backward_s=1.9))
    assert "too little" in why_not(cost, replace(cost, backward_s=1.95))
    for more in ({"saved_bytes": 101}, {"forward_peak_bytes": 151}, {"backward_peak_bytes": 101}):
        assert "200 B" in why_not(cost, replace(cost, backward_s=1.0, **more))
    one = compiled_blocks.MeasuredClass(
        name="Layer", sites=("a", "b"), plain=cost, compiled=replace(cost, backward_s=1.5), compile_s=10.0
    )
    assert one.in_words().endswith("compiling took 10 s, which 10 steps earn back")


def test_compiling_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, batch = parts()
    with pytest.raises(UsageError, match='numerics="exact"'):
        memfit.fit(model, optimizer, loss, batch, compile="blocks", numerics="exact")
    with pytest.raises(UsageError, match='compile is "blocks" or None'):
        memfit.fit(model, optimizer, loss, batch, compile="all")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="lines=True"):
        memfit.fit(model, optimizer, loss, batch, compile="blocks", lines=True)

    def find() -> str:
        raise TierUnavailableError("none")

    monkeypatch.setattr(compiled_blocks, "find_compiler", find)
    with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler"):
        memfit.fit(model, optimizer, loss, batch, compile="blocks")
    memfit.fit(model, optimizer, loss, batch).close()


def test_blocks_that_draw_random_numbers_or_have_hooks_stay_plain() -> None:
    model, optimizer, batch = parts()
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2)])
    model.forward = lambda hidden: model.head(model.layers[1](model.layers[0](model.entry(hidden))))  # type: ignore[method-assign]
    with memfit.fit(model, torch.optim.SGD(model.parameters(), 0.1), loss, batch, compile="blocks") as job:
        assert "Not compiled: 2 blocks Sequential: it draws random numbers" in job.reason
        assert job.numerics.is_exact
    model, optimizer, batch = parts()
    model.layers[1].get_submodule("mix").register_forward_hook(lambda *_: None)
    with memfit.fit(model, optimizer, loss, memfit.Parts([batch, batch]), compile="blocks") as job:
        assert "Not compiled: 3 blocks Layer: it has hooks" in job.reason


def test_calls_that_are_compiled_take_their_share_and_are_never_selected() -> None:
    profile = gpt_profile(layers=3, batch_rows=2, rows=(2,))
    names = [call.site for call in profile.traces[2].calls if call.is_repeated]
    assert any(call.held(Saved.SELECT) for call in profile.traces[2].calls)
    found = at_shares(profile, dict.fromkeys(names, CompiledShare(forward=0.5, backward=0.25)))
    assert found.compiled == tuple(names)
    for before, after in zip(profile.traces[2].calls, found.traces[2].calls, strict=True):
        if before.site not in names:
            assert after == before
            continue
        assert after.forward_flops == round(before.forward_flops / 2)
        assert after.backward_flops == round(before.backward_flops / 4)
        assert after.held(Saved.SELECT) is None


class Wide(nn.Module):
    """Layers whose point-wise operations keep much more for backward than what compiled ones keep."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(5)])

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.entry(hidden)
        for layer in self.layers:
            hidden = layer(hidden, scale=0.5)
        return hidden


class Ending(nn.Module):
    """Ends in an operation that saves its result, which code behind it adds to what went in."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.mix(functional.gelu(hidden)))


class Passing(nn.Module):
    """Returns one of its arguments beside what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)

    def forward(self, hidden: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(functional.gelu(self.mix(hidden)) * bias) + hidden, bias


class Widening(nn.Module):
    """Plain, it keeps its argument in another dtype alone; compiled, the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.double()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.sigmoid(self.mix(normed.float())) * 0.5


class Stack(Wide):
    """Layers of a kind, with code between them."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind() for _ in range(5)])
        self.bias = nn.Linear(64, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.entry(hidden)
        bias = self.bias(hidden)
        for layer in self.layers:
            if isinstance(layer, Passing):
                hidden, bias = layer(hidden, bias)
            else:
                hidden = hidden + layer(hidden)
        return hidden


def intervals_of(plan: Plan, directory: Path, model: nn.Module | None = None) -> tuple[list[Interval], memfit.Profile]:
    """Trains with compiled blocks, and measures a step action by action; and the profile of the job."""
    allocator = install()
    gc.collect()
    before = allocator.stats().live_bytes - (sum(p.nbytes for p in model.parameters()) if model else 0)
    torch.manual_seed(0)
    model, batch = model or Wide(), torch.randn(1024, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memfit.fit(model, optimizer, loss, batch, plan=plan, compile="blocks", directory=directory) as job:
        assert "Compiled: 5 blocks" in job.reason, job.reason
        timeline = predict(lower(job.schedule, job.plan, job.profile, staging_bytes=0))
        job.step(batch)
        return measure_step(job, batch, timeline, allocator, before), job.profile


def assert_within_prediction(intervals: list[Interval], slack_bytes: int = SLACK_BYTES) -> None:
    for i in intervals:
        assert i.peak_bytes <= i.predicted_peak_bytes + slack_bytes, i
        assert i.live_bytes <= i.predicted_bytes + slack_bytes, i


KEEP, RECOMPUTE = CallPlan(), CallPlan(saved=Saved.RECOMPUTE)
CALLS = {
    "keep": [KEEP] * 5,
    "recompute": [RECOMPUTE] * 5,
    "mixed": [KEEP, RECOMPUTE, RECOMPUTE, KEEP, RECOMPUTE],
    "offload": [CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK)] * 5,
}


@pytest.mark.compiles
@pytest.mark.usefixtures("without_measuring")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("saved", CALLS)
def test_compiled_blocks_hold_what_was_measured_of_one(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager_decomp_partition")
    intervals, profile = intervals_of(Plan(calls=(KEEP, *CALLS[saved])), tmp_path)
    assert_within_prediction(intervals)
    peak = max(i.peak_bytes for i in intervals)
    assert max(i.predicted_peak_bytes for i in intervals) <= 1.1 * peak + SLACK_BYTES
    model = Wide()
    plain = memfit.profile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, torch.randn(1024, 64))
    kept, kept_plain = ([one.traces[1024].saved_bytes(call) for call in range(1, 6)] for one in (profile, plain))
    assert kept == [4 * 64 * 1024] * 5, "the product alone"
    assert kept_plain == [2 * nbytes for nbytes in kept]


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("kind", "backend"), [(Ending, "inductor"), (Passing, "inductor"), (Widening, "aot_eager_decomp_partition")]
)
def test_what_a_compiled_block_keeps_of_arguments_and_outputs_is_counted(
    kind: type[nn.Module], backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_blocks, "BACKEND", backend)
    monkeypatch.setattr(compiled_blocks, "MOST_SHARE", math.inf)
    torch._dynamo.reset()
    plan = Plan(calls=(KEEP, KEEP, *CALLS["mixed"]))
    # The compiler keeps some tensors of its own; one of the program's has 256 KiB.
    assert_within_prediction(intervals_of(plan, tmp_path, Stack(kind))[0], 3 << 16)
    torch._dynamo.reset()


@pytest.mark.compiles
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_blocks_that_a_compiler_fuses_stay_within_what_is_predicted_of_them(
    microbatches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of microbatches, plain blocks' bytes are the bound: where neither forward nor backward of the whole sample takes more."""
    monkeypatch.setattr(compiled_blocks, "MOST_SHARE", math.inf)
    torch._dynamo.reset()
    plan = Plan(microbatches=microbatches, calls=(KEEP, *CALLS["mixed"]))
    assert_within_prediction(intervals_of(plan, tmp_path)[0], 3 << 16)
    torch._dynamo.reset()


@pytest.mark.compiles
@pytest.mark.usefixtures("without_measuring")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("limit", "set_by_user", "compiled_with"), [(None, 1.0, 1.0), ("4GiB", 1.0, 0.9), ("4GiB", 0.4, 0.4)]
)
def test_compiled_code_keeps_less_where_there_is_a_limit(
    limit: str | None, set_by_user: float, compiled_with: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        budgets.append(functorch_config.activation_memory_budget)
        return graph.forward

    monkeypatch.setattr(compiled_blocks, "BACKEND", backend)
    model, optimizer, batch = parts()
    with (
        functorch_config.patch(activation_memory_budget=set_by_user),
        memfit.fit(model, optimizer, loss, batch, limit=limit, compile="blocks") as job,
    ):
        job.step(batch)
        assert functorch_config.activation_memory_budget == set_by_user
    assert budgets and set(budgets) == {compiled_with}


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_nothing_of_what_was_measured_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_blocks, "MOST_SHARE", math.inf)
    torch._dynamo.reset()
    allocator = install()
    model, batch = Wide(512), torch.randn(16, 512)
    for layer in model.layers:
        vars(layer)["own"] = [layer]  # layers of transformers lie in cycles
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    try:
        before = allocator.stats().live_bytes
        with memfit.fit(model, optimizer, loss, batch, compile="blocks", directory=tmp_path):
            # The weights of a copied block, and their gradients, are 1 MiB each.
            assert allocator.stats().live_bytes <= before + 4 * SLACK_BYTES
    finally:
        gc.enable()
    torch._dynamo.reset()


def test_measured_bytes_are_those_of_calls_of_the_same_sizes() -> None:
    profile = gpt_profile(layers=3, batch_rows=2, rows=(2, 1))
    whole = profile.traces[2]
    site = next(call for call in whole.calls if call.is_repeated)
    kept = sum(s.nbytes for s in whole.storages if s.saved_inside == (site.index,) and not s.argument_of)
    own = CompiledBytes(saved=kept // 4, plain_saved=kept, forward_peak=1000, backward_peak=800, plain=site)
    found = at_shares(profile, {site.site: CompiledShare(forward=0.5, backward=0.5, bytes=own)})
    changed, plain = found.traces[2].calls[site.index], found.traces[1].calls[site.index]
    freed = whole.saved_bytes(site.index) - found.traces[2].saved_bytes(site.index)
    assert 0 < freed <= whole.saved_bytes(site.index) - own.saved
    assert changed.inside_peak_bytes == 1000 and changed.backward_leaves_bytes == site.backward_leaves_bytes + freed
    assert found.traces[1].storages == profile.traces[1].storages
    assert plain.forward_peak_bytes == profile.traces[1].calls[site.index].forward_peak_bytes
    # A compiled call makes what it saves also where nobody keeps it.
    assert plain.forward_peak(Saved.RECOMPUTE) == plain.forward_peak_bytes


def test_layers_that_the_user_compiled_are_not_selected() -> None:
    model, optimizer, batch = parts()
    for layer in model.layers[1:]:
        layer.compile(backend="eager")
    profile = memfit.profile(model, optimizer, loss, batch)
    held = {call.site: call.held(Saved.SELECT) for call in profile.traces[ROWS].calls}
    assert held["layers.0"] is not None
    assert held["layers.1"] is None and held["layers.2"] is None
