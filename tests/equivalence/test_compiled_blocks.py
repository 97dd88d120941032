"""`fit(compile="blocks")`: the bits of layers that are compiled by hand, measured, told, and plain again at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.core.compiled_calls import CompiledShare, at_shares
from memfit.core.errors import MemfitWarning, TierUnavailableError, UnsupportedError, UsageError
from memfit.core.plan import CallPlan, Plan
from memfit.core.saved_policies import Saved
from memfit.job import compiled_blocks
from unit.profiles import gpt_profile

WIDTH, ROWS = 16, 6


class Layer(nn.Module):
    """Point-wise operations behind a product."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

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
    cost = compiled_blocks.BlockCost(forward_s=1.0, backward_s=2.0, saved_bytes=100, peak_bytes=200)
    why_not = compiled_blocks._why_not
    assert not why_not(cost, replace(cost, backward_s=1.9))
    assert "too little" in why_not(cost, replace(cost, backward_s=1.95))
    for more in ({"saved_bytes": 101}, {"peak_bytes": 201}):
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


def test_layers_that_the_user_compiled_are_not_selected() -> None:
    model, optimizer, batch = parts()
    for layer in model.layers[1:]:
        layer.compile(backend="eager")
    profile = memfit.profile(model, optimizer, loss, batch)
    held = {call.site: call.held(Saved.SELECT) for call in profile.traces[ROWS].calls}
    assert held["layers.0"] is not None
    assert held["layers.1"] is None and held["layers.2"] is None
