"""Cures of the refusals of `profiling`: models that cannot be placed, and losses that cannot be traced."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import memfit
from equivalence import test_few_bits as few_bits
from memfit.core.plan import Plan
from unit.advice import BATCH, ON_DISK, Scene, follows, live_bytes, loss, three_layers


def trains(s: Scene, function: Callable[[Any, Any], Tensor] = loss, sample: Any = BATCH, **wishes: Any) -> None:
    """Trains the scene's model for a step, to the bits of a plain loop."""
    job = s.fit(function, sample, **wishes)
    job.step(sample)
    job.close()
    s.trains_as(lambda model: function(model, sample).backward())


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(three_layers())


@follows("trace/blocks.py", "is a TorchScript module")
def the_module_that_was_scripted(s: Scene) -> None:
    s.begin(scripted)
    s.refused(s.fit)
    s.begin(three_layers)
    trains(s)


@follows("trace/blocks.py", "a tensor whose values lie in other tensors inside it")
def adapters_on_ordinary_weights(s: Scene) -> None:
    def frozen() -> nn.Module:
        model = three_layers()
        model.get_submodule("0").requires_grad_(False)
        return model

    def quantized() -> nn.Module:
        model = frozen()
        ordinary = model.get_parameter("0.weight")
        model.get_submodule("0").weight = nn.Parameter(TwoTensor(ordinary, ordinary), requires_grad=False)
        return model

    s.begin(quantized)
    s.refused(s.fit)
    s.begin(frozen)
    trains(s)
    case = few_bits.case_of()  # layers that hold their weights as bitsandbytes' do
    with few_bits._fit(case, few_bits.PLANS["disk"]) as job:
        assert job.step(few_bits.batch_of(0)).is_finite


class Listing(nn.Module):
    """Layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, batch: Tensor) -> Tensor:
        first, last = self.layers
        return last(torch.tanh(first(batch)))


@follows("trace/blocks.py", "name its members instead")
def members_of_a_list(s: Scene) -> None:
    s.begin(Listing)
    s.refused(lambda: s.fit(blocks=["layers"]))
    trains(s, blocks=["layers.0", "layers.1"])


@follows("trace/blocks.py", "run the model once, then profile it")
def a_lazy_model_that_has_run(s: Scene) -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))

    def run() -> nn.Module:
        model = lazy()
        model(BATCH)
        return model

    s.begin(lazy)
    s.refused(s.fit)
    s.begin(run)
    trains(s)


class Counting(nn.Module):
    """A model with a large buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = three_layers()
        self.register_buffer("seen", torch.zeros(1 << 19))

    def forward(self, batch: Tensor) -> Tensor:
        return self.inner(batch)


@follows("trace/program_state.py", "that it keeps (")
def a_large_tensor_that_a_loss_writes(s: Scene) -> None:
    kept = torch.zeros(1 << 19)

    def counting(model: Any, batch: Tensor) -> Tensor:
        kept.add_(1)
        return loss(model, batch)

    def in_steps(model: Any, batch: Tensor) -> Tensor:
        return loss(model, batch) if memfit.is_tracing() else counting(model, batch)

    def in_a_buffer(model: Any, batch: Tensor) -> Tensor:
        model.seen.add_(1)
        return loss(model, batch)

    s.refused(lambda: s.fit(counting))
    s.begin()
    kept.zero_()
    trains(s, in_steps)
    assert kept[0] == 2  # by the step, and by the plain loop
    s.begin(Counting)
    trains(s, in_a_buffer)
    assert s.model.seen[0] == 1


def positive(values: Tensor) -> Tensor:
    """A sum whose operations follow from the numbers."""
    return values[values > 0].sum()


