"""Worked examples of the field, with answers known beforehand, as memfit itself does them.

The one on defragmenting a buffer of `narrow` views is `test_the_textbook_arena_keeps_live_tensors_through_defragmentation` in `memory/test_arena.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import memfit
from memfit.core.plan import CallPlan, Order, Plan, Saved

WIDTH, ROWS = 8, 4


@dataclass
class Chain:
    """A chain of equal layers; which outputs are alive is seen by weak references to their storages.

    Layer i makes output i from output i-1 (the input is output 0); a linear layer saves its input for backward.
    """

    layers: int
    runs: list[int] = field(default_factory=list[int])
    """Numbers of the layers in the order in which they ran forward, recomputing included."""
    peak: int = 0
    """Most outputs alive at once, whenever a layer's forward or backward began."""
    at_backward: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """Outputs alive when a layer's backward began."""
    when_made_again: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """Outputs alive when a layer had run forward again."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.layers)))
        self._made: list[tuple[int, StorageWeakRef]] = []
        for number, layer in enumerate(self.model, start=1):
            layer.register_forward_hook(partial(self._ran, number))

    def _ran(self, number: int, _layer: nn.Module, _args: tuple[Tensor], output: Tensor) -> None:
        if type(output) is not Tensor or output.device.type != "cpu" or not torch.is_grad_enabled():
            return  # the trace
        is_first = number not in self.runs
        self.runs.append(number)
        self._made.append((number, StorageWeakRef(output.untyped_storage())))
        self.peak = max(self.peak, len(self.alive()))
        if is_first:
            output.register_hook(partial(self._goes_back, number))
        else:
            self.when_made_again[number] = self.alive()

    def _goes_back(self, number: int, _gradient: Tensor) -> None:
        self.at_backward[number] = self.alive()
        self.peak = max(self.peak, len(self.alive()))

    def alive(self) -> set[int]:
        return {number for number, storage in self._made if not storage.expired()}

    def train_one_step(self, segment: int) -> None:
        """One step in which every `segment`-th output is kept and the others are made again."""
        calls = tuple(
            CallPlan(saved=Saved.RECOMPUTE, joins_previous=index % segment != 0) for index in range(self.layers)
        )
        batch = {"x": torch.randn(ROWS, WIDTH)}
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        with memfit.fit(self.model, optimizer, _sum, batch, plan=Plan(calls=calls)) as job:
            self.runs.clear()
            self._made.clear()
            self.peak = 0
            job.step(batch)


def _sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).sum()


def _distance(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def test_a_chain_of_six_with_every_second_output_kept_makes_five_then_three_again() -> None:
    chain = Chain(6)
    chain.train_one_step(2)
    again = chain.runs[6:]
    assert chain.runs[:6] == [1, 2, 3, 4, 5, 6]
    # What is missing is made again from the back: 5 for {4, 5, 6}, then 3 for {2, 3, 4}, then 1.
    assert [number for number in again if number % 2] == [5, 3, 1]
    # Kept beside the last output: 2 and 4. Nothing of 1, 3, 5 outlived the forward.
    assert chain.at_backward[6] - {6} == {2, 4}
    # The last segment lives on {4, 5, 6}, beside 2 that waits; the next one on {2, 3, 4}, when 5 and 6 are gone.
    assert {4, 5} <= chain.when_made_again[5] <= {2, 4, 5, 6}
    assert {2, 3} <= chain.when_made_again[3] <= {2, 3, 4}
    assert chain.when_made_again[1] <= {1, 2}


@pytest.mark.parametrize(("layers", "segment", "most"), [(100, 10, 20), (64, 8, 16)])
def test_a_chain_with_every_kth_output_kept_holds_n_over_k_plus_k_and_runs_at_most_n_layers_more(
    layers: int, segment: int, most: int
) -> None:
    assert most == layers // segment + segment
    chain = Chain(layers)
    chain.train_one_step(segment)
    assert chain.peak <= most
    assert chain.peak > layers // segment
    assert layers < len(chain.runs) <= 2 * layers


@pytest.mark.parametrize(
    ("is_frozen", "share"),
    [
        (False, 1 / 3),  # backward makes gradients of inputs and of weights: two forwards
        (True, 1 / 2),  # weights that do not train: gradients of inputs only, one forward
    ],
)
def test_recomputing_everything_once_costs_a_third_or_half_of_a_step_by_what_backward_costs(
    is_frozen: bool, share: float
) -> None:
    model = Chain(12).model
    if is_frozen:
        # The first layer trains, so that gradients flow through all others.
        for layer in list(model)[1:]:
            layer.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    profile = memfit.profile(model, optimizer, _sum, {"x": torch.randn(ROWS, WIDTH)})
    calls = profile.traces[ROWS].calls[1:]  # the first one's input needs no gradient
    forward = sum(call.forward_flops for call in calls)
    backward = sum(call.backward_flops for call in calls)
    assert forward == len(calls) * 2 * ROWS * WIDTH * WIDTH
    assert forward / (forward + backward) == pytest.approx(share)


@pytest.mark.parametrize("order", [Order.MICROBATCH_MAJOR, Order.LAYER_MAJOR])
def test_a_batch_cut_in_m_saves_an_mth_of_the_activations_and_gives_equal_gradients(order: Order) -> None:
    microbatches, rows = 4, 8
    batch = {name: torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3)) for name in ("x", "y")}
    whole = Chain(6).model
    _distance(whole, batch).backward()

    model = Chain(6).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    profile = memfit.profile(model, optimizer, _distance, batch, microbatches=(1, microbatches))
    # The last call holds the loss as well, a number whatever the rows.
    whole_calls, part_calls = (profile.traces[count].calls[:-1] for count in (rows, rows // microbatches))
    for call, part in zip(whole_calls, part_calls, strict=True):
        assert call.forward_peak_bytes == rows * WIDTH * 4 == part.forward_peak_bytes * microbatches

    plan = Plan(microbatches=microbatches, order=order)
    with memfit.fit(model, optimizer, _distance, batch, plan=plan, keep_gradients=True) as job:
        job.step(batch)
        for name, parameter in whole.named_parameters():
            gradient = job.gradient(name)
            assert gradient is not None
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-7)
