"""The results that selection keeps are those that the profile counts: one table, two readers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from equivalence.saved_harness import JOINED_SELECT, SELECT, WRITES, Driver
from memfit.core.operators import policies_that_keep
from memfit.core.saved_policies import Saved
from memfit.engine.frames import RecomputedFrame

WIDTH = 16


class Layer(nn.Module):
    """A bit of everything: products that stay, that are changed in place by every road, that draw numbers, that nobody asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Parameter(torch.randn(2, 8, 8) / 3)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        kept = self.up(hidden).sin()
        changed = functional.relu_(self.up(kept))
        heads = changed.unflatten(-1, (2, 8)).transpose(1, 2)
        product = torch.matmul(heads, self.mix)
        through_view = torch.matmul(heads, self.mix)
        through_view += product.cos()
        attended = functional.scaled_dot_product_attention(heads, product, through_view)
        random = functional.scaled_dot_product_attention(heads, product, heads, dropout_p=0.5)
        made = (attended + random).transpose(1, 2).flatten(2)
        turned = self.convolution(made.transpose(1, 2)).transpose(1, 2).exp()
        return hidden + self.down(turned)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values)
        return values


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["values"]).square().mean()


@pytest.mark.parametrize("are_joined", [False, True])
def test_what_the_profile_says_is_kept_is_what_is_kept(are_joined: bool) -> None:
    model, batch = Model(), {"values": torch.randn(4, 6, WIDTH)}
    profile = memfit.profile(model, torch.optim.SGD(model.parameters()), _loss, batch)
    (trace,) = profile.traces.values()
    driver = Driver(
        model,
        ["layers.0", "layers.1"],
        [SELECT, JOINED_SELECT] if are_joined else [SELECT],
        extra_stays=[batch["values"]],
    )
    with driver, WRITES.watching():
        loss = _loss(model, batch)
        for frame, call in zip(driver.frames, trace.calls, strict=True):
            assert isinstance(frame, RecomputedFrame)
            assert frame._record is not None
            selection = frame._record.selection
            assert selection is not None
            storages = {storage._cdata: storage.nbytes() for storage in selection.storages()}
            held = call.held(Saved.SELECT)
            assert held is not None
            assert sum(storages.values()) == held.nbytes - (0 if are_joined else held.unneeded_bytes)
            assert storages
        del loss


def test_an_operator_without_a_schema_or_one_that_writes_is_not_selected() -> None:
    aten = torch.ops.aten
    x = torch.randn(2, 2)
    assert Saved.SELECT in policies_that_keep(aten.mm.default, (x, x), {})
    assert Saved.SELECT in policies_that_keep(aten.mm.dtype, (x, x, torch.float32), {})
    assert not policies_that_keep(aten.mm.out, (x, x), {"out": x})
    assert not policies_that_keep(aten.add.Tensor, (x, x), {})
    assert not policies_that_keep(torch.ops.higher_order.cond, (), {})
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert Saved.SELECT in policies_that_keep(attention, (x, x, x), {})
    assert not policies_that_keep(attention, (x, x, x, 0.25), {})