class Changing(nn.Module):
    """Changes its weight before each forward."""

    def __init__(self, change: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.inner, self.change = nn.Linear(8, 8), change

    def forward(self, batch: Tensor) -> Tensor:
        weight = self.change(self.inner.weight)
        return self.inner(batch) if weight is None else nn.functional.linear(batch, weight, self.inner.bias)


@follows("trace/recorder.py", "other memory")
def a_weight_that_is_changed_in_place(s: Scene) -> None:
    def other(weight: Tensor) -> None:
        weight.data = weight.data * 0.5

    def same(weight: Tensor) -> None:
        with torch.no_grad():
            weight.copy_(weight * 0.5)

    s.begin(lambda: Changing(other))
    s.refused(s.fit)
    ways: list[Callable[[Tensor], Tensor | None]] = [same, lambda weight: weight * 0.5]
    for cured in ways:
        s.begin(lambda cured=cured: Changing(cured))
        trains(s, plan=Plan())


class Halving(nn.Module):
    """Multiplies by a matrix, a parameter or a buffer, that it halves itself, and reads its numbers."""

    matrix: Tensor

    def __init__(self, *, has_buffer: bool, halves: bool = True) -> None:
        super().__init__()
        self.inner, self.halves = nn.Linear(8, 8), halves
        matrix = torch.eye(8)
        self.register_buffer("matrix", matrix) if has_buffer else setattr(self, "matrix", nn.Parameter(matrix))

    def forward(self, batch: Tensor) -> Tensor:
        if self.halves:
            with torch.no_grad():
                self.matrix.mul_(0.5)
        out = self.inner(batch) @ self.matrix
        return out + positive(out)


@follows("trace/recorder.py", "the trace itself would change it")
def a_buffer_or_a_change_between_steps(s: Scene) -> None:
    s.begin(lambda: Halving(has_buffer=False))
    s.refused(s.fit)
    s.begin(lambda: Halving(has_buffer=True))
    trains(s)
    s.begin(lambda: Halving(has_buffer=False, halves=False))
    with s.fit() as job:
        with job.weights(), torch.no_grad():
            s.model.matrix.mul_(0.5)
        job.step(BATCH)
    s.trains_as(lambda model: [model.matrix.data.mul_(0.5), loss(model, BATCH).backward()])


@follows("trace/recorder.py", "that is not part of the model")
def one_module_with_all_that_trains(s: Scene) -> None:
    beside = nn.Linear(8, 8)
    s.refused(lambda: s.fit(lambda model, batch: loss(beside, model(batch))))
    s.begin(lambda: nn.ModuleDict({"model": three_layers(), "head": nn.Linear(8, 8)}))
    trains(s, lambda both, batch: loss(both["head"], both["model"](batch)))
    s.begin(three_layers)
    beside.requires_grad_(False)
    trains(s, lambda model, batch: loss(beside, model(batch)))


@follows("trace/summary.py", "or make it repeatable")
def a_draw_from_a_default_generator(s: Scene) -> None:
    turns = itertools.cycle([True, False])

    def scaled(draw: Callable[[], bool]) -> Callable[[Any, Tensor], Tensor]:
        return lambda model, batch: loss(model, batch * 2.0 if draw() else batch)

    s.refused(lambda: s.fit(scaled(lambda: next(turns))))
    s.begin()
    random.seed(3)
    job = s.fit(scaled(lambda: random.random() < 0.5))
    job.step(BATCH)
    job.close()
    random.seed(3)
    s.trains_as(lambda model: scaled(lambda: random.random() < 0.5)(model, BATCH).backward())
    s.begin()
    trains(s, scaled(lambda: True))


@follows("trace/trace_run.py", "returned a value without gradient")
def a_loss_that_is_not_detached(s: Scene) -> None:
    def frozen() -> nn.Module:
        return three_layers().requires_grad_(False)

    def thawed() -> nn.Module:
        model = frozen()
        model.get_submodule("2").requires_grad_()
        return model

    s.begin(frozen)
    s.refused(s.fit)
    s.begin(three_layers)
    s.refused(lambda: s.fit(lambda model, batch: loss(model, batch).detach()))
    for build in (three_layers, thawed):
        s.begin(build)
        trains(s)


def reading(model: Any, batch: Tensor) -> Tensor:
    """A loss that looks at a few numbers of what the model gives, where there are more than 4 rows."""
    out = model(batch)
    few = out[..., :1]
    return out.square().mean() + (positive(few) / len(few) if batch[..., 0].numel() > 4 else 0.0)


def guarded(model: Any, batch: Tensor) -> Tensor:
    """The same, which a trace meets without the numbers."""
    if not memfit.is_tracing():
        return reading(model, batch)
    out = model(batch)
    return out.square().mean() + out[..., :1].relu().sum() / len(out)


def joined(model: Any, batch: Tensor) -> Tensor:
    """A loss whose first row is a factor of all."""
    return reading(model, batch) * (1.0 + batch[0, 0, 0].abs())


LARGER = torch.cat([BATCH, BATCH])


@follows("trace/trace.py", "It cannot run on data either")
def a_sample_that_reads_numbers(s: Scene) -> None:
    job = s.fit(reading, plan=ON_DISK)
    s.refused(lambda: job.step(LARGER))
    s.refused(lambda: job.step(LARGER[:, :7]))
    assert job.step(BATCH).is_finite
    job.close()
    for function in (guarded, reading):
        s.begin()
        trains(s, function, LARGER, plan=ON_DISK)


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)))


@follows("trace/trace.py", "met the limit")
def rows_that_fit_the_limit(s: Scene) -> None:
    live_bytes()  # counts from here on
    batch = torch.randn(2, 1 << 15, 8)

    def fitted(function: Callable[[Any, Tensor], Tensor], limit_mib: int, sample: Tensor = batch) -> None:
        others = live_bytes() - batch.nbytes
        s.begin(deep)
        job = s.fit(function, sample, limit=others + (limit_mib << 20), emulate_device=True)
        assert job.step(sample).is_finite
        job.close()

    s.refused(lambda: fitted(reading, 13))
    fitted(guarded, 13)
    fitted(reading, 13, batch[:, : 1 << 13])
    fitted(reading, 20)  # with room for a real step of one row
    # What joins the rows of a batch is not cut.
    with pytest.raises(memfit.UsageError, match="are not to be cut into the"):
        fitted(joined, 20)
    fitted(joined, 20, batch[:1])


@follows("trace/trace.py", "is new in the model")
def a_job_for_a_new_parameter(s: Scene) -> None:
    job = s.fit()
    s.model.shift = nn.Parameter(torch.zeros(8))
    s.refused(lambda: job.evaluate(LARGER))
    job.close()
    s.optimizer = torch.optim.AdamW(s.model.parameters())
    assert s.fit().step(BATCH).is_finite
