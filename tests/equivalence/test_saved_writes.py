"""Changes in place under frames of saved tensors: known by storage, through whatever tensor they go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from equivalence.saved_harness import (
    JOINED_SELECT,
    POLICIES,
    SELECT,
    WRITES,
    Driver,
    blocks,
    make_offloader,
    run_driven,
    run_plain,
    under,
)
from memfit.core.errors import UnsupportedError
from memfit.engine.offload import Offloader


@pytest.fixture
def offloader(tmp_path: Path) -> Iterator[Offloader]:
    with make_offloader(tmp_path) as made:
        yield made


def squares(values: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: model(values).pow(2).sum()


def test_a_batched_product_that_is_changed_through_its_unsafe_view_is_made_again() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
            self.weight = nn.Parameter(torch.randn(2, 2, 8, 8) / 3)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            product = torch.matmul(self.up(hidden).view(2, 2, -1, 8), self.weight)  # bmm and _unsafe_view
            product += torch.tanh(hidden).view(product.shape)
            return hidden + self.down(product.view(hidden.shape))

    model, values = nn.Sequential(Adds(), Adds()), torch.randn(12, 8)
    plain = run_plain(model, squares(values))
    for policies in ([SELECT], [SELECT, JOINED_SELECT]):
        run_driven(model, squares(values), Driver(model, ["0", "1"], policies)).assert_equal(plain)


def _by_unsafe_view(values: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._unsafe_view(values, values.shape)


def _by_set(values: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.set_(torch.empty(0), values.detach())


_ALIASES = {
    "unsafe view": _by_unsafe_view,
    "unsafe chunk": lambda values: values.unsafe_chunk(1)[0],
    "data": lambda values: values.data,
    "set_": _by_set,
}
_WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda values: values.add_(1),
    "copy_": lambda values: values.copy_(torch.ones(())),
    "out=": lambda values: torch.add(values, 1, out=values),
    "foreach": lambda values: torch.ops.aten._foreach_add_([values], 1.0),
    "a part": lambda values: values[1:2].zero_(),
}


@pytest.mark.parametrize("alias", sorted(_ALIASES))
@pytest.mark.parametrize("way", sorted(_WAYS))
def test_an_argument_that_is_changed_past_its_version_counter_is_refused(
    alias: str, way: str, offloader: Offloader
) -> None:
    model = blocks(2)
    for policy in ("recompute", "select", "boundary away"):
        with under(POLICIES[policy], model, offloader) as driver, WRITES.watching():
            values = nn.functional.relu(torch.randn(4, 8, requires_grad=True)) * 2
            loss = model(values).sum()
            with torch.no_grad():
                _WAYS[way](_ALIASES[alias](values))
            # As an argument, or as what the call's first operation saved.
            with pytest.raises(
                (UnsupportedError, RuntimeError), match=r"argument of 0 .* changed in place|0 has been modified"
            ):
                driver.backward(loss)


@pytest.mark.parametrize("alias", sorted(_ALIASES))
@pytest.mark.parametrize("policy", ["recompute", "select", "offload to disk", "offload to host"])
def test_a_saved_tensor_that_is_changed_past_its_version_counter_is_refused(
    policy: str, alias: str, offloader: Offloader
) -> None:
    class Saves(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            made = values.exp()
            self.made = made.detach()
            return made * 2

    model = nn.Sequential(Saves())
    for leaves_early in (False, True):
        with under(POLICIES[policy], model, offloader) as driver, WRITES.watching():
            loss = model(torch.randn(8, 64, requires_grad=True)).sum()
            if leaves_early:
                driver.end_forward()
            with torch.no_grad():
                _ALIASES[alias](model[0].made).add_(1)  # type: ignore[union-attr]
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                driver.backward(loss)


def test_two_counters_at_one_version_make_two_moved_storages(offloader: Offloader) -> None:
    class Saves(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values * values

    model = nn.Sequential(Saves(), Saves())
    values = torch.randn(8, 64, requires_grad=True)
    kept: list[torch.Tensor] = []

    def run(leave: Callable[[], None]) -> torch.Tensor:
        first = values * 1
        second = _by_unsafe_view(first)
        kept.append(model[0](first))  # the loss does not need it, but it holds its moved storage
        leave()
        with torch.no_grad():
            second.data.add_(1)
        return model[1](second).sum()

    (plain,) = torch.autograd.grad(run(lambda: None), values)
    with under(POLICIES["offload to disk"], model, offloader) as driver, WRITES.watching():
        driver.backward(run(driver.end_forward))
    assert values.grad is not None
    assert torch.equal(plain, values.grad)


def test_chunks_of_one_product_that_change_in_turn_are_not_taken_for_each_other(offloader: Offloader) -> None:
    cell = nn.LSTMCell(8, 8)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values + self.cell(values)[0]

    model, values = nn.Sequential(Recurrent(), Recurrent()), torch.randn(12, 8)
    plain = run_plain(model, squares(values))
    for policy in POLICIES:
        driver = Driver(model, ["0", "1"], POLICIES[policy], offloader=offloader)
        run_driven(model, squares(values), driver).assert_equal(plain)


class _Remembers(nn.Module):
    """Reads what its last call left on it, and leaves something else: an attribute, and places in a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = torch.zeros(12, 8)
        self.notes = [torch.ones(8)]
        self.named = {"scale": torch.ones(8)}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        inside = self.linear(values) * self.notes[0] * self.named["scale"] + self.last
        made = torch.tanh(inside) * self.gate(values)
        self.last = made.detach() * 1
        self.notes[0] = self.notes[0] + 0.5
        self.named["scale"] = self.named["scale"] * 1.5
        return made


def test_a_call_runs_again_on_what_its_module_remembered_then(offloader: Offloader) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(3)
        shared = _Remembers()
        return nn.Sequential(nn.Linear(8, 8), shared, _Remembers(), shared)

    values = torch.randn(12, 8)
    plain = run_plain(model(), squares(values), steps=1)
    for policy in POLICIES:
        under_it = model()
        driver = Driver(under_it, ["1", "2"], POLICIES[policy], offloader=offloader)
        run_driven(under_it, squares(values), driver, steps=1).assert_equal(plain)


def test_a_tensor_on_a_module_that_a_call_reads_and_changes_in_place_is_refused(offloader: Offloader) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.count = torch.ones(8)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.count += 0.5
            return torch.tanh(self.linear(values) + self.count)

    model, values = nn.Sequential(nn.Linear(8, 8), Counts()), torch.randn(12, 8)
    for policy in ("recompute", "select", "boundary away"):
        driver = Driver(model, ["1"], POLICIES[policy], offloader=offloader)
        with pytest.raises(UnsupportedError, match="keeps on itself \\('count'\\)"):
            run_driven(model, squares(values), driver, steps=1)
