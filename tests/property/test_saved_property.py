"""Random modules under random policies: what autograd gets back is what it saved, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from equivalence.saved_harness import Driver, make_offloader, run_driven, run_plain
from memfit.core.plan import CallPlan
from memfit.core.saved_policies import Saved
from memfit.core.tiers import Tier
from memfit.engine.offload import Offloader

WIDTH = 8


@dataclass
class Carrier:
    """What travels from layer to layer; a layer may replace, add to or change it."""

    hidden: torch.Tensor
    aside: list[torch.Tensor]


class Layer(nn.Module):
    """A random row of operations over all that a layer may do.

    Args:
        steps: names of operations, in order.
        takes_object: takes and returns a `Carrier`, which it changes; else a tensor.
    """

    def __init__(self, steps: list[str], *, takes_object: bool, is_frozen: bool) -> None:
        super().__init__()
        self.steps, self.takes_object = steps, takes_object
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in steps)
        self.norm, self.batch_norm, self.dropout = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.25)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.requires_grad_(not is_frozen)

    def forward(self, hidden: torch.Tensor, *, carrier: Carrier | None = None) -> torch.Tensor:
        for step, linear in zip(self.steps, self.linears, strict=True):
            hidden = self._step(step, linear, hidden)
        if carrier is not None:
            carrier.aside.append(hidden.mean())
            carrier.hidden = hidden
        return hidden

    def _step(self, step: str, linear: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        match step:
            case "linear":
                return linear(hidden)
            case "norm":
                return self.norm(hidden)
            case "batch norm":
                return self.batch_norm(hidden.flatten(0, 1)).view_as(hidden)
            case "dropout":
                return self.dropout(hidden)
            case "relu in place":
                return functional.relu_(linear(hidden))
            case "add in place":
                made = linear(hidden)
                made += hidden.mean()
                return made
            case "residual":
                return hidden + torch.tanh(linear(hidden))
            case "attention":
                heads = linear(hidden).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
                return functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
            case "attention dropout":
                heads = linear(hidden).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
                made = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.25)
                return made.transpose(1, 2).flatten(2)
            case "convolution":
                return self.convolution(hidden.transpose(1, 2)).transpose(1, 2)
            case "split":
                left, right = linear(hidden).chunk(2, dim=-1)
                return torch.cat([left * right.sigmoid(), right.exp().clamp(max=2)], dim=-1)
            case "checkpoint":
                inner: Any = checkpoint(lambda t: self.dropout(linear(t).sin()), hidden, use_reentrant=False)
                return inner
            case "no grad":
                with torch.no_grad():
                    scale = linear(hidden).abs().mean()
                return hidden * scale
        raise AssertionError(step)


STEPS = [
    "linear", "norm", "batch norm", "dropout", "relu in place", "add in place", "residual", "attention", "attention dropout",
    "convolution", "split", "checkpoint", "no grad",
]  # fmt: skip


class Model(nn.Module):
    """Layers with glue between them: some outputs are passed on as they are, some changed on the way."""

    def __init__(self, layers: list[Layer], order: list[int], glue: list[str]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.order, self.glue = order, glue

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        carrier = Carrier(hidden, [])
        kept = hidden
        for index, glue in zip(self.order, self.glue, strict=True):
            layer = self.layers[index]
            assert isinstance(layer, Layer)
            made = layer(hidden, carrier=carrier) if layer.takes_object else layer(hidden)
            match glue:
                case "sum":
                    made = made + kept
                case "in place":
                    made = made * 1
                    made += kept
                case "view":
                    made = made.flip(1).transpose(0, 1).contiguous().transpose(0, 1)
            kept, hidden = hidden, made
        return hidden.pow(2).mean() + sum(carrier.aside, torch.zeros(())) + carrier.hidden.sin().mean()


FATES = [
    CallPlan(saved=Saved.KEEP),
    CallPlan(saved=Saved.RECOMPUTE),
    CallPlan(saved=Saved.SELECT),
    CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.HOST),
    CallPlan(saved=Saved.OFFLOAD, saved_home=Tier.DISK),
    CallPlan(saved=Saved.RECOMPUTE, boundary_home=Tier.DISK),
    CallPlan(saved=Saved.SELECT, boundary_home=Tier.HOST),
]


@st.composite
def policies(draw: st.DrawFn, calls: int) -> list[CallPlan]:
    made: list[CallPlan] = []
    while len(made) < calls:
        fate = draw(st.sampled_from(FATES))
        joins = bool(made) and fate.saved in (Saved.RECOMPUTE, Saved.SELECT) and made[-1].saved is fate.saved
        made.append(
            CallPlan(
                saved=fate.saved,
                saved_home=fate.saved_home,
                boundary_home=fate.boundary_home,
                joins_previous=joins and draw(st.booleans()),
            )
        )
    return made


@pytest.fixture(scope="module")
def offloader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offloader]:
    with make_offloader(tmp_path_factory.mktemp("scratch"), minimum_bytes=64) as made:
        yield made


@given(data=st.data())
def test_any_module_under_any_policy_trains_as_in_plain_pytorch(data: st.DataObject, offloader: Offloader) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1000), label="seed"))
    layers = [
        Layer(
            draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5)),
            takes_object=draw(st.booleans()),
            is_frozen=draw(st.integers(0, 3)) == 0,
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    order = draw(st.lists(st.integers(0, len(layers) - 1), min_size=1, max_size=5), label="order")
    glue = draw(
        st.lists(st.sampled_from(["none", "sum", "in place", "view"]), min_size=len(order), max_size=len(order))
    )
    plan = draw(policies(len(order)), label="plan")
    has_autocast = draw(st.booleans(), label="autocast")
    model = Model(layers, order, glue)
    values = torch.randn(3, 4, WIDTH)

    def loss(made: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_autocast):
            return made(values)

    plain = run_plain(model, loss, steps=1)
    sites = [f"layers.{i}" for i in range(len(layers))]
    driver = Driver(model, sites, plan, offloader=offloader, reloads=draw(st.booleans()))
    run_driven(model, loss, driver, steps=1).assert_equal(plain)
    assert not offloader.live_storages()
